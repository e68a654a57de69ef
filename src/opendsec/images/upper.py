# SPDX-License-Identifier: Apache-2.0
"""The writable directory of an overlay, made ready for packing as a layer.

It is a copy that nobody but us writes any more (a snapshot), but all in it was made by a hostile sandbox. So it is walked by descriptor
and no link is followed. What a sandbox's upper holds beyond plain files, and what becomes of it:

    shifted ids             read through an id-mapped mount; an id that is not the sandbox's own becomes root
    whiteouts               kept, as whiteouts of one form each (overlay links many names to one inode, as it happens)
    opaque directories      kept: they hide what is below, in whatever the layer is put on
    redirected directories  a renamed directory of a lower layer is an empty one that points there. A layer may be put on other layers,
                            where the pointer would lead elsewhere: so the directory is filled from the merged view and made opaque
                            (names that a file of a lower layer has in there and elsewhere become files of their own)
    other overlay marks     dropped: they speak of the very mounts that the overlay had. Also `user.overlay.*`, which anybody inside can
                            set and other mounts would believe
    file capabilities       of the sandbox's root become those of the layer's (the id-mapped mount translates)
    sockets, devices        dropped
    holes                   read as zeros; so what all files seem to hold is bounded by what the sandbox's disk could hold

Scrubbing is done on the way (see `scrub`). Compiled Python gets the layer's time (see `pyc`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from opendsec.api.errors import QuotaExceeded, Unsupported
from opendsec.api.images import Finding
from opendsec.images import pyc
from opendsec.images.erofs import TIMESTAMP
from opendsec.images.layers import MAX_ID
from opendsec.images.redirects import MAX_PATH, OPAQUE, Redirects, shifted_back, stays, within
from opendsec.images.scrub import Matcher, Rule, Scrub
from opendsec.images.view import DIRECTORY
from opendsec.kernel import abi, mounts, syscalls

METACOPY = "trusted.overlay.metacopy"
MOST_FINDINGS = 2000
LONGEST_NAME = 254  # mkfs.erofs (1.5 to 1.8) cuts the last byte of longer ones, and then does not find them
_READABLE_PATH = 1000


class UpperSource(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="upper"):
    """A directory that is ours to change, with an empty directory `aside` of the same file system beside it."""

    path: str
    aside: str
    uid_base: int  # the host's id of root inside; 0 = not shifted
    lower: tuple[tuple[str, str], ...] = ()  # metadata and data file of each layer below, lowest first
    max_bytes: int = 1 << 50  # of all files, holes included
    scrub: Scrub | None = None


class Overview(NamedTuple):
    entries: int
    scrubbed_bytes: int


def prepare(source: UpperSource, *, log: Callable[[str], None], found: Callable[[Finding], None]) -> Overview:
    """Make the directory what the layer will hold, but for the shifted ids. Raises QuotaExceeded, Unsupported, OSError."""
    with contextlib.ExitStack() as stack:
        root = os.open(source.path, DIRECTORY)
        stack.callback(os.close, root)
        aside = os.open(source.aside, DIRECTORY)
        stack.callback(os.close, aside)
        redirects = Redirects(root, aside, source.uid_base, source.lower, log)
        redirects.follow()
        work = _Work(source, root, aside, log, found, source.max_bytes + redirects.copied_bytes)
        try:
            work.clean()
            return Overview(work.entries, work.scrubbed_bytes)
        finally:
            work.close()


def stage(source: UpperSource, work: Path) -> Path:
    """A read-only view of the prepared directory with the ids as inside, attached in `work`, in the caller's own mount namespace."""
    top = work / "stage"
    top.mkdir(mode=0o755)
    plain = os.open(source.path, DIRECTORY)
    try:
        view = shifted_back(plain, source.uid_base)
    finally:
        os.close(plain)
    try:
        mounts.attach(view, abi.AT_FDCWD, top)
    finally:
        os.close(view)
    return top


class _Work:
    def __init__(
        self,
        source: UpperSource,
        root: int,
        aside: int,
        log: Callable[[str], None],
        found: Callable[[Finding], None],
        max_bytes: int,
    ) -> None:
        self.source, self.root, self.aside, self.log, self.found, self.max_bytes = source, root, aside, log, found, max_bytes
        self.matcher = None if source.scrub is None else Matcher(source.scrub)
        self.entries = self.bytes = self.scrubbed_bytes = self._findings = self._moved = 0
        self._sized: set[int] = set()  # inodes with several names
        self._lower = -1

    def close(self) -> None:
        if self._lower >= 0:
            os.close(self._lower)

    def folder(self, path: bytes) -> int:
        if len(path) > MAX_PATH:
            raise Unsupported(f"is nested too deep to be packed: {_shown(path[:200])!r}…")
        return syscalls.openat2(self.root, path or b".", DIRECTORY, resolve=abi.RESOLVE_NO_SYMLINKS | abi.RESOLVE_BENEATH)

    # --- everything else ----------------------------------------------------------------------------------------------

    def clean(self) -> None:
        """Depth first, by name."""
        pending: list[tuple[bytes, Rule | None]] = [(b"", None)]
        emptied: list[bytes] = []
        while pending:
            path, covering = pending.pop()
            fd = self.folder(path)
            try:
                self._attributes(within(fd, b"."), os.fstat(fd))
                self.entries += 1
                for name in sorted(map(os.fsencode, os.listdir(fd)), reverse=True):
                    below = path + b"/" + name if path else name
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    if len(name) > LONGEST_NAME:
                        raise Unsupported(f"a name of {len(name)} bytes cannot be packed, only up to {LONGEST_NAME}: {_shown(below)!r}")
                    rule = self._scrubbed(below, status, fd, covering)
                    if rule is not None and not (stat.S_ISDIR(status.st_mode) and self._piecewise()):
                        self._take_away(below, status, rule)
                    elif stat.S_ISDIR(status.st_mode):
                        pending.append((below, rule))
                        if rule is not None:
                            emptied.append(below)
                    else:
                        self._entry(fd, name, below, status)
                if path.rpartition(b"/")[2] == pyc.CACHE_DIRECTORY:
                    self._compiled(path, fd)
            finally:
                os.close(fd)
        for path in reversed(emptied):
            with contextlib.suppress(OSError):  # something in it is kept
                os.rmdir(path, dir_fd=self.root)

    def _piecewise(self) -> bool:
        return self.matcher is not None and self.matcher.keeps

    def _entry(self, fd: int, name: bytes, path: bytes, status: os.stat_result) -> None:
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFCHR and status.st_rdev == 0:
            self._whiteout(fd, name, status)
        elif kind in (stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK):
            self.log(f"left out {'a socket' if kind == stat.S_IFSOCK else 'a device'}: {os.fsdecode(path)!r}")
            os.unlink(name, dir_fd=fd)
            return
        else:
            if kind == stat.S_IFREG:
                self._count(status)
            self._attributes(within(fd, name), status)
        self.entries += 1

    def _count(self, status: os.stat_result) -> None:
        if status.st_nlink > 1:
            if status.st_ino in self._sized:
                return
            self._sized.add(status.st_ino)
        self.bytes += status.st_size
        if self.bytes > self.max_bytes:
            raise QuotaExceeded(f"its files are sparse: with their holes they hold more than the {self.max_bytes} bytes of a layer")

    def _whiteout(self, fd: int, name: bytes, status: os.stat_result) -> None:
        if status.st_nlink > 1:
            os.unlink(name, dir_fd=fd)
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=fd)
        os.chown(name, self.source.uid_base, self.source.uid_base, dir_fd=fd, follow_symlinks=False)
        os.chmod(name, 0, dir_fd=fd)

    def _attributes(self, path: bytes, status: os.stat_result) -> None:
        base = self.source.uid_base
        owner = (_own(status.st_uid, base), _own(status.st_gid, base))
        if owner != (status.st_uid, status.st_gid):
            os.chown(path, *owner, follow_symlinks=False)
        for name in os.listxattr(path, follow_symlinks=False):
            if name == METACOPY:
                raise Unsupported("a file has no content of its own: the overlay was mounted with metacopy")
            if not self._stays(path, name, status):
                os.removexattr(path, name, follow_symlinks=False)

    def _stays(self, path: bytes, name: str, status: os.stat_result) -> bool:
        if name == OPAQUE:
            return stat.S_ISDIR(status.st_mode) and os.getxattr(path, name, follow_symlinks=False) == b"y"
        return stays(name)

    def _compiled(self, path: bytes, fd: int) -> None:
        for name in sorted(map(os.fsencode, os.listdir(fd))):
            beginning = pyc.normalised(self.root, path.rpartition(b"/")[0], fd, name, timestamp=TIMESTAMP)
            if beginning is not None:
                target = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                try:
                    os.pwrite(target, beginning, 0)
                finally:
                    os.close(target)

    # --- scrubbing ---------------------------------------------------------------------------------------------------

    def _scrubbed(self, path: bytes, status: os.stat_result, fd: int, covering: Rule | None) -> Rule | None:
        if self.matcher is None or (stat.S_ISCHR(status.st_mode) and status.st_rdev == 0):
            return None
        if covering is not None:
            return None if self.matcher.kept(b"/" + path) else covering
        return self.matcher.rule(b"/" + path, status, fd)

    def _take_away(self, path: bytes, status: os.stat_result, rule: Rule) -> None:
        """By renaming, whatever its size and depth: it goes with the snapshot."""
        opaque = stat.S_ISDIR(status.st_mode) and self._is_opaque(path)
        name = self._away_name()
        os.rename(path, name, src_dir_fd=self.root, dst_dir_fd=self.aside)
        if opaque and self._below_has(path):  # the sandbox had removed what is below, before it made this one
            os.mknod(path, stat.S_IFCHR, 0, dir_fd=self.root)
            os.chown(path, self.source.uid_base, self.source.uid_base, dir_fd=self.root, follow_symlinks=False)
        size = self._size(name, status)
        self.scrubbed_bytes += size
        self._findings += 1
        if self._findings <= MOST_FINDINGS:
            self.found(Finding(rule=rule.name, path=_shown(path), message=rule.reason, bytes=size))
        elif self._findings == MOST_FINDINGS + 1:
            self.found(Finding(rule="scrub.more", path="/", message=f"more than {MOST_FINDINGS} paths; the others are not listed"))

    def _is_opaque(self, path: bytes) -> bool:
        try:
            return os.getxattr(within(self.root, path), OPAQUE, follow_symlinks=False) == b"y"
        except OSError:
            return False

    def _below_has(self, path: bytes) -> bool:
        if not self.source.lower:
            return False
        if self._lower < 0:
            held = [mounts.mount_erofs(meta, data) for meta, data in reversed(self.source.lower)]
            try:
                self._lower = os.dup(held[0]) if len(held) == 1 else mounts.overlay(held, None, None)
            finally:
                for fd in held:
                    os.close(fd)
        try:
            os.close(syscalls.openat2(self._lower, path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, resolve=abi.RESOLVE_BENEATH))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV):
                return False
            raise
        return True

    def _size(self, name: bytes, status: os.stat_result) -> int:
        """Of what was put aside, links counted once; of what lies too deep, nothing."""
        total, seen, pending = 0, set(), [name]
        if not stat.S_ISDIR(status.st_mode):
            return status.st_size
        while pending:
            path = pending.pop()
            try:
                fd = os.open(path, DIRECTORY, dir_fd=self.aside)
            except OSError:
                continue
            try:
                with os.scandir(fd) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(path + b"/" + os.fsencode(entry.name))
                        elif entry.is_file(follow_symlinks=False):
                            one = entry.stat(follow_symlinks=False)
                            if one.st_ino not in seen:
                                seen.add(one.st_ino)
                                total += one.st_size
            finally:
                os.close(fd)
        return total

    def _away_name(self) -> bytes:
        self._moved += 1
        return b"%d" % self._moved


def _shown(path: bytes) -> str:
    return "/" + path[:_READABLE_PATH].decode(errors="backslashreplace")


def _own(number: int, base: int) -> int:
    return number if base <= number <= base + MAX_ID else base
