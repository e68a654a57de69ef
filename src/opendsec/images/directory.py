# SPDX-License-Identifier: Apache-2.0
"""A directory made ready for packing, without copying it.

The source is walked once by descriptor, following no link and crossing no mount. What must not be as it is there becomes an `Edit`;
the edits are written into a small directory of our own, and a read-only overlay of it above the source is what gets packed:

    Hide        excluded by a pattern, or a kind that a layer does not carry (devices, sockets)
    Rewrite     the same file with another beginning (see `pyc`)

So the source is never written, not even linked to, may lie on any file system, and costs no copy.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from opendsec.api.errors import InvalidRequest
from opendsec.images import pyc
from opendsec.images.erofs import TIMESTAMP
from opendsec.images.layers import MAX_ID
from opendsec.images.view import DIRECTORY, opened
from opendsec.kernel import abi, mounts, syscalls

# Directories above the prefix appear in the sandbox with the highest layer's mode: these must not become 0755.
_KNOWN_MODES = {b"tmp": 0o1777, b"var/tmp": 0o1777, b"dev/shm": 0o1777, b"root": 0o700, b"run/lock": 0o1777}


class Hide(NamedTuple):
    path: bytes  # relative to the source


class Rewrite(NamedTuple):
    path: bytes
    beginning: bytes  # instead of as many bytes


Edit = Hide | Rewrite


def excluded(path: bytes, patterns: Sequence[bytes]) -> bool:
    """Whether a shell pattern covers `path`, relative to the source. `*` crosses slashes; a pattern without a slash is compared with
    the last part of the path alone."""
    name = path.rpartition(b"/")[2]
    return any(fnmatch.fnmatchcase(path if b"/" in pattern else name, pattern) for pattern in patterns)


def scan(root_fd: int, *, exclude: Sequence[str], keep_owner: bool, log: Callable[[str], None]) -> list[Edit]:
    """The edits for the directory at `root_fd`. Raises InvalidRequest for owners that a layer cannot hold, OSError."""
    patterns = [os.fsencode(pattern.strip("/")) for pattern in exclude]
    edits: list[Edit] = []
    pending = [b""]
    while pending:
        folder = pending.pop()
        with opened(root_fd, folder) as fd:
            for name in sorted(map(os.fsencode, os.listdir(fd))):
                path = folder + b"/" + name if folder else name
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                kind = stat.S_IFMT(status.st_mode)
                if excluded(path, patterns):
                    edits.append(Hide(path))
                elif kind in (stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK):
                    edits.append(Hide(path))
                    log(f"left out {_KINDS[kind]} {os.fsdecode(path)!r}")
                else:
                    if keep_owner and not (status.st_uid <= MAX_ID and status.st_gid <= MAX_ID):
                        raise InvalidRequest(
                            f"{os.fsdecode(path)!r} belongs to {status.st_uid}:{status.st_gid}, but a layer holds ids up to {MAX_ID}; "
                            "give owner 'root'",
                            field="source.owner",
                        )
                    if kind == stat.S_IFDIR:
                        if _is_mount_point(fd, name):
                            log(f"left empty: something is mounted on {os.fsdecode(path)!r}")
                        else:
                            pending.append(path)
            if folder.rpartition(b"/")[2] == pyc.CACHE_DIRECTORY:
                hidden = {edit.path for edit in edits if edit.path.startswith(folder)}
                edits.extend(_compiled(root_fd, folder, fd, hidden=hidden))
    return edits


_KINDS = {stat.S_IFCHR: "character device", stat.S_IFBLK: "block device", stat.S_IFSOCK: "socket"}


def _is_mount_point(fd: int, name: bytes) -> bool:
    try:
        os.close(syscalls.openat2(fd, name, DIRECTORY, resolve=abi.RESOLVE_NO_XDEV))
    except OSError as error:
        if error.errno == errno.EXDEV:
            return True
        raise
    return False


def _compiled(root_fd: int, folder: bytes, cache_fd: int, *, hidden: set[bytes]) -> Iterator[Rewrite]:
    for name in sorted(map(os.fsencode, os.listdir(cache_fd))):
        path = folder + b"/" + name
        if path in hidden:
            continue
        beginning = pyc.normalised(root_fd, folder.rpartition(b"/")[0], cache_fd, name, timestamp=TIMESTAMP)
        if beginning is not None:
            yield Rewrite(path, beginning)


def apply(edits: Sequence[Edit], root_fd: int, into: Path) -> None:
    """Write edits into the empty directory `into` as an overlay's upper layer: whiteouts, new files, and the directories above them,
    which have to look like the source's, since an overlay shows the upper one's attributes."""
    into_fd = os.open(into, DIRECTORY)
    try:
        _copy_attributes(root_fd, into_fd)
        made = {b""}
        links: dict[tuple[int, int], bytes] = {}
        for edit in edits:
            _make_parents(edit.path, root_fd, into_fd, made)
            if isinstance(edit, Hide):
                os.mknod(edit.path, stat.S_IFCHR | 0o600, os.makedev(0, 0), dir_fd=into_fd)
            else:
                _rewrite(edit, root_fd, into_fd, links)
    finally:
        os.close(into_fd)


def _make_parents(path: bytes, root_fd: int, into_fd: int, made: set[bytes]) -> None:
    parts = path.split(b"/")[:-1]
    for depth in range(1, len(parts) + 1):
        folder = b"/".join(parts[:depth])
        if folder in made:
            continue
        os.mkdir(folder, dir_fd=into_fd)
        with opened(root_fd, folder) as source_fd, opened(into_fd, folder) as target_fd:
            _copy_attributes(source_fd, target_fd)
        made.add(folder)


def _rewrite(edit: Rewrite, root_fd: int, into_fd: int, links: dict[tuple[int, int], bytes]) -> None:
    source = os.open(edit.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root_fd)
    try:
        status = os.fstat(source)
        first = links.setdefault((status.st_dev, status.st_ino), edit.path)
        if first != edit.path:
            os.link(first, edit.path, src_dir_fd=into_fd, dst_dir_fd=into_fd)
            return
        target = os.open(edit.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=into_fd)
        try:
            os.write(target, edit.beginning)
            os.lseek(source, len(edit.beginning), os.SEEK_SET)
            while os.sendfile(target, source, None, 1 << 24):
                pass
            _copy_attributes(source, target)
        finally:
            os.close(target)
    finally:
        os.close(source)


def _copy_attributes(source: int, target: int) -> None:
    status = os.fstat(source)
    os.fchown(target, status.st_uid, status.st_gid)
    os.fchmod(target, stat.S_IMODE(status.st_mode))  # after chown, which clears setuid
    for name in os.listxattr(source):
        if name != "security.selinux":
            os.setxattr(target, name, os.getxattr(source, name))


def stage(root_fd: int, edits: Sequence[Edit], *, prefix: str, work: Path) -> Path:
    """A directory in `work` that shows the source, with the edits, at `prefix`: what mkfs.erofs packs.

    The caller has a mount namespace of its own, which takes the mounts made here along when it ends. Nothing can be reached through a
    link on it, so a directory that somebody makes a link while mkfs.erofs walks leads nowhere.
    """
    top = work / "stage"
    top.mkdir(mode=0o755)
    place, so_far = top, b""
    for part in Path(prefix).parts[1:]:
        place, so_far = place / part, so_far + b"/" + os.fsencode(part)
        place.mkdir()
        place.chmod(_KNOWN_MODES.get(so_far[1:], 0o755))
    tree = mounts.bind_readonly(root_fd, b"", attrs=abi.MOUNT_ATTR_NOSYMFOLLOW)
    try:
        if edits:
            upper = work / "edits"
            upper.mkdir(mode=0o700)
            apply(edits, root_fd, upper)
            upper_fd = os.open(upper, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                plain, tree = tree, mounts.overlay([upper_fd, tree], None, None, attrs=abi.MOUNT_ATTR_NOSYMFOLLOW, options={})
                os.close(plain)
            finally:
                os.close(upper_fd)
        mounts.attach(tree, abi.AT_FDCWD, place)
    finally:
        os.close(tree)
    return top
