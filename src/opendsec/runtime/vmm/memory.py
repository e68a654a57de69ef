# SPDX-License-Identifier: Apache-2.0
"""A guest's memory as a file: the file it lies on, with the pages that QEMU has of its own written over a copy."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from opendsec.api.errors import Internal
from opendsec.kernel import process_memory

BUFFER_BYTES = 4 << 20
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


def write_private(pid: int, name: bytes, target: int, size: int) -> int:
    """Write the process's own pages of its mapping of `name` to `target`, each at its place."""
    written = mapped = 0
    with mmap.mmap(-1, BUFFER_BYTES) as buffer:
        for mapping in process_memory.mappings(pid):
            if mapping.path != name:
                continue
            mapped += mapping.end - mapping.start
            pages = process_memory.private_pages(pid, mapping.start, mapping.end)
            for batch in batches(pages, BUFFER_BYTES):
                process_memory.read_ranges(pid, batch, buffer)
                at = 0
                with memoryview(buffer) as view:
                    for start, end in batch:
                        length = end - start
                        with view[at : at + length] as part:
                            if os.pwrite(target, part, start - mapping.start + mapping.offset) != length:
                                raise OSError(0, "a short write")
                        at += length
                written += at
    if mapped != size:
        raise Internal(f"the guest's memory is mapped to {mapped} of {size} bytes")
    return written


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
