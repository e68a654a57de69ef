# SPDX-License-Identifier: Apache-2.0
"""Commands and files through QEMU's guest agent: the real one, as a process of this machine instead of a guest."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tempfile
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest

from opendsec.api.errors import InvalidRequest, NotFound, SandboxLost, Unavailable, Unsupported
from opendsec.api.exec import Pty
from opendsec.api.spec import Limits
from opendsec.runtime.backend import Exit
from opendsec.runtime.guest.qga import AgentRefused
from opendsec.runtime.vm.agent import AgentChannel
from opendsec.testing.contracts.backend import plan
from tests import guest_agent

LIMITS = Limits(cpu=1.0, cpu_weight=100, memory_bytes=128 << 20, disk_bytes=16 << 20, inodes=64, pids=64, open_files=64)
WAIT_S = 20.0


@pytest.fixture
def folder() -> Generator[Path, None, None]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
async def channel(folder: Path) -> AsyncGenerator[AgentChannel, None]:
    with guest_agent.running(folder) as path:
        channel = AgentChannel(guest_agent.dial(path), None)
        try:
            async with asyncio.timeout(WAIT_S):
                yield channel
        finally:
            channel.close()


async def run(
    channel: AgentChannel, *argv: str, stdin: bytes | None = None, env: dict[str, str] | None = None
) -> tuple[Exit, bytes, bytes]:
    with contextlib.ExitStack() as stack:

        def pipe() -> tuple[int, int]:
            ends = os.pipe2(os.O_CLOEXEC)
            for fd in ends:
                stack.callback(_close, fd)
            return ends

        out, err, given = pipe(), pipe(), pipe()
        fds = (given[0] if stdin is not None else None, out[1], err[1])
        running = await channel.exec(plan(*argv, env=env or {}, cwd="/"), fds, LIMITS)
        for fd in (out[1], err[1], given[0]):
            os.close(fd)
        said = await asyncio.gather(*(asyncio.to_thread(_all, fd) for fd in (out[0], err[0])), asyncio.to_thread(_give, given[1], stdin))
        return await running.exited, said[0], said[1]


def _give(fd: int, data: bytes | None) -> bytes:
    with open(fd, "wb", closefd=True) as pipe:
        pipe.write(data or b"")
    return b""


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)


def _all(fd: int) -> bytes:
    data = b""
    while part := os.read(fd, 1 << 16):
        data += part
    return data


@pytest.mark.slow
async def test_commands(channel: AgentChannel) -> None:
    assert await run(channel, "/bin/sh", "-c", "echo out; echo err >&2; exit 7") == (Exit(code=7), b"out\n", b"err\n")
    assert await run(channel, "/bin/cat", stdin=b"given") == (Exit(code=0), b"given", b"")
    big = os.urandom(3 << 20)
    assert await run(channel, "/bin/cat", stdin=big) == (Exit(code=0), big, b"")
    assert await run(channel, "/bin/sh", "-c", "kill -TERM $$") == (Exit(signal=15), b"", b"")
    ended, out, _ = await run(channel, "/no/such/program")
    assert "/no/such/program" in ended.not_started and out == b""
    ended, out, _ = await run(channel, "/usr/bin/env", env={"MINE": "ä b"})
    assert ended.code == 0 and set(out.decode().split("\n")) >= {"OWN=agent", "MINE=ä b"}


async def test_too_much_input_is_not_begun(channel: AgentChannel) -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(5 << 20)
        running = await channel.exec(plan("/bin/cat", env={}, cwd="/"), (file.fileno(), None, None), LIMITS)
        assert "more input" in (await running.exited).not_started


async def test_it_is_ended(channel: AgentChannel) -> None:
    running = await channel.exec(plan("/bin/sleep", "1000", env={}, cwd="/"), (None, None, None), LIMITS)
    assert running.alive_children() and not running.exited.done()
    running.kill_tree()
    assert await running.exited == Exit(signal=9)
    assert not running.alive_children()
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:  # one that has not begun, since its input has not ended
        running = await channel.exec(plan("/bin/cat", env={}, cwd="/"), (reading, None, None), LIMITS)
        running.kill_tree()
        os.write(writing, b"x")
        assert await running.exited == Exit(signal=9)
    finally:
        os.close(reading)
        os.close(writing)


async def test_what_it_cannot_do_is_said_by_name(channel: AgentChannel, folder: Path) -> None:
    for fields, named in (({"pty": Pty()}, "pty"), ({"user": "somebody"}, "user"), ({"cwd": "/tmp"}, "cwd")):
        with pytest.raises(Unsupported) as raised:
            await channel.exec(plan("/bin/true", **{"env": {}, "cwd": "/"} | fields), (None, None, None), LIMITS)
        assert raised.value.field == named
    with pytest.raises(Unsupported, match="sessions"):
        await channel.exec(plan("/bin/true", env={}, cwd="/"), (None, None, None, 0), LIMITS)
    with pytest.raises(Unsupported, match="guest-set-time"):
        await channel.call("guest-set-time", dict[str, object])
    with pytest.raises(AgentRefused):
        await channel.call("guest-file-close", dict[str, object], {"handle": 12345})
    path = os.fsencode(folder)
    for call in (
        lambda: channel.files.stat(path),
        lambda: channel.files.mkdir(path, mode=0o755, user=None, parents=False),
        lambda: channel.files.open_write(path, mode=0o600, user=None, append=False, parents=False),
        lambda: channel.files.open_write(path, mode=None, user="root", append=False, parents=False),
    ):
        with pytest.raises(Unsupported):
            await asyncio.to_thread(call)


async def test_files(channel: AgentChannel, folder: Path) -> None:
    path, data = os.fsencode(folder / "file ä"), os.urandom((1 << 20) + 17)

    def use() -> None:
        files = channel.files
        writer = files.open_write(path, mode=None, user=None, append=False, parents=True)
        writer.write(data[:1000])
        assert not os.path.exists(path)
        writer.write(data[1000:])
        assert writer.commit() == len(data)
        assert Path(os.fsdecode(path)).read_bytes() == data
        reader = files.open_read(path)
        assert reader.size_bytes() == len(data)
        assert reader.read(0, len(data) + 100) == data
        assert reader.read(500, 100) == data[500:600]
        assert reader.read(len(data), 10) == b""
        reader.close()
        reader.close()
        writer = files.open_write(path, mode=None, user=None, append=True, parents=False)
        writer.write(b"more")
        assert writer.commit() == len(data) + 4
        writer = files.open_write(path, mode=None, user=None, append=False, parents=False)
        writer.write(b"never")
        writer.abort()
        assert Path(os.fsdecode(path)).read_bytes() == data + b"more"
        with pytest.raises(NotFound):
            files.open_read(b"/no/such/file")
        with pytest.raises(NotFound):
            files.open_write(b"/no/such/file", mode=None, user=None, append=False, parents=False).commit()
        with pytest.raises(InvalidRequest):
            files.open_read(b"relative")

    await asyncio.to_thread(use)


async def test_another_connection_goes_on(channel: AgentChannel, folder: Path) -> None:
    """As after a pause: the agent lives on, and what was asked before may be half said."""
    assert (await run(channel, "/bin/echo", "one"))[1] == b"one\n"
    running = await channel.exec(plan("/bin/sleep", "1000", env={}, cwd="/"), (None, None, None), LIMITS)
    await channel.detach()
    asked = asyncio.ensure_future(run(channel, "/bin/echo", "two"))
    await asyncio.sleep(0)
    sock = guest_agent.dial(folder / "agent.sock")
    sock.send(b'{"execute": "guest-exec", "argum')
    channel.resume(sock)
    assert (await asked)[1] == b"two\n"
    running.kill_tree()
    assert await running.exited == Exit(signal=9)


async def test_nonsense_loses_the_sandbox() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        channel = AgentChannel(ours, None)
        try:
            asking = asyncio.ensure_future(channel.system())
            loop = asyncio.get_running_loop()
            theirs.setblocking(False)
            asked = await loop.sock_recv(theirs, 4096)
            number = json.loads(asked[1:])["arguments"]["id"]
            theirs.send(b'\xff{"return": %d}\n' % number)
            assert b"guest-get-osinfo" in await loop.sock_recv(theirs, 4096)
            theirs.send(b'{"return": 7}\n')
            with pytest.raises(SandboxLost):
                await asking
            assert "no agent" in await asyncio.wait_for(asyncio.shield(channel.broken), WAIT_S)
            assert channel.lost
        finally:
            channel.close()


async def test_an_agent_that_has_gone_is_unavailable() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        lonely = AgentChannel(ours, None)
        try:
            with pytest.raises(Unavailable, match="does not answer"):
                await lonely.line.ready(0.01)
            assert not lonely.lost
            lonely.close()
            with pytest.raises(SandboxLost):
                await lonely.line.ready()
        finally:
            lonely.close()
