# SPDX-License-Identifier: Apache-2.0
"""Why a machine ended, from what is known."""

from __future__ import annotations

import signal

from opendsec.runtime.backend import Exit

SHUTDOWN_REASONS = {
    "guest-reset": "the guest reset the machine",
    "guest-shutdown": "the guest shut the machine down",
    "guest-panic": "the guest's kernel panicked",
    "host-signal": "QEMU was told to end by a signal",
    "host-qmp-quit": "QEMU was told to end",
    "host-error": "QEMU met an error",
}


def diagnosis(exit: Exit | None, *, reason: str, killed: bool, oom: bool, errors: str) -> str:
    """Why QEMU ended, in one line."""
    if killed:
        return "the machine was ended"
    if oom:
        what = "QEMU was killed: its memory limit was reached"
    elif exit is not None and exit.signal == signal.SIGSYS:
        what = "QEMU was killed for a system call that its filter forbids"
    elif exit is not None and exit.signal is not None:
        what = f"QEMU was killed by signal {exit.signal}"
    elif reason:
        what = reason
    elif exit is not None and exit.code is not None:
        what = f"QEMU ended with {exit.code}"
    else:
        what = "QEMU ended"
    last = [line for line in errors.strip().splitlines() if line][-3:]
    return f"{what}: {' / '.join(last)[-500:]}" if last else what
