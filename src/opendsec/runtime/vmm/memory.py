# SPDX-License-Identifier: Apache-2.0
"""A guest's memory as a file, in two ways.

Whole (`dump`): a copy of the file it lies on, with the pages that QEMU has of its own written over it. Machines can lie on that in turn.
What differs (`dump_changes`): those pages alone, to be written (`load_changes`) into a new QEMU whose memory lies on the same file. Small
and quick where little was changed; how often it is done makes no difference, since it is always against that file.

    changes     magic 8 bytes · u32 version · u32 page size · u64 bytes of memory · u64 count of ranges · u32 CRC-32 of the table · u32 0
                count times u64 offset · u64 length; then the content of the ranges, one after the other. Little-endian.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from opendsec.api.errors import Internal
from opendsec.kernel import process_memory

BUFFER_BYTES = 4 << 20
MAGIC, VERSION = b"DSECRAM\n", 1
_HEADER = struct.Struct("<8sIIQQII")
_RANGE = struct.Struct("<QQ")
Range = tuple[int, int]


def dump(pid: int, name: bytes, base: Path, to: Path, *, private: bool) -> int:
    """Write to the new file `to` what the process, which stands still, has mapped of `base` (as its file `name`). Bytes that came from
    the process. Blocking: for a worker thread."""
    with open(base, "rb") as source, open(to, "xb") as target:
        try:
            process_memory.copy_file(source.fileno(), target.fileno())
            return write_private(pid, name, target.fileno(), os.fstat(source.fileno()).st_size) if private else 0
        except BaseException:
            os.unlink(to)
            raise


def own_ranges(pid: int, name: bytes, size: int) -> tuple[list[Range], list[int]]:
    """The address ranges of the process's own pages in its mapping of `name`, and for each its offset in the file."""
    ranges: list[Range] = []
    offsets: list[int] = []
    mapped = 0
    for mapping in process_memory.mappings(pid):
        if mapping.path != name:
            continue
        mapped += mapping.end - mapping.start
        if mapping.offset + mapping.end - mapping.start > size:
            raise Internal("the guest's memory is mapped beyond its end")  # a QEMU that is not itself any more could do that
        for start, end in process_memory.private_pages(pid, mapping.start, mapping.end):
            ranges.append((start, end))
            offsets.append(start - mapping.start + mapping.offset)
    if mapped != size:
        raise Internal(f"the guest's memory is mapped to {mapped} of {size} bytes")
    return ranges, offsets


def write_private(pid: int, name: bytes, target: int, size: int) -> int:
    """Write the process's own pages of its mapping of `name` to `target`, each at its place."""
    written = 0
    ranges, offsets = own_ranges(pid, name, size)
    places = iter(zip(ranges, offsets, strict=True))
    (begin, end), offset = next(places, ((0, 0), 0))
    with mmap.mmap(-1, BUFFER_BYTES) as buffer, memoryview(buffer) as view:
        for batch in batches(iter(ranges), BUFFER_BYTES):
            process_memory.read_ranges(pid, batch, buffer)
            at = 0
            for start, stop in batch:
                if start >= end:
                    (begin, end), offset = next(places)
                with view[at : at + stop - start] as part:
                    write_at(target, part, start - begin + offset)
                at += stop - start
            written += at
    return written


def write_at(target: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(target, data, offset)
        data, offset = data[count:], offset + count


def dump_changes(pid: int, name: bytes, size: int, to: Path) -> int:
    """Write the process's own pages of its mapping of `name`, a file of `size` bytes, to the new file `to`. Bytes of pages."""
    ranges, offsets = own_ranges(pid, name, size)
    table = b"".join(_RANGE.pack(offset, end - start) for (start, end), offset in zip(ranges, offsets, strict=True))
    header = _HEADER.pack(MAGIC, VERSION, process_memory.PAGE, size, len(ranges), zlib.crc32(table), 0)
    written = 0
    with open(to, "xb", buffering=0) as target:
        try:
            write_at(target.fileno(), memoryview(header + table), 0)
            with mmap.mmap(-1, BUFFER_BYTES) as buffer, memoryview(buffer) as view:
                for batch in batches(iter(ranges), BUFFER_BYTES):
                    process_memory.read_ranges(pid, batch, buffer)
                    length = sum(end - start for start, end in batch)
                    with view[:length] as part:
                        write_at(target.fileno(), part, len(header) + len(table) + written)
                    written += length
            return written
        except BaseException:
            os.unlink(to)
            raise


def load_changes(pid: int, name: bytes, size: int, path: Path) -> int:
    """Write what `dump_changes` wrote into the process's mapping of `name`. Bytes of pages. Raises Internal if the file is damaged or of
    a memory of another size."""
    with open(path, "rb", buffering=0) as source:
        offsets = read_table(source.fileno(), size)
        mappings = [one for one in process_memory.mappings(pid) if one.path == name]
        ranges = [(address, address + length) for offset, length in offsets for address in (address_of(mappings, offset, length),)]
        at = _HEADER.size + _RANGE.size * len(offsets)
        loaded = 0
        with mmap.mmap(-1, BUFFER_BYTES) as buffer, memoryview(buffer) as view:
            for batch in batches(iter(ranges), BUFFER_BYTES):
                length = sum(end - start for start, end in batch)
                with view[:length] as part:
                    if os.preadv(source.fileno(), [part], at + loaded) != length:
                        raise Internal("a file of changed memory is cut short")
                process_memory.write_ranges(pid, batch, buffer)
                loaded += length
        return loaded


def read_table(source: int, size: int) -> list[tuple[int, int]]:
    """The (offset, length) of a file of changes, checked."""
    data = os.pread(source, _HEADER.size, 0)
    if len(data) != _HEADER.size or data[:8] != MAGIC:
        raise Internal("not a file of changed memory")
    _, version, page, whole, count, checksum, _ = _HEADER.unpack(data)
    if (version, page, whole) != (VERSION, process_memory.PAGE, size):
        raise Internal(f"changed memory of version {version}, {page} bytes a page, {whole} in all does not fit")
    if count > size // page:
        raise Internal("a file of changed memory is damaged")
    table = os.pread(source, _RANGE.size * count, _HEADER.size)
    if len(table) != _RANGE.size * count or zlib.crc32(table) != checksum:
        raise Internal("a file of changed memory is damaged")
    offsets = list(_RANGE.iter_unpack(table))
    if any(offset + length > size for offset, length in offsets):
        raise Internal("a file of changed memory is damaged")
    return offsets


def address_of(mappings: list[process_memory.Mapping], offset: int, length: int) -> int:
    for one in mappings:
        if one.offset <= offset and offset + length <= one.offset + one.end - one.start:
            return one.start + offset - one.offset
    raise Internal("the guest's memory is not mapped as it was")


def batches(ranges: Iterator[Range], limit: int) -> Iterator[list[Range]]:
    """The same ranges, cut so that each list has at most `limit` bytes."""
    batch: list[Range] = []
    room = limit
    for begin, end in ranges:
        start = begin
        while start < end:
            part = min(end - start, room)
            batch.append((start, start + part))
            start += part
            room -= part
            if not room:
                yield batch
                batch, room = [], limit
    if batch:
        yield batch
