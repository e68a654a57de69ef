# SPDX-License-Identifier: Apache-2.0
"""This machine's half of moving files: trees to and from tar streams, with bounded memory.

tarfile blocks, so it runs in a thread of its own at one end of a pipe; the event loop serves the other end.
What comes out of a sandbox is hostile: every name is walked by descriptor, no symlink is ever followed, none is made that could lead
out of the tree, and no device, fifo, owner or setuid bit is taken over. What is left out is told by name to `left_out`, from that thread.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import secrets
import tarfile
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, BinaryIO

from opendsec.api.errors import Internal, InvalidRequest
from opendsec.client.transport import CHUNK_BYTES

LeftOut = Callable[[str], None]  # gets the names of what is not copied


class Counted:
    """An iterable of chunks that knows how much went by."""

    def __init__(self, chunks: AsyncIterable[bytes], progress: Callable[[int], None] | None = None) -> None:
        self._chunks = chunks
        self._progress = progress
        self.total_bytes = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._chunks:
            if not isinstance(chunk, (bytes, bytearray, memoryview)):
                raise InvalidRequest(f"chunks must be bytes, not {type(chunk).__name__}", field="data")
            self.total_bytes += len(chunk)
            yield bytes(chunk)
            if self._progress is not None:
                self._progress(self.total_bytes)


# --- single files


async def read_file(path: Path) -> AsyncIterator[bytes]:
    """The content of a local file, a chunk at a time."""
    with path.open("rb", buffering=0) as file:
        async for chunk in read_open_file(file):
            yield chunk


async def read_open_file(file: IO[bytes]) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
        yield chunk


async def write_file(path: Path, chunks: AsyncIterable[bytes], *, mode: int) -> int:
    """Replace `path` by what comes, once all of it is there; the bytes written."""
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}")
    total = 0
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidRequest(f"cannot write here: {error.strerror}: {path}", field="local") from None
    try:
        with os.fdopen(fd, "wb", buffering=0) as file:
            async for chunk in chunks:
                await asyncio.to_thread(_write_all, file, chunk)
                total += len(chunk)
            os.fchmod(file.fileno(), mode)
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError):
            raise InvalidRequest(f"cannot write here: {error.strerror}: {path}", field="local") from None
        raise
    return total


def _write_all(file: IO[bytes], chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[file.write(view) :]


# --- trees


async def pack(directory: Path, left_out: LeftOut | None = None) -> AsyncGenerator[bytes, None]:
    """A tar stream of what is in `directory`, named relative to it. Symlinks are kept as symlinks."""
    readable, writable = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(readable, False)
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, thread_name_prefix="opendsec-pack") as pool:
        job = loop.run_in_executor(pool, _pack, directory, writable, left_out)
        try:
            while True:
                try:
                    chunk = os.read(readable, CHUNK_BYTES)
                except BlockingIOError:
                    await _ready(readable, write=False)
                    continue
                if not chunk:
                    break
                yield chunk
        finally:
            os.close(readable)  # if this end goes first, the thread's next write fails and it ends
            try:
                await job
            except BrokenPipeError:
                pass


def _pack(directory: Path, fd: int, left_out: LeftOut | None) -> None:
    with (
        os.fdopen(fd, "wb", buffering=0) as out,
        tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, bufsize=CHUNK_BYTES) as tar,
    ):
        for name in sorted(os.listdir(directory)):
            _add(tar, directory / name, name, left_out)


def _add(tar: tarfile.TarFile, path: Path, name: str, left_out: LeftOut | None) -> None:
    """Owners of this machine mean nothing inside; sockets and devices are not content."""
    member = tar.gettarinfo(path, arcname=name)
    if member is None or not (member.isfile() or member.isdir() or member.issym() or member.islnk()):  # none at all: a socket
        if left_out is not None:
            left_out(name)
        return
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    if member.isreg():
        with path.open("rb") as content:
            tar.addfile(member, content)
        return
    tar.addfile(member)
    if member.isdir():
        for below in sorted(os.listdir(path)):
            _add(tar, path / below, f"{name}/{below}", left_out)


async def unpack(chunks: AsyncIterable[bytes], directory: Path, left_out: LeftOut | None = None) -> int:
    """Unpack a hostile tar stream into `directory`; the bytes of file content."""
    try:
        directory.mkdir(exist_ok=True)
        root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidRequest(f"cannot write here: {error.strerror}: {directory}", field="local") from None
    readable, writable = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writable, False)
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, thread_name_prefix="opendsec-unpack") as pool:
        job = loop.run_in_executor(pool, _unpack, readable, root, left_out)
        broken: BrokenPipeError | None = None
        try:
            async for chunk in chunks:
                await _feed(writable, chunk)
        except BrokenPipeError as error:  # the thread ended first and knows why
            broken = error
        except BaseException:
            os.close(writable)
            writable = -1
            await asyncio.wait((job,))
            job.exception()
            raise
        finally:
            if writable >= 0:
                os.close(writable)
        try:
            total = await job
        except tarfile.TarError as error:
            raise Internal(f"the edge sent a tar stream that cannot be read: {error}") from None
        except OSError as error:
            raise InvalidRequest(f"cannot write here: {error.strerror}: {directory}", field="local") from None
        if broken is not None:
            raise Internal("the tar stream goes on after its end")
        return total


async def _feed(fd: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            await _ready(fd, write=True)


async def _ready(fd: int, *, write: bool) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    if write:
        loop.add_writer(fd, wake)
    else:
        loop.add_reader(fd, wake)
    try:
        await ready
    finally:
        if write:
            loop.remove_writer(fd)
        else:
            loop.remove_reader(fd)


def _unpack(fd: int, root: int, left_out: LeftOut | None) -> int:
    """Runs in the thread; owns both descriptors."""
    skip = left_out or (lambda name: None)
    total = 0
    symlinks: list[tuple[tuple[str, ...], str]] = []
    modes: list[tuple[tuple[str, ...], int]] = []
    try:
        with os.fdopen(fd, "rb", buffering=0) as source, tarfile.open(fileobj=source, mode="r|", bufsize=CHUNK_BYTES) as tar:
            for member in tar:
                parts = _parts(member.name)
                if parts is None or (not parts and not member.isdir()):
                    skip(member.name)
                elif member.isdir():
                    os.close(_descend(root, parts))
                    modes.append((parts, member.mode & 0o777))
                elif member.isfile():
                    content = tar.extractfile(member)
                    assert content is not None
                    total += _store(root, parts, content, member.mode & 0o777)
                elif member.islnk() and (target := _parts(member.linkname)):
                    _link(root, parts, target)
                elif member.issym() and _stays_within(parts, member.linkname):
                    symlinks.append((parts, member.linkname))
                else:
                    skip(member.name)
            while source.read(CHUNK_BYTES):  # padding after the end; leaving it would break the pipe under the writer
                pass
        # Last, so that no later member is written through one, and modes after all content is in, deepest first.
        for parts, leads_to in symlinks:
            _symlink(root, parts, leads_to)
        for parts, mode in sorted(modes, key=lambda one: -len(one[0])):
            directory = _descend(root, parts)
            try:
                os.fchmod(directory, mode | 0o700)
            finally:
                os.close(directory)
    finally:
        os.close(root)
    return total


def _parts(name: str) -> tuple[str, ...] | None:
    """A member's name as path components; None if it leaves the tree."""
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    return None if ".." in parts or "\0" in name else parts


def _stays_within(parts: tuple[str, ...], target: str) -> bool:
    if target.startswith("/") or "\0" in target:
        return False
    joined = posixpath.normpath(posixpath.join("/".join(parts[:-1]), target))
    # `..` after a name could pass through another symlink: only leading ones are certain.
    rest = target.split("/")
    while rest and rest[0] in ("..", "."):
        rest.pop(0)
    return not joined.startswith("..") and ".." not in rest


def _descend(root: int, parts: tuple[str, ...]) -> int:
    """A descriptor of the directory at `parts`, made where missing, reached through no symlink."""
    current = os.dup(root)
    try:
        for part in parts:
            try:
                os.mkdir(part, 0o700, dir_fd=current)
            except FileExistsError:
                pass
            following = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current)
            os.close(current)
            current = following
    except BaseException:
        os.close(current)
        raise
    return current


def _clear(name: str, directory: int) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass


def _store(root: int, parts: tuple[str, ...], content: IO[bytes] | BinaryIO, mode: int) -> int:
    directory = _descend(root, parts[:-1])
    try:
        _clear(parts[-1], directory)
        fd = os.open(parts[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
        with os.fdopen(fd, "wb", buffering=0) as file:
            total = 0
            while chunk := content.read(CHUNK_BYTES):
                _write_all(file, chunk)
                total += len(chunk)
            os.fchmod(file.fileno(), mode)
        return total
    finally:
        os.close(directory)


def _link(root: int, parts: tuple[str, ...], target: tuple[str, ...]) -> None:
    """A hard link to a member that came before."""
    source, directory = _descend(root, target[:-1]), _descend(root, parts[:-1])
    try:
        _clear(parts[-1], directory)
        os.link(target[-1], parts[-1], src_dir_fd=source, dst_dir_fd=directory, follow_symlinks=False)
    finally:
        os.close(source)
        os.close(directory)


def _symlink(root: int, parts: tuple[str, ...], target: str) -> None:
    directory = _descend(root, parts[:-1])
    try:
        _clear(parts[-1], directory)
        os.symlink(target, parts[-1], dir_fd=directory)
    finally:
        os.close(directory)
