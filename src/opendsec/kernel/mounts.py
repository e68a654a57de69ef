# SPDX-License-Identifier: Apache-2.0
"""File systems as *detached* mounts: made, combined and changed by descriptor, attached nowhere until a sandbox has them.

A detached mount is visible in no mount namespace and goes with its last descriptor, so nothing of it can leak, whatever
becomes of us. What works on them (Linux 6.18, each also probed by `features`):

* `open_tree(OPEN_TREE_CLONE)` of a detached mount by descriptor, and of such a clone (since 6.15; before that the mount has
  to be attached somewhere, a private mount namespace will do).
* An id-mapped clone of an EROFS mount as overlay's lower layer by descriptor (`lowerdir+`, since 6.13). Id-mapping is per
  mount and only once, so each sandbox gets its own clone; superblock and page cache stay shared.
* Upper and work directory by O_PATH descriptor, also inside a detached tmpfs.
* EROFS straight from files, metadata and data apart, without loop devices (since 6.12; before that loop devices, here).

Functions return descriptors; the caller closes them. Errors carry what the file system said, not errno alone.
"""

from __future__ import annotations

import errno
import os

from opendsec.kernel import abi, procfs, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opendsec.kernel.syscalls import StrPath

QUIET = abi.MOUNT_ATTR_NOSUID | abi.MOUNT_ATTR_NODEV | abi.MOUNT_ATTR_NOEXEC
"""Attributes for what holds neither programs nor devices."""

FSCONFIG_STRING_MAX = 255

OVERLAY_OPTIONS: dict[str, str] = {"redirect_dir": "on", "metacopy": "off", "index": "off"}
"""Said in full, because distributions build different defaults into their kernels. With redirect_dir a directory of an image
can be renamed as on any disk (else EXDEV); its xattrs are `trusted.*`, which no sandbox can write. The index would tie an
upper to the very lower mounts it was first used with."""


def new_mount(fstype: str | bytes, options: Mapping[str, StrPath | None], attrs: int = 0) -> int:
    """A detached mount of a new superblock. An option of None is a flag."""
    context = syscalls.fsopen(fstype)
    try:
        for key, value in options.items():
            if value is None:
                syscalls.fsconfig_set_flag(context, key)
            else:
                syscalls.fsconfig_set_string(context, key, value)
        syscalls.fsconfig_create(context)
        return syscalls.fsmount(context, attrs)
    finally:
        os.close(context)


def mount_erofs(meta: StrPath, data: StrPath | None = None, attrs: int = 0) -> int:
    """An EROFS image from its metadata file and, if it was built apart, its data file. Read-only, always.

    Where EROFS cannot mount files, loop devices carry them; they free themselves with the mount.
    """
    held: list[int] = []
    try:
        options: dict[str, StrPath | None] = {"source": _mountable(meta, held), "ro": None}
        if data is not None:
            options["device"] = _mountable(data, held)
        attrs |= abi.MOUNT_ATTR_RDONLY
        try:
            return new_mount("erofs", options, attrs)
        except OSError as error:
            if error.errno != errno.ENOTBLK:
                error.filename = error.filename or os.fsdecode(meta)
                raise
        return _mount_erofs_by_loop(meta, data, attrs)
    finally:
        for fd in held:
            os.close(fd)


def _mountable(path: StrPath, held: list[int]) -> StrPath:
    """The path, or for one too long for fsconfig a short name of the same file."""
    if len(os.fsencode(path)) <= FSCONFIG_STRING_MAX:
        return path
    held.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    return procfs.fd_path(held[-1])


def _mount_erofs_by_loop(meta: StrPath, data: StrPath | None, attrs: int) -> int:
    from opendsec.kernel import loop

    with loop.attach(meta, read_only=True) as meta_device:
        options: dict[str, StrPath | None] = {"source": meta_device.path, "ro": None}
        if data is None:
            return new_mount("erofs", options, attrs)
        with loop.attach(data, read_only=True) as data_device:
            options["device"] = data_device.path
            return new_mount("erofs", options, attrs)


def clone(mount_fd: int, path: StrPath = b"", *, recursive: bool = False) -> int:
    """A detached copy of a mount, or of the directory or file at `path` beneath `mount_fd` as a mount of its own."""
    flags = abi.OPEN_TREE_CLONE | abi.AT_EMPTY_PATH | abi.AT_SYMLINK_NOFOLLOW
    return syscalls.open_tree(mount_fd, path, flags | (abi.AT_RECURSIVE if recursive else 0))


def idmapped_clone(mount_fd: int, userns_fd: int) -> int:
    """A detached copy whose files belong to the ids that the user namespace maps them to."""
    fd = clone(mount_fd)
    try:
        syscalls.mount_setattr(fd, b"", abi.AT_EMPTY_PATH, userns_fd=userns_fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def bind_readonly(dirfd: int, path: StrPath, *, attrs: int = abi.MOUNT_ATTR_NOSUID | abi.MOUNT_ATTR_NODEV) -> int:
    """A detached, read-only bind of a directory or file of the host; submounts do not come along. `dirfd` may be AT_FDCWD."""
    fd = syscalls.open_tree(dirfd, path, abi.OPEN_TREE_CLONE | abi.AT_EMPTY_PATH | abi.AT_SYMLINK_NOFOLLOW)
    try:
        syscalls.mount_setattr(fd, b"", abi.AT_EMPTY_PATH, set=abi.MOUNT_ATTR_RDONLY | attrs)
    except BaseException:
        os.close(fd)
        raise
    return fd


def overlay(
    lower: Sequence[int],
    upper: int | StrPath | None,
    work: int | StrPath | None,
    *,
    volatile: bool = True,
    attrs: int = 0,
    options: Mapping[str, str] = OVERLAY_OPTIONS,
) -> int:
    """An overlay of mounts or directories given by descriptor, top layer first, and a writable directory (None: read-only).

    `upper` and `work` are empty directories of one file system, by path or descriptor. A volatile overlay never waits for
    the disk and is not to be mounted a second time after a crash of the machine: right for scratch.
    """
    if not lower:
        raise OSError(errno.EINVAL, "overlay: no lower layer")
    context = syscalls.fsopen("overlay")
    try:
        for fd in lower:
            syscalls.fsconfig_set_fd(context, "lowerdir+", fd)
        if upper is not None and work is not None:
            _set_directory(context, "upperdir", upper)
            _set_directory(context, "workdir", work)
            if volatile:
                syscalls.fsconfig_set_flag(context, "volatile")
        for key, value in options.items():
            syscalls.fsconfig_set_string(context, key, value)
        syscalls.fsconfig_create(context)
        return syscalls.fsmount(context, attrs)
    finally:
        os.close(context)


def _set_directory(context: int, key: str, directory: int | StrPath) -> None:
    if not isinstance(directory, int):
        if len(os.fsencode(directory)) <= FSCONFIG_STRING_MAX:
            syscalls.fsconfig_set_string(context, key, directory)
            return
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _set_directory(context, key, fd)
        finally:
            os.close(fd)
        return
    try:
        syscalls.fsconfig_set_fd(context, key, directory)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Before 6.13 overlay takes names only.
        syscalls.fsconfig_set_string(context, key, procfs.fd_path(directory))


def tmpfs(
    size_bytes: int,
    inodes: int,
    mode: int = 0o755,
    *,
    uid: int = 0,
    gid: int = 0,
    attrs: int = abi.MOUNT_ATTR_NOSUID | abi.MOUNT_ATTR_NODEV,
) -> int:
    """A tmpfs of at most so many bytes (rounded up to pages) and inodes (its root directory counts), neither 0."""
    if size_bytes <= 0 or inodes <= 0:
        raise ValueError("tmpfs takes a limit of 0 as none")
    options = {"size": str(size_bytes), "nr_inodes": str(inodes), "mode": f"{mode:o}", "uid": str(uid), "gid": str(gid)}
    return new_mount("tmpfs", options, attrs)


def proc(*, hidepid: str | None = None, attrs: int = QUIET) -> int:
    """A /proc of the pid namespace that the caller's children are in. `hidepid`: "off", "noaccess", "invisible", "ptraceable"."""
    return new_mount("proc", {} if hidepid is None else {"hidepid": hidepid}, attrs)


def devpts(
    *, gid: int = 5, mode: int = 0o620, maximum: int | None = None, attrs: int = abi.MOUNT_ATTR_NOSUID | abi.MOUNT_ATTR_NOEXEC
) -> int:
    """A devpts instance of its own, whose ptmx everyone inside may open. `gid` is one of the caller's user namespace."""
    options: dict[str, StrPath | None] = {"newinstance": None, "ptmxmode": "0666", "mode": f"{mode:o}", "gid": str(gid)}
    if maximum is not None:
        options["max"] = str(maximum)
    return new_mount("devpts", options, attrs)


def attach(mount_fd: int, to_fd: int, to_path: StrPath = b"") -> None:
    """Attach a detached mount at `to_path` beneath `to_fd` (final symlink not followed), or on what `to_fd` itself is."""
    flags = abi.MOVE_MOUNT_F_EMPTY_PATH | (0 if os.fsencode(to_path) else abi.MOVE_MOUNT_T_EMPTY_PATH)
    syscalls.move_mount(mount_fd, b"", to_fd, to_path, flags)


def usage(fd: int) -> tuple[int, int, int, int]:
    """(bytes in all, bytes free to a user, inodes in all, inodes free) of the file system behind a descriptor."""
    stats = os.fstatvfs(fd)
    return stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize, stats.f_files, stats.f_favail
