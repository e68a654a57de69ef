# SPDX-License-Identifier: Apache-2.0
"""The btrfs pool: a file of fixed size, a loop device on it, a mount.

    <state>/scratch.img     reserved whole when it is made, so that sandboxes can never fill the disk beneath
    <state>/scratch/        where it is mounted

The mount outlives the edge, as the sandboxes do; the next edge finds it there. All calls block; `open` may take a second.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from pathlib import Path

from opendsec.api.errors import Unavailable, Unsupported
from opendsec.api.units import format_bytes
from opendsec.kernel import abi, btrfs, loop, mounts, syscalls

GIB, MIB = 1 << 30, 1 << 20
DEFAULT_BYTES = 64 * GIB
SMALLEST_BYTES = 256 * MIB

_ATTRS = abi.MOUNT_ATTR_NOATIME | abi.MOUNT_ATTR_NOSUID | abi.MOUNT_ATTR_NODEV
# Discarding would punch holes into the file, and what it gave back could be gone when it is wanted again.
_OPTIONS: dict[str, str | bytes | os.PathLike[str] | os.PathLike[bytes] | None] = {"nodiscard": None}


class Pool:
    """An open pool. `fd` is its root directory."""

    def __init__(self, state_dir: Path) -> None:
        self.image, self.place = state_dir / "scratch.img", state_dir / "scratch"
        self.fd = -1
        self._mounted = False

    def open(self, size_bytes: int | None) -> None:
        """Mount the pool, or take over one that is mounted; make it first if there is none, of `size_bytes` (None: half of
        what is free, at most 64 GiB), or of what can be had of that. Raises Unsupported, Unavailable."""
        try:
            self.place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_mounted():
                if not self.image.exists():
                    make(self.image, size_bytes)
                self._mount()
            self._mounted = True
            self.fd = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            os.fchmod(self.fd, 0o700)
            _enable_quota(self.fd)
        except OSError as error:
            self.let_go()
            raise Unavailable(f"the scratch pool {self.image} cannot be used: {error}") from error

    def _is_mounted(self) -> bool:
        if not os.path.ismount(self.place):
            return False
        fd = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if syscalls.fstatfs_type(fd) != abi.BTRFS_SUPER_MAGIC:
                raise Unavailable(f"something else is mounted on {self.place}")
            return True
        finally:
            os.close(fd)

    def _mount(self) -> None:
        # Two devices with one file system would each believe to be alone; sandboxes may keep the first alive without any mount of ours.
        name = os.fsencode(self.image.resolve())
        bound = next((device for device, backing in loop.attached().items() if backing == name), None)
        with contextlib.ExitStack() as stack:
            if bound is None:
                bound = stack.enter_context(_attach(self.image)).path
            mount = mounts.new_mount("btrfs", {"source": bound, **_OPTIONS}, _ATTRS)
            try:
                mounts.attach(mount, abi.AT_FDCWD, self.place)
            finally:
                os.close(mount)

    def size_bytes(self) -> int:
        """What sandboxes can write in all: some of the pool holds its own structures."""
        return mounts.usage(self.fd)[0] * 31 // 32

    def let_go(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def unmount(self, *, remove: bool) -> None:
        """Unmount it; with `remove` delete it, even while sandboxes use it (their space is free when they end)."""
        self.let_go()
        if not self._mounted:
            return
        try:
            syscalls.umount2(self.place)
        except OSError as error:
            if error.errno == errno.EBUSY and remove:
                syscalls.umount2(self.place, abi.MNT_DETACH)
            elif error.errno not in (errno.EBUSY, errno.EINVAL):  # EINVAL: somebody else has unmounted it
                raise
        self._mounted = False
        if remove:
            self.image.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.place.rmdir()


def make(image: Path, size_bytes: int | None) -> None:
    """Reserve and format a pool file; under another name until it is whole. Raises Unsupported, Unavailable, OSError."""
    tool = shutil.which("mkfs.btrfs", path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")
    if tool is None:
        raise Unsupported("mkfs.btrfs is not installed (Debian package btrfs-progs)")
    unfinished = image.with_name(f"{image.name}.new")
    unfinished.unlink(missing_ok=True)
    try:
        fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _reserve(fd, size_bytes or _default_size(image.parent), image)
        finally:
            os.close(fd)
        # -K: mkfs would discard, which gives the reserved space back. One copy of metadata: there is one disk beneath.
        command = [tool, "-q", "-K", "-m", "single", "-d", "single", os.fspath(unfinished)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Unavailable(f"mkfs.btrfs failed: {done.stderr.strip()[-500:]}")
        os.rename(unfinished, image)
    finally:
        unfinished.unlink(missing_ok=True)


def _default_size(folder: Path) -> int:
    stats = os.statvfs(folder)
    return min(DEFAULT_BYTES, stats.f_bavail * stats.f_frsize // 2)


def _reserve(fd: int, size_bytes: int, image: Path) -> None:
    """Allocate `size_bytes`, or half of it and so on if there is not so much. Raises Unsupported, Unavailable."""
    size_bytes -= size_bytes % MIB
    while size_bytes >= SMALLEST_BYTES:
        try:
            syscalls.fallocate(fd, 0, 0, size_bytes)
            return
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                raise Unsupported(f"the file system of {image.parent} cannot reserve space for a pool") from None
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            os.ftruncate(fd, 0)
            size_bytes = (size_bytes // 2) - (size_bytes // 2) % MIB
    raise Unavailable(f"not even {format_bytes(SMALLEST_BYTES)} can be reserved for a pool in {image.parent}")


def _attach(image: Path) -> loop.LoopDevice:
    try:
        return loop.attach(image, direct_io=True)  # else each page would be cached twice
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return loop.attach(image)


def _enable_quota(fd: int) -> None:
    """Simple quotas where the kernel has them: with classic ones, writing costs a third more and grows with snapshots."""
    try:
        btrfs.quota_enable(fd, simple=True)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY):
            raise
        btrfs.quota_enable(fd)
