# SPDX-License-Identifier: Apache-2.0
"""Whoever of the family is killed, at whatever moment: right bytes or EIO, in bounded time, never a hole."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from opendsec.images.lazy.client import Loader
from opendsec.images.lazy.protocol import Mechanism
from opendsec.kernel import procfs
from tests.lazy import Layer, Reader, Rig, noise

pytestmark = [pytest.mark.requires("fanotify_pre_content"), pytest.mark.slow]

MIB = 1 << 20
EIO = 5


async def held_reader(rig: Rig, loader: Loader, layer: Layer, name: str = "big") -> Reader:
    """A reader that waits for the store."""
    mount = await rig.mount(loader, layer)
    gate = rig.web.hold("data.blob")
    reader = Reader(mount, name)
    await asyncio.to_thread(gate.wait_arrived)
    return reader


@pytest.mark.requires("fuse")
@pytest.mark.parametrize("mechanism", ["fanotify", "fuse"])
@pytest.mark.parametrize("role", ["loader", "keeper 0", "keeper 1"])
async def test_one_of_the_family_is_killed_while_readers_wait(tmp_path: Path, role: str, mechanism: Mechanism) -> None:
    with Rig(tmp_path, mechanism=mechanism) as rig:
        layer = rig.layer({"big": noise(2 * MIB, 1), "other": noise(MIB, 2)})
        async with rig.loader() as loader:
            reader = await held_reader(rig, loader, layer)
            name, _, number = role.partition(" ")
            victim = rig.pids(name)[int(number or 0)]
            os.kill(victim, signal.SIGKILL)
            rig.wait(lambda: len(rig.pids("loader")) == 1 and len(rig.pids("keeper")) == 2 and victim not in rig.family())
            rig.web.let_go()
            assert await reader.result_soon() == layer.files["big"]
            assert await rig.read(await rig.mount(loader, layer), "other") == layer.files["other"]


async def test_each_of_the_family_in_turn(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        layer = rig.layer({f"f{n}": noise(MIB, n) for n in range(9)})
        async with rig.loader() as loader:
            mount = await rig.mount(loader, layer)
            for n in range(9):
                reader = Reader(mount, f"f{n}")
                pids = sorted(rig.family())
                os.kill(pids[n % len(pids)], signal.SIGKILL)
                assert await reader.result_soon() == layer.files[f"f{n}"]
                rig.wait(lambda: len(rig.pids("loader")) == 1 and len(rig.pids("keeper")) == 2)
            os.kill(rig.pids("loader")[0], 0)


async def test_the_whole_family_is_killed_while_the_edge_lives(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        layer = rig.layer({"big": noise(2 * MIB, 1), "other": noise(MIB, 2)})
        async with rig.loader() as loader:
            reader = await held_reader(rig, loader, layer)
            rig.kill_all()
            rig.web.let_go()
            result = await reader.result_soon()
            assert result in (layer.files["big"], EIO)
            assert loader.lost == ()
            mount = await rig.mount(loader, layer)
            assert await rig.read(mount, "other") == layer.files["other"]
            assert await rig.read(mount, "big") == layer.files["big"]


async def test_the_edge_dies_and_the_next_one_adopts(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        layer = rig.layer({"big": noise(2 * MIB, 1), "other": noise(MIB, 2)})
        async with rig.loader() as loader:
            mount = await rig.mount(loader, layer)
            before = rig.pids("loader")
            gate = rig.web.hold("data.blob")
            reader = Reader(mount, "big")
            await asyncio.to_thread(gate.wait_arrived)
        rig.web.let_go()
        assert await reader.result_soon() == layer.files["big"]  # nobody is attached
        async with rig.loader() as loader:
            assert rig.pids("loader") == before and loader.lost == ()
            assert await rig.read(mount, "other") == layer.files["other"]


async def test_all_are_killed_and_what_was_mounted_is_told_as_lost(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        mounted, whole, idle = (rig.layer({"big": noise(MIB, n)}) for n in range(3))
        async with rig.loader() as loader:
            await rig.mount(loader, mounted)
            await rig.mount(loader, whole)
            await loader.warm(whole.digest)
            await loader.ensure(idle.digest)
        rig.kill_all()
        async with rig.loader() as loader:
            assert loader.lost == (mounted.digest,)
            os.kill(rig.pids("loader")[0], signal.SIGKILL)  # it is not forgotten before the edge has done what is to be done
        async with rig.loader() as loader:
            assert loader.lost == (mounted.digest,)
            await loader.forget_lost()
            # A new mount is right: what the old one may have got is in its own page cache.
            assert await rig.read(await rig.mount(loader, mounted), "big") == mounted.files["big"]
        async with rig.loader() as loader:
            assert loader.lost == ()


async def test_the_family_ends_when_nobody_needs_it(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        layer = rig.layer({"big": noise(MIB, 1)})
        async with rig.loader() as loader:
            mount = await rig.mount(loader, layer)
        assert await rig.read(mount, "big") == layer.files["big"]
        rig.unmount()
        rig.wait(lambda: not rig.family())
        async with rig.loader() as loader:
            assert loader.lost == ()
            asked = len(rig.web.requests)
            assert await rig.read(await rig.mount(loader, layer), "big") == layer.files["big"]
            assert len(rig.web.requests) == asked  # the map was closed in good order, and the chunks are here


async def test_a_loader_that_keeps_crashing_refuses(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        layer = rig.layer({"big": noise(MIB, 1)})
        async with rig.loader() as loader:
            reader = await held_reader(rig, loader, layer)
            await rig.crash_until(lambda: reader.process.poll() is not None)
            assert await reader.result_soon() == EIO
            rig.web.let_go()
            rig.wait(lambda: rig.pids("loader"))
            assert await rig.read(await rig.mount(loader, layer), "big") == layer.files["big"]


async def test_a_reader_that_is_killed_while_it_waits_leaves_nothing(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        layer = rig.layer({"big": noise(MIB, 1)})
        async with rig.loader() as loader:
            reader = await held_reader(rig, loader, layer)
            reader.process.kill()
            assert await reader.result_soon() == -signal.SIGKILL
            rig.web.let_go()
            assert await rig.read(await rig.mount(loader, layer), "big") == layer.files["big"]
            pid = rig.pids("loader")[0]
            rig.wait(lambda: not any(b"big" in target for target in procfs.fds(pid).values()))
