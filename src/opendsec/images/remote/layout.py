# SPDX-License-Identifier: Apache-2.0
"""What lies where in a remote store.

    layers/sha256-<hex>/layer.json                    the layer's record (`layers.LayerRecord`); says which packing it is of
    layers/sha256-<hex>/<packing>/meta.erofs.zst      the metadata, compressed
    layers/sha256-<hex>/<packing>/data.chunks         the chunk table
    layers/sha256-<hex>/<packing>/data.blob           the data
    images/<file name of the image's name>            its record: layers and config
    traces/sha256-<hex>/<packing>/<sha256>            access traces; opaque here, named by an image's record

Two machines may pack one tree differently (see `layers`), and the files of one packing are worthless with those of another. So each
packing has a directory named by its checksums: files of a key never change, pushers never mix, and the small records, which are
written last, are the only objects that are ever replaced. So a push that was cut short is never seen, and nobody needs a lock. Nothing
but plain reads is needed to pull: servers that list nothing will do.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from opendsec.api.images import ImageConfig
from opendsec.images import names
from opendsec.images.layers import LayerRecord, directory_name

IMAGE_MAGIC, IMAGE_VERSION = "opendsec-remote-image", 1

META_ZST, TABLE, DATA = "meta.erofs.zst", "data.chunks", "data.blob"


def packing(record: LayerRecord) -> str:
    """Needs a record with a chunk table."""
    return hashlib.sha256(f"{record.meta_sha256} {record.chunks_sha256}".encode()).hexdigest()[:32]


def layer_prefix(record: LayerRecord) -> str:
    return f"layers/{directory_name(record.digest)}/{packing(record)}"


def layer_record(digest: str) -> str:
    return f"layers/{directory_name(digest)}/layer.json"


def image_record(name: str) -> str:
    return f"images/{names.file_name(name).replace('%', '_')}"


def trace(record: LayerRecord, sha256: str) -> str:
    return f"traces/{directory_name(record.digest)}/{packing(record)}/{sha256}"


class TraceFile(msgspec.Struct, frozen=True, kw_only=True):
    """An access trace as it came from the store of the machine that pushed."""

    layer: str  # digest
    name: str  # of the file
    bytes: int
    sha256: str  # hex digits
    packing: str  # which it is of: chunks have other numbers in another


class RemoteImage(msgspec.Struct, frozen=True, kw_only=True):
    """The record of an image, in the envelope of `records`."""

    name: str
    layers: tuple[str, ...]  # digests, lowest first
    config: ImageConfig
    created_at: float
    notes: tuple[str, ...] = ()
    traces: tuple[TraceFile, ...] = ()


MAX_TRACE_BYTES, MAX_TRACES = 32 << 20, 1024
_TRACE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


def is_trace(file: TraceFile) -> bool:
    """Whether the file may be fetched and kept under its name."""
    plain = re.fullmatch(r"[0-9a-f]{64}", file.sha256) and re.fullmatch(r"[0-9a-f]{32}", file.packing)
    return bool(plain and is_trace_name(file.name) and names.is_digest(file.layer) and 0 < file.bytes <= MAX_TRACE_BYTES)


def is_trace_name(name: str) -> bool:
    return _TRACE_NAME.fullmatch(name) is not None
