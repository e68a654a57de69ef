# SPDX-License-Identifier: Apache-2.0
"""Whether what was saved of a machine can be gone on from with what is here now. QEMU checks little of that, and says so in its own words.

A template's record has what all of its kind depend on, for all that came of it has the same: QEMU's version, the processor, board and
devices, firmware. What else is on a command line may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from opendsec.kernel import procfs
from opendsec.runtime.vmm.arguments import Accel, arguments
from opendsec.runtime.vmm.machine import Machine

QEMU = "QEMU"
OPTIONS = ("-machine", "-cpu", "-smp", "-m", "-device", "-global")


def facts(machine: Machine, accel: Accel, qemu: str) -> dict[str, str]:
    """By names for people. `qemu`: its version."""
    words = arguments(machine, accel)
    lines = [f"{option} {value}" for option, value in pairwise(words) if option in OPTIONS]
    return {QEMU: qemu, "processor": procfs.cpu_model() if accel == "kvm" else "emulated", "devices": "\n".join(lines)}


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """For people, a clause each. What was not noted then is taken for the same."""
    found = []
    for name, before in then.items():
        after = now.get(name, "")
        if before == after:
            continue
        had, has = before.splitlines(), after.splitlines()
        if len(had) > 1 or len(has) > 1:
            gone, new = [line for line in had if line not in has], [line for line in has if line not in had]
            found.append(f"its {name}: {'; '.join(gone)[:200] or 'nothing'} then, {'; '.join(new)[:200] or 'nothing'} now")
        else:
            found.append(f"its {name}: {before or 'none'} then, {after or 'none'} now")
    return found
