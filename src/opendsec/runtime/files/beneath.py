# SPDX-License-Identifier: Apache-2.0
"""One operation's view of a sandbox's files: resolving beneath the root, what is the sandbox's own, owners, errors."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from opendsec.api import spec
from opendsec.api.errors import Conflict, Denied, Internal, InvalidRequest, NotFound, OpenDSecError, QuotaExceeded, SandboxLost, Unavailable
from opendsec.api.files import FileInfo, FileKind
from opendsec.kernel import abi, fds, fsuser, syscalls

MAX_NAME_BYTES = 255
MAX_LINKS = 40  # as the kernel
NOBODY = 65_534  # what an id shows as that has no meaning inside

# From a held directory to an entry of it: no symlink, no other mount.
ENTRY = abi.RESOLVE_BENEATH | abi.RESOLVE_NO_XDEV | abi.RESOLVE_NO_SYMLINKS | abi.RESOLVE_NO_MAGICLINKS

_KINDS: dict[int, FileKind] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character_device",
    stat.S_IFBLK: "block_device",
}


class Owner(NamedTuple):
    """Ids as seen inside."""

    uid: int
    gid: int


def text(name: bytes, limit: int = 200) -> str:
    """A name for people: valid Unicode whatever the bytes are, and not longer than a message bears."""
    return (name if len(name) <= limit else name[:limit] + b"...").decode("utf-8", "replace")


def kind_of(mode: int) -> FileKind:
    return _KINDS.get(stat.S_IFMT(mode), "file")


def check_path(path: bytes, field: str = "path") -> bytes:
    """`path` if it is absolute and can be a path at all. Raises InvalidRequest."""
    spec.check_path(path.decode("utf-8", "surrogateescape"), field)
    return path


def split(path: bytes, field: str = "path") -> tuple[bytes, bytes]:
    """(directory, last name) of a path whose entry is to be made, replaced or removed. Trailing slashes do not count.

    Raises InvalidRequest for the root itself and for a last component ".." (which names no entry that could be changed).
    """
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if not parts:
        raise InvalidRequest("the root directory itself cannot be changed like this", field=field)
    if parts[-1] == b"..":
        raise InvalidRequest("must not end in '..'", field=field)
    return b"/" + b"/".join(parts[:-1]), parts[-1]


# --- errors --------------------------------------------------------------------------------------------------------

_CONFLICTS = {
    errno.EEXIST: "exists already",
    errno.EISDIR: "is a directory",
    errno.ENOTDIR: "is not a directory, or something on the way is not",
    errno.ENOTEMPTY: "is not empty",
    errno.ELOOP: "goes over too many symbolic links, or over one that cannot be followed from outside",
    errno.EXDEV: "is on another file system, or leads to one",
    errno.EBUSY: "is in use by the kernel (a mount point?)",
    errno.ETXTBSY: "is a program that is running",
    errno.EAGAIN: "keeps changing, or is held by a lease",
    errno.ENXIO: "is no regular file",
    errno.EPIPE: "has no reader any more",
    errno.EMLINK: "has too many links",
}
_LOST = (errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.ESRCH)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EOPNOTSUPP)
_BUSY = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def _quota_exceeded(path: bytes, where: int | None) -> QuotaExceeded:
    resource, what = "disk", "no space left"
    if where is not None:
        try:
            told = os.fstatvfs(where)
        except OSError:
            pass  # the answer only makes the message better
        else:
            if not told.f_files:  # btrfs has no number of inodes that could be used up; where they are limited, it is by its quota too
                what = "no space left, or as many files as it may have,"
            elif not told.f_favail:
                resource, what = "inodes", "no inodes (files) left"
    return QuotaExceeded(f"{text(path)}: {what} in the sandbox", field=resource, data={"resource": resource})


def from_os_error(error: OSError, path: bytes, field: str = "path", where: int | None = None) -> OpenDSecError:
    """The contract's error for the kernel's. `where`: a descriptor of the file system, to tell what it ran out of."""
    code = error.errno or 0
    subject = text(path)
    if code == errno.ENOENT:
        return NotFound(f"{subject} does not exist", field=field)
    if code in _CONFLICTS:
        return Conflict(f"{subject} {_CONFLICTS[code]}", field=field, data={"errno": errno.errorcode[code]})
    if code in _FULL:
        return _quota_exceeded(path, where)
    if code in (errno.EINVAL, errno.ENAMETOOLONG):
        return InvalidRequest(f"{subject}: {os.strerror(code)}", field=field)
    if code in _REFUSED:
        return Denied(f"{subject}: {os.strerror(code)}", field=field)
    if code in _LOST:
        return SandboxLost("the sandbox has ended")
    if code in _BUSY:
        return Unavailable(f"{subject}: {os.strerror(code)}")
    return Internal(f"{subject}: {os.strerror(code)}")


@contextmanager
def translated(path: bytes, field: str = "path", where: int | None = None) -> Iterator[None]:
    """OSError inside becomes an error of the contract that names `path`."""
    try:
        yield
    except OSError as error:
        raise from_os_error(error, path, field, where) from error


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """`fd`, closed at the end. (contextlib.closing wants an object.)"""
    try:
        yield fd
    finally:
        os.close(fd)


# --- the view ------------------------------------------------------------------------------------------------------


class Tree:
    """A sandbox's files during one operation. `root` and `user` belong to whoever made it; see `access.SandboxFiles`."""

    def __init__(self, root: int, user: fsuser.FsUser, uid_base: int, ids: int) -> None:
        self.root = root
        self.user = user
        self.uid_base = uid_base
        self.ids = ids
        self._root_mount = fsuser.statx_mnt_id(root)

    # Owners: the host's ids are the sandbox's plus `uid_base`.

    def inside(self, host_id: int) -> int:
        number = host_id - self.uid_base
        return number if 0 <= number < self.ids else NOBODY

    def owner_of(self, st: os.stat_result) -> Owner:
        return Owner(self.inside(st.st_uid), self.inside(st.st_gid))

    def become(self, owner: Owner) -> None:
        """Files made from here on belong to `owner`."""
        self.user.become(self.uid_base + owner.uid, self.uid_base + owner.gid)

    def give(self, fd: int, owner: Owner) -> None:
        """Make what an open descriptor names belong to `owner`. Clears setuid and setgid, so `mode` comes after."""
        st = os.fstat(fd)
        if (st.st_uid, st.st_gid) != (self.uid_base + owner.uid, self.uid_base + owner.gid):
            os.fchown(fd, self.uid_base + owner.uid, self.uid_base + owner.gid)

    # Resolving.

    def open(self, path: bytes, flags: int = 0, *, follow: bool = True) -> int:
        """An O_PATH descriptor of what `path` names inside."""
        return fds.beneath(self.root, path, os.O_PATH | flags | (0 if follow else os.O_NOFOLLOW))

    def owns(self, fd: int) -> bool:
        """Whether the file is on the sandbox's own file systems: its root's mount, or a tmpfs where its ids own the file.

        The second rule is for /dev/shm and the like, and keeps out files of the host that an operator mounted from a tmpfs.
        """
        if fsuser.statx_mnt_id(fd) == self._root_mount:
            return True
        return syscalls.fstatfs_type(fd) == abi.TMPFS_MAGIC and 0 <= os.fstat(fd).st_uid - self.uid_base < self.ids

    def require_own(self, fd: int, path: bytes) -> None:
        if not self.owns(fd):
            raise Denied(f"{text(path)} is on a file system of the kernel's or the host's, which is not changed from outside", field="path")

    def directory(self, path: bytes) -> int:
        """An O_PATH descriptor of a directory in which entries may be changed."""
        fd = self.open(path, os.O_DIRECTORY)
        try:
            self.require_own(fd, path)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def make_directories(self, path: bytes, owner: Owner) -> int:
        """As `directory`, but what is missing of it is made: mode 0755, owned by `owner`."""
        try:
            return self.directory(path)
        except FileNotFoundError:
            pass
        parts = [part for part in path.split(b"/") if part not in (b"", b".")]
        fd, existing = self._deepest(parts)
        try:
            self.become(owner)
            for part in parts[existing:]:
                if part == b"..":
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                child, made = make_directory(fd, part, 0o755)
                os.close(fd)
                fd = child
                if made:
                    self.give_path(fd, owner)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _deepest(self, parts: list[bytes]) -> tuple[int, int]:
        """The deepest existing directory on the way to a missing one, and how many components lead to it."""
        for existing in range(len(parts) - 1, 0, -1):
            try:
                return self.directory(b"/" + b"/".join(parts[:existing])), existing
            except FileNotFoundError:
                pass
        return self.directory(b"/"), 0

    def give_path(self, fd: int, owner: Owner) -> None:
        """As `give`, for an O_PATH descriptor."""
        st = os.fstat(fd)
        if (st.st_uid, st.st_gid) != (self.uid_base + owner.uid, self.uid_base + owner.gid):
            fsuser.chown_path(fd, self.uid_base + owner.uid, self.uid_base + owner.gid)

    # Reading.

    def open_regular(self, fd: int, path: bytes, flags: int = os.O_RDONLY) -> int:
        """Open for good what the O_PATH descriptor `fd` names, if it is a regular file. Raises Conflict.

        On file systems that are not the sandbox's own, only for reading, and with the bare rights of the sandbox's root.
        """
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise Conflict(f"{text(path)} is a {kind_of(mode).replace('_', ' ')}, not a regular file", field="path")
        flags |= os.O_NONBLOCK | os.O_NOCTTY
        if self.owns(fd):
            return fds.reopen(fd, flags)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            self.require_own(fd, path)
        with self.user.bare():
            return fds.reopen(fd, flags)

    def open_directory(self, fd: int) -> int:
        """Open for listing the directory that the O_PATH descriptor `fd` names."""
        if self.owns(fd):
            return fds.reopen(fd, os.O_RDONLY | os.O_DIRECTORY)
        with self.user.bare():
            return fds.reopen(fd, os.O_RDONLY | os.O_DIRECTORY)

    def read_small(self, path: bytes, limit: int) -> bytes:
        """At most the first `limit` bytes of a regular file; b"" if there is none. For files the sandbox may have forged."""
        try:
            with closing(self.open(path)) as fd, closing(self.open_regular(fd, path)) as file:
                parts = []
                while limit > 0 and (part := os.read(file, min(limit, 65_536))):
                    parts.append(part)
                    limit -= len(part)
                return b"".join(parts)
        except (OSError, Conflict):
            return b""

    # Describing.

    def info(self, name: bytes, fd: int) -> FileInfo:
        """What an O_PATH descriptor (of a symlink: one opened with O_NOFOLLOW) names."""
        st = os.fstat(fd)
        return self.describe(name, st, read_link(b"", fd) if stat.S_ISLNK(st.st_mode) else None)

    def describe(self, name: bytes, st: os.stat_result, target: bytes | None) -> FileInfo:
        return FileInfo(
            name=name.decode("utf-8", "replace"),
            raw_name=name,
            kind=kind_of(st.st_mode),
            size_bytes=st.st_size,
            mode=stat.S_IMODE(st.st_mode),
            uid=self.inside(st.st_uid),
            gid=self.inside(st.st_gid),
            modified_at=st.st_mtime,
            target=target,
        )


# --- entries of a held directory -----------------------------------------------------------------------------------


def read_link(name: bytes, directory: int) -> bytes | None:
    """What a symlink holds (of `directory` itself with an empty name); None if it cannot be read: /proc keeps some to itself."""
    try:
        return os.readlink(name, dir_fd=directory)
    except OSError:
        return None


def open_entry(directory: int, name: bytes, flags: int = 0) -> int:
    """An O_PATH descriptor of the entry itself, also of a symlink. EXDEV: something is mounted there."""
    return syscalls.openat2(directory, name, os.O_PATH | os.O_NOFOLLOW | flags, 0, ENTRY)


def make_directory(parent: int, name: bytes, mode: int) -> tuple[int, bool]:
    """(an O_PATH descriptor of directory `name`, whether this call made it). A symlink in its place raises ENOTDIR."""
    try:
        os.mkdir(name, mode, dir_fd=parent)
        made = True
    except FileExistsError:
        made = False
    fd = open_entry(parent, name, os.O_DIRECTORY)
    try:
        if made and stat.S_IMODE(os.fstat(fd).st_mode) != mode:  # the process's umask took some of it
            fsuser.chmod_path(fd, mode)
    except BaseException:
        os.close(fd)
        raise
    return fd, made
