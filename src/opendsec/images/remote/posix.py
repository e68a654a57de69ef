# SPDX-License-Identifier: Apache-2.0
"""A store in a directory: a mount of 3FS, NFS or JuiceFS that several machines have, or a plain disk.

    <root>/<key>        objects
    <root>/.tmp/…       what is being put; each put clears what is older than a day, of machines that died

A put writes, syncs and renames, which those file systems do atomically. A mount that hangs holds a thread, never the event loop.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeVar

from opendsec.images.origins import is_key
from opendsec.images.remote.store import Kind, StoreError, ignore
from opendsec.images.remote.threads import Abandoned, Workers

T = TypeVar("T")

_TEMPORARY = ".tmp"
_STALE_S = 24 * 3600.0
_BLOCK = 4 << 20

_KINDS: dict[int, tuple[Kind, str]] = {
    errno.ENOENT: ("missing", "there is no such object"),
    errno.ENOTDIR: ("missing", "there is no such object"),
    errno.EISDIR: ("missing", "there is no such object"),
    errno.EACCES: ("denied", "permission denied"),
    errno.EPERM: ("denied", "permission denied"),
    errno.EROFS: ("denied", "it is mounted read-only"),
    errno.ENOSPC: ("full", "no space left"),
    errno.EDQUOT: ("full", "the quota is used up"),
    errno.EFBIG: ("full", "the file system takes no file so large"),
}


class PosixStore:
    """See `store.RemoteStore`. Bounded in time only inside `retry.Patient`, as `config.open_store` makes it."""

    def __init__(self, name: str, root: Path, *, writable: bool = False, clock: Callable[[], float] = time.time) -> None:
        self.name, self.writable = name, writable
        self._root, self._clock = root, clock
        self._workers = Workers(f"store {name}")
        self._cleared = False

    async def get(self, key: str, *, limit: int) -> bytes:
        def work(abandoned: Abandoned) -> bytes:
            with self._opened(key) as fd:
                size = os.fstat(fd).st_size
                if size > limit:
                    raise StoreError("damaged", self.name, key, f"has {size} bytes, more than the {limit} such an object may have")
                return self._read(fd, key, 0, size, abandoned)

        return await self._run(key, work)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        def work(abandoned: Abandoned) -> bytes:
            with self._opened(key) as fd:
                return self._read(fd, key, start, length, abandoned)

        return await self._run(key, work)

    async def put(self, key: str, content: bytes | Path, *, progress: Callable[[int], None] = ignore) -> None:
        if not self.writable:
            raise StoreError("denied", self.name, key, "it is not configured as writable")
        await self._run(key, lambda abandoned: self._put(key, content, progress, abandoned))

    async def exists(self, key: str) -> bool:
        try:
            await self.size(key)
        except StoreError as error:
            if error.kind == "missing":
                return False
            raise
        return True

    async def size(self, key: str) -> int:
        def work(abandoned: Abandoned) -> int:
            with self._opened(key) as fd:
                return os.fstat(fd).st_size

        return await self._run(key, work)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        def work(abandoned: Abandoned) -> list[str]:
            found = []
            for folder, _, files in os.walk(self._path(prefix)):
                if abandoned.is_set():
                    break
                found += [str(Path(folder, file).relative_to(self._root)) for file in files]
            if not found:
                self._check_root(prefix)
            return found

        for key in await self._run(prefix, work):
            if is_key(key):
                yield key

    async def delete(self, key: str) -> None:
        if not self.writable:
            raise StoreError("denied", self.name, key, "it is not configured as writable")

        def work(abandoned: Abandoned) -> None:
            try:
                self._path(key).unlink()
            except FileNotFoundError:
                self._check_root(key)

        await self._run(key, work)

    async def close(self) -> None:
        self._workers.close()

    # --- in threads ------------------------------------------------------------------------------------------------

    async def _run(self, key: str, work: Callable[[Abandoned], T]) -> T:
        try:
            return await self._workers.run(work)
        except OSError as error:
            kind, why = _KINDS.get(error.errno or 0, ("unreachable", os.strerror(error.errno or errno.EIO)))
        raise StoreError(kind, self.name, key, why)

    def _path(self, key: str) -> Path:
        if not is_key(key):
            raise StoreError("missing", self.name, "", "that is no key")
        return self._root / key

    def _check_root(self, key: str) -> None:
        """A directory that is not there is a mount that failed, not a store without objects."""
        if not self._root.is_dir():
            raise StoreError("unreachable", self.name, key, "its directory is not there")

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[int]:
        try:
            fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            self._check_root(key)
            raise
        try:
            yield fd
        finally:
            os.close(fd)

    def _read(self, fd: int, key: str, start: int, length: int, abandoned: Abandoned) -> bytes:
        parts, at = [], start
        while at < start + length and not abandoned.is_set():
            part = os.pread(fd, min(_BLOCK, start + length - at), at)
            if not part:
                raise StoreError("damaged", self.name, key, f"ends at byte {at}, but {start + length} were expected")
            parts.append(part)
            at += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _put(self, key: str, content: bytes | Path, progress: Callable[[int], None], abandoned: Abandoned) -> None:
        target = self._path(key)
        self._check_root(key)
        temporary = self._root / _TEMPORARY
        temporary.mkdir(mode=0o700, exist_ok=True)
        self._clear(temporary)
        staged = temporary / secrets.token_hex(16)
        try:
            with open(staged, "xb", buffering=0) as file:
                if isinstance(content, bytes):
                    _write(file.fileno(), content)
                    progress(len(content))
                else:
                    _copy(content, file.fileno(), progress, abandoned)
                os.fchmod(file.fileno(), 0o644)
                os.fsync(file.fileno())
            target.parent.mkdir(parents=True, exist_ok=True)
            if not abandoned.is_set():  # who gave up may have put something newer
                os.rename(staged, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                staged.unlink()
        _sync_up(target.parent, self._root)

    def _clear(self, temporary: Path) -> None:
        if self._cleared:
            return
        self._cleared = True
        for entry in os.scandir(temporary):
            with contextlib.suppress(OSError):  # another machine clears too
                if entry.stat(follow_symlinks=False).st_mtime < self._clock() - _STALE_S:
                    os.unlink(entry.path)


def _write(fd: int, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def _copy(source: Path, fd: int, progress: Callable[[int], None], abandoned: Abandoned) -> None:
    done = 0
    with open(source, "rb", buffering=0) as file:
        while not abandoned.is_set() and (block := file.read(_BLOCK)):
            _write(fd, block)
            done += len(block)
            progress(done)


def _sync_up(folder: Path, root: Path) -> None:
    """Make a rename durable, and the directories that were made for it."""
    while True:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # some network file systems sync no directories
                raise
        finally:
            os.close(fd)
        if folder == root:
            return
        folder = folder.parent
