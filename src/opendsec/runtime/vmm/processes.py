# SPDX-License-Identifier: Apache-2.0
"""The QEMU of a template that has translated what its guest does first: captured once, gone on from by each clone (see `checkpoint`).

    templates/<key>/process/    process.json, ram, disk (what a clone's own begins as), pages, script

It is good for one boot of the host. What has none is cloned by loading the device state instead, which is slower and does the same.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from opendsec.kernel import features, procfs
from opendsec.runtime.vmm.arguments import Accel
from opendsec.runtime.vmm.store import read, write

VERSION = 1
NAME = "process"


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """`process.json`."""

    version: int = VERSION
    boot_id: str


def possible(accel: Accel) -> bool:
    """Whether processes can be captured: an emulator's, where the kernel shows all of it. What a processor keeps for KVM cannot be had."""
    return accel == "tcg" and features.probe("process_capture").present


def find(template: Path) -> Path | None:
    """The captured process of a template's directory, if there is one that can be used. Blocking."""
    state = read(template / NAME / "process.json", ProcessState)
    return template / NAME if state is not None and (state.version, state.boot_id) == (VERSION, procfs.boot_id()) else None


def publish(folder: Path) -> None:
    """Say that it is whole."""
    write(folder / "process.json", msgspec.json.encode(ProcessState(boot_id=procfs.boot_id())))
