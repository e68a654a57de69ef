# SPDX-License-Identifier: Apache-2.0
"""A machine's TPM: a process beside its QEMU (swtpm), which speaks to nobody else.

It is confined as QEMU is, as another user, and has one file, its state. Its group is beneath QEMU's: the machine's limits hold for both,
and it cannot be left behind. It ends when QEMU lets go of their connection.

What a TPM holds is part of the devices' state: QEMU asks for it when a machine is saved, and gives it to a new one when a machine is
loaded. So a pause, a snapshot with memory and a fork have it, and the file, which counts only while the process lives, begins empty. A
machine that boots from a snapshot of its disk alone has a new TPM, as it has new variables of its firmware.
"""

from __future__ import annotations

import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from opendsec.api.errors import Unsupported
from opendsec.images.waiting import in_thread
from opendsec.runtime.spawn import Spawner, close_all
from opendsec.runtime.vmm import programs, tools
from opendsec.runtime.vmm.arguments import Inside
from opendsec.runtime.vmm.place import ERRORS_FIFO, Place

PROGRAM = "swtpm"
CONTROL_FD = 3
MAX_STATE_BYTES = 1 << 20  # ten times what there is


def missing() -> str:
    """Why there can be none here, or ""."""
    return "" if shutil.which(PROGRAM, path="/usr/bin") else "no TPM for machines here (Debian package swtpm)"


def command() -> list[str]:
    return [
        *(f"/usr/bin/{PROGRAM}", "socket", "--tpm2", "--terminate"),
        *("--ctrl", f"type=unixio,clientfd={CONTROL_FD}"),
        *("--tpmstate", "backend-uri=file:///target"),
    ]


def files(state: Path) -> list[Inside]:
    return [Inside(str(state), "target", writable=True)]


@dataclass(frozen=True)
class Tpm:
    """`state`: its file, made here. `tools`: of tools' root directories, see `programs.prepare_tools`."""

    state: Path
    tools: Path

    async def start(self, spawner: Spawner, place: Place, control: int) -> None:
        """Beside the QEMU that was just started in `place`; `control`: the other end of what QEMU has, which the caller keeps. Whoever ends
        QEMU ends this, also if this raises."""
        if why := missing():
            raise Unsupported(why, field="spec.profile")
        tool = await in_thread(programs.prepare_tools, self.tools, [PROGRAM])
        self.state.unlink(missing_ok=True)
        self.state.touch(mode=0o600)
        own = msgspec.structs.replace(place, group=f"{place.group}/tpm", limits={}, uid=place.uid + 1, root=str(tool.root))
        errors = os.open(Path(place.directory) / ERRORS_FIFO, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            limit = (resource.RLIMIT_FSIZE, MAX_STATE_BYTES, MAX_STATE_BYTES)
            given = [(CONTROL_FD, control), (2, errors)]
            answer = await tools.start(spawner, own, command(), files(self.state), given, rlimits=[limit])
        finally:
            os.close(errors)
        close_all(answer.fds)
