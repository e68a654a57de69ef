# SPDX-License-Identifier: Apache-2.0
"""What an edge leaves that dies in the midst, laid out step by step: the next one takes over, and nothing stands in its way later. And what
a disk without room does: what cannot be saved runs on."""

from __future__ import annotations

import subprocess

import msgspec
import pytest

from opendsec.api.errors import OpenDSecError, SandboxLost, Unavailable
from opendsec.api.ids import SNAPSHOT, new_id
from opendsec.kernel import procfs
from opendsec.runtime.microvm.backend import MicroVMBackend
from opendsec.runtime.vmm.handle import VmHandle
from opendsec.testing.contracts.backend import Setup, output

pytestmark = pytest.mark.slow


async def made(vms: Setup) -> VmHandle:
    handle = await vms.backend.create(vms.placement())
    assert isinstance(handle, VmHandle)
    return handle


async def next_edge(vms: Setup, handle: VmHandle) -> VmHandle:
    backend = await vms.restart()
    found = await backend.adopt(handle.record)
    assert isinstance(found, VmHandle)
    return found


async def pausing_and_keeping(vms: Setup, handle: VmHandle) -> None:
    """Both work, and what is on the disk stays."""
    await output(handle, "sh", "-c", "echo kept >/root/file")
    await vms.backend.resume(await handle.pause())
    for memory in (True, False):
        await vms.backend.remove_snapshot(await handle.snapshot(new_id(SNAPSHOT), memory=memory))
    assert (await output(handle, "cat", "/root/file"))[0] == b"kept\n"


async def test_half_of_a_pause_or_a_snapshot_hinders_none_later(vms: Setup) -> None:
    handle = await made(vms)
    store = handle.backend.store
    ram, devices = store.saved(msgspec.structs.replace(handle.box, saves=handle.box.saves + 1))
    over = store.own_disk(msgspec.structs.replace(handle.box, generation=handle.box.generation + 1))
    await handle.vmm.stop()  # it dies while it saves
    for path in (ram, devices, over):
        path.write_bytes(b"half")
    handle = await next_edge(vms, handle)
    await pausing_and_keeping(vms, handle)
    await handle.destroy()


async def test_who_was_paused_but_not_ended_ends_and_is_resumed_once(vms: Setup) -> None:
    handle = await made(vms)
    await output(handle, "sh", "-c", "echo kept >/root/file")
    store, vmm, pid = handle.backend.store, handle.vmm, handle.vmm.pid
    after = msgspec.structs.replace(handle.box, state="paused", memory="own", saves=1, vmm=None)
    await handle.channel.park()
    await vmm.stop()
    for path, save in zip(store.saved(after), (vmm.dump_memory, vmm.save_devices), strict=True):
        await save(path)
    store.write_box(after)  # it dies here
    handle = await next_edge(vms, handle)
    assert pid not in procfs.pids()
    assert (await output(handle, "cat", "/root/file"))[0] == b"kept\n"
    await pausing_and_keeping(vms, handle)
    await handle.destroy()


async def test_without_room_it_runs_on(vms: Setup) -> None:
    handle = await made(vms)
    store = handle.backend.store
    box = store.box(handle.sandbox_id)
    await output(handle, "sh", "-c", "echo kept >/root/file")
    for folder, attempt in (
        (box, handle.pause),
        (store.root / "memory", lambda: handle.snapshot(new_id(SNAPSHOT), memory=True)),
        (store.root / "snapshots", lambda: handle.snapshot(new_id(SNAPSHOT), memory=False)),
    ):
        names = sorted(path.name for path in folder.iterdir())
        # What QEMU has open goes on beneath it.
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k,nr_inodes=64", "tmpfs", folder], check=True)
        try:
            (folder / "full").write_bytes(bytes(4096))
            with pytest.raises((OSError, OpenDSecError)) as told:
                await attempt()
            assert not isinstance(told.value, SandboxLost)
            assert [path.name for path in folder.iterdir()] == ["full"]
        finally:
            subprocess.run(["umount", folder], check=True)
        assert sorted(path.name for path in folder.iterdir()) == names
        assert (await output(handle, "cat", "/root/file"))[0] == b"kept\n"
    await pausing_and_keeping(vms, handle)
    await handle.destroy()
    store.collect()
    assert not [path for path in (store.root / "disks").iterdir() if not path.name.startswith("template-")]
    assert not list((store.root / "memory").iterdir())


async def test_a_guest_that_does_not_take_its_clock_after_a_pause_is_lost(vms: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has run, so what was saved does not fit its disk any more."""

    async def refuse(wall_clock_ns: int | None = None, seed: bytes | None = None) -> None:
        raise Unavailable("the guest did not set its clock")

    handle = await made(vms)
    record = await handle.pause()
    monkeypatch.setattr(handle.channel, "clock", refuse)
    assert isinstance(vms.backend, MicroVMBackend)
    with pytest.raises(SandboxLost, match="clock"):
        await vms.backend.resume(record)
    await handle.destroy()


async def test_a_full_disk_of_the_host_is_an_error_inside_and_no_standstill(vms: Setup) -> None:
    assert isinstance(vms.backend, MicroVMBackend)
    boxes = vms.backend.store.root / "boxes"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", boxes], check=True)
    try:
        handle = await made(vms)
        said, _ = await output(handle, "sh", "-c", "head -c 8000000 /dev/urandom >/tmp/large; sync /tmp/large || echo refused")
        assert said.split()[-1:] == [b"refused"]
        assert await handle.vmm.status() == "running"
        await handle.destroy()
    finally:
        subprocess.run(["umount", boxes], check=True)
