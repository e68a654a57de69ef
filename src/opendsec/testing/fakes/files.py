# SPDX-License-Identifier: Apache-2.0
"""FileAccess over a plain directory, for the fake backend. Not safe against anybody: for tests that work on their own files only."""

from __future__ import annotations

import os
import pwd
import select
import shutil
import stat as st
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from opendsec.api.errors import Conflict, InvalidRequest, NotFound, OpenDSecError
from opendsec.api.files import FileInfo, FileKind, WatchEvent

T = TypeVar("T")

KINDS: dict[int, FileKind] = {
    st.S_IFREG: "file",
    st.S_IFDIR: "directory",
    st.S_IFLNK: "symlink",
    st.S_IFIFO: "fifo",
    st.S_IFSOCK: "socket",
    st.S_IFCHR: "character_device",
    st.S_IFBLK: "block_device",
}


def info(path: bytes, *, follow: bool = True) -> FileInfo:
    found = os.stat(path, follow_symlinks=follow)
    name = os.path.basename(path)
    kind = KINDS[st.S_IFMT(found.st_mode)]
    return FileInfo(
        name=name.decode("utf-8", "replace"),
        raw_name=name,
        kind=kind,
        size_bytes=found.st_size,
        mode=st.S_IMODE(found.st_mode),
        uid=found.st_uid,
        gid=found.st_gid,
        modified_at=found.st_mtime,
        target=os.readlink(path) if kind == "symlink" else None,
    )


def translate(error: OSError, path: bytes) -> OpenDSecError:
    text = f"{path.decode('utf-8', 'replace')}: {error.strerror}"
    if isinstance(error, FileNotFoundError):
        return NotFound(text, field="path")
    return Conflict(text, field="path")


class DirectoryFiles:
    """Paths are taken beneath `root`."""

    def __init__(self, root: Path) -> None:
        self._root = os.fsencode(root)

    def _full(self, path: bytes) -> bytes:
        full = os.path.normpath(self._root + b"/" + path.strip(b"/"))
        if full != self._root and not full.startswith(self._root + b"/"):
            raise InvalidRequest("leads out of the sandbox", field="path")
        return full

    def _try(self, path: bytes, work: Callable[[bytes], T]) -> T:
        try:
            return work(self._full(path))
        except OSError as error:
            raise translate(error, path) from None

    def stat(self, path: bytes, *, follow: bool = True) -> FileInfo:
        return self._try(path, lambda full: info(full, follow=follow))

    def list(self, path: bytes) -> Sequence[FileInfo]:
        return self._try(path, lambda full: [info(entry.path, follow=False) for entry in sorted(os.scandir(full), key=_name)])

    def open_read(self, path: bytes) -> int:
        def work(full: bytes) -> int:
            if not st.S_ISREG(os.stat(full).st_mode):
                raise Conflict("is not a regular file", field="path")
            return os.open(full, os.O_RDONLY | os.O_CLOEXEC)

        return self._try(path, work)

    def open_write(
        self, path: bytes, *, mode: int | None, user: str | None, append: bool, parents: bool, default_user: str = ""
    ) -> DirectoryWriter:
        def work(full: bytes) -> DirectoryWriter:
            before = os.stat(full) if os.path.exists(full) else None
            permissions = mode if mode is not None else st.S_IMODE(before.st_mode) if before is not None else 0o644
            uid = before.st_uid if before is not None and user is None else _uid(user or default_user)
            if parents:
                os.makedirs(os.path.dirname(full), exist_ok=True)
            if os.path.isdir(full):
                raise Conflict("is a directory", field="path")
            return DirectoryWriter(full, mode=permissions, uid=uid, append=append)

        return self._try(path, work)

    def mkdir(self, path: bytes, *, mode: int, user: str | None, parents: bool) -> FileInfo:
        def work(full: bytes) -> FileInfo:
            if parents:
                os.makedirs(full, exist_ok=True)
            else:
                os.mkdir(full)
            os.chmod(full, mode)
            os.chown(full, _uid(user or ""), -1)
            return info(full)

        return self._try(path, work)

    def move(self, path: bytes, to: bytes) -> FileInfo:
        def work(full: bytes) -> FileInfo:
            os.rename(full, self._full(to))
            return info(self._full(to), follow=False)

        return self._try(path, work)

    def remove(self, path: bytes, *, recursive: bool) -> None:
        def work(full: bytes) -> None:
            if os.path.isdir(full) and not os.path.islink(full):
                shutil.rmtree(full) if recursive else os.rmdir(full)
            else:
                os.unlink(full)

        self._try(path, work)

    def chmod(self, path: bytes, *, mode: int | None, user: str | None) -> FileInfo:
        def work(full: bytes) -> FileInfo:
            if user is not None:
                os.chown(full, _uid(user), -1)
            if mode is not None:
                os.chmod(full, mode)
            return info(full)

        return self._try(path, work)

    def archive(self, path: bytes, out_fd: int) -> None:
        def work(full: bytes) -> None:
            os.stat(full)
            with open(out_fd, "wb", closefd=False) as stream, tarfile.open(fileobj=stream, mode="w|") as tar:
                tar.add(os.fsdecode(full), arcname=os.path.basename(os.fsdecode(full)))

        self._try(path, work)

    def extract(self, path: bytes, in_fd: int, *, user: str | None) -> int:
        def work(full: bytes) -> int:
            os.makedirs(full, exist_ok=True)
            size = 0
            try:
                with open(in_fd, "rb", closefd=False) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
                    for member in tar:
                        tar.extract(member, os.fsdecode(full), filter="data")
                        size += member.size if member.isreg() else 0
            except tarfile.TarError as error:
                raise InvalidRequest(f"is not a tar stream: {error}", field="body") from None
            return size

        return self._try(path, work)

    def open_watch(self, path: bytes) -> DirectoryWatch:
        def work(full: bytes) -> DirectoryWatch:
            if not os.path.isdir(full):
                raise (NotFound if not os.path.exists(full) else Conflict)("is not a directory", field="path")
            return DirectoryWatch(full)

        return self._try(path, work)


class DirectoryWriter:
    """Writes beside the file and renames; appends in place."""

    def __init__(self, full: bytes, *, mode: int, uid: int, append: bool) -> None:
        self._full = full
        self._temporary = full if append else full + b".writing"
        fresh = not os.path.exists(self._temporary)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_APPEND if append else os.O_TRUNC)
        self._fd = os.open(self._temporary, flags, 0o600)
        if fresh or not append:
            os.fchmod(self._fd, mode)
            os.fchown(self._fd, uid, -1)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def commit(self) -> int:
        size = os.fstat(self._fd).st_size
        os.close(self._fd)
        if self._temporary != self._full:
            os.rename(self._temporary, self._full)
        return size

    def abort(self) -> None:
        os.close(self._fd)
        if self._temporary != self._full:
            os.unlink(self._temporary)


class DirectoryWatch:
    """Looks again whenever asked: `fileno` is always readable."""

    def __init__(self, full: bytes) -> None:
        self._full = full
        self._known = self._look()
        ours, theirs = os.pipe()
        os.close(theirs)
        self._fd = ours

    def _look(self) -> dict[bytes, int]:
        try:
            return {entry.name: entry.stat(follow_symlinks=False).st_mtime_ns for entry in os.scandir(self._full)}
        except FileNotFoundError:
            return {}

    def fileno(self) -> int:
        return self._fd

    def read(self) -> Sequence[WatchEvent]:
        select.select([], [], [], 0.01)  # so that the always readable descriptor does not spin
        before, self._known = self._known, self._look()
        if not os.path.isdir(self._full):
            return [WatchEvent(kind="gone")]
        events = [_event("created", name) for name in self._known if name not in before]
        events += [_event("deleted", name) for name in before if name not in self._known]
        events += [_event("modified", name) for name, at in self._known.items() if before.get(name, at) != at]
        return events

    def close(self) -> None:
        os.close(self._fd)


def _event(kind: Literal["created", "deleted", "modified"], name: bytes) -> WatchEvent:
    return WatchEvent(kind=kind, name=name.decode("utf-8", "replace"), raw_name=name)


def _name(entry: os.DirEntry[bytes]) -> bytes:
    return entry.name


def _uid(user: str) -> int:
    name = user.partition(":")[0]
    if name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name or "root").pw_uid
    except KeyError:
        raise InvalidRequest(f"no such user: {name}", field="user") from None
