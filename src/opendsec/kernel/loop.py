# SPDX-License-Identifier: Apache-2.0
"""Loop devices. All of ours clear themselves: the kernel detaches the file when the last user of the device is gone, be it
our descriptor or a mount, so that a crash leaves none behind."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct

from opendsec.kernel import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

    from opendsec.kernel.syscalls import StrPath

LOOP_CONFIGURE = 0x4C0A
LOOP_CTL_GET_FREE = 0x4C82
LO_FLAGS_READ_ONLY = 1
LO_FLAGS_AUTOCLEAR = 4
LO_FLAGS_DIRECT_IO = 16

LOOP_MAJOR = 7
CONTROL = "/dev/loop-control"
MAX_RACES = 64

_INFO64 = struct.Struct("=QQQQQIIII64s64s32sQQ")  # struct loop_info64: 232 bytes
_CONFIG_TAIL = bytes(64)  # struct loop_config: fd, block_size, info, 8 reserved words


class LoopDevice:
    """A device bound to a file, held by a descriptor. Closing it detaches the file as soon as nothing else uses the device."""

    __slots__ = ("fd", "path")

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.path = path

    def close(self) -> None:
        """Let go. A mount of the device keeps it alive until it is unmounted. May be called again."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def __enter__(self) -> LoopDevice:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def attach(path: StrPath, *, read_only: bool = False, direct_io: bool = False, block_bytes: int = 0) -> LoopDevice:
    """Bind a free loop device to a file. With `direct_io` the file's pages are not cached a second time beneath the device's.

    Other users of loop devices may take a free number between our asking and our binding; then the next one is tried.
    """
    flags = LO_FLAGS_AUTOCLEAR | (LO_FLAGS_READ_ONLY if read_only else 0) | (LO_FLAGS_DIRECT_IO if direct_io else 0)
    backing = os.open(path, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC)
    try:
        control = os.open(CONTROL, os.O_RDWR | os.O_CLOEXEC)
        try:
            for _ in range(MAX_RACES):
                number = fcntl.ioctl(control, LOOP_CTL_GET_FREE)
                device = _try_configure(number, backing, flags, block_bytes, os.fsencode(path))
                if device is not None:
                    return device
        finally:
            os.close(control)
    finally:
        os.close(backing)
    raise OSError(errno.EBUSY, "LOOP_CONFIGURE: every free device was taken by others", os.fsdecode(path))


def _try_configure(number: int, backing: int, flags: int, block_bytes: int, path: bytes) -> LoopDevice | None:
    """None: the number was taken, or removed, meanwhile."""
    name = f"/dev/loop{number}"
    try:
        fd = os.open(name, (os.O_RDONLY if flags & LO_FLAGS_READ_ONLY else os.O_RDWR) | os.O_CLOEXEC)
    except FileNotFoundError:
        # A bare devtmpfs without udev has the node already; a container's /dev may not.
        os.mknod(name, 0o600 | stat.S_IFBLK, os.makedev(LOOP_MAJOR, number))
        return None
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV):
            return None
        raise
    info = _INFO64.pack(0, 0, 0, 0, 0, number, 0, 0, flags, path[:63], b"", b"", 0, 0)
    config = struct.pack("=II", backing, block_bytes) + info + _CONFIG_TAIL
    try:
        fcntl.ioctl(fd, LOOP_CONFIGURE, config)
    except OSError as error:
        os.close(fd)
        if error.errno == errno.EBUSY:
            return None
        raise OSError(error.errno, f"LOOP_CONFIGURE: {error.strerror}", os.fsdecode(path)) from None
    return LoopDevice(fd, name)


def backing_file(device: str) -> bytes | None:
    """The file a device such as "/dev/loop3" is bound to, by name; None if to none."""
    try:
        return procfs.read(f"/sys/block/{os.path.basename(device)}/loop/backing_file").rstrip(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return None


def attached() -> dict[str, bytes]:
    """Device path → backing file, for every bound device of the machine."""
    found = {}
    for name in os.listdir("/sys/block"):
        if name.startswith("loop"):
            backing = backing_file(name)
            if backing is not None:
                found[f"/dev/{name}"] = backing
    return found
