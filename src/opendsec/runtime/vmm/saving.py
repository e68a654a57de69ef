# SPDX-License-Identifier: Apache-2.0
"""What of a VM is saved, and in which order, so that a crash at any point leaves one whole state: the one before or the one after.

    pause      the channel comes to a stop, the machine stands still; device state and memory are written beside the ones before;
               box.json says "paused" (this is the moment); QEMU ends; the ones before are removed
    snapshot   as above; memory goes to the snapshot's own place; a new empty disk is laid on the present one, which is frozen and gets a
               further name; the machine goes on; last of all the snapshot's record is written

Both are on the disk before they are told of: what is paused and what is kept outlives a loss of power. A machine that is resumed is
"running" on the disk before it runs, for its own disk does not fit its saved memory any more from then on.

A disk on which another was laid never changes again, so it can be shared. box.json names the new disk before QEMU writes to it: the guest
writes nothing in between, since it stands still.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from opendsec.api.errors import Conflict, Internal, OpenDSecError, SandboxLost
from opendsec.images.waiting import in_thread, to_the_end
from opendsec.kernel.fds import written_to
from opendsec.runtime.backend import SnapshotRecord
from opendsec.runtime.vmm import disks, qcow2
from opendsec.runtime.vmm.process import Vmm
from opendsec.runtime.vmm.records import vm_record_of
from opendsec.runtime.vmm.store import BoxState, SnapshotState, VmStore, settle

if TYPE_CHECKING:
    from opendsec.runtime.vmm.handle import VmHandle


MANY_DISKS = 8
MAX_DISKS = 64


def node_of(generation: int) -> str:
    """QEMU's name of the block node that a disk of this generation is, in a machine that was started with an earlier one."""
    return f"disk{generation}"


async def pause(handle: VmHandle) -> None:
    """Raises SandboxLost, Unavailable: then it runs on."""
    await to_the_end(_pause(handle))


async def _pause(handle: VmHandle) -> None:
    vmm, store, box = handle.vmm, handle.backend.store, handle.box
    await handle.channel.park()
    after = msgspec.structs.replace(box, state="paused", memory="own", saves=box.saves + 1, vmm=None)
    ram, devices = store.saved(after)
    try:
        for path in (ram, devices):  # of a pause in which an edge died
            path.unlink(missing_ok=True)
        await vmm.stop()
        await vmm.save_devices(devices)
        await vmm.dump_memory(ram)
        after = msgspec.structs.replace(after, stored_bytes=await in_thread(_stored, [ram, devices]))
        await in_thread(_settle_box, store, after)
    except BaseException:
        with contextlib.suppress(OSError):  # it may say "paused" already
            await in_thread(store.write_box, box)
        for path in (ram, devices):
            path.unlink(missing_ok=True)
        with contextlib.suppress(Exception):
            await vmm.cont()
            handle.channel.unpark()
        raise
    handle.let_go_of_vmm()
    await handle.channel.detach()
    handle.update(after)
    with contextlib.suppress(OpenDSecError, OSError):  # it is paused, whatever stays behind for a while
        await vmm.kill()
    with contextlib.suppress(OSError):
        await in_thread(_drop_older, store.box(box.sandbox_id), after)
        await handle.backend.collect_soon(box)


def _settle_box(store: VmStore, box: BoxState) -> None:
    """Everything that it will be resumed with, then that it is paused."""
    folder = store.box(box.sandbox_id)
    settle([*folder.rglob("*"), *(store.disk(one) for one in box.disks)])
    settle([folder, *store.shared_folders()])
    store.write_box(box, durable=True)


def _settle_snapshot(store: VmStore, snapshot: SnapshotState) -> None:
    place = store.memory(snapshot.record.snapshot_id)
    memory = [place / "ram", place / "devices", place] if snapshot.record.memory else []
    settle([*memory, *(store.disk(one) for one in snapshot.disks)])
    settle(store.shared_folders())


def _drop_older(folder: Path, box: BoxState) -> None:
    kept = {"box.json", "variables", f"disk-{box.generation}.qcow2", f"ram-{box.saves}", f"devices-{box.saves}"}
    for path in folder.iterdir():
        if path.name not in kept:
            path.unlink(missing_ok=True)


async def snapshot(handle: VmHandle, snapshot_id: str, *, memory: bool, durable: bool) -> SnapshotRecord:
    """Raises SandboxLost, Unavailable, Conflict: then it runs on, and there is no snapshot."""
    return await to_the_end(_snapshot(handle, snapshot_id, memory=memory, durable=durable))


async def _snapshot(handle: VmHandle, snapshot_id: str, *, memory: bool, durable: bool) -> SnapshotRecord:
    vmm, store = handle.vmm, handle.backend.store
    if store.read_snapshot(snapshot_id) is not None:
        raise Conflict(f"there is a snapshot {snapshot_id} already")
    if len(handle.box.disks) >= MAX_DISKS:
        raise Conflict(f"its disk lies on {len(handle.box.disks)} others, of snapshots of snapshots; the most is {MAX_DISKS}")
    with handle.backend.keeping(snapshot_id):
        try:
            await _still(handle, vmm, snapshot_id, memory=memory)
            await _nobody_writes(vmm, [store.disk(snapshot_id), *([store.memory(snapshot_id) / "devices"] if memory else [])])
            shortened = await in_thread(_shorten, handle)
            box = handle.box
            record = SnapshotRecord(
                snapshot_id=snapshot_id,
                backend=handle.backend.name,
                sandbox_id=box.sandbox_id,
                memory=memory,
                limits=box.limits,
                layers=handle.record.layers,
                stored_bytes=await in_thread(_stored, [store.disk(snapshot_id), store.memory(snapshot_id) / "ram"]),
                vm=vm_record_of(box),
            )
            state = SnapshotState(record=record, disks=box.disks)
            if durable:
                await in_thread(_settle_snapshot, store, state)
            await in_thread(store.write_snapshot, state, durable=durable)
            if shortened:
                await handle.backend.collect_soon(box)
            return record
        except BaseException:
            await in_thread(shutil.rmtree, store.memory(snapshot_id), ignore_errors=True)
            raise


async def _still(handle: VmHandle, vmm: Vmm, snapshot_id: str, *, memory: bool) -> None:
    """What happens while it stands still."""
    store = handle.backend.store
    if memory:
        await handle.channel.park()
    else:
        await handle.channel.freeze_disk()
    try:
        await vmm.stop()
        if memory:
            place = store.memory(snapshot_id)
            await in_thread(place.mkdir, mode=0o700)
            await vmm.save_devices(place / "devices")
            await vmm.dump_memory(place / "ram")
        await _push(handle, vmm, snapshot_id)
    finally:
        with contextlib.suppress(SandboxLost):
            await vmm.cont()
        handle.channel.unpark()
        if not memory:
            with contextlib.suppress(SandboxLost):
                await handle.channel.thaw_disk()


async def _nobody_writes(vmm: Vmm, paths: list[Path]) -> None:
    """What others will stand on must not change any more: a QEMU that has kept a way to write to it is not ours any more, and is ended.
    Raises SandboxLost."""
    if await in_thread(lambda: [path for path in paths if written_to(path)]):
        await vmm.kill()
        raise SandboxLost("its QEMU has kept what it had to let go of; somebody has taken it over")


async def _push(handle: VmHandle, vmm: Vmm, disk_id: str) -> None:
    """Freeze the present disk under this id, and lay a new one on it."""
    store, before = handle.backend.store, handle.box
    after = msgspec.structs.replace(before, disks=(*before.disks, disk_id), generation=before.generation + 1)
    fresh = store.own_disk(after)
    top = await top_node(vmm)
    try:
        await in_thread(_prepare, store.own_disk(before), store.disk(disk_id), fresh, before.scratch_bytes)
        await in_thread(store.write_box, after)
        await vmm.push_overlay(top, store.own_disk(before), fresh, node_of(after.generation))
    except BaseException:
        if await _pushed(vmm, after) is False:
            fresh.unlink(missing_ok=True)  # first: what is to be written needs room
            store.disk(disk_id).unlink(missing_ok=True)
            await in_thread(store.write_box, before)
            raise
    handle.update(after)
    store.own_disk(before).unlink(missing_ok=True)  # it has its other name


def _shorten(handle: VmHandle) -> bool:
    """Make one of the disks that were frozen one upon another, if they have become many: the last has it all then, and may lie on
    those before or not. Whoever has it open has the one from before."""
    store, box = handle.backend.store, handle.box
    frozen = box.disks[_above_template(box.disks) :]
    if len(frozen) < MANY_DISKS:
        return False
    top = store.disk(frozen[-1])
    fresh = top.with_name(f".{top.name}.new")
    fresh.unlink(missing_ok=True)
    qcow2.merge([store.disk(one) for one in frozen], fresh, box.scratch_bytes)
    settle([fresh])  # whatever is durable and lies on the one before may not lose it
    fresh.rename(top)
    short = msgspec.structs.replace(box, disks=(*box.disks[: -len(frozen)], frozen[-1]))
    store.write_box(short)
    handle.update(short)
    return True


def _above_template(names: tuple[str, ...]) -> int:
    """Where those begin that lie on the last template's disk."""
    return max((index + 1 for index, name in enumerate(names) if name.startswith("template-")), default=0)


def _prepare(own: Path, frozen: Path, fresh: Path, size: int) -> None:
    os.link(own, frozen)
    fresh.unlink(missing_ok=True)  # of a snapshot in which an edge died
    disks.write_overlay(fresh, size)


async def _pushed(vmm: Vmm, after: BoxState) -> bool | None:
    """Whether the machine writes to the newer disk; None if nobody can tell, because it is dead."""
    try:
        return await top_node(vmm) == node_of(after.generation)
    except Exception:
        return None


async def top_node(vmm: Vmm) -> str:
    """The block node that the guest writes to."""
    answer = await vmm.call("query-block")
    for device in answer if isinstance(answer, list) else ():
        inserted = device.get("inserted") or {}
        if not inserted.get("ro", True) and isinstance(inserted.get("node-name"), str) and inserted["node-name"] != "variables":
            return str(inserted["node-name"])
    raise Internal("QEMU has no disk to write to")


def _stored(paths: list[Path]) -> int:
    return sum(path.stat().st_blocks * 512 for path in paths if path.exists())
