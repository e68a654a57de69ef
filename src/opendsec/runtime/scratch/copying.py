# SPDX-License-Identifier: Apache-2.0
"""A copy of an overlay's upper directory, marks and all, in bounded time: its sandbox stands still meanwhile.

The tree is hostile, so it is walked by descriptor and no link is followed. Holes stay holes, hard links stay links. Sockets and devices
but for whiteouts are left out.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path

from opendsec.api.errors import Unsupported
from opendsec.kernel import procfs

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def copy_tree(source: int, target: Path, *, max_bytes: int, max_files: int, timeout_s: float) -> None:
    """Copy what is in the directory `source` into the empty directory `target`. Raises OSError, and Unsupported beyond the bounds."""
    opened = os.open(target, _DIRECTORY)
    try:
        top = os.open(".", _DIRECTORY, dir_fd=source)
        try:
            _Copy(top, opened, max_bytes, max_files, time.monotonic() + timeout_s).run()
        finally:
            os.close(top)
    finally:
        os.close(opened)


class _Copy:
    def __init__(self, source: int, target: int, max_bytes: int, max_files: int, deadline: float) -> None:
        self.source, self.target = source, target
        self.bytes_left, self.files_left, self.deadline = max_bytes, max_files, deadline
        self.links: dict[int, bytes] = {}

    def run(self) -> None:
        pending = [b"."]
        while pending:
            path = pending.pop()
            fd = os.open(path, _DIRECTORY, dir_fd=self.source)
            try:
                if path != b".":
                    os.mkdir(path, 0o700, dir_fd=self.target)
                for name in sorted(map(os.fsencode, os.listdir(fd))):
                    below = path + b"/" + name
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    self._count()
                    if stat.S_ISDIR(status.st_mode):
                        pending.append(below)
                    else:
                        self._entry(fd, name, below, status)
                self._dress(_in(fd, b"."), path, os.fstat(fd))
            finally:
                os.close(fd)

    def _count(self) -> None:
        self.files_left -= 1
        if self.files_left < 0 or self.bytes_left < 0 or time.monotonic() > self.deadline:
            raise Unsupported("it would take too long to copy what the sandbox has written to memory while it stands still")

    def _entry(self, fd: int, name: bytes, path: bytes, status: os.stat_result) -> None:
        kind = stat.S_IFMT(status.st_mode)
        if status.st_nlink > 1:
            first = self.links.setdefault(status.st_ino, path)
            if first != path:
                os.link(first, path, src_dir_fd=self.target, dst_dir_fd=self.target, follow_symlinks=False)
                return
        if kind == stat.S_IFREG:
            self._content(fd, name, path, status.st_size)
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(name, dir_fd=fd), path, dir_fd=self.target)
        elif kind == stat.S_IFIFO:
            os.mkfifo(path, 0o600, dir_fd=self.target)
        elif kind == stat.S_IFCHR and status.st_rdev == 0:
            os.mknod(path, stat.S_IFCHR, 0, dir_fd=self.target)
        else:
            return
        self._dress(_in(fd, name), path, status)

    def _content(self, fd: int, name: bytes, path: bytes, size: int) -> None:
        reading = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        try:
            writing = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self.target)
            try:
                os.ftruncate(writing, size)
                at = 0
                while at < size:
                    try:
                        at = os.lseek(reading, at, os.SEEK_DATA)
                    except OSError as error:
                        if error.errno == errno.ENXIO:
                            break  # nothing but a hole
                        raise
                    end = os.lseek(reading, at, os.SEEK_HOLE)
                    os.lseek(writing, at, os.SEEK_SET)
                    while at < end:
                        sent = os.sendfile(writing, reading, at, min(end - at, 8 << 20))
                        if not sent:
                            return
                        at += sent
                        self.bytes_left -= sent
                        self.files_left += 1
                        self._count()
            finally:
                os.close(writing)
        finally:
            os.close(reading)

    def _dress(self, source: bytes, path: bytes, status: os.stat_result) -> None:
        target = _in(self.target, path)
        os.chown(target, status.st_uid, status.st_gid, follow_symlinks=False)
        if not stat.S_ISLNK(status.st_mode):
            os.chmod(target, stat.S_IMODE(status.st_mode))
        for name in os.listxattr(source, follow_symlinks=False):
            os.setxattr(target, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)  # what compiled Python is checked by


def remove_tree(path: Path) -> None:
    """Remove a directory of any depth, if it is there: what lies deeper is moved up and removed there."""
    try:
        top = os.open(path, _DIRECTORY)
    except FileNotFoundError:
        return
    try:
        pending, count = [b"."], 0
        while pending:
            name = pending.pop()
            fd = os.open(name, _DIRECTORY, dir_fd=top)
            try:
                for entry in list(map(os.fsencode, os.listdir(fd))):
                    if not stat.S_ISDIR(os.stat(entry, dir_fd=fd, follow_symlinks=False).st_mode):
                        os.unlink(entry, dir_fd=fd)
                        continue
                    count += 1
                    moved = b"removing-%d" % count
                    os.rename(entry, moved, src_dir_fd=fd, dst_dir_fd=top)
                    pending.append(moved)
            finally:
                os.close(fd)
            if name != b".":
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    path.rmdir()


def _in(fd: int, name: bytes) -> bytes:
    return os.fsencode(procfs.fd_path(fd)) + b"/" + name
