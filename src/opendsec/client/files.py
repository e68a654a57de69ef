# SPDX-License-Identifier: Apache-2.0
"""Files of a sandbox. Paths are absolute, inside; bytes are exact, text may carry surrogate escapes for names that are not UTF-8."""

from __future__ import annotations

import asyncio
import os
import stat as stat_module
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path as LocalPath
from typing import BinaryIO

from opendsec.api import routes
from opendsec.api.errors import InvalidRequest, NotFound, Unavailable
from opendsec.api.files import FileInfo, FileList, WatchEvent, Written
from opendsec.client import _core, transfer
from opendsec.client._core import Path
from opendsec.client.link import Link
from opendsec.client.transport import ConnectionBroken

Content = str | bytes | AsyncIterable[bytes] | BinaryIO
Progress = Callable[[int], None]


class Files:
    """The files of one sandbox.

    Errors: NotFound, Conflict (wrong kind of file, not empty, exists), InvalidRequest, QuotaExceeded (the sandbox's disk is full),
    SandboxLost.
    """

    def __init__(self, link: Link, sandbox_id: str) -> None:
        self._link = link
        self._ids = {"sandbox_id": sandbox_id}

    # --- content

    async def read(self, path: Path) -> str:
        """The whole file as text; what is not UTF-8 becomes U+FFFD."""
        return (await self.read_bytes(path)).decode("utf-8", "replace")

    async def read_bytes(self, path: Path, *, offset: int = 0, length: int | None = None) -> bytes:
        """The file, or `length` bytes of it from `offset`; fewer only at its end."""
        async with aclosing(self.chunks(path, offset=offset, length=length)) as chunks:
            return b"".join([chunk async for chunk in chunks])

    async def chunks(self, path: Path, *, offset: int = 0, length: int | None = None) -> AsyncGenerator[bytes, None]:
        """The same, a piece at a time, for files larger than memory."""
        query: _core.Query = {"path": _core.raw_path(path), "offset": _count(offset, "offset") or None, "length": _count(length, "length")}
        async with self._link.download(routes.READ, self._ids, query=query) as answer:
            received = 0
            async for chunk in answer.chunks():
                received += len(chunk)
                yield chunk
            if answer.length is not None and received != answer.length:
                raise Unavailable(f"the file was cut off after {received} of {answer.length} bytes")

    async def write(
        self,
        path: Path,
        data: Content,
        *,
        mode: int | None = None,
        user: str | None = None,
        parents: bool = False,
        action_id: str | None = None,
    ) -> int:
        """Make `data` the file's content; its size in bytes. The old content stays until all of the new one is there.

        `data`: text (UTF-8), bytes, an open binary file, or an async iterable of bytes, streamed with bounded memory. `mode` and `user`
        apply to a new file; `parents` makes missing directories. Returns only when the size on disk is what was sent.
        """
        return await self._write(path, data, append=False, mode=mode, user=user, parents=parents, action_id=action_id)

    async def append(
        self,
        path: Path,
        data: Content,
        *,
        mode: int | None = None,
        user: str | None = None,
        parents: bool = False,
        action_id: str | None = None,
    ) -> int:
        """Add `data` at the end of the file, which is made if missing; its size in bytes afterwards."""
        return await self._write(path, data, append=True, mode=mode, user=user, parents=parents, action_id=action_id)

    async def _write(
        self, path: Path, data: Content, *, append: bool, mode: int | None, user: str | None, parents: bool, action_id: str | None
    ) -> int:
        query: _core.Query = {
            "path": _core.raw_path(path),
            "mode": _mode(mode),
            "user": user,
            "append": append or None,
            "parents": parents or None,
            "action_id": action_id,
        }
        if isinstance(data, (str, bytes, bytearray, memoryview)):
            raw = _core.text_bytes(data)
            written = await self._link.upload(routes.WRITE, Written, self._ids, raw, query=query, repeatable=True)
            sent = len(raw)
        else:
            counted = transfer.Counted(_stream(data))
            written = await self._link.upload(routes.WRITE, Written, self._ids, lambda: counted, query=query)
            sent = counted.total_bytes
        if written.size_bytes < sent if append else written.size_bytes != sent:
            raise Unavailable(f"wrote {sent} bytes, but the file has {written.size_bytes}")
        return written.size_bytes

    # --- names

    async def list(self, path: Path) -> Sequence[FileInfo]:
        """The entries of a directory."""
        return (await self._link.call(routes.LIST_FILES, FileList, self._ids, query={"path": _core.raw_path(path)})).entries

    async def stat(self, path: Path, *, follow: bool = True) -> FileInfo:
        """What is there; of a symlink itself unless `follow`."""
        return await self._link.call(routes.STAT, FileInfo, self._ids, query={"path": _core.raw_path(path), "follow": follow})

    async def exists(self, path: Path) -> bool:
        """Whether anything is there, be it a dangling symlink."""
        try:
            await self.stat(path, follow=False)
        except NotFound as error:
            if error.field in ("id", "sandbox_id"):
                raise  # it is the sandbox that does not exist
            return False
        return True

    async def mkdir(
        self, path: Path, *, mode: int | None = None, user: str | None = None, parents: bool = False, action_id: str | None = None
    ) -> FileInfo:
        """Make a directory; with `parents` also those above it, and no error if it is there."""
        query: _core.Query = {
            "path": _core.raw_path(path),
            "mode": _mode(mode),
            "user": user,
            "parents": parents or None,
            "action_id": action_id,
        }
        return await self._link.call(routes.MKDIR, FileInfo, self._ids, query=query)

    async def move(self, path: Path, to: Path, *, action_id: str | None = None) -> FileInfo:
        """Rename within the sandbox, replacing a file of that name."""
        query: _core.Query = {"path": _core.raw_path(path), "to": _core.raw_path(to, "to"), "action_id": action_id}
        return await self._link.call(routes.MOVE, FileInfo, self._ids, query=query)

    async def remove(self, path: Path, *, recursive: bool = False, action_id: str | None = None) -> None:
        """Remove a file, an empty directory, or with `recursive` a whole tree."""
        query: _core.Query = {"path": _core.raw_path(path), "recursive": recursive or None, "action_id": action_id}
        await self._link.command(routes.REMOVE, self._ids, query=query)

    async def chmod(self, path: Path, mode: int | None = None, *, user: str | None = None, action_id: str | None = None) -> FileInfo:
        """Change permission bits, owner, or both."""
        query: _core.Query = {"path": _core.raw_path(path), "mode": _mode(mode), "user": user, "action_id": action_id}
        return await self._link.call(routes.CHMOD, FileInfo, self._ids, query=query)

    async def watch(self, path: Path) -> AsyncGenerator[WatchEvent, None]:
        """Changes in a directory, from now on. The first event is `ready`: what happens after it will be seen."""
        try:
            query: _core.Query = {"path": _core.raw_path(path)}
            async with aclosing(self._link.lines(routes.WATCH, WatchEvent, self._ids, query=query)) as events:
                async for event in events:
                    yield event
                    if event.kind == "gone":
                        return
        except ConnectionBroken as error:
            raise Unavailable(f"the watch ended: {error}", data={"sent": error.sent}) from None

    # --- between here and there

    async def upload(
        self,
        local: str | os.PathLike[str],
        path: Path,
        *,
        user: str | None = None,
        progress: Progress | None = None,
        left_out: transfer.LeftOut | None = None,
        action_id: str | None = None,
    ) -> int:
        """Copy a file or directory of this machine to `path`; the bytes of file content. Modes are kept; owners become `user`.

        A directory's content appears in `path`, which is made if missing. `progress` is called with the bytes sent so far, `left_out`
        (from another thread) with the names of what is neither file, directory nor symlink and stays behind. A directory is read and
        sent again from its beginning if the connection breaks, and both are told again then.
        """
        source = LocalPath(local)
        try:
            info = await asyncio.to_thread(source.stat)
        except OSError as error:
            raise InvalidRequest(f"cannot read it: {error.strerror}: {source}", field="local") from None
        if stat_module.S_ISREG(info.st_mode):
            content = transfer.Counted(transfer.read_file(source), progress)
            mode = stat_module.S_IMODE(info.st_mode) & 0o777
            return await self.write(path, content, mode=mode, user=user, parents=True, action_id=action_id)
        if not stat_module.S_ISDIR(info.st_mode):
            raise InvalidRequest(f"is neither a file nor a directory: {source}", field="local")
        query: _core.Query = {"path": _core.raw_path(path), "user": user, "action_id": action_id}
        await self.mkdir(path, user=user, parents=True)

        def body() -> AsyncIterable[bytes]:
            return transfer.Counted(transfer.pack(source, left_out), progress)

        return (await self._link.upload(routes.UPLOAD, Written, self._ids, body, query=query, repeatable=True)).size_bytes

    async def download(
        self, path: Path, local: str | os.PathLike[str], *, progress: Progress | None = None, left_out: transfer.LeftOut | None = None
    ) -> int:
        """Copy a file or directory to `local` on this machine; the bytes of file content.

        The content is hostile, so nothing of it is followed here: files and directories come with their permission bits (no setuid),
        symlinks only if they stay within the copy. Everything else is left out, and its name told to `left_out` (from another thread).
        An existing file is replaced as a whole.
        """
        info = await self.stat(path)
        target = LocalPath(local)
        if info.kind == "file":
            async with aclosing(self.chunks(path)) as chunks:
                return await transfer.write_file(target, transfer.Counted(chunks, progress), mode=info.mode & 0o777)
        if info.kind != "directory":
            raise InvalidRequest(f"is a {info.kind.replace('_', ' ')}, neither a file nor a directory", field="path")
        async with aclosing(self.archive(path)) as chunks:
            return await transfer.unpack(transfer.Counted(chunks, progress), target, left_out)

    async def archive(self, path: Path) -> AsyncGenerator[bytes, None]:
        """A directory as a tar stream, its content named relative to it."""
        async with self._link.download(routes.DOWNLOAD, self._ids, query={"path": _core.raw_path(path)}) as answer:
            async for chunk in answer.chunks():
                yield chunk

    async def extract(self, path: Path, chunks: AsyncIterable[bytes], *, user: str | None = None, action_id: str | None = None) -> int:
        """Unpack a tar stream beneath `path`; the bytes of file content."""
        query: _core.Query = {"path": _core.raw_path(path), "user": user, "action_id": action_id}
        return (await self._link.upload(routes.UPLOAD, Written, self._ids, lambda: chunks, query=query)).size_bytes


def _mode(mode: int | None) -> str | None:
    if mode is None:
        return None
    if not isinstance(mode, int) or isinstance(mode, bool) or not 0 <= mode <= 0o7777:
        raise InvalidRequest(f"must be from 0 to 0o7777; got {mode!r}", field="mode")
    return f"{mode:o}"


def _count(value: int | None, field: str) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise InvalidRequest(f"must be a whole number of at least 0; got {value!r}", field=field)
    return value


def _stream(data: AsyncIterable[bytes] | BinaryIO) -> AsyncIterable[bytes]:
    if isinstance(data, AsyncIterable):
        return data
    if hasattr(data, "read"):
        return transfer.read_open_file(data)
    raise InvalidRequest(f"must be text, bytes, a binary file or an async iterable, not {type(data).__name__}", field="data")
