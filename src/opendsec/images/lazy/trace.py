# SPDX-License-Identifier: Apache-2.0
"""Access traces: which chunks of a layer somebody read first, in order.

    offset  bytes  field, little endian
    0       8      magic, b"DSECTRCE"
    8       4      version, 1
    12      4      count of entries
    16      32     SHA-256 of the chunk table the numbers are of
    48      8·n    chunk number, and its place in the order of the whole run, which may have gone through several layers
    …       32     SHA-256 of all before

What one packing of a layer calls chunk 7 is another's chunk 9, so a trace of another table is refused, as is what names a chunk twice.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
from collections.abc import Sequence
from pathlib import Path

from opendsec.images.chunks import MAX_CHUNKS
from opendsec.images.records import Damaged

MAGIC, VERSION = b"DSECTRCE", 1
_HEADER, _ENTRY, _SUM_BYTES = struct.Struct("<8sII32s"), struct.Struct("<II"), 32
MAX_BYTES = _HEADER.size + _ENTRY.size * MAX_CHUNKS + _SUM_BYTES
FILE = "start.trace"
"""The trace that is kept with a layer and replayed when it is first used."""

Entry = tuple[int, int]  # chunk, place


def encode(entries: Sequence[Entry], table_sha256: bytes) -> bytes:
    body = _HEADER.pack(MAGIC, VERSION, len(entries), table_sha256) + b"".join(_ENTRY.pack(*entry) for entry in entries)
    return body + hashlib.sha256(body).digest()


def decode(data: bytes, *, count: int, table_sha256: bytes) -> list[Entry]:
    """The entries by their place. Raises Damaged; `count` and `table_sha256` are those of the layer."""
    if not _HEADER.size + _SUM_BYTES <= len(data) <= MAX_BYTES:
        raise Damaged(f"has {len(data)} bytes, which no trace has")
    magic, version, entries, table = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise Damaged("is not a trace")
    if version > VERSION:
        raise Damaged(f"has format version {version}, but this program reads up to {VERSION}")
    end = _HEADER.size + entries * _ENTRY.size
    if version < 1 or len(data) != end + _SUM_BYTES:
        raise Damaged(f"has {len(data)} bytes for {entries} entries")
    if hashlib.sha256(memoryview(data)[:end]).digest() != data[end:]:
        raise Damaged("does not match its checksum")
    if table != table_sha256:
        raise Damaged("is of another packing of the layer")
    found = [(chunk, place) for chunk, place in _ENTRY.iter_unpack(data[_HEADER.size : end])]
    if len({chunk for chunk, _ in found}) != entries or any(chunk >= count for chunk, _ in found):
        raise Damaged("names a chunk twice, or one that is not there")
    return sorted(found, key=lambda entry: entry[1])


def read(path: Path, *, count: int, table_sha256: bytes) -> list[Entry]:
    """Raises FileNotFoundError, Damaged."""
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    try:
        return decode(data, count=count, table_sha256=table_sha256)
    except Damaged as error:
        raise Damaged(f"{path.name} {error}") from None


def write(folder: Path, content: bytes) -> None:
    """Make this the trace that is replayed, at once."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    staged = folder / f".{secrets.token_hex(8)}"
    try:
        with open(staged, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(staged, folder / FILE)
    finally:
        staged.unlink(missing_ok=True)
