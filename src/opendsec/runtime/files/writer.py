# SPDX-License-Identifier: Apache-2.0
"""Writing one file.

What a write does to a file that is there already, compared with a shell's `> path`:

* A final symlink is followed (beneath the root) and stays a symlink; if it dangles, its target is made. As a shell does.
* The content changes all at once, on commit, because it is a new inode renamed over the old one. Other hard links, and
  processes that hold the old file open, keep the old content. A shell writes into the old inode instead.
* Owner and permission bits stay, unless given; setuid and setgid go, unless the mode is given.

Until commit the content has no name at all (O_TMPFILE), so nothing can touch it, and an edge that is killed leaves nothing
behind. Where a file system has no O_TMPFILE, a name that nobody can guess stands in.

Appending writes in place, as `>> path`, to the inode that is there; owner and mode change only if given.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from opendsec.api.errors import Conflict, Internal, InvalidRequest
from opendsec.kernel import abi, syscalls
from opendsec.runtime.files.beneath import MAX_LINKS, Owner, Tree, closing, kind_of, open_entry, split, text, translated


class Sandbox(Protocol):
    """What a writer needs of the sandbox later, when it ends."""

    def acting(self) -> AbstractContextManager[object]:
        """A context in which the thread acts as root of the sandbox."""

    def check_alive(self) -> None:
        """Raises SandboxLost. Its file system outlives a sandbox while we hold a descriptor of it; content does not count then."""


NEW_FILE_MODE = 0o644
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)  # ENOENT, EISDIR: from kernels that do not know the flag


class Target(NamedTuple):
    """Where a write goes. `directory` is an O_PATH descriptor and belongs to the holder; `existing` is None for a new file."""

    directory: int
    name: bytes
    existing: os.stat_result | None


def find_target(tree: Tree, path: bytes, *, parents: bool, owner: Owner) -> Target:
    """The directory and name that a shell redirect to `path` would open. `parents` makes what is missing of the directory."""
    if path.endswith((b"/", b"/.", b"/..")):
        raise InvalidRequest("names a directory", field="path")
    where = path
    for hop in range(MAX_LINKS):
        try:
            folder, name = split(where)
        except InvalidRequest:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)) from None
        directory = tree.make_directories(folder, owner) if parents and hop == 0 else tree.directory(folder)
        try:
            try:
                entry = open_entry(directory, name)
            except FileNotFoundError:
                return Target(directory, name, None)
            with closing(entry):
                st = os.fstat(entry)
                if not stat.S_ISLNK(st.st_mode):
                    if not stat.S_ISREG(st.st_mode):
                        raise Conflict(f"{text(path)} is a {kind_of(st.st_mode).replace('_', ' ')}, not a regular file", field="path")
                    return Target(directory, name, st)
                link = os.readlink(b"", dir_fd=entry)
        except BaseException:
            os.close(directory)
            raise
        os.close(directory)
        where = link if link.startswith(b"/") else folder + b"/" + link
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


class _Writing:
    """What both writers share: a descriptor, a count, and errors that clean up."""

    def __init__(self, path: bytes, fd: int) -> None:
        self._path = path
        self._fd = fd
        self._written = 0

    def write(self, data: bytes) -> None:
        """All of `data`. After an error the writer is aborted. Raises QuotaExceeded."""
        if self._fd < 0:
            raise Internal("written to after the end")
        try:
            with translated(self._path, where=self._fd), memoryview(data) as view:
                done = 0
                while done < len(view):
                    count = os.write(self._fd, view[done:])
                    done += count
                    self._written += count
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class NewFile(_Writing):
    """Content that becomes a file on commit. Owns `target.directory`, also when the constructor raises.

    With `exclusive` a file that appeared at the name meanwhile is a Conflict and not replaced.
    """

    def __init__(
        self, sandbox: Sandbox, tree: Tree, path: bytes, target: Target, *, owner: Owner, mode: int, exclusive: bool = False
    ) -> None:
        self._sandbox = sandbox
        self._directory, self._name, self._existing = target
        self._owner = (tree.uid_base + owner.uid, tree.uid_base + owner.gid)
        self._mode = mode
        self._exclusive = exclusive
        self._temporary: bytes | None = None
        try:
            tree.become(owner)
            super().__init__(path, self._create())
        except BaseException:
            os.close(self._directory)
            raise

    def _create(self) -> int:
        try:
            return os.open(b".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=self._directory)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
        name = _unguessable()
        fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._directory)
        self._temporary = name
        return fd

    def commit(self) -> int:
        if self._fd < 0:
            raise Internal("committed after the end")
        try:
            with translated(self._path, where=self._fd), self._sandbox.acting():
                st = os.fstat(self._fd)
                if st.st_size != self._written:
                    raise Internal(f"{text(self._path)}: {self._written} bytes were written, {st.st_size} are on disk")
                if (st.st_uid, st.st_gid) != self._owner:
                    os.fchown(self._fd, *self._owner)
                os.fchmod(self._fd, self._mode)  # after the change of owner, which clears setuid, and despite the umask
                self._publish()
                there = os.stat(self._name, dir_fd=self._directory, follow_symlinks=False)
                if (there.st_dev, there.st_ino, there.st_size) != (st.st_dev, st.st_ino, self._written):
                    raise Conflict(f"{text(self._path)} was changed by something else while it was written", field="path")
            self._sandbox.check_alive()
        finally:
            self.abort()
        return self._written

    def _publish(self) -> None:
        if self._temporary is None:
            if self._existing is None:
                try:
                    syscalls.linkat(self._fd, b"", self._directory, self._name, abi.AT_EMPTY_PATH)
                    return
                except FileExistsError:
                    if self._exclusive:
                        raise
            name = _unguessable()
            syscalls.linkat(self._fd, b"", self._directory, name, abi.AT_EMPTY_PATH)
            self._temporary = name
        syscalls.renameat2(self._directory, self._temporary, self._directory, self._name, abi.RENAME_NOREPLACE if self._exclusive else 0)
        self._temporary = None

    def abort(self) -> None:
        if self._fd < 0:
            return
        try:
            if self._temporary is not None:
                with self._sandbox.acting():
                    os.unlink(self._temporary, dir_fd=self._directory)
        except OSError:
            pass  # removed or moved away inside; there is nothing left of ours to remove
        finally:
            self._close()
            os.close(self._directory)


class Appending(_Writing):
    """Content written in place at the end of a file.

    Abort takes back what was appended, if nobody else has changed the file's size since; otherwise it stays.
    """

    def __init__(self, sandbox: Sandbox, path: bytes, fd: int, *, owner: tuple[int, int] | None, mode: int | None) -> None:
        super().__init__(path, fd)
        self._sandbox = sandbox
        self._owner = owner
        self._mode = mode
        self._start = os.fstat(fd).st_size

    def commit(self) -> int:
        if self._fd < 0:
            raise Internal("committed after the end")
        try:
            with translated(self._path, where=self._fd), self._sandbox.acting():
                size = os.fstat(self._fd).st_size
                if size < self._start + self._written:
                    raise Conflict(f"{text(self._path)} was cut by something else while it was appended to", field="path")
                if self._owner is not None:
                    os.fchown(self._fd, *self._owner)
                if self._mode is not None:
                    os.fchmod(self._fd, self._mode)
            self._sandbox.check_alive()
            return size
        finally:
            self._close()

    def abort(self) -> None:
        if self._fd < 0:
            return
        try:
            if self._written and os.fstat(self._fd).st_size == self._start + self._written:
                os.ftruncate(self._fd, self._start)
        except OSError:
            pass  # a dead sandbox, or a disk error: there is nothing better to do
        finally:
            self._close()


def _unguessable() -> bytes:
    return b".opendsec-" + secrets.token_hex(16).encode()
