# SPDX-License-Identifier: Apache-2.0
"""Another process's memory: where its mappings are, which of their pages are its own, and their content."""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import mmap
import os
import struct

from opendsec.kernel import abi, procfs, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = mmap.PAGESIZE

# ioctl(2) of /proc/<pid>/pagemap since 6.7: include/uapi/linux/fs.h
PAGEMAP_SCAN = 0xC060_6610
_SCAN = struct.Struct("=12Q")
_REGION = struct.Struct("=3Q")
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_REGIONS_AT_ONCE = 4096

# An entry of pagemap itself.
_ENTRY_PRESENT, _ENTRY_SWAPPED, _ENTRY_FILE = 1 << 63, 1 << 62, 1 << 61
_ENTRIES_AT_ONCE = 1 << 16

_MAX_IOVECS = 1024


class Mapping:
    """One line of /proc/<pid>/maps."""

    __slots__ = ("end", "inode", "offset", "path", "permissions", "start")

    def __init__(self, line: bytes) -> None:
        fields = line.split(None, 5)
        start, _, end = fields[0].partition(b"-")
        self.start, self.end = int(start, 16), int(end, 16)
        self.permissions = fields[1].decode()  # such as r-xp
        self.offset, self.inode = int(fields[2], 16), int(fields[4])
        self.path = fields[5].strip() if len(fields) > 5 else b""


def mappings(pid: int) -> list[Mapping]:
    return [Mapping(line) for line in procfs.read(procfs.path_of(pid, "maps")).split(b"\n") if line]


def private_pages(pid: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Ranges of a private file mapping that hold the process's own pages, no longer the file's: copied on write, present or swapped out.
    The process should stand still."""
    pagemap = os.open(procfs.path_of(pid, "pagemap"), os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            yield from _scan(pagemap, start, end)
        except OSError as error:
            if error.errno not in (errno.ENOTTY, errno.EINVAL):
                raise
            yield from _walk(pagemap, start, end)
    finally:
        os.close(pagemap)


def _scan(pagemap: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    regions = bytearray(_REGION.size * _REGIONS_AT_ONCE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(regions))
    while start < end:
        wanted = _IS_PRESENT | _IS_SWAPPED
        # size, flags, start, end, walk_end (returned), vec, vec_len, max_pages, inverted, all of, any of, returned
        request = bytearray(
            _SCAN.pack(_SCAN.size, 0, start, end, 0, address, _REGIONS_AT_ONCE, 0, _IS_FILE, _IS_FILE, wanted, wanted | _IS_FILE)
        )
        count = fcntl.ioctl(pagemap, PAGEMAP_SCAN, request)
        for number in range(count):
            first, last, _ = _REGION.unpack_from(regions, number * _REGION.size)
            yield first, last
        reached = _SCAN.unpack(request)[4]
        if reached <= start:
            return
        start = reached


def _walk(pagemap: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The same by reading an entry a page."""
    begun, at = -1, start
    while at < end:
        entries = array.array("Q", os.pread(pagemap, 8 * min(_ENTRIES_AT_ONCE, (end - at) // PAGE), at // PAGE * 8))
        if not entries:
            break
        for entry in entries:
            own = entry & (_ENTRY_PRESENT | _ENTRY_SWAPPED) and not entry & _ENTRY_FILE
            if own and begun < 0:
                begun = at
            elif not own and begun >= 0:
                yield begun, at
                begun = -1
            at += PAGE
    if begun >= 0:
        yield begun, at


def read_ranges(pid: int, ranges: list[tuple[int, int]], into: mmap.mmap) -> None:
    """Read the ranges (start, end) one after the other into the buffer. Raises OSError, also when a part cannot be read."""
    _transfer("process_vm_readv", pid, ranges, into)


def write_ranges(pid: int, ranges: list[tuple[int, int]], source: mmap.mmap) -> None:
    """The reverse."""
    _transfer("process_vm_writev", pid, ranges, source)


def _transfer(call: str, pid: int, ranges: list[tuple[int, int]], buffer: mmap.mmap) -> None:
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    for number in range(0, len(ranges), _MAX_IOVECS):
        some = ranges[number : number + _MAX_IOVECS]
        total = sum(end - start for start, end in some)
        local = struct.pack("=2Q", address, total)
        remote = b"".join(struct.pack("=2Q", start, end - start) for start, end in some)
        done = syscalls.syscall(call, pid, local, 1, remote, len(some), 0)
        if done != total:
            raise OSError(errno.EFAULT, f"{call}: {done} of {total} bytes")
        address += total


def copy_file(source: int, target: int) -> bool:
    """Make the empty file `target` the same as `source`, holes included; whether they now share their blocks."""
    size = os.fstat(source).st_size
    try:
        fcntl.ioctl(target, abi.FICLONE, source)
        return True
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY):
            raise
    os.ftruncate(target, size)
    at = 0
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole to the end
                break
            raise
        end = os.lseek(source, at, os.SEEK_HOLE)
        while at < end:
            copied = os.copy_file_range(source, target, end - at, at, at)
            if not copied:
                raise OSError(errno.EIO, "the file became shorter while it was copied")
            at += copied
    return False
