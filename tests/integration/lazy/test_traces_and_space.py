# SPDX-License-Identifier: Apache-2.0
"""Traces recorded and replayed; the cache kept within its bounds while it is read."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from opendsec.images.lazy import trace
from tests.lazy import Reader, Rig, drop_page_cache, noise

pytestmark = [pytest.mark.requires("fanotify_pre_content"), pytest.mark.slow]

MIB = 1 << 20


@pytest.mark.parametrize("local", [False, True])
async def test_a_trace_has_what_was_read_first_in_order_and_nothing_of_others(tmp_path: Path, local: bool) -> None:
    with Rig(tmp_path) as rig:
        layer = rig.layer({f"f{n}": noise(60_000, n) for n in range(40)}, local=local)
        async with rig.loader() as loader:
            others = 0 if local else await rig.mount(loader, layer)
            if not local:
                assert await rig.read(others, "f7") == layer.files["f7"]  # in its page cache, and here
            view = await asyncio.to_thread(rig.mount_data, layer, await loader.start_trace("run1", layer.digest))
            for name in ("f30", "f7", "f20", "f30"):
                assert await rig.read(view, name) == layer.files[name]
                if not local:
                    assert await rig.read(others, "f2") == layer.files["f2"]
            entries = await loader.stop_trace("run1", layer.digest, keep=True)
            wanted = [index for name in ("f30", "f7", "f20") for index in layer.chunks_of(name)]
            assert list(entries.chunks) == list(dict.fromkeys(wanted))
            rig.unmount(view)
            rig.wait(lambda: not list(rig.store.cache.glob("view-*")))
            kept = trace.read(
                rig.store.traces / rig.cached(layer).name / trace.FILE,
                count=layer.table.count,
                table_sha256=bytes.fromhex(rig.store.record(layer.digest).chunks_sha256),
            )
            assert [chunk for chunk, _ in kept] == list(entries.chunks)


async def test_a_trace_is_replayed_in_its_order_when_the_layer_is_first_used(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        layer = rig.layer({f"f{n:02}": noise(65536 * 2, n) for n in range(30)})
        wanted = [layer.chunks_of(f"f{n:02}").start for n in (20, 4, 28, 12)]
        content = trace.encode(
            [(chunk, place) for place, chunk in enumerate(wanted)], bytes.fromhex(rig.store.record(layer.digest).chunks_sha256)
        )
        trace.write(rig.store.traces / rig.cached(layer).name, content)
        async with rig.loader(parallel=2) as loader:  # one of the two is for demand
            await loader.ensure(layer.digest)
            await asyncio.to_thread(rig.web.wait_requests, 4)
            assert [request.start >> 16 for request in rig.web.requests] == wanted


async def test_a_trace_is_replayed_again_after_the_layer_was_dropped(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        layer = rig.layer({f"f{n:02}": noise(65536 * 2, n) for n in range(30)})
        wanted = [layer.chunks_of(f"f{n:02}").start for n in (20, 4)]
        content = trace.encode(
            [(chunk, place) for place, chunk in enumerate(wanted)], bytes.fromhex(rig.store.record(layer.digest).chunks_sha256)
        )
        trace.write(rig.store.traces / rig.cached(layer).name, content)
        async with rig.loader() as loader:
            path, _ = await loader.ensure(layer.digest)
            await loader.warm(layer.digest, traced_only=True)
            assert await loader.evict(layer.digest) == 2 * 65536
            rig.web.reset()
            mount = await asyncio.to_thread(rig.mount_data, layer, path)  # without asking again, as the store does
            assert await rig.read(mount, "f10") == layer.files["f10"]
            rig.wait(lambda: {request.start >> 16 for request in rig.web.requests} >= set(wanted))


async def test_demand_goes_before_prefetch(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        layer = rig.layer({"big": noise(64 * MIB, 1), "small": noise(20_000, 2)})
        async with rig.loader(parallel=3) as loader:
            mount = await rig.mount(loader, layer)
            gate = rig.web.hold("data.blob")
            warming = asyncio.ensure_future(loader.warm(layer.digest))
            await asyncio.to_thread(gate.wait_arrived)
            reader = Reader(mount, "small")
            rig.web.let_go()
            assert await reader.result_soon() == layer.files["small"]
            before = len(rig.web.requests)
            await warming
            assert before < len(rig.web.requests) / 2


async def test_a_damaged_trace_is_told_and_ignored(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        layer = rig.layer({"big": noise(MIB, 1)})
        trace.write(rig.store.traces / rig.cached(layer).name, b"DSECTRCE" + bytes(200))
        async with rig.loader() as loader:
            assert await rig.read(await rig.mount(loader, layer), "big") == layer.files["big"]
            await rig.wait_event("trace.damaged")


async def test_a_loader_that_dies_while_it_records_says_that_the_trace_is_gone(tmp_path: Path) -> None:
    from opendsec.api.errors import Conflict

    with Rig(tmp_path) as rig:
        layer = rig.layer({"a": noise(MIB, 1), "b": noise(MIB, 2)})
        async with rig.loader() as loader:
            view = await asyncio.to_thread(rig.mount_data, layer, await loader.start_trace("run1", layer.digest))
            assert await rig.read(view, "a") == layer.files["a"]
            os.kill(rig.pids("loader")[0], 9)
            assert await rig.read(view, "b") == layer.files["b"]
            with pytest.raises(Conflict, match="record it again"):
                await loader.stop_trace("run1", layer.digest, keep=True)


# --- space ---------------------------------------------------------------------------------------------------------


def on_disk(rig: Rig) -> int:
    return sum(path.stat().st_blocks * 512 for path in rig.store.cache.glob("*/data"))


async def test_the_cache_stays_within_its_limit_and_unused_layers_go_first(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        layers = [rig.layer({"big": noise(3 * MIB, n)}) for n in range(5)]
        async with rig.loader(limit_bytes=8 * MIB, quiet_s=60.0) as loader:
            held = await rig.mount(loader, layers[0])
            assert await rig.read(held, "big") == layers[0].files["big"]
            for layer in layers[1:]:
                mount = await rig.mount(loader, layer)
                assert await rig.read(mount, "big") == layer.files["big"]
                rig.unmount(mount)
                rig.wait(lambda: on_disk(rig) <= 8.5 * MIB)
            by_digest = {stats.digest: stats for stats in (await loader.stats()).layers}
            assert by_digest[layers[0].digest].complete
            drop_page_cache()
            assert await rig.read(held, "big") == layers[0].files["big"]


async def test_cold_chunks_of_a_mounted_layer_are_dropped_under_its_readers(tmp_path: Path) -> None:
    """The page caches are dropped all the time too, so that every read gets to the file."""
    with Rig(tmp_path) as rig:
        layer = rig.layer({f"f{n}": noise(MIB, n) for n in range(24)})
        async with rig.loader(limit_bytes=6 * MIB) as loader:
            mounts = [await rig.mount(loader, layer) for _ in range(3)]
            for turn in range(4):
                names = [f"f{(turn * 7 + n) % 24}" for n in range(12)]
                readers = [Reader(mounts[n % 3], name, 65536) for n, name in enumerate(names)]
                drop_page_cache()
                results = await asyncio.gather(*(reader.result_soon() for reader in readers))
                assert [result == layer.files[name] for result, name in zip(results, names, strict=True)] == [True] * 12
            rig.wait(lambda: on_disk(rig) <= 7 * MIB)


async def test_a_complete_layer_that_is_mounted_keeps_its_data_and_an_unused_one_gives_it(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        layer = rig.layer({"big": noise(3 * MIB, 1)})
        async with rig.loader() as loader:
            mount = await rig.mount(loader, layer)
            await loader.warm(layer.digest)
            late = await rig.mount(loader, layer)
            assert await loader.evict(layer.digest) == 0
            drop_page_cache()
            assert await rig.read(late, "big") == layer.files["big"]
            rig.unmount(mount, late)
            assert await loader.evict(layer.digest) == layer.table.data_bytes
            assert on_disk(rig) == 0
            assert await rig.read(await rig.mount(loader, layer), "big") == layer.files["big"]


async def test_chunks_that_another_layer_has_are_copied(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        shared = noise(4 * MIB, 1)
        whole = rig.layer({"a-shared": shared}, local=True)
        other = rig.layer({"a-shared": shared, "z-own": noise(100_000, 2)})
        async with rig.loader() as loader:
            mount = await rig.mount(loader, other)
            assert await rig.read(mount, "a-shared") == shared
            assert await rig.read(mount, "z-own") == other.files["z-own"]
            assert (await loader.stats()).copied_bytes >= len(shared) - 65536
            assert rig.web.sent_bytes < MIB
        assert whole.digest != other.digest


async def test_a_collected_layer_is_forgotten_and_can_come_back(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        layer = rig.layer({"big": noise(MIB, 1)})
        async with rig.loader() as loader:
            mount = await rig.mount(loader, layer)
            assert await rig.read(mount, "big") == layer.files["big"]
            rig.unmount(mount)
            rig.store.gc(grace_s=0.0)
            assert not rig.cached(layer).exists()
            again = rig.layer({"big": noise(MIB, 1)})
            assert await rig.read(await rig.mount(loader, again), "big") == layer.files["big"]
