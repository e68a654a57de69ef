# SPDX-License-Identifier: Apache-2.0
"""A store in a directory: a mount of 3FS, NFS or JuiceFS that several machines have, or a plain disk.

    <root>/<key>        objects
    <root>/.tmp/…       what is being put; each put clears what is older than a day, of machines that died

A put writes, syncs and renames, which those file systems do atomically. A mount that hangs holds a thread, never the event loop.
Others may write to such a directory: no link in it leads out of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeVar

from opendsec.images.origins import is_key
from opendsec.images.remote.store import Kind, StoreError, ignore
from opendsec.images.remote.threads import Abandoned, Workers
from opendsec.kernel import abi, fds

T = TypeVar("T")

_TEMPORARY = ".tmp"
_STALE_S = 24 * 3600.0
_BLOCK = 4 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

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

    async def size(self, key: str) -> int:
        def work(abandoned: Abandoned) -> int:
            with self._opened(key) as fd:
                return os.fstat(fd).st_size

        return await self._run(key, work)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        def work(abandoned: Abandoned) -> list[str]:
            found: list[str] = []
            with self._root_fd(prefix) as root, contextlib.suppress(FileNotFoundError, NotADirectoryError):
                top = fds.beneath(root, self._key(prefix), _FOLDER)
                try:
                    for folder, _, files, _ in os.fwalk(".", dir_fd=top):
                        if abandoned.is_set():
                            break
                        found += [os.path.normpath(os.path.join(prefix, folder, file)) for file in files]
                finally:
                    os.close(top)
            return found

        for key in await self._run(prefix, work):
            if is_key(key):
                yield key

    async def delete(self, key: str) -> None:
        if not self.writable:
            raise StoreError("denied", self.name, key, "it is not configured as writable")

        def work(abandoned: Abandoned) -> None:
            folder, _, name = self._key(key).rpartition("/")
            with self._root_fd(key) as root, contextlib.suppress(FileNotFoundError, NotADirectoryError):
                parent = fds.beneath(root, folder or ".", _FOLDER)
                try:
                    os.unlink(name, dir_fd=parent)
                finally:
                    os.close(parent)

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

    def _key(self, key: str) -> str:
        if not is_key(key):
            raise StoreError("missing", self.name, "", "that is no key")
        return key

    @contextlib.contextmanager
    def _root_fd(self, key: str) -> Iterator[int]:
        """A directory that is not there is a mount that failed, not a store without objects."""
        try:
            fd = os.open(self._root, _FOLDER)
        except (FileNotFoundError, NotADirectoryError):
            raise StoreError("unreachable", self.name, key, "its directory is not there: it has to be mounted or made first") from None
        try:
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[int]:
        with self._root_fd(key) as root:
            fd = fds.beneath(root, self._key(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise StoreError("missing", self.name, key, "there is no such object")
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
        with contextlib.ExitStack() as stack:
            root = stack.enter_context(self._root_fd(key))
            *folders, name = self._key(key).split("/")
            temporary = _made(root, _TEMPORARY, 0o700, resolve=abi.RESOLVE_NO_SYMLINKS)
            stack.callback(os.close, temporary)
            self._clear(temporary)
            staged = secrets.token_hex(16)
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with open(os.open(staged, flags, 0o600, dir_fd=temporary), "wb", buffering=0) as file:
                    if isinstance(content, bytes):
                        fds.write_all(file.fileno(), content)
                        progress(len(content))
                    else:
                        _copy(content, file.fileno(), progress, abandoned)
                    os.fchmod(file.fileno(), 0o644)
                    os.fsync(file.fileno())
                above = [root]
                for depth in range(len(folders)):
                    above.append(_made(root, "/".join(folders[: depth + 1])))
                    stack.callback(os.close, above[-1])
                if not abandoned.is_set():  # who gave up may have put something newer
                    os.rename(staged, name, src_dir_fd=temporary, dst_dir_fd=above[-1])
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(staged, dir_fd=temporary)
            for folder in reversed(above):
                _sync(folder)

    def _clear(self, temporary: int) -> None:
        if self._cleared:
            return
        self._cleared = True
        for name in os.listdir(temporary):
            with contextlib.suppress(OSError):  # another machine clears too
                if os.stat(name, dir_fd=temporary, follow_symlinks=False).st_mtime < self._clock() - _STALE_S:
                    os.unlink(name, dir_fd=temporary)


def _made(root: int, path: str, mode: int = 0o777, *, resolve: int = 0) -> int:
    """A directory beneath `root`, made if its parent is there and it is not."""
    try:
        return fds.beneath(root, path, _FOLDER, resolve=resolve)
    except FileNotFoundError:
        pass
    folder, _, name = path.rpartition("/")
    parent = fds.beneath(root, folder or ".", _FOLDER, resolve=resolve)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, mode, dir_fd=parent)
    finally:
        os.close(parent)
    return fds.beneath(root, path, _FOLDER, resolve=resolve)


def _copy(source: Path, fd: int, progress: Callable[[int], None], abandoned: Abandoned) -> None:
    done = 0
    with open(source, "rb", buffering=0) as file:
        while not abandoned.is_set() and (block := file.read(_BLOCK)):
            fds.write_all(fd, block)
            done += len(block)
            progress(done)


def _sync(folder: int) -> None:
    """Make a rename durable, and the directories that were made for it."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # some network file systems sync no directories
            raise
