# SPDX-License-Identifier: Apache-2.0
"""Full VMs: as microVMs, but of a disk image, with firmware, on a board with a screen.

A clone's disk and its firmware's variables are its own; the disk is an overlay, the variables, half a MiB, are a copy.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from opendsec.api.errors import InvalidRequest, Unsupported
from opendsec.images.waiting import in_thread
from opendsec.runtime.backend import LayerRef, Placement
from opendsec.runtime.container.backend import ContainerBackend
from opendsec.runtime.guest.channel import Channel
from opendsec.runtime.microvm.backend import MicroVMBackend
from opendsec.runtime.vm.agent import AgentChannel
from opendsec.runtime.vm.convert import Format, to_raw
from opendsec.runtime.vm.images import Disks
from opendsec.runtime.vm.operator import Operator
from opendsec.runtime.vm.profiles import PROFILES, Profile
from opendsec.runtime.vm.silent import SilentChannel
from opendsec.runtime.vm.templates import DiskTemplates, copy_variables
from opendsec.runtime.vmm.arguments import Accel
from opendsec.runtime.vmm.process import Vmm
from opendsec.runtime.vmm.store import BoxState, Layer, Template
from opendsec.runtime.vmm.templates import Wanted, cpus_of, memory_of
from opendsec.runtime.vmm.tpm import missing as missing_tpm

NAME = "vm"
DEFAULT = "linux-uefi"


class VMBackend(MicroVMBackend):
    """See `runtime.backend.Backend`."""

    name = NAME
    can = (*MicroVMBackend.can, "screen")
    cannot = (("network", "no policy can be held over it yet"), ("pack", "what a VM has written cannot be packed yet"))

    def __init__(
        self,
        *,
        edge_id: str,
        root: Path,
        run_dir: Path,
        containers: ContainerBackend,
        accel: Accel = "tcg",
        missing: Sequence[str] = (),
        shared: Path | None = None,
        operator: Operator | None = None,
        merge: bool = False,
    ) -> None:
        """`root`: not that of the microVMs."""
        super().__init__(
            edge_id=edge_id, root=root, run_dir=run_dir, containers=containers, accel=accel, missing=missing, shared=shared, waiting=0
        )
        self.images = Disks(root / "images")
        self.templates = DiskTemplates(self.store, self.parts, spawner=containers.spawner, place=self.template_place, poller=self.poller)
        self.templates.merge = merge
        self.operator = operator or Operator()
        self.templates.images, self.templates.operator = self.images, self.operator

    async def start(self) -> None:
        await super().start()
        if not self._missing:
            await in_thread(self._collect_images)

    def _collect_images(self) -> None:
        """Disks on which nothing stands any more."""
        needed: set[str] = set()
        for path in (self.store.root / "templates").iterdir():
            if (template := self.store.read_template(path.name)) is not None:
                needed.update(template.layers)
        for box in self.store.box_states():
            needed.update(layer.digest for layer in box.layers)
        for name in self.store.snapshots():
            if (snapshot := self.store.read_snapshot(name)) is not None:
                needed.update(snapshot.record.layers)
        self.images.collect(needed)

    async def convert(self, source: str, format: Format, work: Path, target: Path) -> int:
        """Make a disk image of another kind a raw one, `target`; its size. See `convert`."""
        if missing := (*self._missing, *self.containers.missing):
            raise Unsupported(f"this machine cannot run VMs: {'; '.join(missing)}", field="source")
        place = self.place_named(self.new_machine(), uid=self._new_uid())
        return await to_raw(await self.containers.spawner(), self.store.root / "tools", place, Path(source), format, work, target)

    # --- create ----------------------------------------------------------------------------------------------------------

    def _check(self, placement: Placement) -> None:
        super()._check(placement)
        profile = _profile(placement)
        if why := self.operator.lacks(profile) or (missing_tpm() if profile.tpm else ""):
            raise Unsupported(f"profile {profile.name}: {why}", field="spec.profile")
        if len(placement.layers) != 1:
            raise InvalidRequest("a VM is made of a disk image alone; what else it needs is copied into it", field="spec.layers")
        if placement.limits.memory_bytes < profile.min_memory_bytes:
            raise InvalidRequest(f"profile {profile.name} needs at least {profile.min_memory_bytes >> 20} MiB", field="spec.memory")
        snapshot = placement.snapshot
        if snapshot is not None and placement.vm is not None and snapshot.memory:
            kept = snapshot.vm.options
            if (kept.profile or DEFAULT, kept.width, kept.height) != (profile.name, placement.vm.width, placement.vm.height):
                raise InvalidRequest("it has another profile or display: a machine made of a snapshot has the same", field="spec.snapshot")

    def wanted(self, layers: Sequence[LayerRef], placement: Placement, disks: tuple[str, ...] = ()) -> Wanted:
        limits, options = placement.limits, placement.vm
        return Wanted(
            accel=self.accel,
            layers=tuple(Layer(layer.digest, str(layer.meta), str(layer.data)) for layer in layers),
            cpus=cpus_of(limits),
            memory_bytes=memory_of(limits),
            disk_bytes=limits.disk_bytes,
            inodes=0,
            disks=disks,
            profile=_profile(placement).name,
            width=options.width if options is not None else 0,
            height=options.height if options is not None else 0,
        )

    def _lay_out(self, box: BoxState) -> None:
        super()._lay_out(box)
        copy_variables(self.store.template(box.template), self.store.box(box.sandbox_id))

    async def _load(self, box: BoxState, template: Template) -> Vmm:
        if box.memory or PROFILES[template.profile].agent == "guestd":
            return await super()._load(box, template)
        ram = self.store.template(box.template) / "ram"
        machine = self.templates.machine(template, box.layers, self.store.own_disk(box), box.disks, ram)
        return await self._start(box, replace(machine, incoming=False), template)

    async def dial(self, vmm: Vmm, profile: str) -> socket.socket:
        return await (vmm.agent() if PROFILES[profile or DEFAULT].agent == "qga" else vmm.channel())

    def reboots(self, box: BoxState) -> bool:
        return PROFILES[box.options.profile or DEFAULT].agent == "guestd"

    async def open_channel(self, sock: socket.socket, profile: str) -> Channel:
        agent = PROFILES[profile or DEFAULT].agent
        if agent != "guestd":
            return (AgentChannel if agent == "qga" else SilentChannel)(sock, self.poller())
        return await super().open_channel(sock, profile)


def _profile(placement: Placement) -> Profile:
    name = placement.vm.profile if placement.vm is not None else ""
    return PROFILES[name or DEFAULT]
