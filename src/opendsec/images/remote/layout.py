# SPDX-License-Identifier: Apache-2.0
"""What lies where in a remote store.

    layers/sha256-<hex>/layer.json                    the layer's record (`layers.LayerRecord`); says which packing it is of
    layers/sha256-<hex>/<packing>/meta.erofs.zst      the metadata, compressed
    layers/sha256-<hex>/<packing>/data.chunks         the chunk table
    layers/sha256-<hex>/<packing>/data.blob           the data
    images/<file name of the image's name>            its record: layers and config
    traces/sha256-<hex>/<packing>/<name>              access traces; opaque here

Two machines may pack one tree differently (see `layers`), and the files of one packing are worthless with those of another. So each
packing has a directory named by its checksums: files of a key never change, pushers never mix, and the small records, which are
written last, are the only objects that are ever replaced.
"""

from __future__ import annotations

import hashlib

from opendsec.images import names
from opendsec.images.layers import LayerRecord, directory_name

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


def trace_prefix(record: LayerRecord) -> str:
    return f"traces/{directory_name(record.digest)}/{packing(record)}"
