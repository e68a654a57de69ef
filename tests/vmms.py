# SPDX-License-Identifier: Apache-2.0
"""Rungs for tests of the QEMU driver: a spawner, a root directory for QEMU, and a guest of a few hundred bytes that boots in no time.

    async def test_something(vmms: Vmms) -> None:
        vmm = await vmms.start(vmms.machine(pages=100))    # ended after the test
        await vmms.until(vmm, "n=3")                       # what the guest says

The guest is tests/guests/tiny.c: it counts on its serial port, with a checksum of the pages it has filled.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from opendsec.kernel import cgroups
from opendsec.runtime.spawn import Spawner
from opendsec.runtime.vmm import programs
from opendsec.runtime.vmm.machine import MIB, Disk, Machine, Ram
from opendsec.runtime.vmm.process import Place, Vmm, group_limits
from tests.boxes import STAGING, UID_BASE
from tests.support import NATIVE_INIT, ROOT

MEMORY = 64 * MIB
_numbers = itertools.count()


class Vmms:
    """One test's machines."""

    def __init__(self, spawner: Spawner, prepared: programs.Programs, guest: Path, folder: Path) -> None:
        self.spawner, self.programs, self.guest, self.folder = spawner, prepared, guest, folder
        self.group = f"opendsec-vmm{os.getpid()}"
        self.started: list[Vmm] = []

    def machine(self, *, pages: int = 0, more: str = "", shared: bool = True, disks: tuple[Disk, ...] = ()) -> Machine:
        """A microVM that runs the guest, on memory of a new file."""
        ram = self.folder / f"ram{next(_numbers)}"
        ram.touch()
        os.truncate(ram, MEMORY)
        append = f"pages={pages} {more}"
        return Machine(
            kind="microvm", cpus=1, memory_bytes=MEMORY, ram=Ram(str(ram), shared), kernel=str(self.guest), append=append, disks=disks
        )

    def place(self, machine: Machine, *, memory_bytes: int | None = None) -> Place:
        number = next(_numbers)
        limits = group_limits(machine, cpu=1)
        if memory_bytes is not None:
            limits["memory_bytes"] = memory_bytes
        return Place(
            name=f"m{number}",
            directory=str(self.folder / "run" / f"m{number}"),
            group=f"{self.group}/m{number}",
            limits=limits,
            uid=UID_BASE + 65_536 + number,
            root=str(self.programs.root),
            staging=str(STAGING),
        )

    async def start(self, machine: Machine, place: Place | None = None) -> Vmm:
        vmm = await Vmm.start(self.spawner, machine, place or self.place(machine), accel="tcg")
        self.started.append(vmm)
        return vmm

    async def template(self, *, pages: int = 0) -> tuple[Machine, Path]:
        """A machine that has said three lines, and its device state; it is ended."""
        machine = self.machine(pages=pages)
        vmm = await self.start(machine)
        await self.until(vmm, "n=2")
        await vmm.stop()
        state = self.folder / f"devices{next(_numbers)}"
        await vmm.save_devices(state)
        await vmm.kill()
        os.chmod(machine.ram.path, 0o444)
        return machine, state

    async def clone(self, machine: Machine, state: Path, *, ram: str = "") -> Vmm:
        vmm = await self.start(machine.clone(ram or machine.ram.path, machine.disks))
        await vmm.load(state)
        return vmm

    async def until(self, vmm: Vmm, text: str, timeout_s: float = 30.0) -> str:
        """Wait until the guest has said that; everything it has said."""
        async with asyncio.timeout(timeout_s):
            while text not in vmm.console():
                vmm.said.clear()
                await vmm.said.wait()
        return vmm.console()

    async def further(self, vmm: Vmm, lines: int, timeout_s: float = 30.0) -> str:
        """Wait until the guest has said so many more lines; everything it has said."""
        before = vmm.console().count("\n")
        async with asyncio.timeout(timeout_s):
            while vmm.console().count("\n") < before + lines:
                vmm.said.clear()
                await vmm.said.wait()
        return vmm.console()

    async def close(self) -> None:
        for vmm in self.started:
            await vmm.kill()
        await self.spawner.close()
        group = cgroups.discover().group(self.group)
        if group.exists():
            assert group.children() == []
        group.remove()
        assert not list((self.folder / "run").glob("*")), "directories of machines are left"


@pytest.fixture(scope="session")
def vmm_programs() -> Iterator[programs.Programs]:
    folder = Path(tempfile.mkdtemp(prefix="dsec-qemu-", dir="/var/tmp"))
    try:
        yield programs.prepare(folder)
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def tiny_guest() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="dsec-guest-", dir="/var/tmp"))
    flags = "-m32 -Os -ffreestanding -fno-pie -fno-stack-protector -nostdlib -static -no-pie -Wl,-Ttext=0x100000 -Wl,--build-id=none"
    try:
        command = ["cc", *flags.split(), "-Wl,-e,start", str(ROOT / "tests/guests/tiny.c"), "-o", str(folder / "tiny")]
        subprocess.run(command, check=True, timeout=60)
        yield folder / "tiny"
    finally:
        shutil.rmtree(folder)


@pytest.fixture
async def vmms(vmm_programs: programs.Programs, tiny_guest: Path) -> AsyncIterator[Vmms]:
    folder = Path(tempfile.mkdtemp(prefix="vm-", dir="/var/tmp"))
    made = Vmms(await Spawner.start(NATIVE_INIT), vmm_programs, tiny_guest, folder)
    try:
        yield made
        await made.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def with_ram(machine: Machine, path: Path, *, shared: bool) -> Machine:
    return replace(machine, ram=Ram(str(path), shared))
