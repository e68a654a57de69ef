# SPDX-License-Identifier: Apache-2.0
"""The chunk table of a layer, `data.chunks`: what each piece of its data file must be. A chunk is what is fetched, checked and kept.

    offset  bytes  field, little endian
    0       8      magic, b"DSECCHNK"
    8       4      version, 1
    12      4      chunk_bytes: a power of two, 4 KiB to 4 MiB
    16      8      data_bytes: of the data file
    24      4      count: data_bytes / chunk_bytes, rounded up
    28      4      0
    32      32·n   SHA-256 of each chunk; the last one is of the bytes that are there, without padding
    …       32     SHA-256 of all before

Readers refuse, in this order: a size that no table has, another magic, a newer version, numbers out of bounds, a size that does not
fit the numbers, a wrong checksum.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec

from opendsec.images.records import Damaged

MAGIC, VERSION = b"DSECCHNK", 1
CHUNK_BYTES = 64 << 10
"""Of tables made now; why: docs/adr/0014-layer-format-and-stores.md. Readers take what the table says."""

MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 4 << 10, 4 << 20
MAX_CHUNKS = 1 << 21  # 128 GiB of data in chunks of 64 KiB; the table has 64 MiB then
_HEADER, _DIGEST_BYTES = struct.Struct("<8sIIQII"), 32
MAX_BYTES = _HEADER.size + _DIGEST_BYTES * (MAX_CHUNKS + 1)
_BLOCK = 4 << 20


class ChunkTable(msgspec.Struct, frozen=True):
    """Immutable. Chunks are counted from 0."""

    chunk_bytes: int
    data_bytes: int
    digests: bytes  # one after the other

    @property
    def count(self) -> int:
        return len(self.digests) // _DIGEST_BYTES

    def digest(self, index: int) -> bytes:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.digests[index * _DIGEST_BYTES : (index + 1) * _DIGEST_BYTES]

    def span(self, first: int, count: int = 1) -> tuple[int, int]:
        """Offset and length in the data file of `count` chunks from `first` on."""
        if first < 0 or count < 1 or first + count > self.count:
            raise IndexError(first, count)
        start = first * self.chunk_bytes
        return start, min(self.data_bytes, start + count * self.chunk_bytes) - start

    def covering(self, offset: int, length: int) -> range:
        """The chunks that hold any of these bytes; bytes past the end are in none."""
        end = min(offset + length, self.data_bytes)
        return range(offset // self.chunk_bytes, -(-end // self.chunk_bytes)) if offset < end else range(0)

    def matches(self, index: int, data: bytes | memoryview) -> bool:
        """Whether `data` is chunk `index`, whole."""
        return len(data) == self.span(index)[1] and hashlib.sha256(data).digest() == self.digest(index)

    def first_mismatch(self, first: int, data: bytes | memoryview) -> int | None:
        """The first chunk that is wrong in `data`, which is to be whole chunks from `first` on; None if all are right."""
        view, index = memoryview(data), first
        for start in range(0, len(view), self.chunk_bytes):
            if not self.matches(index, view[start : start + self.chunk_bytes]):
                return index
            index += 1
        return None

    def encode(self) -> bytes:
        body = _HEADER.pack(MAGIC, VERSION, self.chunk_bytes, self.data_bytes, self.count, 0) + self.digests
        return body + hashlib.sha256(body).digest()


def decode(data: bytes) -> ChunkTable:
    """Raises Damaged."""
    if not _HEADER.size + _DIGEST_BYTES <= len(data) <= MAX_BYTES:
        raise Damaged(f"has {len(data)} bytes, which no chunk table has")
    magic, version, chunk_bytes, data_bytes, count, reserved = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise Damaged("is not a chunk table")
    if version > VERSION:
        raise Damaged(f"has format version {version}, but this program reads up to {VERSION}")
    if not is_chunk_bytes(chunk_bytes):
        raise Damaged(f"has chunks of {chunk_bytes} bytes")
    if version < 1 or reserved != 0 or count != -(-data_bytes // chunk_bytes) or count > MAX_CHUNKS:
        raise Damaged(f"has {count} chunks for {data_bytes} bytes")
    end = _HEADER.size + _DIGEST_BYTES * count
    if len(data) != table_bytes(data_bytes, chunk_bytes):
        raise Damaged(f"has {len(data)} bytes for {count} chunks")
    if hashlib.sha256(memoryview(data)[:end]).digest() != data[end:]:
        raise Damaged("does not match its checksum")
    return ChunkTable(chunk_bytes, data_bytes, data[_HEADER.size : end])


def is_chunk_bytes(number: int) -> bool:
    return MIN_CHUNK_BYTES <= number <= MAX_CHUNK_BYTES and not number & (number - 1)


def table_bytes(data_bytes: int, chunk_bytes: int) -> int:
    """How large a table is."""
    return _HEADER.size + _DIGEST_BYTES * (-(-data_bytes // chunk_bytes) + 1)


def read(path: Path) -> ChunkTable:
    """Raises FileNotFoundError, Damaged."""
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    try:
        return decode(data)
    except Damaged as error:
        raise Damaged(f"{path.name} {error}") from None


def write(path: Path, table: ChunkTable) -> str:
    """Write a new file, not yet synced. Its SHA-256 in hex digits, as records have it."""
    data = table.encode()
    with open(path, "xb") as file:
        file.write(data)
    return hashlib.sha256(data).hexdigest()


class Builder:
    """Makes a table, and the checksum of the whole, of bytes that come in pieces of any size."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._whole, self._chunk = hashlib.sha256(), hashlib.sha256()
        self._filled = self._total = 0
        self._digests = bytearray()

    def add(self, data: bytes | memoryview) -> None:
        """Raises Damaged if there is more than a table can hold."""
        self._whole.update(data)
        view = memoryview(data)
        self._total += len(view)
        while view:
            part = view[: self._chunk_bytes - self._filled]
            self._chunk.update(part)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == self._chunk_bytes:
                self._close()

    def _close(self) -> None:
        if len(self._digests) >= MAX_CHUNKS * _DIGEST_BYTES:
            raise Damaged(f"has more than {MAX_CHUNKS} chunks")
        self._digests += self._chunk.digest()
        self._chunk, self._filled = hashlib.sha256(), 0

    def finish(self) -> tuple[ChunkTable, str]:
        """The table, and the SHA-256 of all in hex digits."""
        if self._filled:
            self._close()
        return ChunkTable(self._chunk_bytes, self._total, bytes(self._digests)), self._whole.hexdigest()


def compute(path: Path, chunk_bytes: int = CHUNK_BYTES, progress: Callable[[int], None] = lambda done: None) -> tuple[ChunkTable, str]:
    """The table of a file, and the file's SHA-256 in hex digits. `progress` gets the bytes read so far."""
    builder, done = Builder(chunk_bytes), 0
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while block := file.read(_BLOCK):
            builder.add(block)
            done += len(block)
            progress(done)
    return builder.finish()
