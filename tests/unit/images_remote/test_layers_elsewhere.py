# SPDX-License-Identifier: Apache-2.0
"""The store with layers whose data is not here, of the first format, or half here."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec
import pytest

from opendsec.api.errors import Internal, NotFound
from opendsec.api.images import ImageConfig
from opendsec.images import chunks, layers
from opendsec.images.layers import DATA, META, RECORD, TABLE, LayerRecord
from opendsec.images.origins import Origin
from opendsec.images.records import Damaged
from opendsec.images.store import ImageStore
from tests.layers import add_image, add_layer, check_store, content, digest_of, make_first_version, new_store, packed

ORIGIN = Origin(stores=("team",), prefix="layers/sha256-00/11")


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return new_store(tmp_path / "images")


def publish_elsewhere(store: ImageStore, name: str = "far", packing: str = "") -> LayerRecord:
    with store.workspace() as (work, _):
        record = packed(work / "out", name, 200_000, packing)
        (work / "out" / DATA).unlink()
        store.publish(work / "out", record, origin=ORIGIN)
    return record


class Sparse:
    """A data source as the loader's: a sparse file in the cache."""

    def __init__(self, store: ImageStore) -> None:
        self.cache = store.cache

    def data_file(self, directory: Path, record: LayerRecord) -> Path:
        path = self.cache / directory.name / DATA
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.truncate(path, record.data_bytes)
        return path


def test_a_layer_is_there_without_its_data(store: ImageStore) -> None:
    record = publish_elsewhere(store)
    assert store.origin(record.digest) == ORIGIN
    assert store.chunk_table(record.digest).data_bytes == 200_000
    store.check(record.digest)
    store.verify(record.digest)
    with pytest.raises(Internal, match=r"data\.blob is missing"):  # of a store without a loader
        store.layer_ref(record.digest)
    store.name_image("image", [record.digest], ImageConfig())
    lazy = ImageStore(store.root, data_source=Sparse(store))
    (ref,) = lazy.resolve("image").layers
    assert (ref.data.parent.parent, ref.data.stat().st_size) == (store.cache, 200_000)
    assert [layer.data_bytes for layer in store.list().layers] == [200_000]
    check_store(store.root)


def test_data_that_comes_later_completes_it(store: ImageStore, tmp_path: Path) -> None:
    record = publish_elsewhere(store)
    (tmp_path / "data").write_bytes(content("far", 200_000)[:-1])
    with pytest.raises(Internal, match="instead of 200000"):
        store.add_data(record.digest, tmp_path / "data")
    (store.root / "tmp" / "data").write_bytes(content("far", 200_000))
    store.add_data(record.digest, store.root / "tmp" / "data")
    assert store.origin(record.digest) is None
    assert store.layer_ref(record.digest).data.stat().st_mode & 0o777 == 0o444
    store.verify(record.digest)


def test_who_publishes_it_with_data_completes_it(store: ImageStore) -> None:
    publish_elsewhere(store)
    add_layer(store, "far", 200_000)
    assert store.origin(digest_of("far")) is None
    store.verify(digest_of("far"))


def test_data_of_another_packing_is_not_mixed_in(store: ImageStore) -> None:
    record = publish_elsewhere(store)
    add_layer(store, "far", 200_000, packing="other")
    assert store.origin(record.digest) == ORIGIN
    assert store.record(record.digest) == record
    store.check(record.digest)


def test_a_whole_layer_is_not_replaced_by_one_elsewhere(store: ImageStore) -> None:
    add_layer(store, "far", 200_000)
    publish_elsewhere(store)
    assert store.origin(digest_of("far")) is None
    store.verify(digest_of("far"))


@pytest.mark.parametrize("damage", ["table", "table missing", "meta", "origin", "record"])
def test_damage_is_seen_and_mended_by_publishing(store: ImageStore, damage: str) -> None:
    directory = store.directory(publish_elsewhere(store).digest)
    if damage == "table missing":
        (directory / TABLE).unlink()
    else:
        path = directory / {"table": TABLE, "meta": META, "origin": "origin.json", "record": RECORD}[damage]
        path.chmod(0o644)
        path.write_bytes(b"x")
    fresh = ImageStore(store.root)
    with pytest.raises(Internal, match="is damaged"):
        fresh.check(digest_of("far"))
    publish_elsewhere(fresh)
    fresh.check(digest_of("far"))


def test_a_layer_of_the_first_format_gets_its_table(store: ImageStore) -> None:
    digest = add_layer(store, "old")
    expected = store.chunk_table(digest)
    make_first_version(store, digest)
    old = ImageStore(store.root)
    old.check(digest)
    old.verify(digest)
    assert old.record(digest).chunks_sha256 == ""
    assert old.chunk_table(digest) == expected
    assert old.record(digest).chunk_bytes == chunks.CHUNK_BYTES
    other = ImageStore(store.root)
    assert other.chunk_table(digest) == expected
    other.verify(digest)
    assert os.listdir(store.root / "tmp") == []


def test_a_damaged_layer_of_the_first_format_gets_none(store: ImageStore) -> None:
    digest = add_layer(store, "old")
    make_first_version(store, digest)
    data = store.directory(digest) / DATA
    data.chmod(0o644)
    data.write_bytes(data.read_bytes()[::-1])
    old = ImageStore(store.root)
    with pytest.raises(Internal, match="does not match its checksum"):
        old.chunk_table(digest)
    assert not (store.directory(digest) / TABLE).exists()


def test_what_another_process_changed_is_seen(store: ImageStore) -> None:
    digest = add_layer(store, "layer")
    other = ImageStore(store.root)
    before = other.record(digest)
    (store.directory(digest) / RECORD).write_bytes(b"damaged")
    add_layer(ImageStore(store.root), "layer", packing="another")
    assert other.record(digest) != before
    other.verify(digest)


def test_builders_may_leave_the_table_to_the_store(store: ImageStore) -> None:
    with store.workspace() as (work, _):
        record = packed(work / "out", "layer", 100_000)
        (work / "out" / TABLE).unlink()
        bare = msgspec.structs.replace(record, chunk_bytes=0, chunks_sha256="")
        with pytest.raises(Damaged):
            store.publish(work / "out", msgspec.structs.replace(bare, data_sha256="0" * 64))
        store.publish(work / "out", bare)
    assert store.record(record.digest) == record


def test_verify_says_where(store: ImageStore) -> None:
    digest = add_layer(store, "layer", 400_000)
    data = store.directory(digest) / DATA
    data.chmod(0o644)
    with open(data, "r+b") as file:
        for at in (70_000, 300_000):
            file.seek(at)
            file.write(b"wrong")
    with pytest.raises(Internal, match=r"data\.blob does not match its checksum in 2 of 7 chunks, the first at byte 65536"):
        store.verify(digest)


def test_a_table_of_other_data_is_refused(tmp_path: Path) -> None:
    record = packed(tmp_path / "a", "a", 100_000)
    other = packed(tmp_path / "b", "b", 100_000)
    with pytest.raises(Damaged, match="does not match"):
        layers.check_table((tmp_path / "b" / TABLE).read_bytes(), record)
    with pytest.raises(Damaged, match="not as the record says"):
        layers.check_table((tmp_path / "b" / TABLE).read_bytes(), msgspec.structs.replace(other, data_bytes=5))


# --- garbage -------------------------------------------------------------------------------------------------------


def beside(store: ImageStore, name: str) -> None:
    """What else there is of a layer: its cache, traces."""
    store.write_trace(digest_of(name), "start.trace", b"t" * 5000)
    cached = store.cache / digest_of(name).replace(":", "-")
    cached.mkdir()
    (cached / DATA).write_bytes(b"c" * 50_000)


def test_what_lies_beside_a_layer_goes_with_it(store: ImageStore) -> None:
    add_image(store, "image", "kept")
    record = publish_elsewhere(store)
    for name in ("kept", "far"):
        beside(store, name)
    planned = store.gc(grace_s=0, dry_run=True)
    assert planned.digests == (record.digest,)
    assert store.origin(record.digest) == ORIGIN
    done = store.gc(grace_s=0)
    assert (done.digests, done.freed_bytes) == (planned.digests, planned.freed_bytes)
    assert done.freed_bytes >= 55_000
    kept = [digest_of("kept").replace(":", "-")]
    assert os.listdir(store.cache) == os.listdir(store.traces) == os.listdir(store.root / "layers") == kept
    with pytest.raises(NotFound):
        store.write_trace(record.digest, "start.trace", b"")


def test_what_lost_its_layer_is_collected_too(tmp_path: Path) -> None:
    now = 2e9
    store = ImageStore(tmp_path / "images", clock=lambda: now)
    store.prepare()
    (store.cache / digest_of("x").replace(":", "-")).mkdir()
    (store.partial / "sha256-11.22").write_bytes(b"x" * 5000)
    assert store.gc(in_use={digest_of("x")}).freed_bytes >= 4096  # the partial file
    assert len(os.listdir(store.cache)) == 1  # a sandbox that lives on a layer whose files are gone still needs its cache
    store.gc()
    assert os.listdir(store.cache) == os.listdir(store.partial) == []


def test_partial_data_is_kept_for_a_while_and_while_it_is_held(store: ImageStore) -> None:
    path = store.partial / "sha256-11.22"
    path.write_bytes(b"x")
    store.gc()
    assert path.exists()
    with open(path, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        store.gc(grace_s=0)
        store.drop_partial()
        assert path.exists()
    store.gc(grace_s=0)
    assert not path.exists()


def test_renewing_is_as_good_as_publishing(tmp_path: Path) -> None:
    now = [1000.0]
    store = ImageStore(tmp_path / "images", clock=lambda: now[0])
    store.prepare()
    digest = add_layer(store, "layer")
    now[0] += 5000
    store.renew(digest)
    assert store.gc().digests == ()
    now[0] += 5000
    assert store.gc().digests == (digest,)
    with pytest.raises(NotFound):
        store.renew(digest)
