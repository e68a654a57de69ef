# SPDX-License-Identifier: Apache-2.0
"""A FUSE file system of a few read-only files, as the kernel speaks it (include/uapi/linux/fuse.h): one directory, no library.

Why no library: those own the device and the memory of what is being asked, and both die with the process. Here a request is plain numbers
that a successor can answer, as long as somebody holds the device open.
"""

from __future__ import annotations

import errno
import os
import stat
import struct

from opendsec.kernel import mounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opendsec.kernel.syscalls import StrPath

    Buffer = bytes | bytearray | memoryview

DEVICE = "/dev/fuse"
ROOT = 1
REQUEST_BYTES = 8192
"""The kernel wants at least so much room for a request."""

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH = 1, 2, 3, 14, 15, 17, 18, 25
INIT, OPENDIR, READDIR, RELEASEDIR, ACCESS, INTERRUPT, DESTROY, BATCH_FORGET = 26, 27, 28, 29, 34, 36, 38, 42
SILENT = frozenset({FORGET, BATCH_FORGET, INTERRUPT})

_HEADER = struct.Struct("=IIQQIIIHH")
_OUT = struct.Struct("=IiQ")
_ATTR = struct.Struct("=6Q10I")
_ENTRY = struct.Struct("=4Q2I")
_ATTR_OUT = struct.Struct("=QII")
_OPEN_OUT = struct.Struct("=QIi")
_READ_IN = struct.Struct("=QQII")
_INIT_IN = struct.Struct("=4I")
_INIT_OUT = struct.Struct("=4I2H2I2H2I6I")
_STATFS = struct.Struct("=5Q4I6I")

MAJOR, MINOR = 7, 31
ASYNC_READ, MAX_PAGES = 1 << 0, 1 << 22
KEEP_CACHE = 1 << 1
FOREVER_S = 1 << 30
READ_PAGES = 256


class Request:
    """`body` is a view of the buffer that was read into."""

    __slots__ = ("body", "node", "opcode", "unique")

    def __init__(self, data: Buffer) -> None:
        length, self.opcode, self.unique, self.node, _uid, _gid, _pid, _ext, _pad = _HEADER.unpack_from(data)
        self.body = memoryview(data)[_HEADER.size : length]

    def name(self) -> bytes:
        """Of a LOOKUP."""
        return bytes(self.body).split(b"\0", 1)[0]

    def read(self) -> tuple[int, int]:
        """Offset and size of a READ."""
        _fh, offset, size, _flags = _READ_IN.unpack_from(self.body)
        return offset, size


def open_device() -> int:
    return os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)


def mount(device: int) -> int:
    """The file system behind an open device, detached. The first request is INIT."""
    options: dict[str, StrPath | None] = {
        "source": "opendsec",
        "fd": str(device),
        "rootmode": f"{stat.S_IFDIR | 0o500:o}",
        "user_id": "0",
        "group_id": "0",
        "allow_other": None,
    }
    return mounts.new_mount("fuse", options, mounts.QUIET)


def receive(device: int, buffer: bytearray | memoryview) -> int:
    """Have a request written into `buffer`; its size, 0 if there is none. Raises OSError ENODEV when all mounts are gone."""
    try:
        return os.readv(device, [buffer])
    except (BlockingIOError, FileNotFoundError, InterruptedError):  # ENOENT: the one who asked has given up
        return 0


def reply(device: int, unique: int, *parts: Buffer) -> bool:
    """Answer; False if nobody waits for it any more."""
    size = _OUT.size + sum(map(len, parts))
    return _write(device, [_OUT.pack(size, 0, unique), *parts])


def refuse(device: int, unique: int, code: int) -> bool:
    return _write(device, [_OUT.pack(_OUT.size, -code, unique)])


def _write(device: int, parts: list[Buffer]) -> bool:
    try:
        os.writev(device, parts)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINVAL):
            return False
        raise
    return True


def init_answer(request: Request) -> bytes:
    _major, _minor, readahead, flags = _INIT_IN.unpack_from(request.body)
    flags &= ASYNC_READ | MAX_PAGES
    return _INIT_OUT.pack(MAJOR, MINOR, readahead, flags, 64, 48, 4096, 1, READ_PAGES, 0, 0, 0, *[0] * 6)


def _attributes(node: int, size: int | None) -> bytes:
    """`size` None: the directory."""
    mode, links = (stat.S_IFDIR | 0o500, 2) if size is None else (stat.S_IFREG | 0o400, 1)
    length = size or 0
    return _ATTR.pack(node, length, -(-length // 512), 0, 0, 0, 0, 0, 0, mode, links, 0, 0, 0, 4096, 0)


def entry(node: int, size: int) -> bytes:
    return _ENTRY.pack(node, 0, 0, FOREVER_S, 0, 0) + _attributes(node, size)


def attributes(node: int, size: int | None) -> bytes:
    return _ATTR_OUT.pack(FOREVER_S, 0, 0) + _attributes(node, size)


def opened() -> bytes:
    return _OPEN_OUT.pack(0, KEEP_CACHE, 0)


def statfs() -> bytes:
    return _STATFS.pack(0, 0, 0, 0, 0, 4096, 255, 4096, 0, *[0] * 6)
