# SPDX-License-Identifier: Apache-2.0
"""What the steps of a build do in a sandbox: run a command and hear it, copy files in."""

from __future__ import annotations

import asyncio
import bz2
import contextlib
import gzip
import hashlib
import lzma
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import IO, NamedTuple

from opendsec.api import ids
from opendsec.api.errors import InvalidRequest, OpenDSecError
from opendsec.images.dockerfile.context import FILE, Entry, Reader
from opendsec.images.dockerfile.plan import Copy, Run
from opendsec.images.waiting import to_the_end
from opendsec.runtime.backend import ExecPlan, Handle
from opendsec.runtime.files.tarball import END_OF_ARCHIVE, Member, header, padding, write_all

TAIL_BYTES = 4000
LINE_BYTES = 2000  # longer lines are told in pieces
LINES = 20_000  # told of one step; the end is in the error anyhow
_BLOCK = 1 << 20


class Ran(NamedTuple):
    """How a command ended. `failed`: why it counts as failed, or ""."""

    code: int | None
    failed: str
    tail: bytes


async def run_command(handle: Handle, action: Run, *, timeout_s: float, line: Callable[[str], None]) -> Ran:
    """Run it to its end; nothing of it runs when this returns or raises. `line` hears what it prints, both streams as one."""
    before = handle.counters()
    output = _Output(line)
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        os.fchmod(writing, 0o666)  # commands of other users open it by /dev/stdout
        os.set_blocking(reading, False)
        command = ExecPlan(
            process_id=ids.new_id(ids.PROCESS),
            argv=action.argv,
            env=action.env,
            cwd=action.cwd,
            user=action.user,
        )
        running = await handle.exec(command, stdin=None, stdout=writing, stderr=writing)
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    loop = asyncio.get_running_loop()
    loop.add_reader(reading, output.read, reading)
    timed_out = False
    try:
        try:
            exit = await asyncio.wait_for(asyncio.shield(running.exited), timeout_s)
        except TimeoutError:
            timed_out = True
            running.kill_tree()
            exit = await running.exited
    finally:
        running.kill_tree()  # what it left running would go with the sandbox; what that left half written would not
        if not running.exited.done():
            await to_the_end(asyncio.shield(running.exited))
        loop.remove_reader(reading)
        output.read(reading)
        output.end()
        os.close(reading)
        await to_the_end(running.release())
    after = handle.counters()
    failed = ""
    if timed_out:
        failed = f"took longer than {timeout_s:g} s"
    elif exit.not_started:
        failed = f"cannot start: {exit.not_started}"
    elif exit.signal is not None:
        failed = f"killed by signal {exit.signal}"
    elif exit.code or exit.lost:
        failed = f"exit code {exit.code}" if exit.code else "its end is unknown"
    if failed and after.oom_kills > before.oom_kills:
        failed += " (its memory was used up: give the build more)"
    elif failed and (after.disk_full or after.inodes_full):
        failed += " (its disk was used up)"
    return Ran(exit.code, failed, bytes(output.tail))


class _Output:
    """Lines as they come, and the last bytes."""

    def __init__(self, line: Callable[[str], None]) -> None:
        self._line, self._told, self._begun = line, 0, b""
        self.tail = bytearray()

    def read(self, fd: int) -> None:
        for _ in range(64):  # a flood must not stop the event loop
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                with contextlib.suppress(ValueError):
                    asyncio.get_running_loop().remove_reader(fd)
                return
            self.tail += data
            del self.tail[: max(0, len(self.tail) - TAIL_BYTES)]
            *lines, self._begun = (self._begun + data).split(b"\n")
            for one in lines:
                self._tell(one)
            while len(self._begun) > LINE_BYTES:
                self._tell(self._begun[:LINE_BYTES])
                self._begun = self._begun[LINE_BYTES:]

    def end(self) -> None:
        if self._begun:
            self._tell(self._begun)

    def _tell(self, line: bytes) -> None:
        self._told += 1
        if self._told <= LINES:
            self._line(line[:LINE_BYTES].rstrip(b"\r").decode(errors="replace"))
        elif self._told == LINES + 1:
            self._line(f"(more than {LINES} lines: the others are not shown)")


# --- copying --------------------------------------------------------------------------------------------------------


async def copy_into(handle: Handle, reader: Reader, entries: Sequence[Entry], action: Copy, *, owners: bool) -> None:
    """Put entries where they belong, and with ADD the content of archives. Raises InvalidRequest if the source changes meanwhile."""
    archives = await asyncio.to_thread(_archives, reader, entries, action) if action.unpack else []
    files = [entry for entry in entries if entry not in archives]
    if files:
        await _piped(handle, b"/", action.chown, lambda out: _write_tar(reader, files, out, action, owners=owners))
    for archive in archives:
        to = b"/" + os.fsencode(action.to).strip(b"/")
        await _piped(handle, to, action.chown, partial(_unpack, reader, archive))


async def _piped(handle: Handle, to: bytes, chown: str, write: Callable[[int], None]) -> None:
    """Two threads: one writes an archive into a pipe, the other unpacks it in the sandbox."""
    reading, writing = os.pipe2(os.O_CLOEXEC)

    def produce() -> None:
        try:
            write(writing)
        except BrokenPipeError:
            pass  # the reader has given up, and says why
        finally:
            os.close(writing)

    def consume() -> None:
        try:
            handle.files.extract(to, reading, user=chown or None)
        finally:
            os.close(reading)

    both = asyncio.gather(asyncio.to_thread(produce), asyncio.to_thread(consume), return_exceptions=True)
    produced, consumed = await to_the_end(both)
    for error in (produced, consumed):
        if isinstance(error, OpenDSecError):
            raise error
    for error in (produced, consumed):
        if error is not None:
            raise error


def _write_tar(reader: Reader, entries: Sequence[Entry], out: int, action: Copy, *, owners: bool) -> None:
    for entry in entries:
        uid, gid = (entry.uid, entry.gid) if owners else (0, 0)
        mode = entry.mode if action.chmod is None or entry.kind == "symlink" else action.chmod
        member = Member(entry.name, entry.kind, entry.size, mode, uid, gid, 0, entry.link)
        write_all(out, header(member))
        if entry.kind == "file":
            _write_content(reader, entry, out)
            write_all(out, padding(entry.size))
    write_all(out, END_OF_ARCHIVE)


def _write_content(reader: Reader, entry: Entry, out: int) -> None:
    left, content = entry.size, hashlib.sha256()
    fd = reader.open(entry.source, FILE)
    try:
        while left and (block := os.read(fd, min(left, _BLOCK))):
            content.update(block)
            write_all(out, block)
            left -= len(block)
        more = os.read(fd, 1)
    finally:
        os.close(fd)
    if left or more or content.digest() != entry.digest:
        raise InvalidRequest(f"was changed while it was read: {os.fsdecode(entry.source)!r}", field="source.context")


def _archives(reader: Reader, entries: Sequence[Entry], action: Copy) -> list[Entry]:
    """Those that ADD unpacks: sources themselves, not what lies in a directory, that hold a tar, perhaps compressed."""
    named = {path for source in action.sources for path in reader.matches(source)}
    return [entry for entry in entries if entry.kind == "file" and entry.source in named and _is_archive(reader, entry)]


def _is_archive(reader: Reader, entry: Entry) -> bool:
    try:
        with _decompressed(reader, entry) as file:
            return file.read(512)[257:262] == b"ustar"
    except (OSError, EOFError, lzma.LZMAError):
        return False


def _unpack(reader: Reader, entry: Entry, out: int) -> None:
    try:
        with _decompressed(reader, entry) as file:
            while block := file.read(_BLOCK):
                write_all(out, block)
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise InvalidRequest(f"{os.fsdecode(entry.source)!r} is damaged: {error}", field="source.context") from None


@contextlib.contextmanager
def _decompressed(reader: Reader, entry: Entry) -> Iterator[IO[bytes]]:
    with contextlib.ExitStack() as stack:
        file: IO[bytes] = stack.enter_context(open(reader.open(entry.source, FILE), "rb"))
        begin = file.read(6)
        file.seek(0)
        if begin[:2] == b"\x1f\x8b":
            yield stack.enter_context(gzip.open(file))  # type: ignore[arg-type]
        elif begin[:3] == b"BZh":
            yield stack.enter_context(bz2.open(file))
        elif begin == b"\xfd7zXZ\0":
            yield stack.enter_context(lzma.open(file))
        else:
            yield file
