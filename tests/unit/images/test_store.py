# SPDX-License-Identifier: Apache-2.0
"""The store with layers that are mere files: nothing here mounts anything."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest

from opendsec.api.errors import Conflict, Internal, InvalidRequest, NotFound
from opendsec.api.images import ComposeRequest, ImageConfig, LayerKind
from opendsec.images.layers import DATA, META, RECORD, LayerRecord
from opendsec.images.names import LayerName
from opendsec.images.store import GRACE_S, ImageStore


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> ImageStore:
    store = ImageStore(tmp_path / "images", clock=clock)
    store.prepare()
    return store


def digest(content: str) -> str:
    return "sha256:" + hashlib.sha256(content.encode()).hexdigest()


def add(store: ImageStore, content: str, kind: LayerKind = "workspace") -> str:
    with store.workspace() as (work, _):
        out = work / "out"
        out.mkdir()
        files = {META: b"meta " + content.encode(), DATA: b"data " + content.encode()}
        for name, data in files.items():
            (out / name).write_bytes(data)
        sums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        record = LayerRecord(
            digest=digest(content),
            kind=kind,
            meta_bytes=len(files[META]),
            data_bytes=len(files[DATA]),
            meta_sha256=sums[META],
            data_sha256=sums[DATA],
            created_at=1.0,
        )
        return store.publish(out, record).digest


def name(store: ImageStore, kind: LayerKind, text: str, version: str, layer: str) -> None:
    store.name_layer(LayerName(kind, text, version), layer)


@pytest.fixture
def filled(store: ImageStore) -> ImageStore:
    """Image `base` of one layer, and three named layers."""
    store.name_image("base", [add(store, "base", "base")], ImageConfig(env={"A": "1"}))
    name(store, "workspace", "astropy", "1", add(store, "astropy 1"))
    name(store, "workspace", "astropy", "2", add(store, "astropy 2"))
    name(store, "toolkit", "harness", "7", add(store, "harness"))
    return store


def digests(store: ImageStore, image: str, *layers: str) -> list[str]:
    return [layer.digest for layer in store.resolve(image, layers).layers]


def test_layers_come_in_order_lowest_first(filled: ImageStore) -> None:
    found = filled.resolve("base", ["workspace:astropy@2", "toolkit:harness@7", digest("astropy 1")])
    assert [layer.digest for layer in found.layers] == [digest(x) for x in ("base", "astropy 2", "harness", "astropy 1")]
    assert found.config.env == {"A": "1"}
    assert found.layers[1].meta.read_bytes() == b"meta astropy 2"
    assert found.layers[1].data.read_bytes() == b"data astropy 2"


def test_a_layer_given_twice_counts_where_it_is_highest(filled: ImageStore) -> None:
    assert digests(filled, "base", "harness", "astropy@1", "toolkit:harness@7") == [digest(x) for x in ("base", "astropy 1", "harness")]


def test_parts_of_a_name_may_be_left_out_where_clear(filled: ImageStore) -> None:
    assert digests(filled, "base", "harness") == digests(filled, "base", "toolkit:harness@7")
    with pytest.raises(InvalidRequest, match=r"workspace:astropy@1, workspace:astropy@2") as caught:
        filled.resolve("base", ["harness", "astropy"])
    assert caught.value.field == "layers[1]"
    name(filled, "workspace", "astropy", "1", digest("astropy 2"))
    assert digests(filled, "base", "astropy")[1:] == [digest("astropy 2")]  # all candidates are the same layer


@pytest.mark.parametrize(
    ("image", "layers", "kind", "field", "message"),
    [
        ("nosuch", (), NotFound, "image", "images here: base"),
        ("No Such", (), InvalidRequest, "image", "lower case"),
        ("base", ("harness", "workspace:astropy@3"), NotFound, "layers[1]", "there is workspace:astropy@1, workspace:astropy@2"),
        ("base", ("nosuch",), NotFound, "layers[0]", "no layer 'nosuch'"),
        ("base", ("toolkit:astropy@1",), NotFound, "layers[0]", "there is"),
        ("base", ("a b",), InvalidRequest, "layers[0]", "must look like"),
        ("base", (digest("nosuch"),), NotFound, "layers[0]", "no layer sha256"),
    ],
)
def test_what_is_missing_is_named(
    filled: ImageStore, image: str, layers: tuple[str, ...], kind: type[Exception], field: str, message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        filled.resolve(image, layers)
    assert getattr(caught.value, "field", None) == field


def test_an_empty_store_says_so(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "nowhere")
    with pytest.raises(NotFound, match="there are none yet"):
        store.resolve("base")
    assert store.list().images == ()


def test_too_many_layers_are_refused(filled: ImageStore) -> None:
    many = [add(filled, f"layer {number}") for number in range(128)]
    assert len(digests(filled, "base", *many[:127])) == 128
    with pytest.raises(InvalidRequest, match="at most 128"):
        filled.resolve("base", many)


def test_the_listing_has_names_and_sizes(filled: ImageStore) -> None:
    found = filled.list()
    assert [(image.name, image.layers) for image in found.images] == [("base", (digest("base"),))]
    assert found.images[0].size_bytes == len("meta base") + len("data base")
    assert {layer.digest: layer.names for layer in found.layers} == {
        digest("base"): (),
        digest("astropy 1"): ("workspace:astropy@1",),
        digest("astropy 2"): ("workspace:astropy@2",),
        digest("harness"): ("toolkit:harness@7",),
    }


def test_compose_names_layers_of_an_image_and_more(filled: ImageStore) -> None:
    made = filled.compose(ComposeRequest(name="task:1", base="base", layers=("astropy@1", "harness")))
    assert list(made.layers) == [digest(x) for x in ("base", "astropy 1", "harness")]
    assert digests(filled, "task:1") == list(made.layers)
    assert filled.resolve("task:1").config.env == {"A": "1"}
    other = filled.compose(ComposeRequest(name="task:2", base="task:1", layers=(), config=ImageConfig(workdir="/w")))
    assert (other.layers, other.config.workdir) == (made.layers, "/w")
    with pytest.raises(NotFound) as caught:
        filled.compose(ComposeRequest(name="task:3", base="nosuch", layers=()))
    assert caught.value.field == "base"
    with pytest.raises(NotFound) as caught:
        filled.compose(ComposeRequest(name="task:3", base="base", layers=("nosuch",)))
    assert caught.value.field == "layers[0]"
    assert [image.name for image in filled.list().images] == ["base", "task:1", "task:2"]


def test_an_image_whose_record_nobody_could_read_is_not_named(filled: ImageStore) -> None:
    """It would keep `gc` from working, too."""
    with pytest.raises(InvalidRequest) as caught:
        filled.compose(ComposeRequest(name="task:1", base="base", layers=(), config=ImageConfig(env={"A": "\1" * 200_000})))
    assert caught.value.field == "config"
    assert [image.name for image in filled.list().images] == ["base"]
    filled.gc()


def test_naming_needs_the_layers(store: ImageStore) -> None:
    with pytest.raises(NotFound):
        store.name_image("x", [digest("nosuch")], ImageConfig())
    with pytest.raises(NotFound):
        store.name_layer(LayerName("toolkit", "x", "1"), digest("nosuch"))
    with pytest.raises(InvalidRequest):
        store.name_image("X", [], ImageConfig())
    assert store.list().images == ()


def test_names_are_replaced_and_removed(filled: ImageStore) -> None:
    name(filled, "toolkit", "harness", "7", digest("astropy 1"))
    assert digests(filled, "base", "harness")[1:] == [digest("astropy 1")]
    filled.remove("toolkit:harness@7")
    filled.remove("base")
    with pytest.raises(NotFound):
        filled.resolve("base")
    for gone in ("base", "toolkit:harness@7", "nosuch", "workspace:astropy", "N O"):
        with pytest.raises(NotFound):
            filled.remove(gone)
    with pytest.raises(InvalidRequest, match="garbage collection"):
        filled.remove(digest("base"))
    assert len(filled.list().layers) == 4


# --- garbage -------------------------------------------------------------------------------------------------------


def test_gc_removes_what_nothing_uses_after_a_grace_period(filled: ImageStore, clock: Clock) -> None:
    filled.remove("base")
    filled.remove("toolkit:harness@7")
    assert filled.gc().digests == ()
    clock.now += GRACE_S
    assert set(filled.gc(dry_run=True).digests) == {digest("base"), digest("harness")}
    collected = filled.gc({digest("harness")})
    assert collected.digests == (digest("base"),)
    assert collected.freed_bytes > 0
    assert {layer.digest for layer in filled.list().layers} == {digest("astropy 1"), digest("astropy 2"), digest("harness")}
    with pytest.raises(NotFound):
        filled.layer_ref(digest("base"))
    assert os.listdir(filled.root / "tmp") == []


def test_publishing_again_renews_the_grace_period(filled: ImageStore, clock: Clock) -> None:
    filled.remove("base")
    clock.now += GRACE_S
    add(filled, "base", "base")
    assert filled.gc().digests == ()


def test_gc_leaves_what_somebody_is_about_to_name(filled: ImageStore, clock: Clock) -> None:
    filled.remove("base")
    filled.remove("toolkit:harness@7")
    clock.now += GRACE_S
    with filled.at_work([digest("base")]):
        clock.now += 60
        add(filled, "new")
        assert filled.gc(grace_s=0).digests == (digest("harness"),)  # neither what is built upon, nor what was made meanwhile
        with filled.at_work():
            pass
        assert filled.gc(grace_s=0).digests == ()
    assert set(filled.gc(grace_s=0).digests) == {digest("base"), digest("new")}


def test_gc_keeps_everything_while_a_reference_is_damaged(filled: ImageStore) -> None:
    path = next((filled.root / "refs" / "images").iterdir())
    path.write_bytes(path.read_bytes().replace(b"base", b"bose"))
    with pytest.raises(Conflict, match="damaged"):
        filled.gc(grace_s=0)
    with pytest.raises(Internal, match="damaged"):
        filled.resolve("base")


def test_another_process_may_have_collected(filled: ImageStore, clock: Clock) -> None:
    other = ImageStore(filled.root, clock=clock)
    filled.resolve("base", [digest("harness")])  # both know it now
    filled.remove("toolkit:harness@7")
    clock.now += GRACE_S
    other.gc()
    with pytest.raises(NotFound):
        filled.resolve("base", [digest("harness")])
    with pytest.raises(NotFound):
        filled.name_image("x", [digest("harness")], ImageConfig())


# --- damage and crashes --------------------------------------------------------------------------------------------


def layer_path(store: ImageStore, content: str) -> Path:
    return store.root / "layers" / digest(content).replace(":", "-")


@pytest.mark.parametrize("file", [META, DATA])
def test_a_layer_with_a_missing_or_short_file_is_damaged(filled: ImageStore, file: str) -> None:
    path = layer_path(filled, "harness") / file
    os.truncate(path, 3)
    with pytest.raises(Internal, match=f"{file} has 3 bytes instead of"):
        filled.resolve("base", ["harness"])
    path.unlink()
    with pytest.raises(Internal, match=f"{file} is missing"):
        filled.resolve("base", ["harness"])


def test_verify_reads_all(filled: ImageStore) -> None:
    filled.verify(digest("harness"))
    path = layer_path(filled, "harness") / DATA
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(Internal, match=r"data\.blob does not match its checksum"):
        filled.verify(digest("harness"))
    with pytest.raises(NotFound):
        filled.verify(digest("nosuch"))
    with pytest.raises(NotFound):
        filled.verify("../../etc")


def test_a_damaged_record_is_left_out_told_and_replaced(filled: ImageStore, clock: Clock) -> None:
    fresh = ImageStore(filled.root, clock=clock)
    (layer_path(filled, "harness") / RECORD).write_text("{}")
    assert digest("harness") not in {layer.digest for layer in fresh.list().layers}
    assert list(fresh.damaged()) == [digest("harness")]
    with pytest.raises(Internal):
        fresh.resolve("base", ["harness"])
    add(fresh, "harness")
    assert fresh.damaged() == {}
    fresh.resolve("base", ["harness"])


def test_the_first_publisher_wins(store: ImageStore) -> None:
    add(store, "same", "workspace")
    before = os.stat(layer_path(store, "same") / META).st_ino
    add(store, "same", "toolkit")
    assert os.stat(layer_path(store, "same") / META).st_ino == before
    assert store.list().layers[0].kind == "workspace"


def test_publishers_of_one_layer_do_not_disturb_each_other(store: ImageStore) -> None:
    barrier, failures = threading.Barrier(4), []

    def publish() -> None:
        other = ImageStore(store.root)
        barrier.wait()
        try:
            for number in range(5):
                add(other, f"layer {number}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for number in range(5):
        store.verify(digest(f"layer {number}"))
    assert os.listdir(store.root / "tmp") == []


def test_start_up_clears_what_dead_builders_left_and_nothing_else(store: ImageStore) -> None:
    left = store.root / "tmp" / "build-left"
    (left / "out").mkdir(parents=True)
    (left / "out" / META).write_text("half")
    (store.root / "tmp" / "record-1").write_text("half")
    with store.workspace() as (work, _):
        (work / "mine").touch()
        ImageStore(store.root).prepare()
        assert (work / "mine").exists()
        assert os.listdir(store.root / "tmp") == [work.name]
    assert os.listdir(store.root / "tmp") == []


def test_a_workspace_is_removed_on_failure(store: ImageStore) -> None:
    with pytest.raises(ZeroDivisionError), store.workspace() as (work, _):
        (work / "x").mkdir()
        raise ZeroDivisionError
    assert os.listdir(store.root / "tmp") == []


def test_layer_files_are_sealed(filled: ImageStore) -> None:
    for file in (META, DATA):
        assert os.stat(layer_path(filled, "base") / file).st_mode & 0o777 == 0o444
