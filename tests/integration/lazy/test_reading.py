# SPDX-License-Identifier: Apache-2.0
"""Right bytes, each chunk once."""

from __future__ import annotations

import asyncio
import collections
import random
from pathlib import Path

import pytest

from opendsec.images.lazy.readahead import AROUND
from tests.lazy import Reader, Rig, noise

pytestmark = [pytest.mark.requires("fanotify_pre_content"), pytest.mark.slow]

MIB = 1 << 20


def fetched(rig: Rig) -> collections.Counter[int]:
    """How often each chunk was asked for."""
    count: collections.Counter[int] = collections.Counter()
    for request in rig.web.requests:
        count.update(range(request.start >> 16, (request.start + request.length - 1 >> 16) + 1))
    return count


async def test_a_cold_file_is_read_right_and_little_else_is_fetched(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        layer = rig.layer({f"f{n}": noise(200_000, n) for n in range(60)})
        async with rig.loader() as loader:
            mount = await rig.mount(loader, layer)
            assert await rig.read(mount, "f30") == layer.files["f30"]
            wanted = layer.chunks_of("f30")
            around = range(wanted.start // AROUND * AROUND, -(-(wanted.stop + 2) // AROUND) * AROUND)  # 2: what was read ahead
            assert set(wanted) <= set(fetched(rig)) <= set(around)
            assert set(fetched(rig).values()) == {1}
            rig.web.reset()
            assert await rig.read(mount, "f30") == layer.files["f30"]
            assert not set(wanted) & set(fetched(rig))  # what lies around may still be on its way


async def test_neighbours_come_with_few_requests(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        layer = rig.layer({f"f{n:03}": noise(20_000, n) for n in range(200)})  # 64 chunks
        async with rig.loader() as loader:
            mount = await rig.mount(loader, layer)
            names = sorted(layer.files)
            random.Random(1).shuffle(names)
            for name in names:
                assert await rig.read(mount, name) == layer.files[name]
            stats = await loader.stats()
            assert set(fetched(rig).values()) == {1}
            assert stats.misses < 20 and stats.requests < 30


async def test_many_readers_of_many_mounts_have_each_chunk_fetched_once(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        layer = rig.layer({"big": noise(6 * MIB, 1), "small": noise(100_000, 2)})
        async with rig.loader() as loader:
            mounts = [await rig.mount(loader, layer) for _ in range(64)]
            readers = [Reader(mount, name) for mount, name in zip(mounts, ["big", "small"] * 32, strict=True)]
            results = await asyncio.gather(*(reader.result_soon() for reader in readers))
            assert all(result == layer.files[name] for result, name in zip(results, ["big", "small"] * 32, strict=True))
            assert set(fetched(rig).values()) == {1}
            assert (await loader.stats()).fetched_bytes <= layer.table.data_bytes


async def test_a_complete_layer_asks_no_more(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        layer = rig.layer({"big": noise(3 * MIB, 1)})
        async with rig.loader() as loader:
            first = await rig.mount(loader, layer)
            await loader.warm(layer.digest)
            asked = (await loader.stats()).events
            assert await rig.read(first, "big") == layer.files["big"]
            assert await rig.read(await rig.mount(loader, layer), "big") == layer.files["big"]
            stats = await loader.stats()
            assert stats.events == asked and stats.layers[0].complete


async def test_a_small_layer_is_loaded_whole_and_asks_no_more_at_once(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        small = rig.layer({f"f{n}": noise(200_000, n) for n in range(5)})
        large = rig.layer({f"g{n}": noise(200_000, n) for n in range(10)})
        async with rig.loader(small_bytes=1 << 20, tick_s=60) as loader:  # nobody keeps house
            mounts = [await rig.mount(loader, layer) for layer in (small, large)]
            assert await rig.read(mounts[0], "f0") == small.files["f0"]
            while not (await loader.stats()).layers[0].complete:
                await asyncio.sleep(0.001)
            await loader.warm(small.digest)  # waits for the mark to be taken away
            before = (await loader.stats()).events
            for name, content in small.files.items():
                assert await rig.read(mounts[0], name) == content
            assert (await loader.stats()).events == before
            assert await rig.read(mounts[1], "g0") == large.files["g0"]
            assert (await loader.stats()).events > before
            assert not next(one for one in (await loader.stats()).layers if one.digest == large.digest).complete
