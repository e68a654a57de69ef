# SPDX-License-Identifier: Apache-2.0
"""A stored layer: what lies in its directory and what its record says.

    layers/sha256-<hex>/
        layer.json     the record below, in the envelope of `records`
        meta.erofs     EROFS metadata: the whole tree, no file content
        data.chunks    the checksum of each chunk of the data file, see `chunks`
        data.blob      the content of all files, in blocks of 4 KiB, equal ones once; may be missing if there is
        origin.json    where the data can be had, see `origins`

Version 1 had no chunk table. Such a layer is read as it is, and gets its table when one is needed (`ImageStore.chunk_table`).

The digest addresses the *tree* (see `tree`), not these files: another mkfs.erofs may lay the same tree out differently. The
checksums bind the pair, since one metadata file is worthless with another's data file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from opendsec.api.images import LayerKind
from opendsec.images import chunks
from opendsec.images.chunks import ChunkTable
from opendsec.images.records import Damaged

MAGIC, VERSION = "opendsec-layer", 2
MAX_ID = 65_535  # of an owner in a layer: a sandbox has so many ids
RECORD, META, DATA, TABLE = "layer.json", "meta.erofs", "data.blob", "data.chunks"


class LayerRef(msgspec.Struct, frozen=True):
    """A layer as stored: an EROFS metadata file and the data file it points into."""

    digest: str  # sha256:<64 hex digits>
    meta: Path
    data: Path


class LayerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`layer.json`."""

    digest: str
    kind: LayerKind
    meta_bytes: int
    data_bytes: int
    meta_sha256: str  # hex digits
    data_sha256: str
    created_at: float  # unix seconds
    # Since version 2:
    chunk_bytes: int = 0  # 0 = no chunk table
    chunks_sha256: str = ""  # of `data.chunks`, hex digits


class Missing(Exception):
    """A layer's file is not there, or not of the size its record says; the message says which."""


class DataSource(Protocol):
    """Where the data file of a layer comes from.

    The metadata file is always local; the data file is whatever a mount's `device=` may name: it may be sparse and filled when first
    read. The store asks once for each use of a layer, from any thread, before the layer is mounted.
    """

    def data_file(self, directory: Path, record: LayerRecord) -> Path:
        """A local file of `record.data_bytes` bytes that serves the layer's data as long as the layer may be mounted. Raises Missing."""


class LocalData:
    """The data file lies, complete, beside the metadata file."""

    def data_file(self, directory: Path, record: LayerRecord) -> Path:
        return present(directory / DATA, record.data_bytes)


def present(path: Path, size_bytes: int) -> Path:
    """`path` if it is a file of that size. Raises Missing."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise Missing(f"{path.name} is missing") from None
    if found != size_bytes:
        raise Missing(f"{path.name} has {found} bytes instead of {size_bytes}")
    return path


def describe(
    directory: Path, *, digest: str, kind: LayerKind, created_at: float, progress: Callable[[int], None] = lambda done: None
) -> LayerRecord:
    """The record of a layer just packed into `directory` (`meta.erofs` and `data.blob`), where the chunk table is written too."""
    table, data_sha256 = chunks.compute(directory / DATA, progress=progress)
    with open(directory / META, "rb") as file:
        meta_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return LayerRecord(
        digest=digest,
        kind=kind,
        meta_bytes=(directory / META).stat().st_size,
        data_bytes=table.data_bytes,
        meta_sha256=meta_sha256,
        data_sha256=data_sha256,
        created_at=created_at,
        chunk_bytes=table.chunk_bytes,
        chunks_sha256=chunks.write(directory / TABLE, table),
    )


def with_table(directory: Path, record: LayerRecord) -> LayerRecord:
    """`record` with the chunk table of `directory`'s data, which is written there. Raises Damaged if the data is not the record's."""
    table, data_sha256 = chunks.compute(directory / DATA)
    if (table.data_bytes, data_sha256) != (record.data_bytes, record.data_sha256):
        raise Damaged(f"{DATA} does not match its checksum")
    written = chunks.write(directory / TABLE, table)
    return msgspec.structs.replace(record, chunk_bytes=table.chunk_bytes, chunks_sha256=written)


def read_table(directory: Path, record: LayerRecord) -> ChunkTable:
    """The chunk table that the record names. Raises Missing, Damaged."""
    try:
        data = (directory / TABLE).read_bytes()
    except FileNotFoundError:
        raise Missing(f"{TABLE} is missing") from None
    return check_table(data, record)


def check_table(data: bytes, record: LayerRecord) -> ChunkTable:
    """The chunk table, if these are its bytes. Raises Damaged."""
    if len(data) > chunks.MAX_BYTES or hashlib.sha256(data).hexdigest() != record.chunks_sha256:
        raise Damaged(f"{TABLE} does not match its checksum")
    try:
        table = chunks.decode(data)
    except Damaged as error:
        raise Damaged(f"{TABLE} {error}") from None
    if (table.chunk_bytes, table.data_bytes) != (record.chunk_bytes, record.data_bytes):
        raise Damaged(f"{TABLE} is of {table.data_bytes} bytes in chunks of {table.chunk_bytes}, not as the record says")
    return table


def directory_name(digest: str) -> str:
    return digest.replace(":", "-", 1)


def digest_of(directory: Path) -> str:
    return directory.name.replace("-", ":", 1)
