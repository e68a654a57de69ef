# SPDX-License-Identifier: Apache-2.0
"""What the backends of VMs share: QEMU through the containers' spawner, the store, handles, adopting and clearing.

A box is its entry in the store (`box.json`, the truth about it), a QEMU with its control group and run directory, and a channel. They are
acquired in that order and released in the reverse one. What a subclass adds is how a machine comes to be (`launch`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from opendsec.api.errors import Conflict, InvalidRequest, NotFound, SandboxLost, Unsupported
from opendsec.api.ids import new_id
from opendsec.api.sandboxes import Capability
from opendsec.images.waiting import in_thread
from opendsec.kernel import cgroups
from opendsec.runtime.backend import Handle, Placement, Record, SnapshotRecord
from opendsec.runtime.container.backend import ContainerBackend
from opendsec.runtime.container.plan import edge_group
from opendsec.runtime.guest.channel import Channel
from opendsec.runtime.poller import Poller
from opendsec.runtime.vmm import process
from opendsec.runtime.vmm.arguments import Accel
from opendsec.runtime.vmm.handle import VmHandle
from opendsec.runtime.vmm.machine import Machine
from opendsec.runtime.vmm.process import Place, Vmm
from opendsec.runtime.vmm.saving import node_of, top_node
from opendsec.runtime.vmm.store import BoxState, VmStore

MACHINE = "vm"  # kind of the ids that name machines


class VmBackend:
    """`containers`: started before and closed after; its spawner forks our QEMUs. `root`: each backend's own."""

    name = "vm"
    can: tuple[str, ...] = ("create", "run", "stream", "sessions", "pty", "files", "limits", "pause", "fork", "snapshot")
    cannot: tuple[tuple[str, str], ...] = ()

    def __init__(
        self,
        *,
        edge_id: str,
        root: Path,
        run_dir: Path,
        containers: ContainerBackend,
        accel: Accel = "tcg",
        missing: Sequence[str] = (),
    ) -> None:
        self.edge_id, self.accel = edge_id, accel
        self.store = VmStore(root)
        self.containers = containers
        self.handles: dict[str, VmHandle] = {}
        self._run_dir = run_dir / self.name
        self._missing = tuple(missing)
        self._keeping: Counter[str] = Counter()  # ids of disks and memory in use that no record names yet
        self._poller: Poller | None = None

    # --- shared parts --------------------------------------------------------------------------------------------------

    def capabilities(self) -> tuple[Capability, ...]:
        reason = "; ".join((*self._missing, *self.containers.missing))
        return (
            *(Capability(name=name, available=not reason, reason=reason) for name in self.can),
            *(Capability(name=name, available=False, reason=why) for name, why in self.cannot),
            Capability(
                name="hardware_virtualization", available=self.accel == "kvm" and not reason, reason="" if self.accel == "kvm" else TCG
            ),
        )

    async def start(self) -> None:
        if self._missing:
            return
        await in_thread(self.store.prepare)
        self._run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        await self._clear_strangers()

    async def _clear_strangers(self) -> None:
        """Machines that no box names: half-made templates and waiting ones of an edge that died."""
        # A paused one has none: if it is there, its edge died before it had ended it.
        known = {box.machine for box in self.store.box_states() if box.state != "paused"}
        found = {path.name for path in self._run_dir.iterdir()}
        if (top := self._top()).exists():
            found |= {group.name.rpartition("/")[2] for group in top.children()}
        await asyncio.gather(*(process.remove(self.place_named(name)) for name in found - known))
        await in_thread(self.store.clear_unfinished)
        await in_thread(self.store.collect)

    async def close(self) -> None:
        for handle in list(self.handles.values()):
            await handle.let_go()
        self.handles.clear()
        if self._poller is not None:
            self._poller.close()
            self._poller = None
        with contextlib.suppress(OSError):
            self._top().remove_if_empty()
        with contextlib.suppress(OSError):
            self._run_dir.rmdir()

    def poller(self) -> Poller:
        if self._poller is None:
            self._poller = Poller()
        return self._poller

    async def dial(self, vmm: Vmm, profile: str) -> socket.socket:
        """A connection to whoever speaks for the guest."""
        return await vmm.channel()

    async def open_channel(self, sock: socket.socket, profile: str) -> Channel:
        """A channel to a guest over a connection to its port, which is the channel's from now on. `profile`: of a full VM."""
        return await Channel.open(sock, poller=self.poller())

    def reboots(self, box: BoxState) -> bool:
        """Whether its guest's agent is there again after a reset of the machine."""
        return False

    def _top(self) -> cgroups.Group:
        return self.containers.hierarchies.group(f"{edge_group(self.edge_id)}-{self.name}")

    def place_named(self, name: str, machine: Machine | None = None, *, uid: int = 0, cpu: float = 1.0, root: Path | None = None) -> Place:
        return Place(
            name=name,
            directory=str(self._run_dir / name),
            group=f"{self._top().name}/{name}",
            limits={} if machine is None else process.group_limits(machine, cpu=cpu),
            uid=uid,
            root=str(root or ""),
            staging=str(self.containers.staging),
        )

    @contextlib.contextmanager
    def keeping(self, *ids: str) -> Iterator[None]:
        """These disks, memories and templates are not collected meanwhile, though no record names them yet."""
        self.keep(*ids)
        try:
            yield
        finally:
            self.unkeep(*ids)

    def keep(self, *ids: str) -> None:
        self._keeping.update(ids)

    def unkeep(self, *ids: str) -> None:
        self._keeping.subtract(ids)
        self._keeping += Counter()  # without those that are at zero

    async def collect_soon(self, box: BoxState) -> None:
        """Something of what this one stood on may not be needed any more."""
        if box.memory not in ("", "own") or any(not one.startswith("template-") for one in box.disks):
            await in_thread(self.store.collect, frozenset(self._keeping))

    # --- create ----------------------------------------------------------------------------------------------------------

    async def launch(self, placement: Placement) -> tuple[BoxState, Vmm, Channel]:
        """A running machine with a confirmed identity, and its box as written down. What it leaves when it raises, `_clear` removes."""
        raise NotImplementedError

    async def create(self, placement: Placement) -> Handle:
        self._check(placement)
        vmm: Vmm | None = None
        try:
            box, vmm, channel = await self.launch(placement)
            return VmHandle(self, box, vmm, channel)
        except BaseException:
            if vmm is not None:
                await asyncio.shield(vmm.kill())
            await asyncio.shield(self._clear(placement.sandbox_id))
            raise

    def _check(self, placement: Placement) -> None:
        if missing := (*self._missing, *self.containers.missing):
            raise Unsupported(f"this machine cannot run VMs: {'; '.join(missing)}", field="spec.backend")
        if placement.vm is not None and placement.vm.hardware_required and self.accel != "kvm":
            raise Unsupported(TCG, field="spec.hardware_virtualization")
        snapshot = placement.snapshot
        if snapshot is None:
            return
        if snapshot.backend != self.name:
            raise InvalidRequest(f"it is one of backend {snapshot.backend}", field="spec.snapshot")
        if snapshot.layers != tuple(layer.digest for layer in placement.layers):
            raise InvalidRequest("it has other layers: a sandbox made of a snapshot has the same", field="spec.snapshot")
        if (snapshot.limits.memory_bytes, snapshot.limits.disk_bytes, snapshot.limits.inodes) != (
            placement.limits.memory_bytes,
            placement.limits.disk_bytes,
            placement.limits.inodes,
        ):
            raise InvalidRequest(
                "it has another size: a sandbox made of a snapshot has the same memory, disk and inodes", field="spec.snapshot"
            )
        if snapshot.memory and snapshot.vm.accelerator != self.accel:
            raise Conflict(f"its memory is one of {snapshot.vm.accelerator}, and here is {self.accel}", field="spec.snapshot")
        if self.store.read_snapshot(snapshot.snapshot_id) is None:
            raise NotFound(f"snapshot {snapshot.snapshot_id} is gone", field="spec.snapshot")

    async def create_many(self, placements: Sequence[Placement]) -> Sequence[Handle | BaseException]:
        return await asyncio.gather(*(self.create(placement) for placement in placements), return_exceptions=True)

    # --- after a restart -------------------------------------------------------------------------------------------------

    async def adopt(self, record: Record, *, cut: Collection[str] = ()) -> Handle:
        box = await in_thread(self.store.read_box, record.sandbox_id)
        if box is None or box.state == "making":
            raise SandboxLost("its state is gone")
        if box.state == "paused":
            return await self.resume(record, cut=cut)
        assert box.vmm is not None
        vmm = await Vmm.adopt(box.vmm)
        channel: Channel | None = None
        try:
            box = await self._disk_of(vmm, box)
            stood = await vmm.status() == "paused"  # an edge that died while it stood still leaves it so
            if stood:
                await vmm.cont()
            channel = await self.open_channel(await self.dial(vmm, box.options.profile), box.options.profile)
            await channel.thaw_disk()
            if stood:
                await channel.clock()
            await channel.usage()
            handle = VmHandle(self, box, vmm, channel)
            await handle.end_commands(cut)
            await channel.usage()
            return handle
        except BaseException:
            self.handles.pop(record.sandbox_id, None)
            if channel is not None:
                channel.close()
            await vmm.let_go()
            raise

    async def _disk_of(self, vmm: Vmm, box: BoxState) -> BoxState:
        """The box as it is: an edge may have died between writing down a new disk and laying it on the present one."""
        if not box.generation or await top_node(vmm) in (node_of(box.generation), "scratch"):
            return box
        before = msgspec.structs.replace(box, generation=box.generation - 1, disks=box.disks[:-1])
        await in_thread(self.store.write_box, before)
        return before

    async def resume(self, record: Record, *, cut: Collection[str] = ()) -> Handle:
        raise Unsupported("not here")

    async def remove_snapshot(self, record: SnapshotRecord) -> None:
        def remove() -> None:
            self.store.forget_snapshot(record.snapshot_id)
            self.store.collect(frozenset(self._keeping))

        if not self._missing:
            await in_thread(remove)

    def snapshots(self) -> Sequence[str]:
        return self.store.snapshots()

    # --- end -------------------------------------------------------------------------------------------------------------

    async def forget(self, handle: VmHandle) -> None:
        """Called by a handle whose machine is gone."""
        self.handles.pop(handle.sandbox_id, None)
        await self._clear(handle.sandbox_id)

    async def clear(self, sandbox_id: str, record: Record | None) -> None:
        if (handle := self.handles.get(sandbox_id)) is not None:
            await handle.destroy()
        else:
            await self._clear(sandbox_id)

    async def _clear(self, sandbox_id: str) -> None:
        if self._missing:
            return
        box = await in_thread(self.store.read_box, sandbox_id)
        try:
            if box is not None and box.machine:
                await process.remove(self.place_named(box.machine))
        finally:
            await in_thread(self.store.remove_box, sandbox_id)
        if box is not None:
            await self.collect_soon(box)

    def leftovers(self) -> Sequence[str]:
        return self.store.boxes()

    async def unmount_unused(self) -> int:
        return 0

    def new_machine(self) -> str:
        return new_id(MACHINE)


TCG = "this machine has no hardware virtualisation that boots ordinary kernels: its VMs are emulated"
