# SPDX-License-Identifier: Apache-2.0
"""Probes of what virtual machines need: QEMU, its accelerator, programs that make their disks."""

from __future__ import annotations

import re
import shutil
import subprocess

from opendsec.kernel import abi, kvm, tracee
from opendsec.kernel.probes.tools import Missing, in_child, need, waiting_child

QEMU = "/usr/bin/qemu-system-x86_64"
OLDEST_QEMU = (9, 0)

TURNS, TRIES = 50_000, 3
LONGEST_S = 0.005
"""For all turns: hardware needs some 0.03 ms, emulation at least 50."""


def qemu_version(program: str = QEMU) -> str:
    """Such as "10.0.2". Raises Missing if there is none, or one that is too old."""
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise Missing(f"cannot run {program}: {getattr(error, 'strerror', None) or error}") from None
    found = re.search(r"version ((\d+)\.(\d+)\.(\d+))", said)
    if not found:
        raise Missing(f"QEMU of an unknown version: {said[:80]!r}")
    need((int(found[2]), int(found[3])) >= OLDEST_QEMU, f"QEMU {found[1]} is older than {OLDEST_QEMU[0]}.{OLDEST_QEMU[1]}")
    return found[1]


def qemu(scratch: str) -> str:
    return f"QEMU {qemu_version()}"


def accelerated(scratch: str) -> str:
    """Whether KVM runs a kernel's code on the processor itself. That guests boot on it is another matter, proven before it is used."""
    version = kvm.interface()
    need(version == kvm.INTERFACE, f"unknown KVM interface {version}")
    need(abi.MACHINE == "x86_64", "no loop for this processor")
    in_child(_run_loop)
    return "runs a loop in ring 0 at full speed"


def _run_loop() -> None:
    # The best of some: a busy machine makes the quickest loop look slow.
    best = float("inf")
    for _ in range(TRIES):
        best = min(best, kvm.time_loop(TURNS))
        if best <= LONGEST_S:
            return
    raise Missing(f"a guest's loop in ring 0 takes {best / TURNS * 1e9:.0f} ns a turn: its instructions are emulated")


def programs_for_disks(scratch: str) -> str:
    for program in ("qemu-img", "mkfs.ext4"):
        need(shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin"), f"no {program}")
    return ""


def process_capture(scratch: str) -> str:
    """Whether all that makes up a process can be read from outside."""
    need(abi.MACHINE == "x86_64", "no frames for this processor")
    with waiting_child() as (pid, _), tracee.held(pid) as threads:
        for thread in threads:
            _ = thread.xstate(), thread.mask, thread.rseq(), thread.robust_list(), thread.filters()
            _ = thread.alternate_stack(), thread.tid_address(), thread.sigaction(1)
    return ""
