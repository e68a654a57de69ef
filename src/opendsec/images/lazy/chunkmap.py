# SPDX-License-Identifier: Apache-2.0
"""Which chunks of a layer are here: `cache/sha256-<hex>/map`, a byte for each chunk behind a header, mapped into memory.

    offset  bytes  field, little endian
    0       8      magic, b"DSECHAVE"
    8       4      version, 1
    12      4      count of chunks
    16      32     SHA-256 of the chunk table these are chunks of
    48      16     the machine's boot id
    64      4      1 = closed in good order
    68      4      CRC-32 of the bytes behind the header, if it was closed in good order
    72      4      CRC-32 of the header up to here but for the 8 bytes before
    4096    n      0 = not here, 1 = here

A byte is set after the chunk was checked and written, and cleared before it is dropped. So it is right for as long as the machine runs,
whoever is killed; but a program that went wrong, or a power failure, may have left anything. Therefore what is read from a map that was
not closed in good order during this boot is a hint: such a chunk is compared with its checksum before it is given to anybody.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import uuid
import zlib
from pathlib import Path

MAGIC, VERSION = b"DSECHAVE", 1
HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sII32s16sII")
_CLEAN_AT, _CHECK_AT = 64, 72

ABSENT, HINTED, HERE = 0, 1, 2
"""States in memory; HINTED and HERE are both 1 on disk."""

_AS_HERE, _AS_HINTED = (bytes.maketrans(b"\0\1", bytes([ABSENT, state])) for state in (HERE, HINTED))


class ChunkMap:
    """`states` has ABSENT, HINTED or HERE for each chunk; change it with `set`."""

    def __init__(self, path: Path, *, count: int, table_sha256: bytes, boot_id: str) -> None:
        """Opens or makes the map at `path`. One that is not of this table, or damaged, says nothing: all chunks are HINTED, since the
        data file may still hold them, and a check tells."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = HEADER_BYTES + count
            found, trusted = _read(self._fd, count, table_sha256, uuid.UUID(boot_id).bytes)
            self.damaged = found is None and os.fstat(self._fd).st_size > 0
            os.ftruncate(self._fd, size)
            # Now, because a write into mapped memory that finds no space kills the process.
            os.posix_fallocate(self._fd, 0, size)
            self._map = mmap.mmap(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise
        header = _HEADER.pack(MAGIC, VERSION, count, table_sha256, uuid.UUID(boot_id).bytes, 0, 0)
        self._map[: len(header)] = header
        struct.pack_into("<I", self._map, _CHECK_AT, _check(header))
        if found is None:
            found = bytes([1 if self.damaged else 0]) * count
        self._map[HEADER_BYTES:] = found
        self.trusted = trusted
        self.states = bytearray(found.translate(_AS_HERE if trusted else _AS_HINTED))  # of a large layer tens of thousands

    def set(self, index: int, state: int) -> None:
        self.states[index] = state
        self._map[HEADER_BYTES + index] = 1 if state != ABSENT else 0

    def close(self, *, clean: bool = True) -> None:
        """`clean`: what is HINTED was compared, or stays a hint: then the map cannot be closed in good order."""
        if clean and HINTED not in self.states:
            struct.pack_into("<II", self._map, _CLEAN_AT, 1, zlib.crc32(self._map[HEADER_BYTES:]))
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self._fd)


def _check(header: bytes) -> int:
    return zlib.crc32(header[:_CLEAN_AT])


def _read(fd: int, count: int, table_sha256: bytes, boot_id: bytes) -> tuple[bytes | None, bool]:
    """The bytes, None if they are nothing to go by; and whether they can be trusted."""
    data = os.pread(fd, HEADER_BYTES + count + 1, 0)
    if len(data) != HEADER_BYTES + count:
        return None, False
    magic, version, its_count, its_table, its_boot, clean, crc = _HEADER.unpack_from(data)
    (check,) = struct.unpack_from("<I", data, _CHECK_AT)
    if magic != MAGIC or version != VERSION or check != _check(data[: _HEADER.size]) or its_count != count or its_table != table_sha256:
        return None, False
    states = data[HEADER_BYTES:]
    if states.strip(b"\0\1"):
        return None, False
    return states, bool(clean) and its_boot == boot_id and crc == zlib.crc32(states)
