# SPDX-License-Identifier: Apache-2.0
"""The digest of a file tree: SHA-256 over a canonical form, the same for equal trees on every machine.

In it, of each entry in depth-first order, names sorted as bytes: kind, path, permission bits, owner ids, extended attributes sorted by
name, and then the content's size and SHA-256, a link's target, or a device's number. A hard link is the path of the first entry that
the inode had.

Not in it: times, inode numbers, link counts of directories, holes, the order on disk, `security.selinux` (the machine's label, not
the tree's). Times are left out because nearly every way to make a tree twice gives others, so a layer has one time for all
files (`erofs.TIMESTAMP`). What that costs: tools that compare times see "unchanged", also where a tree was packed half built; and
`.pyc` files, which hold the time of their source, are rewritten to hold this one (`pyc`).

A layer of an OCI image keeps the times that the image has (`.pyc` files there are valid by them), so its digest is of another form, in
which the modification time of each entry is in its line: else two layers that differ in times alone would be one.

Packed layers are digested as mounted, so the digest is of what a sandbox will see, whatever changed at the source meanwhile.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from typing import NamedTuple

from opendsec.kernel import procfs

_HEADER, _HEADER_TIMES = b"opendsec-tree-1\n", b"opendsec-tree-1-times\n"
_IGNORED_XATTRS = frozenset({"security.selinux"})
_BLOCK = 1 << 20

_KINDS = {
    stat.S_IFDIR: b"d",
    stat.S_IFREG: b"f",
    stat.S_IFLNK: b"l",
    stat.S_IFIFO: b"p",
    stat.S_IFSOCK: b"s",
    stat.S_IFCHR: b"c",
    stat.S_IFBLK: b"b",
}


class TreeDigest(NamedTuple):
    digest: str  # sha256:…
    entries: int
    content_bytes: int  # of regular files, hard links once


class TooDeep(Exception):
    """A path of the tree is longer than the kernel takes; the message has its beginning."""


def digest(root_fd: int, *, times: bool = False, progress: Callable[[int], None] = lambda done: None) -> TreeDigest:
    """The digest of the tree at a directory descriptor. `progress` gets the content bytes read so far. Raises OSError, TooDeep."""
    walk = _Walk(root_fd, progress, times)
    walk.directory(b".", os.fstat(root_fd))
    return TreeDigest(f"sha256:{walk.hash.hexdigest()}", walk.entries, walk.content_bytes)


class _Walk:
    def __init__(self, root_fd: int, progress: Callable[[int], None], times: bool) -> None:
        self.root_fd, self.progress, self.times = root_fd, progress, times
        self.hash = hashlib.sha256(_HEADER_TIMES if times else _HEADER)
        self.entries = self.content_bytes = 0
        self.links: dict[tuple[int, int], bytes] = {}
        self.base = os.fsencode(procfs.fd_path(root_fd)) + b"/"

    def directory(self, path: bytes, status: os.stat_result) -> None:
        """Iterative, since a tree may be nested deeper than Python recurses."""
        pending = [(path, status)]
        while pending:
            path, status = pending.pop()
            self.entry(path, status)
            if not stat.S_ISDIR(status.st_mode):
                continue
            if len(path) > 4000:
                raise TooDeep(os.fsdecode(path[:200]))
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.root_fd)
            try:
                names = sorted(map(os.fsencode, os.listdir(fd)), reverse=True)
                pending.extend((path + b"/" + name, os.stat(name, dir_fd=fd, follow_symlinks=False)) for name in names)
            finally:
                os.close(fd)

    def entry(self, path: bytes, status: os.stat_result) -> None:
        self.entries += 1
        kind = stat.S_IFMT(status.st_mode)
        inode = (status.st_dev, status.st_ino)
        if kind != stat.S_IFDIR and status.st_nlink > 1:
            first = self.links.setdefault(inode, path)
            if first != path:
                self.add(b"h", path, first)
                return
        time = (b"%d" % status.st_mtime_ns,) if self.times else ()
        self.add(_KINDS[kind], path, b"%o" % stat.S_IMODE(status.st_mode), b"%d" % status.st_uid, b"%d" % status.st_gid, *time)
        self.xattrs(path)
        if kind == stat.S_IFREG:
            self.add(*self.content(path))
        elif kind == stat.S_IFLNK:
            self.add(os.fsencode(os.readlink(path, dir_fd=self.root_fd)))
        elif kind in (stat.S_IFCHR, stat.S_IFBLK):
            self.add(b"%d:%d" % (os.major(status.st_rdev), os.minor(status.st_rdev)))

    def add(self, *fields: bytes) -> None:
        """Each field with its length before it, so that no two lists of fields read the same."""
        for field in fields:
            self.hash.update(b"%d:" % len(field))
            self.hash.update(field)
        self.hash.update(b"\n")

    def xattrs(self, path: bytes) -> None:
        full = self.base + path
        for name in sorted(os.listxattr(full, follow_symlinks=False)):
            if name not in _IGNORED_XATTRS:
                self.add(b"x", os.fsencode(name), os.getxattr(full, name, follow_symlinks=False))

    def content(self, path: bytes) -> tuple[bytes, bytes]:
        content, size = hashlib.sha256(), 0
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.root_fd)
        try:
            while block := os.read(fd, _BLOCK):
                content.update(block)
                size += len(block)
        finally:
            os.close(fd)
        self.content_bytes += size
        self.progress(self.content_bytes)
        return b"%d" % size, content.digest()
