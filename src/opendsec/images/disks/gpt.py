# SPDX-License-Identifier: Apache-2.0
"""A GUID partition table, written without any tool: two partitions need no more than this."""

from __future__ import annotations

import itertools
import struct
import uuid
import zlib
from collections.abc import Sequence
from typing import NamedTuple

SECTOR = 512
ENTRIES = 128
ENTRY_BYTES = 128
TABLE_SECTORS = ENTRIES * ENTRY_BYTES // SECTOR
FIRST = 2048
"""The first sector that partitions may have: at one MiB, as everybody does."""

ESP = uuid.UUID("c12a7328-f81f-11d2-ba4b-00a0c93ec93b")
ROOT_X86_64 = uuid.UUID("4f68bce3-e8cd-4db1-96e7-fbcaf984b709")
LEGACY_BOOT = 1 << 2  # attribute: what BIOS boot code looks for

_HEADER = struct.Struct("<8sIIIIQQQQ16sQIII")
_ENTRY = struct.Struct("<16s16sQQQ72s")


class Partition(NamedTuple):
    """`first` and `length` in sectors."""

    kind: uuid.UUID
    guid: uuid.UUID
    first: int
    length: int
    name: str
    attributes: int = 0


def tables(disk: uuid.UUID, sectors: int, partitions: Sequence[Partition], boot_code: bytes = b"") -> tuple[bytes, bytes]:
    """What goes at the disk's beginning, and what goes at its end. `boot_code`: of a BIOS, at most 440 bytes."""
    if len(boot_code) > 440:
        raise ValueError("boot code has at most 440 bytes")
    last_usable = sectors - 1 - TABLE_SECTORS - 1
    for before, after in itertools.pairwise(partitions):
        if before.first + before.length > after.first:
            raise ValueError("partitions overlap")
    if any(one.first < FIRST or one.first + one.length - 1 > last_usable for one in partitions):
        raise ValueError("a partition does not fit")
    entries = b"".join(
        _ENTRY.pack(
            one.kind.bytes_le, one.guid.bytes_le, one.first, one.first + one.length - 1, one.attributes, one.name.encode("utf-16-le")
        )
        for one in partitions
    ).ljust(ENTRIES * ENTRY_BYTES, b"\0")

    def header(own: int, other: int, table: int) -> bytes:
        fields = (own, other, FIRST, last_usable, disk.bytes_le, table, ENTRIES, ENTRY_BYTES, zlib.crc32(entries))
        plain = _HEADER.pack(b"EFI PART", 0x10000, _HEADER.size, 0, 0, *fields)
        return _HEADER.pack(b"EFI PART", 0x10000, _HEADER.size, zlib.crc32(plain), 0, *fields).ljust(SECTOR, b"\0")

    protective = struct.pack("<B3sB3sII", 0, b"\x00\x02\x00", 0xEE, b"\xff\xff\xff", 1, min(sectors - 1, 0xFFFFFFFF))
    mbr = boot_code.ljust(446, b"\0") + protective.ljust(64, b"\0") + b"\x55\xaa"
    first = mbr + header(1, sectors - 1, 2) + entries
    return first, entries + header(sectors - 1, 1, sectors - 1 - TABLE_SECTORS)
