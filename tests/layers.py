# SPDX-License-Identifier: Apache-2.0
"""Layers that are mere files, for tests that mount nothing: a store, images of random bytes, and what has to be true of a store
whatever happened to it."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

from opendsec.api.images import ImageConfig
from opendsec.images import layers, records
from opendsec.images.layers import DATA, META, RECORD, TABLE, LayerRecord
from opendsec.images.store import ImageStore


def new_store(root: Path) -> ImageStore:
    store = ImageStore(root)
    store.prepare()
    return store


def content(name: str, size: int) -> bytes:
    """Random, the same for the same name."""
    return random.Random(name).randbytes(size)


def digest_of(name: str) -> str:
    return "sha256:" + hashlib.sha256(name.encode()).hexdigest()


def packed(directory: Path, name: str, size: int, packing: str = "") -> LayerRecord:
    """The files of a layer in a new directory, as a builder leaves them. Another `packing` has other bytes for the same digest."""
    directory.mkdir()
    (directory / META).write_bytes(b"metadata of " + f"{name} {packing}".encode() * 500)
    (directory / DATA).write_bytes(content(name + packing, size))
    return layers.describe(directory, digest=digest_of(name), kind="workspace", created_at=1.0)


def add_layer(store: ImageStore, name: str, size: int = 300_000, packing: str = "") -> str:
    with store.workspace() as (work, _):
        return store.publish(work / "out", packed(work / "out", name, size, packing)).digest


def add_image(store: ImageStore, image: str, *names: str, size: int = 300_000) -> tuple[str, ...]:
    digests = tuple(add_layer(store, name, size) for name in names)
    store.name_image(image, digests, ImageConfig(env={"IMAGE": image}), notes=("a note",))
    return digests


def make_first_version(store: ImageStore, digest: str) -> None:
    """As if the layer had been published before there were chunk tables."""
    directory = store.directory(digest)
    record = store.record(digest)
    (directory / TABLE).unlink()
    fields = ("digest", "kind", "meta_bytes", "data_bytes", "meta_sha256", "data_sha256", "created_at")
    old = LayerRecord(**{name: getattr(record, name) for name in fields})
    (directory / RECORD).write_bytes(records.encode(layers.MAGIC, 1, old))


def check_store(root: Path) -> ImageStore:
    """What start-up finds: all that is named is there and right, nothing half made is left."""
    store = new_store(root)
    assert store.damaged() == {}
    assert os.listdir(root / "tmp") == []
    for layer in store.list().layers:
        store.verify(layer.digest)
        assert store.origin(layer.digest) is not None or (store.directory(layer.digest) / DATA).exists()
    for image in store.list().images:
        for digest in image.layers:
            store.check(digest)
    return store
