# SPDX-License-Identifier: Apache-2.0
"""Kinds of full machines, as data: what a system expects to find. Adding one is adding a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Profile:
    """`agent`: who speaks for the guest inside; qga is QEMU's own. With guestd there are templates and clones; without, a sandbox begins
    with a boot of its own. `reboots`: whether the machine goes on when the guest resets it."""

    name: str
    about: str
    firmware: Literal["uefi", "secure", "bios"] = "uefi"
    agent: Literal["guestd", "qga", "none"] = "guestd"
    board: Literal["q35", "pc"] = "q35"
    bus: Literal["virtio", "sata"] = "virtio"
    vga: bool = False  # the plain adapter, for guests without a virtio driver
    tpm: bool = False
    reboots: bool = False
    min_memory_bytes: int = 128 * MIB
    setup: bool = False  # with the discs that it is installed from
    apple: bool = False  # with the controller and the keys of Apple's machines
    refused: str = ""  # what is said where the operator has not given what it needs


PROFILES = {
    one.name: one
    for one in (
        Profile(name="linux-uefi", about="Linux with guestd, by UEFI", reboots=True, min_memory_bytes=256 * MIB),
        Profile(name="linux-bios", about="Linux with guestd, by BIOS", firmware="bios", reboots=True),
        Profile(name="other-uefi", about="any system without guestd, by UEFI", agent="none", bus="sata", vga=True, reboots=True),
        Profile(
            name="other-bios", about="any system without guestd, by BIOS", agent="none", firmware="bios", bus="sata", vga=True, reboots=True
        ),
        Profile(
            name="android-x86",
            about="Android for PCs, without guestd, by UEFI",
            agent="none",
            bus="sata",
            vga=True,
            reboots=True,
            min_memory_bytes=1024 * MIB,
        ),
        Profile(
            name="windows-11",
            about="Windows 11: secure boot and a TPM",
            firmware="secure",
            agent="qga",
            vga=True,
            tpm=True,
            reboots=True,
            min_memory_bytes=2048 * MIB,
        ),
        Profile(
            name="windows-11-setup",
            about="the same, with what it is installed from",
            firmware="secure",
            agent="qga",
            vga=True,
            tpm=True,
            reboots=True,
            min_memory_bytes=2048 * MIB,
            setup=True,
            refused="the operator of this edge has not named what it is installed from",
        ),
        Profile(
            name="macos",
            about="macOS",
            agent="none",
            bus="sata",
            vga=True,
            reboots=True,
            min_memory_bytes=4096 * MIB,
            apple=True,
            refused="macOS runs on Apple's hardware alone, by its licence, and the operator of this edge has not confirmed any",
        ),
    )
}
