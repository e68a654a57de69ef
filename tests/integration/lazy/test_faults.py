# SPDX-License-Identifier: Apache-2.0
"""The store, the disk and the map fail: right bytes or EIO within a bounded time, and an event."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from opendsec.api.errors import Unavailable
from opendsec.images.lazy.client import Loader
from opendsec.kernel import abi, loop, mounts, syscalls
from opendsec.kernel.probes.tools import closing
from tests.lazy import Layer, Reader, Rig, noise
from tests.services import FaultKind, FaultServer

pytestmark = [pytest.mark.requires("fanotify_pre_content"), pytest.mark.slow]

MIB = 1 << 20


def impatient(folder: Path) -> Rig:
    return Rig(folder, attempt_s=0.3, patience_s=0.8)


@pytest.mark.parametrize("kind", ["cut", "wrong", "short", "status", "drop", "stall"])
async def test_a_store_that_fails_once_is_asked_again(tmp_path: Path, kind: FaultKind) -> None:
    with Rig(tmp_path, attempt_s=0.5, patience_s=20) as rig:
        layer = rig.layer({"big": noise(MIB, 1)})
        async with rig.loader() as loader:
            rig.web.fail(kind, match="data.blob", times=1 if kind == "wrong" else 2)
            assert await rig.read(await rig.mount(loader, layer), "big") == layer.files["big"]


@pytest.mark.parametrize("kind", ["cut", "wrong", "short", "status", "drop", "stall"])
async def test_a_store_that_goes_on_failing_is_eio_inside_and_an_event_outside(tmp_path: Path, kind: FaultKind) -> None:
    with impatient(tmp_path) as rig:
        layer = rig.layer({"big": noise(MIB, 1), "other": noise(300_000, 2)})
        async with rig.loader() as loader:
            mount = await rig.mount(loader, layer)
            rig.web.fail(kind, match="data.blob")
            began = time.monotonic()
            assert await Reader(mount, "big").result_soon() == errno.EIO
            assert time.monotonic() - began < 15
            assert (await rig.wait_event("load.failed")).digest == layer.digest
            rig.web.heal()
            assert await rig.read(mount, "other") == layer.files["other"]
            rig.wait(lambda: Reader(mount, "big").result() == layer.files["big"])  # a failure is remembered for a second


async def test_wrong_chunks_come_from_another_store(tmp_path: Path) -> None:
    with Rig(tmp_path, attempt_s=0.5, patience_s=20) as rig, FaultServer(rig.remote) as second:
        rig.set_stores({"web": rig.web.url, "second": second.url})
        layer = rig.layer({"big": noise(MIB, 1)}, stores=("web", "second"))
        rig.web.fail("wrong", match="data.blob")
        async with rig.loader() as loader:
            assert await rig.read(await rig.mount(loader, layer), "big") == layer.files["big"]
            assert second.requests and all(event.event == "load.damaged" for event in rig.events)


async def test_a_store_that_is_not_configured_is_an_error_that_names_it(tmp_path: Path) -> None:
    with impatient(tmp_path) as rig:
        layer = rig.layer({"big": noise(MIB, 1)}, stores=("elsewhere",))
        async with rig.loader() as loader:
            mount = await rig.mount(loader, layer)
            with pytest.raises(OSError, match="Input/output error"):
                await rig.read(mount, "big")
            assert "elsewhere" in (await rig.wait_event("load.failed")).message
            rig.set_stores({"elsewhere": rig.web.url})  # the operator adds it
            rig.wait(lambda: Reader(mount, "big").result() == layer.files["big"])


async def test_warming_what_cannot_be_had_says_so(tmp_path: Path) -> None:
    with impatient(tmp_path) as rig:
        layer = rig.layer({"big": noise(MIB, 1)})
        rig.web.fail("status", match="data.blob")
        async with rig.loader() as loader:
            with pytest.raises(Unavailable, match="cannot be loaded"):
                await loader.warm(layer.digest)


# --- the disk ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def small_cache(rig: Rig, size: int) -> AsyncIterator[Loader]:
    """A loader whose cache is a file system of its own."""
    cache, image = rig.store.cache, rig.folder / "disk"
    with open(image, "wb") as file:
        file.truncate(size)
    subprocess.run(["mkfs.ext4", "-q", "-m0", "-O", "^has_journal", image], check=True)
    with loop.attach(image) as device:
        fd = mounts.new_mount("ext4", {"source": device.path})
    with closing(os.open(cache, os.O_PATH | os.O_DIRECTORY)) as target, closing(fd):
        mounts.attach(fd, target)
    try:
        async with rig.loader() as loader:
            yield loader
        rig.unmount()
        rig.wait(lambda: not rig.family())
    finally:
        syscalls.umount2(cache, abi.MNT_DETACH)


async def test_a_full_disk_drops_what_is_not_in_use(tmp_path: Path) -> None:
    with impatient(tmp_path) as rig:
        layers = [rig.layer({"big": noise(3 * MIB, n)}) for n in range(4)]
        async with small_cache(rig, 5 * MIB) as loader:
            for layer in layers:
                mount = await rig.mount(loader, layer)
                assert await rig.read(mount, "big") == layer.files["big"]
                rig.unmount(mount)
            assert "cache.full" in {event.event for event in rig.events}


async def test_a_disk_that_stays_full_is_eio_and_an_event(tmp_path: Path) -> None:
    with impatient(tmp_path) as rig:
        layer = rig.layer({"big": noise(3 * MIB, 1), "small": noise(100_000, 2)})
        async with small_cache(rig, MIB) as loader:
            (rig.store.cache / "ballast").write_bytes(bytes(600_000))
            mount = await rig.mount(loader, layer)
            result = await Reader(mount, "big", 65536).result_soon()
            assert result in (errno.EIO, layer.files["big"])
            await rig.wait_event("cache.full")
            (rig.store.cache / "ballast").unlink()
            rig.wait(lambda: Reader(mount, "small").result() == layer.files["small"])


async def test_no_space_for_even_the_map_is_an_error_of_the_edge(tmp_path: Path) -> None:
    with impatient(tmp_path) as rig:
        layer = rig.layer({"big": noise(3 * MIB, 1)})
        async with small_cache(rig, MIB) as loader:
            before = rig.pids("loader")
            with open(rig.store.cache / "ballast", "wb") as file, pytest.raises(OSError, match="No space"):
                while file.write(bytes(4096)):
                    file.flush()
            with pytest.raises(Unavailable, match="No space left"):
                await loader.ensure(layer.digest)
            (rig.store.cache / "ballast").unlink()
            await loader.ensure(layer.digest)
            assert rig.pids("loader") == before


async def test_a_stores_file_that_is_wrong_does_not_end_the_loader(tmp_path: Path) -> None:
    with impatient(tmp_path) as rig:
        layer = rig.layer({"big": noise(MIB, 1)})
        rig.stores.write_text("[[store")
        async with rig.loader() as loader:
            mount = await rig.mount(loader, layer)
            assert await Reader(mount, "big").result_soon() == errno.EIO
            assert "stores.toml" in (await rig.wait_event("load.failed")).message
            rig.set_stores({"web": rig.web.url})
            rig.wait(lambda: Reader(mount, "big").result() == layer.files["big"])


# --- the map -------------------------------------------------------------------------------------------------------


async def read_and_kill(rig: Rig, layer: Layer) -> None:
    """Load it all, then kill everybody."""
    async with rig.loader() as loader:
        await loader.warm(layer.digest)
    rig.kill_all()
    rig.web.reset()


async def test_what_was_loaded_is_still_there_after_all_were_killed(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        layer = rig.layer({"big": noise(2 * MIB, 1)})
        await read_and_kill(rig, layer)
        async with rig.loader() as loader:
            assert await rig.read(await rig.mount(loader, layer), "big") == layer.files["big"]
            assert not rig.web.requests


@pytest.mark.parametrize(
    "damage", ["data lost", "data wrong", "map says all", "map is noise", "map is gone", "map is short", "another boot"]
)
async def test_a_map_or_data_that_is_wrong_is_found_out(tmp_path: Path, damage: str) -> None:
    with Rig(tmp_path) as rig:
        layer = rig.layer({"big": noise(2 * MIB, 1)})
        await read_and_kill(rig, layer)
        data, have = rig.cached(layer) / "data", rig.cached(layer) / "map"
        with open(data, "r+b") as file, open(have, "r+b") as bits:
            if damage == "data lost":
                syscalls.fallocate(file.fileno(), abi.FALLOC_FL_PUNCH_HOLE | abi.FALLOC_FL_KEEP_SIZE, 0, 5 * 65536)
            elif damage == "data wrong":
                file.seek(3 * 65536 + 17)
                file.write(b"wrong")
            elif damage == "map says all":
                syscalls.fallocate(file.fileno(), abi.FALLOC_FL_PUNCH_HOLE | abi.FALLOC_FL_KEEP_SIZE, 0, MIB)
                bits.seek(4096)
                bits.write(b"\1" * layer.table.count)
            elif damage == "map is noise":
                bits.write(noise(4096 + layer.table.count, 3))
            elif damage == "map is short":
                bits.truncate(4100)
            elif damage == "another boot":
                bits.seek(48)
                bits.write(bytes(16))
        if damage == "map is gone":
            have.unlink()
        async with rig.loader() as loader:
            assert await rig.read(await rig.mount(loader, layer), "big") == layer.files["big"]
            await asyncio.sleep(0)
