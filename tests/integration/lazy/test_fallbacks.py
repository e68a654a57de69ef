# SPDX-License-Identifier: Apache-2.0
"""Each mechanism, forced: the same bytes."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from opendsec.api.errors import Unavailable
from opendsec.images.lazy.client import choose
from opendsec.images.lazy.protocol import Mechanism
from opendsec.images.lazy.source import LazyData
from opendsec.images.store import ImageStore
from opendsec.kernel import features, mounts
from tests.lazy import Reader, Rig, noise

pytestmark = [pytest.mark.requires("fanotify_pre_content", "fuse"), pytest.mark.slow]

MIB = 1 << 20

each_mechanism = pytest.mark.parametrize("mechanism", ["fanotify", "fuse", "eager"])


@each_mechanism
async def test_the_same_bytes_by_each_mechanism(tmp_path: Path, mechanism: Mechanism) -> None:
    with Rig(tmp_path, mechanism=mechanism) as rig:
        layer = rig.layer({f"f{n}": noise(700_000, n) for n in range(12)})
        async with rig.loader() as loader:
            mounts_ = [await rig.mount(loader, layer) for _ in range(4)]
            readers = [(name, Reader(mount, name)) for mount in mounts_ for name in list(layer.files)[:6]]
            for name, reader in readers:
                assert await reader.result_soon() == layer.files[name]
            assert (rig.web.sent_bytes < len(layer.blob)) == (mechanism != "eager")
            stats = (await loader.stats()).layers[0]
            assert stats.complete == (mechanism == "eager") and (stats.in_use or mechanism == "eager")


@each_mechanism
async def test_the_store_gets_its_data_by_each_mechanism(tmp_path: Path, mechanism: Mechanism) -> None:
    with Rig(tmp_path, mechanism=mechanism) as rig:
        elsewhere, here = rig.layer({"a": noise(MIB, 1)}), rig.layer({"b": noise(MIB, 2)}, local=True)
        async with rig.loader():
            store = ImageStore(rig.store.root, data_source=LazyData(rig.run_dir))
            for layer, name in ((elsewhere, "a"), (here, "b")):
                for _ in range(2):
                    ref = await asyncio.to_thread(store.layer_ref, layer.digest)
                    mount = await asyncio.to_thread(rig.mount_data, layer, ref.data)
                    assert await rig.read(mount, name) == layer.files[name]


async def test_without_a_loader_the_store_says_so(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        layer = rig.layer({"a": noise(MIB, 1)})
        store = ImageStore(rig.store.root, data_source=LazyData(rig.run_dir))
        with pytest.raises(Unavailable, match="does not answer"):
            await asyncio.to_thread(store.layer_ref, layer.digest)


# --- FUSE ----------------------------------------------------------------------------------------------------------


async def test_a_loader_that_keeps_crashing_refuses_through_fuse_too(tmp_path: Path) -> None:
    with Rig(tmp_path, mechanism="fuse") as rig:
        layer = rig.layer({"big": noise(MIB, 1)})
        async with rig.loader() as loader:
            mount = await rig.mount(loader, layer)
            gate = rig.web.hold("data.blob")
            reader = Reader(mount, "big")
            await asyncio.to_thread(gate.wait_arrived)
            await rig.crash_until(lambda: reader.process.poll() is not None)
            assert await reader.result_soon() == errno.EIO
            rig.web.let_go()
            rig.wait(lambda: rig.pids("loader"))
            rig.wait(lambda: Reader(mount, "big").result() == layer.files["big"])


async def test_with_fuse_the_death_of_all_is_an_error_never_a_hole(tmp_path: Path) -> None:
    with Rig(tmp_path, mechanism="fuse") as rig:
        layer = rig.layer({"big": noise(2 * MIB, 1)})
        async with rig.loader() as loader:
            mount = await rig.mount(loader, layer)
            gate = rig.web.hold("data.blob")
            reader = Reader(mount, "big")
            await asyncio.to_thread(gate.wait_arrived)
        rig.kill_all()
        rig.web.let_go()
        assert await reader.result_soon() == errno.EIO
        async with rig.loader() as loader:
            assert loader.lost == (layer.digest,)
            await loader.forget_lost()
            assert await rig.read(await rig.mount(loader, layer), "big") == layer.files["big"]
            rig.unmount()
        rig.wait(lambda: not rig.family())
        async with rig.loader() as loader:
            assert loader.lost == ()


async def test_a_store_that_fails_is_eio_through_fuse_too(tmp_path: Path) -> None:
    with Rig(tmp_path, mechanism="fuse", attempt_s=0.3, patience_s=0.8) as rig:
        layer = rig.layer({"big": noise(MIB, 1)})
        async with rig.loader() as loader:
            mount = await rig.mount(loader, layer)
            rig.web.fail("wrong", match="data.blob")
            assert await Reader(mount, "big").result_soon() == errno.EIO
            rig.web.heal()
            rig.wait(lambda: Reader(mount, "big").result() == layer.files["big"])


async def test_a_trace_through_fuse(tmp_path: Path) -> None:
    with Rig(tmp_path, mechanism="fuse") as rig:
        layer = rig.layer({f"f{n}": noise(60_000, n) for n in range(20)})
        async with rig.loader() as loader:
            view = await asyncio.to_thread(rig.mount_data, layer, await loader.start_trace("run1", layer.digest))
            for name in ("f15", "f3"):
                assert await rig.read(view, name) == layer.files[name]
            entries = await loader.stop_trace("run1", layer.digest, keep=False)
            assert list(entries.chunks) == list(dict.fromkeys([*layer.chunks_of("f15"), *layer.chunks_of("f3")]))


# --- which one -----------------------------------------------------------------------------------------------------


def test_the_mechanism_is_chosen_by_trying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(tmp_path)[0] == "fanotify"
    assert choose(tmp_path, "eager")[0] == "eager"
    assert choose(tmp_path, "fuse") == ("fuse", "forced")
    monkeypatch.setenv(features.FORCE_MISSING, "fanotify_pre_content")
    mechanism, reason = choose(tmp_path)
    assert mechanism == "fuse" and "fanotify_pre_content: forced" in reason
    with pytest.raises(Unavailable, match="this machine cannot"):
        choose(tmp_path, "fanotify")
    monkeypatch.setenv(features.FORCE_MISSING, "fanotify_pre_content,fuse")
    assert choose(tmp_path)[0] == "eager"
    with pytest.raises(Unavailable, match="must be auto"):
        choose(tmp_path, "fast")


def test_a_file_system_that_cannot_be_watched_is_no_place_for_events() -> None:
    with_tmpfs = mounts.tmpfs(1 << 20, 16)
    try:
        assert choose(Path(f"/proc/self/fd/{with_tmpfs}"))[0] == "fuse"
    finally:
        os.close(with_tmpfs)
