# SPDX-License-Identifier: Apache-2.0
"""Routes about files of a sandbox. FileAccess blocks, so it runs in threads; bodies pass through in pieces, never whole."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, Protocol, TypeVar

import msgspec

from opendsec.api.errors import Conflict, InvalidRequest, Unavailable
from opendsec.api.files import FileInfo, FileList, WatchEvent, Written
from opendsec.api.ids import check_action_id
from opendsec.api.spec import check_user
from opendsec.edge.actions import Action, request_digest
from opendsec.edge.box import Box
from opendsec.edge.http import Disconnected, Handler, Lines, Raw, Request
from opendsec.edge.node import Node
from opendsec.edge.pausing import awake, talking, wake
from opendsec.runtime.backend import FileAccess, FileReader, FileWriter

PIECE_BYTES = 1 << 20
THREADS = 16
ARCHIVES = 16  # each has a thread of its own, which waits for its client
MODES = (0, 0o7777)
T = TypeVar("T")


class Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


class _Write(msgspec.Struct, frozen=True):
    """A recorded write: what is answered, and of which content."""

    size_bytes: int
    sha256: bytes


class FileRoutes:
    """Handlers for one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="files")
        self._archives = 0

    def handlers(self) -> dict[str, Handler]:
        return {
            "READ": self.read,
            "WRITE": self.write,
            "STAT": self.stat,
            "LIST_FILES": self.list,
            "MKDIR": self.mkdir,
            "MOVE": self.move,
            "REMOVE": self.remove,
            "CHMOD": self.chmod,
            "DOWNLOAD": self.download,
            "UPLOAD": self.upload,
            "WATCH": self.watch,
        }

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _call(self, work: Callable[[], T]) -> T:
        """In a thread. A cancelled caller waits for its end all the same: what it works on is closed next."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait((future,))
            raise

    @contextlib.asynccontextmanager
    async def _files(self, request: Request) -> AsyncIterator[tuple[Box, FileAccess]]:
        async with awake(self._node, request.params[0]) as (box, handle):
            yield box, handle.files

    # --- small things ----------------------------------------------------------------------------------------------------

    async def stat(self, request: Request) -> FileInfo:
        path, follow = request.path("path"), "follow" not in request.query or request.flag("follow")
        async with self._files(request) as (_, files):
            return await self._call(lambda: files.stat(path, follow=follow))

    async def list(self, request: Request) -> FileList:
        path = request.path("path")
        async with self._files(request) as (_, files):
            return FileList(tuple(await self._call(lambda: files.list(path))))

    async def mkdir(self, request: Request) -> FileInfo:
        path, mode, user, parents = request.path("path"), request.integer("mode", MODES, base=8), _user(request), request.flag("parents")
        async with self._files(request) as (box, files):
            owner, bits = user or box.template.user, 0o755 if mode is None else mode
            request.intent.begin()
            return await self._call(lambda: files.mkdir(path, mode=bits, user=owner, parents=parents))

    async def move(self, request: Request) -> FileInfo:
        path, to = request.path("path"), request.path("to")
        async with self._files(request) as (_, files):
            request.intent.begin()
            return await self._call(lambda: files.move(path, to))

    async def remove(self, request: Request) -> None:
        path, recursive = request.path("path"), request.flag("recursive")
        async with self._files(request) as (_, files):
            request.intent.begin()
            await self._call(lambda: files.remove(path, recursive=recursive))

    async def chmod(self, request: Request) -> FileInfo:
        path, mode, user = request.path("path"), request.integer("mode", MODES, base=8), _user(request)
        if mode is None and user is None:
            raise InvalidRequest("give mode or user or both", field="mode")
        async with self._files(request) as (_, files):
            request.intent.begin()
            return await self._call(lambda: files.chmod(path, mode=mode, user=user))

    # --- content ---------------------------------------------------------------------------------------------------------

    async def read(self, request: Request) -> Raw:
        path = request.path("path")
        offset = request.integer("offset", (0, 1 << 62)) or 0
        length = request.integer("length", (0, 1 << 62))
        box = self._node.box(request.params[0])
        files = (await wake(self._node, box)).files
        hold = contextlib.ExitStack()

        def begin() -> tuple[FileReader, bytes, int | None]:
            """The file, the first piece, and how much there will be in all (None: read on to the end)."""
            reader = files.open_read(path)
            try:
                want = PIECE_BYTES if length is None else min(PIECE_BYTES, length)
                first = reader.read(offset, want)
                if len(first) < want or len(first) == length:
                    return reader, first, len(first)
                left = reader.size_bytes() - offset  # more than this, should it grow meanwhile, is not sent
                total = left if length is None else min(left, length)
                return reader, first, total if total >= len(first) else None
            except BaseException:
                reader.close()
                raise

        hold.enter_context(talking(self._node, box))
        try:
            reader, first, total = await self._call(begin)
        except BaseException:
            hold.close()
            raise
        hold.callback(reader.close)

        async def pieces() -> AsyncGenerator[bytes, None]:
            yield first
            sent = len(first)
            end = total if total is not None else length
            while end is None or sent < end:
                want = PIECE_BYTES if end is None else min(PIECE_BYTES, end - sent)
                piece = await self._call(partial(reader.read, offset + sent, want))
                if not piece:
                    if total is not None:
                        raise Unavailable("the file became shorter while it was read")
                    return
                sent += len(piece)
                yield piece

        return Raw(pieces(), total, hold.close)

    async def write(self, request: Request) -> Written:
        path, mode, user = request.path("path"), request.integer("mode", MODES, base=8), _user(request)
        append, parents, action_id = request.flag("append"), request.flag("parents"), request.text("action_id")
        if action_id is not None:
            check_action_id(action_id)
        box = self._node.box(request.params[0])
        handle = await wake(self._node, box)
        files, owner, content = handle.files, box.template.user, hashlib.sha256()
        ran = False

        async def work(action: Action[_Write]) -> _Write:
            nonlocal ran
            ran = True
            action.begin("", self._node.clock.time())
            hashing = content if action_id is not None else None
            try:
                size_bytes = await self._write(
                    request,
                    hashing,
                    lambda: files.open_write(path, mode=mode, user=user, append=append, parents=parents, default_user=owner),
                )
            except Disconnected:
                if not append:  # the old content is still there: as if nothing had been asked
                    action.forget()
                raise
            return _Write(size_bytes, content.digest())

        with talking(self._node, box):
            parts = (box.id.encode(), path, repr((mode, user, append, parents)).encode())
            written = await self._node.actions.once(
                action_id, work, result=_Write, kind="write", digest=lambda: request_digest("write", *parts), sandbox_id=box.id
            )
            if not ran:  # recorded: the content belongs to what makes two requests the same
                async for chunk in request.chunks():
                    content.update(chunk)
                if content.digest() != written.sha256:
                    raise Conflict(f"action id {action_id!r} was used before for another content", field="action_id")
        return Written(written.size_bytes)

    async def _write(self, request: Request, content: Hash | None, open_writer: Callable[[], FileWriter]) -> int:
        opened: list[FileWriter] = []  # filled in the thread, so that a cancellation in between does not lose it

        def step(piece: bytes) -> None:
            if not opened:
                opened.append(open_writer())
            opened[0].write(piece)
            if content is not None:
                content.update(piece)

        try:
            async with contextlib.aclosing(_gather(request.chunks())) as pieces:
                async for piece in pieces:
                    await self._call(partial(step, piece))
            if not opened:
                await self._call(partial(step, b""))
            return await self._call(opened[0].commit)
        except BaseException:
            if opened:
                await self._call(opened[0].abort)
            raise

    # --- trees -----------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _archive_slot(self) -> AsyncIterator[None]:
        if self._archives >= ARCHIVES:
            raise Unavailable(f"{ARCHIVES} archives are being transferred already")
        self._archives += 1
        try:
            yield
        finally:
            self._archives -= 1

    async def download(self, request: Request) -> Raw:
        path = request.path("path")
        await wake(self._node, self._node.box(request.params[0]))

        async def pieces() -> AsyncGenerator[bytes, None]:
            async with self._files(request) as (_, files), self._archive_slot():
                ours, theirs = os.pipe2(os.O_CLOEXEC)
                os.set_blocking(ours, False)
                worker = _Thread(lambda: files.archive(path, theirs), closing=theirs)
                try:
                    while piece := await _read_ready(ours):
                        yield piece
                finally:
                    os.close(ours)  # the archiver, if it still writes, sees a broken pipe
                    await worker.ended()
                worker.result()

        return Raw(pieces(), None, lambda: None)

    async def upload(self, request: Request) -> Written:
        path, user = request.path("path"), _user(request)
        async with self._files(request) as (_, files), self._archive_slot():
            request.intent.begin()
            theirs, ours = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(ours, False)
            worker = _Thread(lambda: files.extract(path, theirs, user=user), closing=theirs)
            try:
                async for piece in request.chunks():
                    if not await _write_ready(ours, piece):
                        break  # the reader has ended: it will say why
            except Disconnected:
                request.intent.forget()  # what came of it stays; the whole of it may come again, and does the same
                raise
            finally:
                os.close(ours)
                await worker.ended()
            return Written(worker.result())

    async def watch(self, request: Request) -> Lines:
        path = request.path("path")
        async with awake(self._node, request.params[0]) as (box, handle):
            watch = await self._call(lambda: handle.files.open_watch(path))

        async def events() -> AsyncGenerator[WatchEvent, None]:
            with self._node.use(box), contextlib.closing(watch):
                yield WatchEvent(kind="ready")
                while True:
                    await _readable(watch.fileno(), handle.died)
                    if handle.died.done():
                        yield WatchEvent(kind="gone")
                        return
                    for event in watch.read():
                        yield event
                        if event.kind == "gone":
                            return

        return Lines(events())


# --- helpers -------------------------------------------------------------------------------------------------------------


def _user(request: Request) -> str | None:
    return check_user(request.text("user") or "", "user") or None


async def _gather(chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Pieces of about PIECE_BYTES: a thread's turn for each network packet would cost more than the writing."""
    parts, size = [], 0
    async for chunk in chunks:
        parts.append(chunk)
        size += len(chunk)
        if size >= PIECE_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
    if parts:
        yield b"".join(parts)


class _Thread(Generic[T]):
    """One call in a thread of its own. `closing`: a descriptor that is closed when it ends, so that the other end of the pipe sees it."""

    def __init__(self, work: Callable[[], T], *, closing: int) -> None:
        self._future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._work, self._closing = work, closing
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, name="archive", daemon=True).start()

    def _run(self) -> None:
        try:
            try:
                result = self._work()
            finally:
                os.close(self._closing)
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._future.set_exception, error)
        else:
            self._loop.call_soon_threadsafe(self._future.set_result, result)

    async def ended(self) -> None:
        """Until it has ended, however; not to be hurried by a cancellation."""
        await asyncio.shield(asyncio.wait((self._future,)))
        if not self._future.cancelled():
            self._future.exception()  # seen, even if nobody asks for the result

    def result(self) -> T:
        return self._future.result()


def _settle(future: asyncio.Future[str]) -> None:
    if not future.done():
        future.set_result("")


async def _readable(fd: int, *others: asyncio.Future[str]) -> None:
    """Until `fd` is readable or one of the others is done."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[str] = loop.create_future()
    loop.add_reader(fd, _settle, ready)
    try:
        await asyncio.wait((ready, *others), return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_reader(fd)


async def _read_ready(fd: int) -> bytes:
    """What a pipe holds, at most 64 KiB; empty at its end."""
    while True:
        try:
            return os.read(fd, 1 << 16)
        except BlockingIOError:
            await _readable(fd)


async def _write_ready(fd: int, data: bytes) -> bool:
    """All of `data` into a pipe; False if nobody reads it any more."""
    loop, view = asyncio.get_running_loop(), memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BrokenPipeError:
            return False
        except BlockingIOError:
            ready: asyncio.Future[str] = loop.create_future()
            loop.add_writer(fd, _settle, ready)
            try:
                await ready
            finally:
                loop.remove_writer(fd)
    return True
