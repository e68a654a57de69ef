# SPDX-License-Identifier: Apache-2.0
"""Which accelerator guests run on here: found by timing a loop and then by booting their very kernel, never by a device's existence.

What a boot has shown is remembered until the machine is restarted or QEMU or the kernel is another.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Literal

import msgspec

from opendsec.api.errors import Internal, SandboxLost, Unavailable
from opendsec.kernel import features, procfs
from opendsec.runtime.spawn import Spawner
from opendsec.runtime.vmm.machine import MIB, Machine
from opendsec.runtime.vmm.process import Place, Vmm
from opendsec.runtime.vmm.programs import Programs

BOOT_TIMEOUT_S = 20.0
MEMORY_BYTES = 256 * MIB
ALIVE = ("Run /init", "Unable to mount root", "Cannot open root device", "No working init found")
"""What a kernel says when it has come all the way to its first program. The last ones without one are as good a proof."""
APPEND = "console=ttyS0 panic=-1 reboot=t"


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, and why."""

    name: Literal["kvm", "tcg"]
    reason: str


class _Remembered(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    found: Accelerator


def by_loop() -> Accelerator:
    """What can be said without a boot: KVM only if it is worth trying to boot on."""
    feature = features.probe("kvm")
    if not feature.present:
        return Accelerator(name="tcg", reason=f"no KVM: {feature.reason}")
    return Accelerator(name="kvm", reason=feature.reason)


async def accelerator(spawner: Spawner, programs: Programs, kernel: Path, place: Place, memory: Path) -> Accelerator:
    """The accelerator for guests that boot `kernel`. `place`: one that is free, for a machine of MEMORY_BYTES; `memory`: the file of what
    was found before."""
    found = by_loop()
    if found.name == "tcg":
        return found
    key = await asyncio.to_thread(key_of, programs, kernel)
    if (known := recall(memory, key)) is not None:
        return known
    found = await boot(spawner, kernel, place)
    remember(memory, key, found)
    return found


async def boot(spawner: Spawner, kernel: Path, place: Place, *, accel: Literal["kvm", "tcg"] = "kvm") -> Accelerator:
    """Boot the kernel; "tcg" with the reason unless it comes to life."""
    append = f"{APPEND} tsc_early_khz={round(procfs.cpu_khz())}"  # an emulated one may hang where it measures the clock
    machine = Machine(kind="microvm", cpus=1, memory_bytes=MEMORY_BYTES, kernel=str(kernel), append=append, channel=False, balloon=False)
    try:
        vmm = await Vmm.start(spawner, machine, place, accel=accel)
    except (Internal, SandboxLost, Unavailable) as error:
        return Accelerator(name="tcg", reason=f"{accel} does not start: {error.message}")
    try:
        async with asyncio.timeout(BOOT_TIMEOUT_S):
            while not any(text in vmm.console() for text in ALIVE):
                if vmm.died.done():
                    return Accelerator(name="tcg", reason=f"a guest on {accel} died: {vmm.died.result()}")
                vmm.said.clear()
                waiting = asyncio.ensure_future(vmm.said.wait())
                await asyncio.wait((waiting, vmm.died), return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
    except TimeoutError:
        said = vmm.console().strip().splitlines()[-1:]
        last = f"after {said[0][:100]!r}" if said else "and said nothing"
        return Accelerator(name="tcg", reason=f"a guest on {accel} did not boot within {BOOT_TIMEOUT_S:g} s, {last}")
    finally:
        await vmm.kill()
    return Accelerator(name=accel, reason="a guest's kernel booted")


def key_of(programs: Programs, kernel: Path) -> str:
    facts = kernel.stat()
    return hashlib.sha256(f"{procfs.boot_id()} {programs.digest} {kernel} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()


def recall(memory: Path, key: str) -> Accelerator | None:
    try:
        known = msgspec.json.decode(memory.read_bytes(), type=_Remembered)
    except (OSError, msgspec.DecodeError):
        return None
    return known.found if known.key == key else None


def remember(memory: Path, key: str, found: Accelerator) -> None:
    fd, name = tempfile.mkstemp(prefix=".accelerator-", dir=memory.parent)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(_Remembered(key=key, found=found)))
    os.replace(name, memory)
