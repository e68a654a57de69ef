# SPDX-License-Identifier: Apache-2.0
"""Renamed directories of an overlay's upper directory, made whole.

With `redirect_dir` a directory of a lower layer that is renamed becomes an empty one that says where below its content is. As part of a
layer that may be put on other layers that means nothing, or worse, something else. So it is replaced by an opaque directory with all of
its content: what the sandbox wrote there itself by a further link, the rest by copying from the merged view.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import struct
from collections.abc import Callable, Iterator, Sequence

from opendsec.api.errors import Unsupported
from opendsec.images.layers import MAX_ID
from opendsec.images.view import DIRECTORY
from opendsec.kernel import abi, mounts, namespaces, procfs, syscalls

OPAQUE, REDIRECT = "trusted.overlay.opaque", "trusted.overlay.redirect"
CAPABILITY = "security.capability"
ACLS = frozenset(("system.posix_acl_access", "system.posix_acl_default"))
MAX_PATH = 3800  # with a name it must stay a path that the kernel takes

_WITHIN = abi.RESOLVE_NO_SYMLINKS | abi.RESOLVE_BENEATH
_BLOCK = 1 << 20


def stays(name: str) -> bool:
    """Whether a layer keeps an extended attribute of this name, whatever it says; besides OPAQUE."""
    return name == CAPABILITY or name in ACLS or (name.startswith("user.") and not name.startswith("user.overlay."))


def shifted_back(directory: int, uid_base: int) -> int:
    """A detached read-only mount of a directory, whose ids from `uid_base` on show from 0 on."""
    attrs = abi.MOUNT_ATTR_NOSYMFOLLOW | abi.MOUNT_ATTR_NODEV | abi.MOUNT_ATTR_NOSUID
    view = mounts.bind_readonly(directory, b"", attrs=attrs)
    if uid_base == 0:
        return view
    try:
        namespace = namespaces.user_namespace([(uid_base, 0, MAX_ID + 1)])
        try:
            syscalls.mount_setattr(view, b"", abi.AT_EMPTY_PATH, userns_fd=namespace)
        finally:
            os.close(namespace)
        return view
    except BaseException:
        os.close(view)
        raise


def within(fd: int, name: bytes) -> bytes:
    """A path of an entry of an open directory, for calls that take only paths."""
    return os.fsencode(procfs.fd_path(fd)) + b"/" + name


class Redirects:
    """`root`: the upper directory, ours to change; `aside`: an empty directory of the same file system. `lower`: metadata and data files of
    the layers below, lowest first. `copied_bytes`: how much had to be copied."""

    def __init__(self, root: int, aside: int, uid_base: int, lower: Sequence[tuple[str, str]], log: Callable[[str], None]) -> None:
        self.root, self.aside, self.uid_base, self.lower, self.log = root, aside, uid_base, lower, log
        self.copied_bytes = self._made = 0

    def follow(self) -> None:
        """Raises Unsupported, OSError."""
        redirected = list(self._redirected())
        if not redirected:
            return
        copies = []
        view = self._merged_view()
        try:
            for path in redirected:
                copies.append((path, self._copied(view, path)))
        finally:
            os.close(view)
        for path, name in copies:  # only now: what an overlay shows must not change beneath it
            old = self._name()
            os.rename(path, old, src_dir_fd=self.root, dst_dir_fd=self.aside)
            os.rename(name, path, src_dir_fd=self.aside, dst_dir_fd=self.root)
            with contextlib.suppress(OSError, RecursionError):  # else its names would count as links; with the snapshot it goes anyhow
                shutil.rmtree(old, dir_fd=self.aside)
            self.log(f"copied the renamed directory {os.fsdecode(path)!r}")

    def _redirected(self) -> Iterator[bytes]:
        """Topmost ones: what is in one is seen through the merged view."""
        pending = [b""]
        while pending:
            path = pending.pop()
            if len(path) > MAX_PATH:
                continue  # it may be scrubbed; if not, it is refused later
            fd = syscalls.openat2(self.root, path or b".", DIRECTORY, resolve=_WITHIN)
            try:
                if path and REDIRECT in os.listxattr(fd):
                    yield path
                    continue
                with os.scandir(fd) as entries:
                    names = [os.fsencode(entry.name) for entry in entries if entry.is_dir(follow_symlinks=False)]
            finally:
                os.close(fd)
            pending += [path + b"/" + name if path else name for name in names]

    def _merged_view(self) -> int:
        """As the sandbox saw it, ids as inside."""
        if not self.lower:
            raise Unsupported("a renamed directory cannot be packed without the layers below")
        held: list[int] = []
        try:
            held.append(shifted_back(self.root, self.uid_base))
            held += [mounts.mount_erofs(meta, data) for meta, data in reversed(self.lower)]
            options = {"redirect_dir": "follow", "metacopy": "off", "index": "off"}
            return mounts.overlay(held, None, None, attrs=abi.MOUNT_ATTR_NOSYMFOLLOW, options=options)
        finally:
            for fd in held:
                os.close(fd)

    def _copied(self, view: int, path: bytes) -> bytes:
        """The name beside the directory of a whole copy of `path`, shifted and opaque."""
        name = self._name()
        inodes: dict[tuple[int, int], bytes] = {}
        pending = [(path, name)]
        while pending:
            source_path, target_path = pending.pop()
            source = syscalls.openat2(view, source_path, DIRECTORY, resolve=_WITHIN)
            try:
                os.mkdir(target_path, 0o700, dir_fd=self.aside)
                for entry in sorted(map(os.fsencode, os.listdir(source))):
                    status = os.stat(entry, dir_fd=source, follow_symlinks=False)
                    below = target_path + b"/" + entry
                    if stat.S_ISDIR(status.st_mode):
                        pending.append((source_path + b"/" + entry, below))
                        continue
                    if self._linked(source_path + b"/" + entry, below):
                        continue
                    first = inodes.setdefault((status.st_dev, status.st_ino), below)
                    if first != below:
                        os.link(first, below, src_dir_fd=self.aside, dst_dir_fd=self.aside, follow_symlinks=False)
                    else:
                        self._copy_entry(source, entry, status, below)
                self._dress(within(source, b"."), os.fstat(source), target_path)
            finally:
                os.close(source)
        os.setxattr(within(self.aside, name), OPAQUE, b"y", follow_symlinks=False)
        return name

    def _linked(self, path: bytes, target: bytes) -> bool:
        """What the sandbox itself has written in a renamed directory needs no copy, and keeps its other names."""
        try:
            status = os.stat(path, dir_fd=self.root, follow_symlinks=False)
        except OSError:
            return False
        if stat.S_IFMT(status.st_mode) not in (stat.S_IFREG, stat.S_IFLNK, stat.S_IFIFO):
            return False
        os.link(path, target, src_dir_fd=self.root, dst_dir_fd=self.aside, follow_symlinks=False)
        return True

    def _copy_entry(self, source: int, name: bytes, status: os.stat_result, target: bytes) -> None:
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFREG:
            self.copied_bytes += status.st_size
            reading = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=source)
            try:
                writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self.aside)
                try:
                    while block := os.read(reading, _BLOCK):
                        if block.count(0) == len(block):
                            os.lseek(writing, len(block), os.SEEK_CUR)  # what was a hole is one again
                        else:
                            os.write(writing, block)
                    os.ftruncate(writing, os.lseek(writing, 0, os.SEEK_CUR))
                finally:
                    os.close(writing)
            finally:
                os.close(reading)
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(name, dir_fd=source), target, dir_fd=self.aside)
        elif kind == stat.S_IFIFO:
            os.mkfifo(target, 0o600, dir_fd=self.aside)
        else:
            return
        self._dress(within(source, name), status, target)

    def _dress(self, source: bytes, status: os.stat_result, target: bytes) -> None:
        """Owner (shifted), mode, attributes, and the time that compiled Python is checked by."""
        base, path = self.uid_base, within(self.aside, target)
        os.chown(path, base + status.st_uid, base + status.st_gid, follow_symlinks=False)
        if not stat.S_ISLNK(status.st_mode):
            os.chmod(path, stat.S_IMODE(status.st_mode))
        for attribute in filter(stays, os.listxattr(source, follow_symlinks=False)):
            value = os.getxattr(source, attribute, follow_symlinks=False)
            # A capability is one of the sandbox's root; unshifted it stays as it is.
            os.setxattr(path, attribute, _shifted(value, base) if attribute in ACLS else value, follow_symlinks=False)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)

    def _name(self) -> bytes:
        self._made += 1
        return b"whole-%d" % self._made


def _shifted(acl: bytes, base: int) -> bytes:
    """An access control list with its users and groups shifted."""
    out = bytearray(acl)
    for at in range(4, len(acl) - 7, 8):
        tag, _, number = struct.unpack_from("<HHI", acl, at)
        if tag in (0x02, 0x08):
            struct.pack_into("<I", out, at + 4, base + number)
    return bytes(out)
