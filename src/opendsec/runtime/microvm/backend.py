# SPDX-License-Identifier: Apache-2.0
"""MicroVMs: a sandbox is a clone of a template, or of a snapshot with memory.

To create one is to load a device state into a QEMU whose memory lies on the template's, to let it run, and to give it an identity of its
own. Whoever does not confirm that is not handed out: it would draw the same random numbers as its siblings.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import uuid
import zlib
from collections.abc import Awaitable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from opendsec.api.errors import NotFound, OpenDSecError, SandboxLost, Unavailable
from opendsec.images.waiting import in_thread
from opendsec.kernel import procfs
from opendsec.runtime.backend import Handle, LayerRef, Placement, Record, VmOptions
from opendsec.runtime.container.backend import ContainerBackend
from opendsec.runtime.guest.channel import Channel
from opendsec.runtime.microvm.pool import Pool, Waiting
from opendsec.runtime.vmm import disks, process, processes
from opendsec.runtime.vmm.arguments import Accel
from opendsec.runtime.vmm.backend import VmBackend
from opendsec.runtime.vmm.handle import VmHandle
from opendsec.runtime.vmm.machine import Machine
from opendsec.runtime.vmm.parts import GUESTD, Parts
from opendsec.runtime.vmm.process import Place, Vmm
from opendsec.runtime.vmm.store import BoxState, Layer, Template
from opendsec.runtime.vmm.templates import WARM_TIMEOUT_S, Templates, Wanted, cpus_of, memory_of, warm_up
from opendsec.runtime.vmm.tpm import Tpm

T = TypeVar("T")

NAME = "microvm"
MIN_MEMORY_BYTES = 96 << 20
WAITING = 1
UID_SPAN = 4096
LIVES = 1  # flag of a row of COMMANDS: its first process
FIRST_UID = 0x7800_0000  # of QEMUs that belong to no sandbox yet


def has_room(wanted: Wanted) -> bool:
    """Whether a machine may wait that could then use all of its memory, and a quarter of the host's is still there for others."""
    memory = procfs.meminfo()
    return memory["MemAvailable"] - wanted.memory_bytes > memory["MemTotal"] // 4


def first_disk(own: Path, size: int, template: Path | None) -> Path | None:
    """Make a machine's own disk; the captured process that it goes with, if the template in that directory has one."""
    captured = processes.find(template) if template is not None else None
    if captured is None:
        disks.write_overlay(own, size)
    else:
        shutil.copyfile(captured / "disk", own)
        own.chmod(0o600)
    return captured


class MicroVMBackend(VmBackend):
    """See `runtime.backend.Backend`."""

    name = NAME
    cannot: tuple[tuple[str, str], ...] = (
        ("network", "no policy can be held over it yet"),
        ("pack", "what a VM has written cannot be packed yet"),
        ("screen", "a microVM has none"),
    )

    def __init__(
        self,
        *,
        edge_id: str,
        root: Path,
        run_dir: Path,
        containers: ContainerBackend,
        accel: Accel = "tcg",
        missing: Sequence[str] = (),
        guestd: Path = GUESTD,
        shared: Path | None = None,
        waiting: int = WAITING,
        merge: bool = False,
    ) -> None:
        """`waiting`: machines that wait for each template in use; 0: none do. `shared`: another place for kernels and QEMU's files.
        `merge`: see `Machine.merge`."""
        super().__init__(edge_id=edge_id, root=root, run_dir=run_dir, containers=containers, accel=accel, missing=missing)
        self.parts = Parts(self.store, guestd=guestd, shared=shared)
        self.templates = Templates(self.store, self.parts, spawner=containers.spawner, place=self.template_place, poller=self.poller)
        self.templates.merge = merge
        self.pool = Pool(waiting, make=self._make_waiting, discard=self._discard, room=has_room)
        # More at once would only make each wait for the others, until one is taken for dead.
        self._starts = asyncio.Semaphore(max(2, 2 * (os.cpu_count() or 1)))
        self._uids = 0

    async def close(self) -> None:
        await self.pool.close()
        await self.templates.close()
        await super().close()

    def template_place(self, machine: Machine, cpu: float) -> Place:
        """For a machine that belongs to no sandbox."""
        return self.place_named(self.new_machine(), machine, uid=self._new_uid(), cpu=cpu, root=self.parts.programs().root)

    def _new_uid(self) -> int:
        self._uids += 1
        return FIRST_UID + (zlib.crc32(f"{self.edge_id} {self.name}".encode()) % 4096) * UID_SPAN + self._uids % UID_SPAN

    # --- create ----------------------------------------------------------------------------------------------------------

    def wanted(self, layers: Sequence[LayerRef], placement: Placement, disks: tuple[str, ...] = ()) -> Wanted:
        limits = placement.limits
        return Wanted(
            accel=self.accel,
            layers=tuple(Layer(layer.digest, str(layer.meta), str(layer.data)) for layer in layers),
            cpus=cpus_of(limits),
            memory_bytes=max(memory_of(limits), MIN_MEMORY_BYTES),
            disk_bytes=limits.disk_bytes,
            inodes=limits.inodes,
            disks=disks,
        )

    async def prepare(self, placement: Placement) -> None:
        """Have the template that such a sandbox is made of. Takes seconds if it is not there."""
        await self.templates.get(self.wanted(placement.layers, placement))

    async def launch(self, placement: Placement) -> tuple[BoxState, Vmm, Channel]:
        with self.pool.creating():
            if placement.snapshot is None:
                wanted = self.wanted(placement.layers, placement)
                template = await self.templates.get(wanted)
                waiting = self.pool.take(template, wanted)
                if waiting is not None and (found := await self._hand_out(waiting, placement, wanted, template)) is not None:
                    return found
                return await self._launch(placement, template, (*template.disks, template.disk), "")
            snapshot = await in_thread(self.store.read_snapshot, placement.snapshot.snapshot_id)
            if snapshot is None:
                raise NotFound("the snapshot is gone", field="spec.snapshot")
            with self.keeping(snapshot.record.snapshot_id, *snapshot.disks):
                if not snapshot.record.memory:
                    template = await self.templates.get(self.wanted(placement.layers, placement, snapshot.disks))
                    return await self._launch(placement, template, (*template.disks, template.disk), "")
                found_template = await in_thread(self.store.read_template, snapshot.record.vm.template)
                if found_template is None:
                    raise Unavailable("the template that the snapshot came of is gone")
                return await self._launch(placement, found_template, snapshot.disks, snapshot.record.snapshot_id)

    async def _launch(self, placement: Placement, template: Template, chain: tuple[str, ...], memory: str) -> tuple[BoxState, Vmm, Channel]:
        """A clone of the template, or of a snapshot's memory."""
        box = self._box(placement, template, self.new_machine(), placement.uid_base, chain, memory)
        await in_thread(self._lay_out, box)
        async with self._starts:
            vmm = await self._load(box, template)
            return await self._introduce(box, placement, vmm, await self._or_kill(vmm, self._first_word(vmm, box.options.profile)))

    def _box(self, placement: Placement, template: Template, machine: str, uid: int, chain: tuple[str, ...], memory: str = "") -> BoxState:
        return BoxState(
            sandbox_id=placement.sandbox_id,
            state="making",
            template=template.key,
            accel=template.accel,
            machine=machine,
            uid=uid,
            uid_base=placement.uid_base,
            scratch_bytes=template.scratch_bytes,
            limits=placement.limits,
            layers=self.wanted(placement.layers, placement).layers,
            options=placement.vm or VmOptions(),
            hostname=placement.hostname,
            memory=memory,
            disks=chain,
        )

    async def _introduce(self, box: BoxState, placement: Placement, vmm: Vmm, channel: Channel) -> tuple[BoxState, Vmm, Channel]:
        """Give a machine that runs its identity; it is a sandbox then. If this raises, it has ended."""
        try:
            await self.identify(channel, placement.hostname, placement.limits.pids)
            if box.memory:
                await self._silence(channel)
            box = msgspec.structs.replace(box, state="running", vmm=vmm.record)
            self.store.write_box(box)
            return box, vmm, channel
        except BaseException:
            channel.close()
            await asyncio.shield(vmm.kill())
            raise

    async def _or_kill(self, vmm: Vmm, doing: Awaitable[T]) -> T:
        try:
            return await doing
        except BaseException:
            await asyncio.shield(vmm.kill())
            raise

    # --- those that wait ---------------------------------------------------------------------------------------------------

    async def _make_waiting(self, template: Template, wanted: Wanted) -> Waiting:
        name, uid = self.new_machine(), self._new_uid()
        folder = self.store.root / "waiting" / name
        self.keep(template.key)  # its memory lies on the template's
        try:
            await in_thread(folder.mkdir, 0o700, True, True)
            own = folder / "disk-0.qcow2"
            here = self.store.template(template.key)
            captured = await in_thread(first_disk, own, template.scratch_bytes, here)
            ram = (captured or here) / "ram"
            machine = self.templates.machine(template, wanted.layers, own, (*template.disks, template.disk), ram)
            place = self.place_named(name, machine, uid=uid, cpu=float(wanted.cpus), root=self.parts.programs().root)
            vmm = await Vmm.start(await self.containers.spawner(), machine, place, accel=template.accel, process=captured)

            async def run_in() -> Channel:
                if captured is None:
                    await vmm.load(here / "devices")
                channel = await self._first_word(vmm)
                try:
                    if captured is None:  # else it has all that behind it
                        async with asyncio.timeout(WARM_TIMEOUT_S):
                            await warm_up(channel)
                    await vmm.stop()
                    return channel
                except BaseException:
                    channel.close()
                    raise

            return Waiting(name, uid, template.key, folder, vmm, await self._or_kill(vmm, run_in()))
        except BaseException:
            self.unkeep(template.key)
            await in_thread(shutil.rmtree, folder, ignore_errors=True)
            raise

    async def _discard(self, waiting: Waiting) -> None:
        waiting.channel.close()
        try:
            await waiting.vmm.kill()
        finally:
            self.unkeep(waiting.template)
            await in_thread(shutil.rmtree, waiting.folder, ignore_errors=True)

    async def _hand_out(
        self, waiting: Waiting, placement: Placement, wanted: Wanted, template: Template
    ) -> tuple[BoxState, Vmm, Channel] | None:
        """Make it the sandbox; None if it cannot be any more, and then it is gone."""
        box = self._box(placement, template, waiting.name, waiting.uid, (*template.disks, template.disk))
        try:
            self._move_in(box, waiting)
            process.group_of(waiting.vmm.record.place).update({"cpu_cores": placement.limits.cpu})
            await waiting.vmm.cont()
            found = await self._introduce(box, placement, waiting.vmm, waiting.channel)
            self.unkeep(waiting.template)  # its box names it now
            return found
        except (OpenDSecError, OSError):
            await asyncio.shield(self._discard(waiting))
            await in_thread(self.store.remove_box, box.sandbox_id)
            return None
        except BaseException:
            await asyncio.shield(self._discard(waiting))
            raise

    def _move_in(self, box: BoxState, waiting: Waiting) -> None:
        """Its disk becomes the sandbox's. Written down first: what no box names is cleared away by the next edge."""
        self.store.box(box.sandbox_id).mkdir(mode=0o700)
        self.store.write_box(box)
        (waiting.folder / "disk-0.qcow2").rename(self.store.own_disk(box))
        waiting.folder.rmdir()

    def _lay_out(self, box: BoxState) -> None:
        self.store.box(box.sandbox_id).mkdir(mode=0o700)
        self.store.write_box(box)
        first_disk(self.store.own_disk(box), box.scratch_bytes, None if box.memory else self.store.template(box.template))

    async def _load(self, box: BoxState, template: Template) -> Vmm:
        """A machine that stands still with the box's memory in it."""
        captured = None
        if box.memory == "own":
            ram, devices = self.store.saved(box)
        else:
            folder = self.store.memory(box.memory) if box.memory else self.store.template(box.template)
            captured = None if box.memory else await in_thread(processes.find, folder)
            ram, devices = (captured or folder) / "ram", folder / "devices"
        machine = self.templates.machine(template, box.layers, self.store.own_disk(box), box.disks, ram)
        vmm = await self._start(box, machine, template, captured)
        if captured is None:
            await self._or_kill(vmm, vmm.load(devices))
        return vmm

    async def _start(self, box: BoxState, machine: Machine, template: Template, captured: Path | None = None) -> Vmm:
        if box.memory:
            programs = await in_thread(self.templates.programs_for, template, self.accel)
        else:
            programs = await in_thread(self.parts.programs)
        place = self.place_named(box.machine, machine, uid=box.uid, cpu=box.limits.cpu, root=programs.root)
        tpm = Tpm(self.store.box(box.sandbox_id) / "tpm", self.store.root / "tools") if machine.tpm else None
        return await Vmm.start(await self.containers.spawner(), machine, place, accel=box.accel, tpm=tpm, process=captured)

    async def _first_word(self, vmm: Vmm, profile: str = "") -> Channel:
        sock = await self.dial(vmm, profile)
        try:
            await vmm.cont()
        except BaseException:
            sock.close()
            raise
        channel = await self.open_channel(sock, profile)
        channel.silence.served = vmm.served
        return channel

    async def identify(self, channel: Channel, hostname: str, pids: int) -> None:
        """Raises Unavailable or SandboxLost if it stays who its template was."""
        results = await asyncio.gather(
            channel.identity(hostname=hostname, machine_id=os.urandom(16).hex(), boot_id=str(uuid.uuid4())),
            channel.limits(processes=pids),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _silence(self, channel: Channel) -> None:
        """End what the source's edge was running: nobody hears it here. What had ended and left something running lives on."""
        if names := [row.name for row in await channel.commands() if row.flags & LIVES]:
            await channel.cut(names)

    # --- paused ------------------------------------------------------------------------------------------------------------

    async def resume(self, record: Record, *, cut: Collection[str] = ()) -> Handle:
        handle = self.handles.get(record.sandbox_id)
        box = await in_thread(self.store.read_box, record.sandbox_id)
        if box is None or box.state == "making":
            raise SandboxLost("its state is gone")
        if box.state == "running":
            return handle if handle is not None else await self.adopt(record, cut=cut)
        template = await in_thread(self.store.read_template, box.template)
        if template is None:
            raise SandboxLost("the template that it came of is gone")
        if handle is not None:
            async with handle.turn:
                await self._resume(handle, box, template)
            return handle
        fresh, vmm, sock = await self._bring_back(box, template)
        try:
            channel = await self.open_channel(sock, box.options.profile)
            await channel.clock()
            handle = VmHandle(self, fresh, vmm, channel)
            await handle.end_commands(cut)
            await channel.usage()
            return handle
        except BaseException as error:
            await asyncio.shield(vmm.kill())
            self.handles.pop(record.sandbox_id, None)
            _it_has_run(error)
            raise

    async def _resume(self, handle: VmHandle, box: BoxState, template: Template) -> None:
        fresh, vmm, sock = await self._bring_back(box, template)
        try:
            handle.channel.resume(sock)
            handle.update(fresh)
            handle.hold(vmm)
            await handle.channel.clock()
        except BaseException as error:
            handle.lose(vmm, f"it was resumed, and failed: {error}")
            await asyncio.shield(vmm.kill())
            _it_has_run(error)
            raise

    async def _bring_back(self, box: BoxState, template: Template) -> tuple[BoxState, Vmm, socket.socket]:
        """A paused machine, running, and a connection to its guest. If this raises it is paused still: it has not run."""
        fresh = msgspec.structs.replace(box, machine=self.new_machine())
        async with self._starts:
            vmm = await self._load(fresh, template)
        sock: socket.socket | None = None
        try:
            sock = await self.dial(vmm, box.options.profile)
            fresh = msgspec.structs.replace(fresh, state="running", vmm=vmm.record)
            await in_thread(self.store.write_box, fresh, durable=True)
        except BaseException:
            with contextlib.suppress(OSError):  # it may say "running" already
                await in_thread(self.store.write_box, box)
            if sock is not None:
                sock.close()
            await asyncio.shield(vmm.kill())
            raise
        try:
            await vmm.cont()
            return fresh, vmm, sock
        except BaseException as error:
            sock.close()
            await asyncio.shield(vmm.kill())
            _it_has_run(error)
            raise


def _it_has_run(error: BaseException) -> None:
    """For a paused machine that was let run and then ended: its disk has gone on, and its memory as it was saved does not fit it.
    Raises SandboxLost."""
    if isinstance(error, Exception) and not isinstance(error, SandboxLost):
        raise SandboxLost(f"it was resumed, and failed: {error}") from error
