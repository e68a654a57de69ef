# SPDX-License-Identifier: Apache-2.0
"""From a `Machine` to QEMU's command line: pure, printable, the same for the same machine.

QEMU names no file of the host. What it uses is open before it starts (`descriptors` says what has which number), or lies in the root
directory made for it under a fixed name (`inside` says which: what QEMU can open by name only).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from opendsec.runtime.vmm.machine import CHANNEL, MIB, Disk, Display, Firmware, Machine, problems

Accel = Literal["tcg", "kvm"]

QEMU = "/usr/bin/qemu-system-x86_64"

# The command line's numbers of what is always there; those of sockets are listening ones, so that a later edge can connect again.
QMP_FD, CHANNEL_FD, AGENT_FD, SERIAL_FD = 3, 4, 5, 6
FIRST_FD = 7
SERIAL_SET, KVM_SET = 998, 999

SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
CONFIG = "source"  # one of the names that `programs` has a place for
TB_MIB = 96
"""Translated code that TCG keeps at most; a clone shares with its siblings what its template had."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A file of the host that is open in QEMU under this number."""

    fd: int
    path: str
    writable: bool
    set: int = 0  # of QEMU's "fd sets", which have names where a path is wanted: /dev/fdset/N


@dataclass(frozen=True, slots=True)
class Inside:
    """A file of the host that QEMU sees, alone, under this name."""

    path: str
    name: str
    writable: bool = False


def descriptors(machine: Machine, accel: Accel) -> tuple[Opened, ...]:
    """Files that are open when QEMU starts. A writable image is open twice, since QEMU opens it anew for reading only once another lies
    on it."""
    found: list[Opened] = []
    fd, number = FIRST_FD + len(machine.nics) + machine.tpm, 1
    for disk in machine.disks:
        for depth, image in enumerate(disk.images()):
            for writable in (True, False) if not disk.read_only and depth == 0 else (False,):
                found.append(Opened(fd, image.path, writable, number))
                fd += 1
            number += 1
    if accel == "kvm":
        found.append(Opened(fd, "/dev/kvm", True, KVM_SET))
    return tuple(found)


def inside(machine: Machine) -> tuple[Inside, ...]:
    found = []
    if machine.ram.path:
        found.append(Inside(machine.ram.path, "ram", machine.ram.shared))
    for path, name in ((machine.kernel, "kernel"), (machine.initrd, "initrd")):
        if path:
            found.append(Inside(path, name))
    if machine.config:
        found.append(Inside(machine.config, CONFIG))
    if machine.firmware and machine.firmware.code:
        found.append(Inside(machine.firmware.code, "firmware"))
        if machine.firmware.variables:
            found.append(Inside(machine.firmware.variables, "variables", writable=True))
    return tuple(found)


def nic_fd(machine: Machine, index: int) -> int:
    return FIRST_FD + index


def tpm_fd(machine: Machine) -> int:
    return FIRST_FD + len(machine.nics)


def cpu_model(machine: Machine, accel: Accel) -> str:
    return machine.cpu or ("host" if accel == "kvm" else "max")


def arguments(machine: Machine, accel: Accel, *, confined: bool = True) -> list[str]:
    """The whole command line. Raises ValueError for a description that contradicts itself."""
    if wrong := problems(machine):
        raise ValueError("; ".join(wrong))
    mib = machine.memory_bytes // MIB
    words = [
        QEMU,
        *("-name", machine.name),
        *("-machine", _board(machine)),
        *("-accel", f"tcg,thread=multi,tb-size={TB_MIB}" if accel == "tcg" else f"kvm,device=/dev/fdset/{KVM_SET}"),
        *("-cpu", cpu_model(machine, accel)),
        *("-smp", str(machine.cpus)),
        *("-m", f"{mib}M"),
        "-nodefaults",
        "-no-user-config",
        *("-display", "none"),
        # What a device state may be restored into is checked by what we name it after, not by QEMU, whose own check needs the whole
        # migration stream.
        *("-global", "migration.send-configuration=off"),
        *("-action", f"panic={'none' if machine.reboots else 'shutdown'},reboot={'reset' if machine.reboots else 'shutdown'}"),
    ]
    if confined:
        words += ["-sandbox", SANDBOX]
    if machine.uuid:
        words += ["-uuid", machine.uuid]
    words += [word for file in descriptors(machine, accel) for word in ("-add-fd", f"fd={file.fd},set={file.set}")]
    words += ["-object", _memory(machine, mib)]
    words += _boot(machine)
    words += ["-chardev", f"socket,id=qmp,fd={QMP_FD},server=on,wait=off", "-mon", "chardev=qmp,mode=control"]
    words += [
        "-add-fd",
        f"fd={SERIAL_FD},set={SERIAL_SET}",
        "-chardev",
        f"file,id=serial,path=/dev/fdset/{SERIAL_SET},append=on",
        "-serial",
        "chardev:serial",
    ]
    words += _devices(machine)
    if machine.config:
        words += ["-readconfig", f"/{CONFIG}"]
    if machine.incoming:
        words += ["-incoming", "defer", "-S"]
    return [*words, *machine.extra]


def _board(machine: Machine) -> str:
    parts: list[str] = [machine.kind, "memory-backend=ram", "suppress-vmdesc=on", f"mem-merge={'on' if machine.merge else 'off'}"]
    if machine.kind == "microvm":
        # No timer and interrupt controller of old: no firmware sets them up, and a kernel that trusts ACPI does not either. What the timer
        # had sent by the time that interrupts were first allowed came as number 0, a "divide error": of ten boots here, four to eight died.
        parts += ["rtc=on", "isa-serial=on", "pit=off", "pic=off"]
    else:
        parts += ["vmport=off", "usb=off"]
        if machine.firmware and machine.firmware.secure:
            parts.append("smm=on")
    if machine.firmware and machine.firmware.code:
        parts.append("pflash0=code")
        if machine.firmware.variables:
            parts.append("pflash1=variables")
    return ",".join(parts)


def _memory(machine: Machine, mib: int) -> str:
    ram = machine.ram
    if not ram.path:
        return f"memory-backend-memfd,id=ram,size={mib}M,share=on"
    if ram.shared:
        return f"memory-backend-file,id=ram,mem-path=/ram,size={mib}M,share=on"
    # The kernel lets it be opened for reading only: see native/ram.c, and `inside`.
    return f"memory-backend-file,id=ram,mem-path=/ram,size={mib}M,share=off"


def _boot(machine: Machine) -> list[str]:
    words: list[str] = []
    if machine.kernel:
        words += ["-kernel", "/kernel", *(["-initrd", "/initrd"] if machine.initrd else []), "-append", machine.append]
    firmware: Firmware | None = machine.firmware
    if firmware and firmware.code:
        words += ["-blockdev", _json(driver="file", filename="/firmware", **{"node-name": "code", "read-only": True})]
        if firmware.secure:
            words += ["-global", "driver=cfi.pflash01,property=secure,value=on"]
        if firmware.variables:
            words += ["-blockdev", _json(driver="file", filename="/variables", **{"node-name": "variables"})]
    return words


def _devices(machine: Machine) -> list[str]:
    mmio = machine.kind == "microvm"
    suffix = "device" if mmio else "pci"
    words: list[str] = []
    if machine.channel or machine.agent:
        words += ["-device", f"virtio-serial-{suffix},id=serial0,max_ports=4"]
    if machine.channel:
        words += ["-chardev", f"socket,id=guest,fd={CHANNEL_FD},server=on,wait=off"]
        words += ["-device", f"virtserialport,bus=serial0.0,nr=1,chardev=guest,name={CHANNEL}"]
    if machine.agent:
        words += ["-chardev", f"socket,id=agent,fd={AGENT_FD},server=on,wait=off"]
        words += ["-device", "virtserialport,bus=serial0.0,nr=2,chardev=agent,name=org.qemu.guest_agent.0"]
    if machine.balloon:
        words += ["-device", f"virtio-balloon-{suffix},id=balloon,free-page-reporting=on"]
    if machine.rng:
        words += ["-object", "rng-builtin,id=entropy", "-device", f"virtio-rng-{suffix},rng=entropy"]
    if machine.uses_scsi:
        words += ["-device", "virtio-scsi-device,id=scsi"]
    elif any(disk.bus == "sata" for disk in machine.disks) and machine.kind == "pc":
        words += ["-device", "ahci,id=ahci"]
    if machine.display or any(disk.bus == "usb" for disk in machine.disks):
        words += ["-device", "qemu-xhci,id=usb"]
    words += _disks(machine, suffix)
    for index, nic in enumerate(machine.nics):
        model = f"virtio-net-{suffix}" if nic.model == "virtio" else nic.model
        words += ["-netdev", f"tap,id={nic.id},fd={nic_fd(machine, index)}"]
        words += ["-device", f"{model},netdev={nic.id},mac={nic.mac}" + (",romfile=" if not mmio else "")]
    if machine.display:
        words += _display(machine.display)
    if machine.tpm:
        words += ["-chardev", f"socket,id=tpm,fd={tpm_fd(machine)}", "-tpmdev", "emulator,id=tpm0,chardev=tpm"]
        words += ["-device", "tpm-crb,tpmdev=tpm0"]
    return words


def _disks(machine: Machine, suffix: str) -> list[str]:
    words: list[str] = []
    number, port = 1, 0
    for disk in machine.disks:
        chain = list(disk.images())
        for depth in range(len(chain) - 1, -1, -1):  # what others lie on comes first
            words += ["-blockdev", block_node(disk, depth, f"/dev/fdset/{number + depth}")]
        number += len(chain)
        node = node_name(disk.id, 0)
        options = f"drive={node},serial={disk.id}" + ("" if disk.boot_index is None else f",bootindex={disk.boot_index}")
        if not disk.read_only:
            options += ",werror=report"  # a full disk of the host: else the machine stands still until somebody lets it go on
        if disk.bus == "sata" or disk.bus == "cdrom":
            bus = f"ahci.{port}" if machine.kind == "pc" and disk.bus == "sata" else f"ide.{port}"
            words += ["-device", f"ide-{'cd' if disk.bus == 'cdrom' else 'hd'},id={disk.id},bus={bus},{options}"]
            port += 1
        elif disk.bus == "usb":
            words += ["-device", f"usb-storage,id={disk.id},bus=usb.0,{options}"]
        elif machine.uses_scsi:
            words += ["-device", f"scsi-hd,id={disk.id},bus=scsi.0,{options}"]
        else:
            words += ["-device", f"virtio-blk-{suffix},id={disk.id},{options}"]
    return words


def node_name(disk_id: str, depth: int) -> str:
    """The block node of a disk's image, 0 the one the guest writes to. After a live snapshot the caller names the new ones."""
    return disk_id if depth == 0 else f"{disk_id}.{depth}"


def block_node(disk: Disk, depth: int, filename: str) -> str:
    """A block node as JSON, for the command line.

    Flushes of the guest go no further than the page cache: a sandbox's disk does not outlive a crash of the host anyway, and everything
    that reads the file on this host, a snapshot too, reads through that cache. Files others use as well are not locked.
    """
    chain = list(disk.images())
    read_only = disk.read_only or depth > 0
    options = _node(node_name(disk.id, depth), chain[depth].format, filename, read_only=read_only)
    if chain[depth].format == "qcow2":
        # Never by the name that the file holds.
        options["backing"] = node_name(disk.id, depth + 1) if depth + 1 < len(chain) else None
    return _json(**options)


def overlay_node(node: str, filename: str) -> dict[str, object]:
    """An empty qcow2 file that is to be laid upon a living disk, for `blockdev-add`."""
    return _node(node, "qcow2", filename, read_only=False) | {"backing": None}


def _node(node: str, format: str, filename: str, *, read_only: bool) -> dict[str, object]:
    options: dict[str, object] = {
        "driver": format,
        "node-name": node,
        "read-only": read_only,
        "cache": {"direct": False, "no-flush": True},
        "file": {"driver": "file", "filename": filename, "locking": "off", "aio": "threads"},
    }
    if not read_only:
        options["discard"] = "unmap"
    return options


def _display(display: Display) -> list[str]:
    size = f"xres={display.width},yres={display.height},edid=on"
    return [
        *("-device", f"VGA,{size}" if display.vga else f"virtio-vga,{size}"),
        *("-device", "usb-kbd,bus=usb.0,id=keyboard"),
        *("-device", "usb-tablet,bus=usb.0,id=pointer"),
        *("-vnc", "none"),  # viewers come as connected descriptors (`Vmm.vnc`), there is nothing to connect to
    ]


def _json(**options: object) -> str:
    return json.dumps(options)


def shown(words: Sequence[str]) -> str:
    """The command line for people: one option a line."""
    lines = [words[0]] if words else []
    for word in words[1:]:
        if word.startswith("-"):
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)
