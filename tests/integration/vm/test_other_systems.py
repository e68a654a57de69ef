# SPDX-License-Identifier: Apache-2.0
"""A system that is no Linux and has no agent, end to end: its screen, its keyboard, its disk; pause, resume, snapshot, fork."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import pytest

from opendsec.api.errors import InvalidRequest, Unsupported
from opendsec.api.ids import PROCESS, SNAPSHOT, new_id
from opendsec.runtime.backend import ExecPlan, VmOptions
from opendsec.runtime.vmm.handle import VmHandle
from opendsec.runtime.vmm.screen import size_of
from opendsec.testing.contracts.backend import Setup
from tests.full_vms import FullNode
from tests.integration.vm import tiny
from tests.integration.vm.serial import says

pytestmark = pytest.mark.slow
OPTIONS = VmOptions(profile="other-bios", width=800, height=600)
FIRMWARE_S = 180.0  # emulated, on a busy machine


@pytest.fixture
async def setup() -> AsyncGenerator[Setup, None]:
    with tempfile.TemporaryDirectory() as folder:
        async with FullNode(Path(folder)) as node, tiny.started(node) as setup:
            yield setup


async def types(handle: VmHandle, line: str) -> None:
    screen = handle.screen
    assert screen is not None
    await screen.text(f"{line}\n")
    await says(handle, f"saved: {line};")


def second_sector(path: Path) -> bytes:
    """Of an overlay, read as QEMU reads it."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw"
        subprocess.run(["qemu-img", "convert", "-f", "qcow2", "-O", "raw", path, raw], check=True)
        fd = os.open(raw, os.O_RDONLY)
        try:
            return os.pread(fd, 512, 512)
        finally:
            os.close(fd)


async def test_screen_keyboard_disk_pause_and_fork(setup: Setup) -> None:
    async with setup.box(vm=OPTIONS) as handle:
        assert isinstance(handle, VmHandle) and handle.screen is not None
        await says(handle, "tiny: booted")
        empty = await handle.screen.png()
        assert size_of(empty, (0, 0)) == handle.screen.size == (720, 400)
        await types(handle, "Hi {1+1=2}!")
        assert await handle.screen.png() != empty

        with pytest.raises(Unsupported, match="no agent"):
            await handle.exec(
                ExecPlan(process_id=new_id(PROCESS), argv=("true",), env={}, cwd="/", user="root"), stdin=None, stdout=None, stderr=None
            )
        with pytest.raises(Unsupported, match="no agent"):
            await asyncio.to_thread(handle.files.stat, b"/")
        with pytest.raises(InvalidRequest, match="720x400"):
            await handle.screen.click(720, 0)
        with pytest.raises(InvalidRequest, match="no 'ä'"):
            await handle.screen.text("ä")
        with pytest.raises(InvalidRequest, match="no key"):
            await handle.screen.key("hyper+x")

        before = await handle.screen.png()
        record = await handle.pause()
        own = handle.backend.store.own_disk(handle.box)
        assert second_sector(own).rstrip(b"\0") == b"Hi {1+1=2}!"
        assert await setup.backend.resume(record) is handle
        assert await handle.screen.png() == before
        await types(handle, "again")

        snapshot = await handle.snapshot(new_id(SNAPSHOT), memory=True)
        async with setup.box(vm=OPTIONS, snapshot=snapshot) as child:
            assert isinstance(child, VmHandle)
            await types(child, "child")
            await types(handle, "parent")
            for one, line in ((child, b"child"), (handle, b"parent")):
                await one.pause()
                assert second_sector(one.backend.store.own_disk(one.box)).rstrip(b"\0") == line
        await setup.backend.remove_snapshot(snapshot)

        disk = await setup.backend.resume(handle.record)
        assert disk is handle
        snapshot = await handle.snapshot(new_id(SNAPSHOT), memory=False)
        async with setup.box(vm=OPTIONS, snapshot=snapshot) as fresh:
            assert isinstance(fresh, VmHandle)
            await says(fresh, "tiny: booted")
        await setup.backend.remove_snapshot(snapshot)


async def test_wrong_requests(setup: Setup) -> None:
    for fields, field in (
        ({"vm": msgspec.structs.replace(OPTIONS, profile="macos")}, "spec.profile"),
        ({"vm": msgspec.structs.replace(OPTIONS, profile="windows-11")}, "spec.memory"),
        ({"vm": msgspec.structs.replace(OPTIONS, profile="android-x86")}, "spec.memory"),
        ({"vm": OPTIONS, "layers": setup.layers * 2}, "spec.layers"),
        ({"vm": OPTIONS, "limits": msgspec.structs.replace(tiny.LIMITS, disk_bytes=1 << 20)}, "spec.disk"),
    ):
        with pytest.raises((InvalidRequest, Unsupported)) as raised:
            async with setup.box(**fields):
                pass
        assert raised.value.field == field


async def test_firmware_of_android_looks_for_a_system(setup: Setup) -> None:
    """As far as it goes without one: the firmware runs, and has nothing to start from such a disk. The machine is that of other-uefi."""
    limits = msgspec.structs.replace(tiny.LIMITS, memory_bytes=1 << 30)
    placement = setup.placement(vm=msgspec.structs.replace(OPTIONS, profile="android-x86"), limits=limits)
    handle = await setup.backend.create(placement)
    try:
        assert isinstance(handle, VmHandle) and handle.screen is not None
        await says(handle, "BdsDxe", FIRMWARE_S)
        assert (await handle.screen.png()).startswith(b"\x89PNG")
    finally:
        await handle.destroy()
