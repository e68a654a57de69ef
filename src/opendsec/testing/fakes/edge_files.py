# SPDX-License-Identifier: Apache-2.0
"""The files of the fake edge's sandboxes: plain files beneath a directory."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import AsyncGenerator, Callable
from types import TracebackType

from starlette.requests import Request
from starlette.responses import Response

from opendsec.api import files as f
from opendsec.api.errors import Conflict, InvalidRequest, NotFound
from opendsec.api.spec import check_path, check_user
from opendsec.testing.fakes.edge_parts import FakeBox, Handler, json_answer, lines_answer, query_of

KINDS: dict[int, f.FileKind] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character_device",
    stat.S_IFBLK: "block_device",
}


class FileRoutes:
    """Handlers of the file routes. `box`: the sandbox of a request."""

    def __init__(self, box: Callable[[Request], FakeBox]) -> None:
        self._box = box

    def handlers(self) -> dict[str, Handler]:
        return {
            "READ": self._read,
            "WRITE": self._write,
            "STAT": self._stat,
            "LIST_FILES": self._list_files,
            "MKDIR": self._mkdir,
            "MOVE": self._move,
            "REMOVE": self._remove,
            "CHMOD": self._chmod,
            "DOWNLOAD": self._download,
            "UPLOAD": self._upload,
            "WATCH": self._watch,
        }

    async def _read(self, request: Request) -> Response:
        box, query = self._box(request), query_of(request)
        path = box.path(_path(query))
        with _files():
            if os.path.isdir(path):
                raise Conflict("is a directory", field="path")
            with open(path, "rb") as file:
                file.seek(int(query.get("offset", b"0")))
                data = file.read(int(query["length"]) if "length" in query else -1)
        return Response(data, media_type="application/octet-stream")

    async def _write(self, request: Request) -> Response:
        box, query = self._box(request), query_of(request)
        raw = _path(query)
        check_user(query.get("user", b"").decode(), "user")
        path, data = box.path(raw), await request.body()
        with _files():
            if query.get("parents") == b"1":
                os.makedirs(os.path.dirname(path), exist_ok=True)
            if os.path.isdir(path):
                raise Conflict("is a directory", field="path")
            existed = os.path.exists(path)
            with open(path, "ab" if query.get("append") == b"1" else "wb") as file:
                file.write(data)
            if "mode" in query and not existed:
                os.chmod(path, int(query["mode"], 8))
            written = f.Written(size_bytes=os.path.getsize(path))
        box.tell(raw, "modified" if existed else "created")
        return json_answer(written)

    async def _stat(self, request: Request) -> Response:
        query = query_of(request)
        return json_answer(_file_info(self._box(request).path(_path(query)), follow=query.get("follow") != b"0"))

    async def _list_files(self, request: Request) -> Response:
        path = self._box(request).path(_path(query_of(request)))
        with _files():
            names = sorted(os.listdir(path))
        return json_answer(f.FileList(entries=tuple(_file_info(os.path.join(path, name), follow=False) for name in names)))

    async def _mkdir(self, request: Request) -> Response:
        box, query = self._box(request), query_of(request)
        raw = _path(query)
        path = box.path(raw)
        with _files():
            if query.get("parents") == b"1":
                os.makedirs(path, exist_ok=True)
            else:
                os.mkdir(path)
            if "mode" in query:
                os.chmod(path, int(query["mode"], 8))
        box.tell(raw, "created")
        return json_answer(_file_info(path))

    async def _move(self, request: Request) -> Response:
        box, query = self._box(request), query_of(request)
        raw, to = _path(query), _path(query, "to")
        with _files():
            os.rename(box.path(raw), box.path(to))
        box.tell(raw, "moved_from")
        box.tell(to, "moved_to")
        return json_answer(_file_info(box.path(to), follow=False))

    async def _remove(self, request: Request) -> Response:
        box, query = self._box(request), query_of(request)
        raw = _path(query)
        path = box.path(raw)
        with _files():
            if stat.S_ISDIR(os.lstat(path).st_mode):
                shutil.rmtree(path) if query.get("recursive") == b"1" else os.rmdir(path)
            else:
                os.unlink(path)
        box.tell(raw, "deleted")
        return Response(status_code=204)

    async def _chmod(self, request: Request) -> Response:
        query = query_of(request)
        path = self._box(request).path(_path(query))
        with _files():
            if "mode" in query:
                os.chmod(path, int(query["mode"], 8))
        return json_answer(_file_info(path))

    async def _download(self, request: Request) -> Response:
        path = self._box(request).path(_path(query_of(request)))
        with _files():
            names = sorted(os.listdir(path))
        with tempfile.TemporaryFile() as spool:
            with tarfile.open(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for name in names:
                    tar.add(os.fsdecode(os.path.join(path, name)), arcname=os.fsdecode(name))
            spool.seek(0)
            return Response(spool.read(), media_type="application/x-tar")

    async def _upload(self, request: Request) -> Response:
        path = self._box(request).path(_path(query_of(request)))
        total = 0
        with tempfile.TemporaryFile() as spool:
            async for chunk in request.stream():
                spool.write(chunk)
            spool.seek(0)
            with _files():
                os.makedirs(path, exist_ok=True)
                try:
                    with tarfile.open(fileobj=spool, mode="r:") as tar:
                        total = sum(member.size for member in tar if member.isfile())
                        tar.extractall(os.fsdecode(path), filter="tar")
                except tarfile.TarError as error:
                    raise InvalidRequest(f"is not a tar stream: {error}", field="body") from None
        return json_answer(f.Written(size_bytes=total))

    async def _watch(self, request: Request) -> Response:
        box, raw = self._box(request), _path(query_of(request))
        if not os.path.isdir(box.path(raw)):
            raise NotFound("no such directory", field="path")

        async def lines() -> AsyncGenerator[f.WatchEvent, None]:
            queue: asyncio.Queue[f.WatchEvent] = asyncio.Queue()
            watchers = box.watchers.setdefault(raw.rstrip(b"/"), set())
            watchers.add(queue)
            try:
                yield f.WatchEvent(kind="ready")
                while True:
                    yield await queue.get()
            finally:
                watchers.discard(queue)

        return lines_answer(lines())


class _files:
    """Turns OSError into what the contract says."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise NotFound(error.strerror or "not found", field="path") from None
        if isinstance(error, OSError):
            raise Conflict(error.strerror or str(error), field="path") from None


def _path(query: dict[str, bytes], name: str = "path") -> bytes:
    raw = query.get(name, b"")
    check_path(raw.decode("utf-8", "surrogateescape"), name)
    return raw


def _file_info(path: bytes, *, follow: bool = True) -> f.FileInfo:
    with _files():
        info = os.stat(path, follow_symlinks=follow)
        target = os.readlink(path) if stat.S_ISLNK(info.st_mode) else None
    raw = os.path.basename(path.rstrip(b"/"))
    return f.FileInfo(
        name=raw.decode("utf-8", "replace"),
        raw_name=raw,
        kind=KINDS[stat.S_IFMT(info.st_mode)],
        size_bytes=info.st_size,
        mode=stat.S_IMODE(info.st_mode),
        uid=0,
        gid=0,
        modified_at=info.st_mtime,
        target=target,
    )
