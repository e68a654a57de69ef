# SPDX-License-Identifier: Apache-2.0
"""From a machine to a command line: the same for the same machine, no file of the host in it, every number once."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.runtime.backend import Exit
from opendsec.runtime.vmm import arguments
from opendsec.runtime.vmm.arguments import Inside, Opened
from opendsec.runtime.vmm.diagnosis import diagnosis
from opendsec.runtime.vmm.machine import MIB, Disk, Display, Firmware, Image, Machine, Nic, Ram, problems
from opendsec.runtime.vmm.memory import batches

MICRO = Machine(
    kind="microvm",
    cpus=2,
    memory_bytes=256 * MIB,
    ram=Ram("/host/ram"),
    kernel="/host/kernel",
    append="console=ttyS0 quiet",
    disks=(
        Disk("meta0", "/host/meta", read_only=True),
        Disk("scratch", "/host/own.qcow2", "qcow2", backing=(Image("/host/frozen.qcow2", "qcow2"), Image("/host/empty"))),
    ),
)


def test_a_microvm() -> None:
    words = arguments.arguments(MICRO, "tcg")
    shown = arguments.shown(words)
    assert words == arguments.arguments(MICRO, "tcg")
    for line in (
        "-machine microvm,memory-backend=ram,suppress-vmdesc=on,mem-merge=off,rtc=on,isa-serial=on,pit=off,pic=off",
        "-accel tcg,thread=multi,tb-size=96",
        "-cpu max",
        "-smp 2",
        "-m 256M",
        "-global migration.send-configuration=off",
        "-action panic=shutdown,reboot=shutdown",
        "-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        "-object memory-backend-file,id=ram,mem-path=/ram,size=256M,share=off",
        "-kernel /kernel",
        "-append console=ttyS0 quiet",
        "-device virtserialport,bus=serial0.0,nr=1,chardev=guest,name=org.opendsec.guest.0",
        "-device virtio-blk-device,id=scratch,drive=scratch,serial=scratch,werror=report",
    ):
        assert f"    {line}" in shown.split(" \\\n"), line
    assert "/host" not in shown and "-incoming" not in words


def test_descriptors_and_files_by_name() -> None:
    assert arguments.descriptors(MICRO, "tcg") == (
        Opened(7, "/host/meta", False, 1),
        Opened(8, "/host/own.qcow2", True, 2),
        Opened(9, "/host/own.qcow2", False, 2),
        Opened(10, "/host/frozen.qcow2", False, 3),
        Opened(11, "/host/empty", False, 4),
    )
    assert arguments.descriptors(MICRO, "kvm")[-1] == Opened(12, "/dev/kvm", True, arguments.KVM_SET)
    assert arguments.inside(MICRO) == (Inside("/host/ram", "ram"), Inside("/host/kernel", "kernel"))
    assert arguments.inside(MICRO.template("/host/new"))[0] == Inside("/host/new", "ram", writable=True)


def test_what_disks_lie_on_is_said_and_never_read_from_the_files() -> None:
    nodes = [json.loads(word) for word in arguments.arguments(MICRO, "tcg") if word.startswith('{"driver"')]
    assert [(node["node-name"], node["driver"], node["read-only"], node.get("backing", "-")) for node in nodes] == [
        ("meta0", "raw", True, "-"),
        ("scratch.2", "raw", True, "-"),
        ("scratch.1", "qcow2", True, "scratch.2"),
        ("scratch", "qcow2", False, "scratch.1"),
    ]
    lonely = arguments.block_node(Disk("d", "/x", "qcow2"), 0, "/dev/fdset/1")
    assert json.loads(lonely)["backing"] is None
    assert arguments.overlay_node("n", "/dev/fdset/9")["backing"] is None


def test_a_template_and_its_clones_differ_in_memory_and_disks_alone() -> None:
    template = arguments.arguments(MICRO.template("/t/ram"), "tcg")
    clone = arguments.arguments(MICRO.clone("/t/ram", MICRO.disks), "tcg")
    assert clone[-3:] == ["-incoming", "defer", "-S"]
    assert [(a, b) for a, b in zip(template, clone, strict=False) if a != b] == [
        (
            "memory-backend-file,id=ram,mem-path=/ram,size=256M,share=on",
            "memory-backend-file,id=ram,mem-path=/ram,size=256M,share=off",
        )
    ]


def test_many_disks_of_a_microvm_hang_on_one_controller() -> None:
    many = replace(MICRO, disks=tuple(Disk(f"d{n}", f"/host/{n}", read_only=True) for n in range(20)))
    words = arguments.arguments(many, "tcg")
    assert many.uses_scsi and "virtio-scsi-device,id=scsi" in words and not any(word.startswith("virtio-blk") for word in words)
    assert not replace(many, kind="q35").uses_scsi


def test_a_full_machine() -> None:
    machine = Machine(
        kind="q35",
        cpus=2,
        memory_bytes=1024 * MIB,
        firmware=Firmware("/host/code", "/host/vars", secure=True),
        disks=(Disk("root", "/host/root", boot_index=0), Disk("cd", "/host/iso", read_only=True, bus="cdrom")),
        nics=(Nic("net0", "02:00:00:00:00:01"),),
        display=Display(1024, 768),
        tpm=True,
        reboots=True,
        uuid="0d1c6c8e-0000-4000-8000-000000000000",
        config="/host/secrets",
    )
    assert arguments.Inside("/host/secrets", "source") in arguments.inside(machine)
    shown = arguments.shown(arguments.arguments(machine, "kvm"))
    for line in (
        "-machine q35,memory-backend=ram,suppress-vmdesc=on,mem-merge=off,vmport=off,usb=off,smm=on,pflash0=code,pflash1=variables",
        "-accel kvm,device=/dev/fdset/999",
        "-cpu host",
        "-action panic=none,reboot=reset",
        "-netdev tap,id=net0,fd=7",
        "-device virtio-net-pci,netdev=net0,mac=02:00:00:00:00:01,romfile=",
        "-chardev socket,id=tpm,fd=8",
        "-device ide-cd,id=cd,bus=ide.0,drive=cd,serial=cd",
        "-device virtio-vga,xres=1024,yres=768,edid=on",
        "-device usb-tablet,bus=usb.0,id=pointer",
        "-readconfig /source",
    ):
        assert f"    {line}" in shown.split(" \\\n"), line
    assert "/host" not in shown


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"cpus": 0}, "at least one CPU"),
        ({"memory_bytes": 31 * MIB}, "whole number of MiB"),
        ({"memory_bytes": 64 * MIB + 1}, "whole number of MiB"),
        ({"kernel": ""}, "boots a kernel"),
        ({"display": Display()}, "virtio devices only"),
        ({"name": "a,debug-threads=on"}, "no comma"),
        ({"disks": (Disk("a", "/x"), Disk("a", "/y"))}, "ids of disks"),
        ({"disks": (Disk("a,readonly=off", "/x"),)}, "is no id"),
        ({"disks": (Disk("a", "/x", backing=(Image("/y"),)),)}, "only qcow2"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, object], rule: str) -> None:
    machine = replace(MICRO, **changes)  # type: ignore[arg-type]
    assert any(rule in problem for problem in problems(machine))
    with pytest.raises(ValueError, match=rule):
        arguments.arguments(machine, "tcg")


images = st.builds(Image, st.just("/host/i"), st.sampled_from(["raw", "qcow2"]))
disks = st.lists(st.tuples(st.booleans(), st.lists(images, max_size=4)), max_size=20)


@given(disks, st.integers(0, 4), st.booleans())
def test_every_descriptor_has_its_own_number(shapes: list[tuple[bool, list[Image]]], nics: int, tpm: bool) -> None:
    machine = Machine(
        kind="q35",
        cpus=1,
        memory_bytes=64 * MIB,
        disks=tuple(Disk(f"d{n}", "/host/d", "qcow2", read_only=ro, backing=tuple(below)) for n, (ro, below) in enumerate(shapes)),
        nics=tuple(Nic(f"n{n}", "02:00:00:00:00:01") for n in range(nics)),
        tpm=tpm,
    )
    files = arguments.descriptors(machine, "kvm")
    numbers = [arguments.nic_fd(machine, n) for n in range(nics)] + ([arguments.tpm_fd(machine)] if tpm else []) + [f.fd for f in files]
    assert numbers == list(range(arguments.FIRST_FD, arguments.FIRST_FD + len(numbers)))
    words = arguments.arguments(machine, "kvm")
    assert "/host" not in " ".join(words)
    named = {f"/dev/fdset/{file.set}" for file in files}
    assert {json.loads(word)["file"]["filename"] for word in words if word.startswith('{"driver"')} | {"/dev/fdset/999"} == named
    assert all(sum(file.writable for file in files if file.set == number) <= 1 for number in {file.set for file in files})


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), max_size=20), st.integers(1, 16))
def test_batches_cover_the_ranges_exactly(shapes: list[tuple[int, int]], limit: int) -> None:
    ranges, at = [], 0
    for gap, length in shapes:
        ranges.append((at + gap, at + gap + length))
        at += gap + length + 1
    cut = list(batches(iter(ranges), limit))
    assert all(0 < sum(end - start for start, end in batch) <= limit for batch in cut)
    assert {n for batch in cut for start, end in batch for n in range(start, end)} == {
        n for start, end in ranges for n in range(start, end)
    }


@pytest.mark.parametrize(
    ("exit", "facts", "text"),
    [
        (Exit(signal=9), {}, "QEMU was killed by signal 9"),
        (Exit(signal=9), {"killed": True}, "the machine was ended"),
        (Exit(signal=9), {"oom": True}, "QEMU was killed: its memory limit was reached"),
        (Exit(signal=31), {}, "QEMU was killed for a system call that its filter forbids"),
        (Exit(code=1), {"errors": "a\nqemu: bad thing\n"}, "QEMU ended with 1: a / qemu: bad thing"),
        (Exit(code=0), {"reason": "the guest reset the machine"}, "the guest reset the machine"),
        (Exit(lost=True), {}, "QEMU ended"),
        (None, {}, "QEMU ended"),
    ],
)
def test_diagnosis(exit: Exit | None, facts: dict[str, object], text: str) -> None:
    given_facts: dict[str, object] = {"reason": "", "killed": False, "oom": False, "errors": ""} | facts
    assert diagnosis(exit, **given_facts) == text  # type: ignore[arg-type]
