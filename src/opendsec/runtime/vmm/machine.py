# SPDX-License-Identifier: Apache-2.0
"""A virtual machine as plain data. Nothing here touches the system; `arguments` makes a command line of it, `process` starts it.

A template and its clones are the same `Machine` but for `ram`, `incoming` and the paths of their disks: QEMU restores a device state only
into the very same set of devices, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

CHANNEL = "org.opendsec.guest.0"
"""The name of the virtio-serial port in the guest: /dev/virtio-ports/<name>."""

MIB = 1 << 20
MAX_BLK_DISKS = 14  # of a microvm: it has 24 slots for virtio devices; with more disks all hang on one SCSI controller


@dataclass(frozen=True, slots=True)
class Ram:
    """The file that is the guest's memory. `shared`: what the guest writes goes to the file (a template while it boots); else to private
    pages of the process, and the file, which many may use at once, is opened for reading only. No path: memory of no file at all."""

    path: str = ""
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Image:
    """A file that a disk lies on. Formats are always said, never guessed: a guest can write any header it likes into a raw disk."""

    path: str
    format: Literal["raw", "qcow2"] = "raw"


@dataclass(frozen=True, slots=True)
class Disk:
    """`id` is also its serial number in the guest (at most 20 letters, digits, `-`). `backing`: what a qcow2 file lies on, nearest first,
    to the end of the chain; the names inside qcow2 files are never followed. `bus` other than virtio is for guests without its drivers."""

    id: str
    path: str
    format: Literal["raw", "qcow2"] = "raw"
    read_only: bool = False
    boot_index: int | None = None
    backing: tuple[Image, ...] = ()
    bus: Literal["virtio", "sata", "cdrom", "usb"] = "virtio"
    size_bytes: int = 0  # virtual; 0: not known here

    def images(self) -> Iterator[Image]:
        yield Image(self.path, self.format)
        yield from self.backing


@dataclass(frozen=True, slots=True)
class Nic:
    """A network card on a tap device, whose descriptor is given at the start. `mac` may be changed later, by the guest's agent."""

    id: str
    mac: str
    model: Literal["virtio", "e1000e"] = "virtio"


@dataclass(frozen=True, slots=True)
class Display:
    """A screen with keyboard and absolute pointer. `vga`: the plain adapter, for guests without a virtio driver."""

    width: int = 1280
    height: int = 800
    vga: bool = False


@dataclass(frozen=True, slots=True)
class Firmware:
    """UEFI: code (shared, read-only) and the machine's own variables. No code: the built-in BIOS."""

    code: str = ""
    variables: str = ""
    secure: bool = False  # the code keeps its variables by system management mode


@dataclass(frozen=True, slots=True)
class Machine:
    """A whole machine. `tpm`: the descriptor of swtpm's control socket is given at the start."""

    kind: Literal["microvm", "q35", "pc"]
    cpus: int
    memory_bytes: int
    ram: Ram = Ram()
    kernel: str = ""
    initrd: str = ""
    append: str = ""
    firmware: Firmware | None = None
    disks: tuple[Disk, ...] = ()
    nics: tuple[Nic, ...] = ()
    channel: bool = True
    agent: bool = False  # a second port for the QEMU guest agent of systems that have no guestd
    display: Display | None = None
    balloon: bool = True
    rng: bool = True
    merge: bool = False
    """Whether the host may keep pages of its memory only once that are equal to others' (KSM): who shares them can find that out."""
    tpm: bool = False
    incoming: bool = False
    """Start empty and wait for a device state (`Vmm.load`)."""
    reboots: bool = False
    """Whether a guest that resets the machine goes on; else QEMU ends, which for a microVM is how a kernel's panic shows."""
    uuid: str = ""
    name: str = "guest"
    cpu: str = ""
    """A CPU model other than the accelerator's own."""
    config: str = ""
    """A file with further devices, in QEMU's own form: for what is secret, and so cannot stand in a command line."""
    extra: tuple[str, ...] = field(default=())
    """Further arguments of a profile. Nothing in it may name a file: QEMU sees none."""

    def template(self, ram: str) -> Machine:
        """The same machine, to boot: its memory is that file."""
        return replace(self, ram=Ram(ram, shared=True), incoming=False)

    def clone(self, ram: str, disks: tuple[Disk, ...]) -> Machine:
        """The same machine, to be restored over a template's memory with disks of its own."""
        return replace(self, ram=Ram(ram, shared=False), disks=disks, incoming=True)

    @property
    def uses_scsi(self) -> bool:
        """Whether the disks are SCSI ones in the guest (/dev/sdX, serial number in VPD page 0x80) rather than virtio-blk (/dev/vdX)."""
        return self.kind == "microvm" and len(self.disks) > MAX_BLK_DISKS


def problems(machine: Machine) -> list[str]:
    """What is wrong with a description, each as the rule it breaks."""
    found = []
    if machine.cpus < 1:
        found.append("a machine has at least one CPU")
    if machine.memory_bytes < 32 * MIB or machine.memory_bytes % MIB:
        found.append("memory is a whole number of MiB, at least 32")
    ids = [disk.id for disk in machine.disks] + [nic.id for nic in machine.nics]
    if len(set(ids)) != len(ids):
        found.append("ids of disks and network cards differ")
    for name in ids:
        if not 1 <= len(name) <= 20 or not name.isascii() or not name.replace("-", "").isalnum() or not name[0].isalpha():
            found.append(f"{name!r} is no id: 1 to 20 letters, digits and hyphens, a letter first")
    if machine.kind == "microvm":
        if not machine.kernel and not machine.incoming:
            found.append("a microvm boots a kernel")
        if machine.display or machine.firmware or machine.tpm or any(disk.bus != "virtio" for disk in machine.disks):
            found.append("a microvm has virtio devices only, no display, firmware or TPM")
    for text in (machine.name, machine.uuid, machine.cpu):
        if "," in text or "\0" in text:
            found.append(f"no comma in {text!r}")
    for disk in machine.disks:
        if disk.backing and disk.format != "qcow2":
            found.append(f"disk {disk.id}: only qcow2 lies on something")
    return found
