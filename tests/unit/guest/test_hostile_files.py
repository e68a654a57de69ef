# SPDX-License-Identifier: Apache-2.0
"""File operations with a guest that lies: the caller gets an error, in time, and no more than bounded memory is held."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable

import pytest

from opendsec.api.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded, SandboxLost, Unavailable
from opendsec.runtime.guest import transfer as transfer_module
from opendsec.runtime.guest import watch as watch_module
from opendsec.runtime.guest import wire
from opendsec.runtime.guest.channel import Channel
from opendsec.runtime.guest.files import GuestFiles
from opendsec.runtime.guest.wire import Entry
from opendsec.testing.fakes.guest import FakeGuest, Frame, answer, error, frame

FILE = Entry(stat.S_IFREG | 0o644, 0, 0, 1, 5, 0, 1, 2, b"name", b"")
FOLDER = FILE._replace(mode=stat.S_IFDIR | 0o755, name=b".", size=0)


class Line:
    def __init__(self, channel: Channel, guest: FakeGuest) -> None:
        self.channel, self.guest = channel, guest

    @property
    def files(self) -> GuestFiles:
        return self.channel.files

    def reply(self, kind: int, make: Callable[[Frame], bytes | None]) -> None:
        self.guest.replies[kind] = make

    async def archive(self) -> bytes:
        """The tar stream of /d."""
        reading, writing = os.pipe()
        try:
            await asyncio.to_thread(self.files.archive, b"/d", writing)
            os.close(writing)
            writing = -1
            return os.read(reading, 1 << 16)
        finally:
            os.close(reading)
            if writing >= 0:
                os.close(writing)


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    ours, theirs = socket.socketpair()
    guest = FakeGuest(theirs)
    channel = await Channel.open(ours)
    yield Line(channel, guest)
    channel.close()
    await guest.close()


def data(asked: Frame, content: bytes) -> bytes:
    return b"".join(frame(wire.DATA, asked.id, content[at : at + 65_536]) for at in range(0, len(content), 65_536))


def listed(*entries: Entry) -> bytes:
    return wire.u32(len(entries)) + b"".join(entry.packed() for entry in entries)


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"x" * 256])
async def test_names_that_none_can_be(line: Line, name: bytes) -> None:
    line.reply(wire.LIST, lambda asked: answer(asked, listed(FILE, FILE._replace(name=name))))
    with pytest.raises(SandboxLost):
        await asyncio.to_thread(line.files.list, b"/d")
    await line.channel.broken


async def test_lists_in_parts(line: Line) -> None:
    first, second = listed(FILE._replace(name=b"b")), listed(FILE._replace(name=b"a"), FILE._replace(name=b"c"))
    line.reply(
        wire.LIST,
        lambda asked: frame(wire.LIST | wire.ANSWER, asked.id, first, wire.MORE) + frame(wire.LIST | wire.ANSWER, asked.id, second),
    )
    assert [info.raw_name for info in await asyncio.to_thread(line.files.list, b"/d")] == [b"a", b"b", b"c"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOENT, NotFound),
        (errno.ENOTDIR, Conflict),
        (errno.ENOSPC, QuotaExceeded),
        (errno.ENAMETOOLONG, InvalidRequest),
        (errno.ENOMEM, Unavailable),
        (4000, Exception),
    ],
)
async def test_errors(line: Line, code: int, kind: type[Exception]) -> None:
    line.reply(wire.STAT, lambda asked: error(asked, code, "said the guest"))
    with pytest.raises(kind):
        await asyncio.to_thread(line.files.stat, b"/x")
    await line.channel.ping()


async def test_users_that_are_none(line: Line) -> None:
    line.reply(wire.CHMOD, lambda asked: error(asked, errno.EINVAL, "no such user"))
    with pytest.raises(InvalidRequest) as caught:
        await asyncio.to_thread(lambda: line.files.chmod(b"/x", mode=None, user="who"))
    assert caught.value.field == "user"


async def test_reading(line: Line) -> None:
    content = os.urandom(100_000)
    line.reply(wire.READ, lambda asked: answer(asked, FILE.packed()) + data(asked, content) + frame(wire.EOF, asked.id))
    reader = await asyncio.to_thread(line.files.open_read, b"/x")
    assert await asyncio.to_thread(reader.read, 0, 60_000) == content[:60_000]
    assert await asyncio.to_thread(reader.read, 60_000, 1 << 20) == content[60_000:]
    assert await asyncio.to_thread(reader.read, 100_000, 1) == b""
    reader.close()
    reader.close()


async def test_a_file_that_is_another_one_suddenly(line: Line) -> None:
    entries = iter((FILE, FILE._replace(inode=3)))
    line.reply(wire.READ, lambda asked: answer(asked, next(entries).packed()) + frame(wire.EOF, asked.id))
    reader = await asyncio.to_thread(line.files.open_read, b"/x")
    with pytest.raises(Conflict, match="replaced"):
        await asyncio.to_thread(reader.read, 500, 10)
    reader.close()


@pytest.mark.parametrize(
    "said",
    [
        lambda n: frame(wire.DATA, n, bytes(65_536)) * 3,
        lambda n: frame(wire.DATA, n, b""),
        lambda n: frame(wire.DATA, n, b"x", 1),
        lambda n: frame(wire.EOF, n) * 2,
        lambda n: frame(wire.CREDIT, n, wire.u32(1)),
        lambda n: frame(wire.CLOSE, n, wire.u32(5)) * 2,
        lambda n: frame(wire.WATCHED, n, wire.u32(0)),
    ],
)
async def test_nonsense_on_a_stream(line: Line, said: Callable[[int], bytes]) -> None:
    line.reply(wire.READ, lambda asked: answer(asked, FILE.packed()) + said(asked.id))
    try:
        reader = await asyncio.to_thread(line.files.open_read, b"/x")
        await asyncio.to_thread(reader.read, 0, 1 << 20)
    except SandboxLost:
        pass
    assert "broke the protocol" in await line.channel.broken


async def test_a_transfer_that_stalls(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_module, "STALL_S", 0.02)
    line.reply(wire.READ, lambda asked: answer(asked, FILE.packed()) + data(asked, b"half"))
    reader = await asyncio.to_thread(line.files.open_read, b"/x")
    with pytest.raises(Unavailable, match="has not gone on"):
        await asyncio.to_thread(reader.read, 0, 100)
    reader.close()
    line.reply(wire.WRITE, lambda asked: answer(asked, wire.u32(0)))
    writer = await asyncio.to_thread(lambda: line.files.open_write(b"/x", mode=None, user=None, append=False, parents=False))
    with pytest.raises(Unavailable, match="has not gone on"):
        await asyncio.to_thread(writer.write, bytes(wire.INITIAL_CREDIT + 1))
    await line.guest.hear(wire.ABORT)


async def test_a_write_that_the_guest_gives_up(line: Line) -> None:
    line.reply(wire.WRITE, lambda asked: answer(asked, wire.u32(0)) + frame(wire.CLOSE, asked.id, wire.u32(errno.ENOSPC)))
    line.reply(wire.COMMIT, lambda asked: error(asked, errno.ENOSPC, "full"))
    writer = await asyncio.to_thread(lambda: line.files.open_write(b"/x", mode=None, user=None, append=False, parents=False))
    with pytest.raises(QuotaExceeded):
        for _ in range(100):
            await asyncio.to_thread(writer.write, bytes(1000))
    writer.abort()


async def test_a_size_that_is_not_what_was_written(line: Line) -> None:
    line.reply(wire.WRITE, lambda asked: answer(asked, wire.u32(0)))
    line.reply(wire.COMMIT, lambda asked: answer(asked, wire.u64(3)))
    writer = await asyncio.to_thread(lambda: line.files.open_write(b"/x", mode=None, user=None, append=False, parents=False))
    await asyncio.to_thread(writer.write, b"four")
    with pytest.raises(Conflict, match="changed by something else"):
        await asyncio.to_thread(writer.commit)


def record(entry: Entry, kind: int = wire.RECORD_ENTRY) -> bytes:
    return wire.u32(kind) + entry.packed()


@pytest.mark.parametrize(
    "said",
    [
        wire.u32(9),
        record(FILE)[:20],
        record(FILE._replace(name=b"/etc/passwd")),
        record(FILE._replace(name=b"a/../../b")),
        record(FILE._replace(name=b"")),
        record(FILE._replace(name=b"x" * 300)),
        record(FILE._replace(size=1 << 63)),
        record(FILE._replace(mode=stat.S_IFCHR)),
        wire.u32(wire.RECORD_ENTRY) + FILE.packed()[:48] + wire.u32(0xFFFF_FFFF),
        wire.u32(wire.RECORD_PROBLEM) + wire.u32(1 << 30),
    ],
)
async def test_walks_that_make_no_sense(line: Line, said: bytes) -> None:
    line.reply(wire.WALK, lambda asked: answer(asked, FOLDER.packed()) + data(asked, record(FOLDER) + said) + frame(wire.EOF, asked.id))
    with pytest.raises(SandboxLost):
        await line.archive()


async def test_content_that_is_cut_off(line: Line) -> None:
    line.reply(wire.WALK, lambda asked: answer(asked, FOLDER.packed()) + data(asked, record(FILE) + b"fou") + frame(wire.EOF, asked.id))
    with pytest.raises(Conflict, match="cut off"):
        await line.archive()


async def test_a_walk_that_fails(line: Line) -> None:
    line.reply(
        wire.WALK, lambda asked: answer(asked, FOLDER.packed()) + data(asked, record(FOLDER)) + frame(wire.CLOSE, asked.id, wire.u32(2))
    )
    with pytest.raises(NotFound):
        await line.archive()


async def test_a_flood_of_events_is_an_overflow(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "MAX_WAITING", 10)
    watch = await asyncio.to_thread(line.files.open_watch, b"/d")
    asked = await line.guest.hear(wire.WATCH)
    for number in range(100):
        await line.guest.say(frame(wire.WATCHED, asked.id, wire.u32(1) + wire.u32(1) + wire.string(b"%d" % number)))
    await line.guest.say(frame(wire.WATCHED, asked.id, wire.u32(2) + (wire.u32(8) + wire.string(b"")) * 2))
    await line.channel.ping()
    kinds = [event.kind for event in watch.read()]
    assert kinds == ["created"] * 10 + ["overflow", "gone"]
    assert watch.read() == []
    watch.close()
    watch.close()
    await line.guest.hear(wire.UNWATCH)


async def test_a_watch_ends_with_the_channel(line: Line) -> None:
    watch = await asyncio.to_thread(line.files.open_watch, b"/d")
    line.channel.close()
    assert [event.kind for event in watch.read()] == ["gone"]
    watch.close()


async def test_after_the_end(line: Line) -> None:
    line.channel.close()
    with pytest.raises(SandboxLost):
        await asyncio.to_thread(line.files.stat, b"/x")
