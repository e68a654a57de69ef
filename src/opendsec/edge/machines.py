# SPDX-License-Identifier: Apache-2.0
"""The backends of machines as an edge has them: where they keep things, what they need, and which accelerator they use.

Emulation until a guest was seen to boot on KVM; where a first look says that it may, a boot in the background finds out, and what is made
from then on uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from pathlib import Path

from opendsec.api.errors import InvalidRequest, OpenDSecError, Unsupported
from opendsec.api.sandboxes import Capability, Feature
from opendsec.edge.config import BadSettings, Settings
from opendsec.edge.log import Log
from opendsec.runtime.container.backend import ContainerBackend
from opendsec.runtime.microvm.backend import NAME, MicroVMBackend
from opendsec.runtime.vm import firmware, operator
from opendsec.runtime.vm.backend import NAME as VM_NAME
from opendsec.runtime.vm.backend import VMBackend
from opendsec.runtime.vmm import kernel, probe, tpm
from opendsec.runtime.vmm.backend import VmBackend
from opendsec.runtime.vmm.machine import Machine
from opendsec.runtime.vmm.parts import GUESTD

NEEDED = ("qemu", "vm_disks")
FOLDER, FULL_FOLDER = "vm", "vm-full"  # in the state directory


class Machines:
    """`backends` by name; `find_accelerator` is for the background, once they are started."""

    def __init__(self, settings: Settings, edge_id: str, containers: ContainerBackend, found: Iterable[Feature], log: Log) -> None:
        self._root = settings.state_dir / FOLDER
        self._containers, self._log = containers, log
        self._finding: asyncio.Task[None] | None = None
        self.microvms = MicroVMBackend(
            edge_id=edge_id,
            root=self._root,
            run_dir=settings.run_dir,
            containers=containers,
            missing=missing_for_machines(found),
            shared=settings.vm_parts,
            waiting=settings.vm_waiting,
            merge=settings.vm_ksm == "on",
        )
        full = VMBackend(
            edge_id=edge_id,
            root=settings.state_dir / FULL_FOLDER,
            run_dir=settings.run_dir,
            containers=containers,
            missing=missing_for_machines(found),
            shared=parts_of(settings),
            operator=load_operator(settings.state_dir / operator.FILE),
            merge=settings.vm_ksm == "on",
        )
        self.backends: dict[str, VmBackend] = {NAME: self.microvms, VM_NAME: full}

    def started(self) -> None:
        """The backends are: look whether they may use more than emulation."""
        if probe.by_loop().name == "kvm" and any(one.available for one in self.microvms.capabilities()):
            self._finding = asyncio.ensure_future(self._find_accelerator())

    async def _find_accelerator(self) -> None:
        try:
            parts = self.microvms.parts
            programs, boot = await asyncio.to_thread(parts.programs), await asyncio.to_thread(parts.boot_image)
            machine = Machine(kind="microvm", cpus=1, memory_bytes=probe.MEMORY_BYTES, kernel=str(boot.path), channel=False, balloon=False)
            place = self.microvms.template_place(machine, 1.0)
            spawner = await self._containers.spawner()
            found = await probe.accelerator(spawner, programs, boot.path, place, self._root / "accelerator.json")
        except OpenDSecError as error:
            self._log.warning("machines.no_accelerator", reason=str(error))
            return
        self._log.info("machines.accelerator", name=found.name, reason=found.reason)
        for backend in self.backends.values():
            backend.accel = found.name

    async def close(self) -> None:
        if self._finding is not None:
            self._finding.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._finding
        for backend in self.backends.values():
            await backend.close()


def missing_for_machines(found: Iterable[Feature]) -> list[str]:
    """What VMs need and this machine lacks, besides what containers need."""
    missing = [f"{one.name}: {one.reason}" for one in found if one.name in NEEDED and not one.present]
    return missing if GUESTD.exists() else [*missing, f"{GUESTD.name} was not built"]


def capabilities(missing: Iterable[str]) -> dict[str, tuple[Capability, ...]]:
    """For doctor: what the backends could do, without having them."""
    reason, accelerator = "; ".join(missing), probe.by_loop()
    hardware = Capability(name="hardware_virtualization", available=accelerator.name == "kvm" and not reason, reason=accelerator.reason)

    def of(kind: type[VmBackend]) -> tuple[Capability, ...]:
        can = (Capability(name=name, available=not reason, reason=reason) for name in kind.can)
        return (*can, *(Capability(name=name, available=False, reason=why) for name, why in kind.cannot), hardware)

    return {NAME: of(MicroVMBackend), VM_NAME: of(VMBackend)}


def features(parts: Path) -> tuple[Feature, ...]:
    """Rows of doctor that are not of the machine itself. `parts`: where kernels are kept."""
    known = kernel.installed(parts / "kernels")
    present = known is not None or GUESTD.exists()
    if known is not None:
        reason = known.package.replace("=", " ")
    elif present:
        reason = "Debian's cloud kernel, fetched by apt with the first microVM"
    else:
        reason = f"{GUESTD.name} was not built"
    return (
        Feature(name="guest_kernel", present=present, reason=reason, needed_for="microVMs", without_it="microVMs are refused"),
        _firmware("uefi", secure=False, profiles="linux-uefi, other-uefi, android-x86, macos"),
        _firmware("uefi_secure_boot", secure=True, profiles="windows-11"),
        Feature(
            name="tpm",
            present=not tpm.missing(),
            reason=tpm.missing(),
            needed_for="VMs of profile windows-11",
            without_it="that profile is refused",
        ),
    )


def _firmware(name: str, *, secure: bool, profiles: str) -> Feature:
    try:
        reason, present = firmware.find(secure=secure).code.name, True
    except Unsupported as error:
        reason, present = error.message, False
    return Feature(
        name=name, present=present, reason=reason, needed_for=f"VMs of profiles {profiles}", without_it="those profiles are refused"
    )


def load_operator(path: Path) -> operator.Operator:
    """What the operator gives to machines. Raises BadSettings."""
    try:
        return operator.load(path)
    except (InvalidRequest, OSError) as error:
        raise BadSettings(f"{path}: {error}") from None


def parts_of(settings: Settings) -> Path:
    return settings.vm_parts or settings.state_dir / FOLDER
