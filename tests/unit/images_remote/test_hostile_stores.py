# SPDX-License-Identifier: Apache-2.0
"""Stores that say what cannot be: nothing of it is believed, and nothing larger than promised is written."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path

import msgspec
import pytest
import zstandard

from opendsec.api.errors import Internal
from opendsec.api.images import ImageConfig, ImageList
from opendsec.images import chunks, layers, records
from opendsec.images.layers import LayerRecord
from opendsec.images.remote import layout
from opendsec.images.remote.layout import RemoteImage, TraceFile
from opendsec.images.remote.posix import PosixStore
from opendsec.images.store import ImageStore
from opendsec.images.transfer import pull_image, push_image
from tests.layers import add_image, check_store, digest_of, new_store


@dataclasses.dataclass
class Hostile:
    """A store in a directory, with the image `task` of the layer `base`, whose objects tests change."""

    root: Path
    here: ImageStore
    record: LayerRecord
    image: RemoteImage

    def write_image(self, image: RemoteImage) -> None:
        self.put(layout.image_record("task"), records.encode(layout.IMAGE_MAGIC, layout.IMAGE_VERSION, image))

    def write_record(self, record: LayerRecord) -> None:
        """With its files where the record says."""
        old, new = self.root / layout.layer_prefix(self.record), self.root / layout.layer_prefix(record)
        if record.digest == self.record.digest:
            os.rename(old, new)
        self.put(layout.layer_record(self.record.digest), records.encode(layers.MAGIC, layers.VERSION, record))

    def put(self, key: str, data: bytes) -> None:
        (self.root / key).write_bytes(data)

    async def pull(self, *, lazy: bool = True) -> None:
        store = PosixStore("team", self.root)
        try:
            await pull_image(self.here, "task", store, progress=lambda event: None, lazy=lazy)
        finally:
            await store.close()

    async def refuses(self, message: str) -> None:
        for lazy in (True, False):
            with pytest.raises(Internal, match=message):
                await self.pull(lazy=lazy)
            assert check_store(self.here.root).list() == ImageList((), ())
            assert os.listdir(self.here.traces) == []


@pytest.fixture
async def hostile(tmp_path: Path) -> Hostile:
    source = new_store(tmp_path / "source")
    (tmp_path / "remote").mkdir()
    (digest,) = add_image(source, "task", "base")
    store = PosixStore("team", tmp_path / "remote", writable=True)
    await push_image(source, "task", store, progress=lambda event: None)
    await store.close()
    record = (tmp_path / "remote" / layout.image_record("task")).read_bytes()
    image = records.decode(record, layout.IMAGE_MAGIC, layout.IMAGE_VERSION, RemoteImage)
    return Hostile(tmp_path / "remote", new_store(tmp_path / "here"), source.record(digest), image)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "other"}, "of another image"),
        ({"layers": ()}, "names no layers"),
        ({"layers": ("sha256:../../../etc/passwd",)}, "names no layers"),
        ({"layers": (digest_of("base"),) * 129}, "names no layers"),
        ({"layers": (digest_of("nosuch"),)}, "an image needs this layer, but it is not there"),
        ({"config": ImageConfig(env={"A=B": "x"})}, r"is wrong: config\.env"),
        ({"config": ImageConfig(workdir="relative")}, r"is wrong: config\.workdir"),
        ({"traces": (TraceFile(layer="x", name="x", bytes=1, sha256="x", packing="x"),) * 1025}, "too many traces"),
    ],
)
async def test_records_of_images(hostile: Hostile, change: dict[str, object], message: str) -> None:
    hostile.write_image(msgspec.structs.replace(hostile.image, **change))
    await hostile.refuses(message)


@pytest.mark.parametrize(
    "change",
    [
        {"digest": digest_of("other")},
        {"chunks_sha256": ""},
        {"chunk_bytes": 0},
        {"chunk_bytes": 65537},
        {"meta_bytes": 0},
        {"meta_bytes": 1 << 60},
        {"data_bytes": -1},
    ],
)
async def test_records_of_layers(hostile: Hostile, change: dict[str, object]) -> None:
    hostile.write_record(msgspec.structs.replace(hostile.record, **change))
    await hostile.refuses("of another layer, or out of bounds")


async def test_a_table_of_a_size_that_would_not_end(hostile: Hostile) -> None:
    hostile.write_record(msgspec.structs.replace(hostile.record, data_bytes=1 << 62))
    await hostile.refuses("of another layer, or out of bounds")


async def test_a_table_that_is_true_to_its_checksum_and_wrong(hostile: Hostile) -> None:
    table = chunks.Builder(4096).finish()[0].encode()
    hostile.write_record(msgspec.structs.replace(hostile.record, chunks_sha256=hashlib.sha256(table).hexdigest()))
    record = msgspec.structs.replace(hostile.record, chunks_sha256=hashlib.sha256(table).hexdigest())
    hostile.put(f"{layout.layer_prefix(record)}/data.chunks", table)
    await hostile.refuses("not as the record says")


@pytest.mark.parametrize("bomb", [zstandard.compress(bytes(40 << 20)), b"no zstd", b"", zstandard.compress(b"short")])
async def test_metadata_that_is_not_what_was_promised(hostile: Hostile, bomb: bytes) -> None:
    hostile.put(f"{layout.layer_prefix(hostile.record)}/meta.erofs.zst", bomb)
    await hostile.refuses("the layer's")


async def test_traces_with_names_of_their_own(hostile: Hostile) -> None:
    """They are left out; the image comes."""
    data = b"trace"
    good = TraceFile(
        layer=digest_of("base"),
        name="start.trace",
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        packing=layout.packing(hostile.record),
    )
    key = layout.trace(hostile.record, good.sha256)
    (hostile.root / key).parent.mkdir(parents=True)
    hostile.put(key, data)
    bad: list[dict[str, object]] = [{"name": name} for name in ("", "..", ".x", "a/b", "../../x", "x" * 101, "a\0")]
    bad += [{"bytes": 0}, {"bytes": 1 << 40}, {"sha256": "../" * 20}, {"sha256": "0" * 64}, {"packing": "0" * 32}, {"layer": "x"}]
    others = tuple(msgspec.structs.replace(good, **{"name": f"bad{index}", **change}) for index, change in enumerate(bad))
    hostile.write_image(msgspec.structs.replace(hostile.image, traces=(*others, good)))
    await hostile.pull()
    assert [path.relative_to(hostile.here.traces).name for path in hostile.here.traces.rglob("*") if path.is_file()] == ["start.trace"]
    check_store(hostile.here.root)
