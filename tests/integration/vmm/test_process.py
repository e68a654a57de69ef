# SPDX-License-Identifier: Apache-2.0
"""QEMU driven for real: cloned, dumped, adopted, killed, and nothing left of it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from opendsec.api.errors import Internal, SandboxLost
from opendsec.kernel import procfs
from opendsec.kernel.fds import written_to
from opendsec.runtime.vmm.machine import Disk, Display, Image, Machine, Ram
from opendsec.runtime.vmm.process import Vmm
from tests.vmms import MEMORY, Vmms

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
PAGES = 300
SUM = PAGES * (PAGES + 1) // 2


def digest(path: str | Path) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def counts(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"n=(\d+) sum=\d+\n", text)]


async def test_runs_and_stands_still(vmms: Vmms) -> None:
    vmm = await vmms.start(vmms.machine(pages=PAGES))
    said = await vmms.until(vmm, "n=2")
    assert said.startswith("up\n") and f"n=0 sum={SUM}\n" in said
    assert await vmm.status() == "running"
    await vmm.stop()
    await vmm.stop()
    assert await vmm.status() == "paused"
    before = vmm.console()
    await vmm.call("query-version")
    assert vmm.console() == before
    await vmm.cont()
    await vmms.until(vmm, f"n={counts(before)[-1] + 2}")
    await vmm.kill()
    assert await vmm.died == "the machine was ended"
    await vmm.kill()
    with pytest.raises(SandboxLost):
        await vmm.status()


async def test_clones_share_the_memory_of_the_template_and_leave_it_as_it_is(vmms: Vmms) -> None:
    machine, state = await vmms.template(pages=PAGES)
    before = digest(machine.ram.path)
    clones = [await vmms.clone(machine, state) for _ in range(3)]
    for clone in clones:
        assert await clone.status() == "paused"
        await clone.cont()
    for clone in clones:
        said = await vmms.until(clone, "n=6")
        assert "up" not in said and counts(said)[0] in (2, 3, 4) and f"sum={SUM}" in said
        await clone.stop()
    assert digest(machine.ram.path) == before
    assert not any(clone.errors() for clone in clones)


async def test_a_clone_needs_no_kernel(vmms: Vmms) -> None:
    machine, state = await vmms.template(pages=PAGES)
    clone = await vmms.clone(replace(machine, kernel="", append=""), state)
    await clone.cont()
    await vmms.until(clone, f"n=6 sum={SUM}")


async def test_a_clone_becomes_the_template_of_others(vmms: Vmms) -> None:
    machine, state = await vmms.template(pages=PAGES)
    first = await vmms.clone(machine, state)
    await first.cont()
    await vmms.until(first, "n=8")
    await first.stop()
    last = counts(first.console())[-1]
    ram, devices = vmms.folder / "second", vmms.folder / "second.devices"
    copied = await first.dump_memory(ram)
    await first.save_devices(devices)
    assert 0 < copied < MEMORY // 4, "the pages it has not written are not its own"
    assert os.stat(ram).st_size == MEMORY
    second = await vmms.clone(machine, devices, ram=str(ram))
    await second.cont()
    await first.cont()  # the source goes on, unharmed
    assert counts(await vmms.until(second, f"n={last + 3}"))[0] in (last, last + 1, last + 2)  # a line was half said
    await vmms.until(first, f"n={last + 3} sum={SUM}")
    await second.stop()
    await second.dump_memory(vmms.folder / "third")
    with pytest.raises(FileExistsError):
        await second.dump_memory(vmms.folder / "third")


async def test_what_a_clone_has_changed_goes_to_its_successor(vmms: Vmms) -> None:
    machine, state = await vmms.template(pages=PAGES)
    clone = await vmms.clone(machine, state)
    for turn in range(3):
        await clone.cont()
        assert f"sum={SUM}" in await vmms.further(clone, 4)
        await clone.stop()
        last = counts(clone.console())[-1]
        changes, devices = vmms.folder / f"changes{turn}", vmms.folder / f"turn{turn}.devices"
        assert await clone.dump_changes(changes) + 4096 * 8 > os.stat(changes).st_size < MEMORY // 8
        await clone.save_devices(devices)
        await clone.kill()
        clone = await vmms.start(machine.clone(machine.ram.path, ()))
        assert await clone.load_changes(changes) > 0
        await clone.load(devices)
    await clone.cont()
    said = await vmms.further(clone, 3)
    assert counts(said)[0] in (last, last + 1, last + 2) and f"sum={SUM}" in said
    damaged = vmms.folder / "damaged"
    for data in (b"", b"x" * 100, changes.read_bytes()[:-1], changes.read_bytes()[:44] + b"x" + changes.read_bytes()[45:]):
        damaged.write_bytes(data)
        with pytest.raises(Internal, match="changed memory"):
            await clone.load_changes(damaged)


async def test_a_device_state_that_is_damaged_or_of_another_machine_is_refused(vmms: Vmms) -> None:
    machine, state = await vmms.template()
    damaged = vmms.folder / "damaged"
    damaged.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(Internal, match="refused the device state"):
        await vmms.clone(machine, damaged)
    other = replace(machine, rng=False)
    with pytest.raises(Internal, match="refused the device state"):
        await vmms.clone(other, state)


async def test_what_cannot_start_says_why_and_leaves_nothing(vmms: Vmms) -> None:
    broken = vmms.folder / "broken"
    broken.write_bytes(b"no kernel")
    machine = vmms.machine()
    bad = replace(machine, kernel=str(broken))
    with pytest.raises(Internal, match=r"QEMU did not start: .*kernel"):
        await vmms.start(bad)
    gone = replace(machine, kernel=str(vmms.folder / "none"))
    with pytest.raises((Internal, FileNotFoundError, SandboxLost)):
        await vmms.start(gone)
    disk = Disk("d", str(vmms.folder / "nodisk"))
    with pytest.raises(Internal, match="nodisk"):
        await vmms.start(vmms.machine(disks=(disk,)))


async def test_a_start_that_is_cancelled_leaves_nothing(vmms: Vmms) -> None:
    for rounds in (1, 3, 10, 40):
        machine = vmms.machine()
        task = asyncio.ensure_future(vmms.start(machine))
        for _ in range(rounds):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_another_edge_adopts_it(vmms: Vmms) -> None:
    vmm = await vmms.start(vmms.machine(pages=PAGES))
    await vmms.until(vmm, "n=1")
    record = vmm.record
    await vmm.let_go()
    adopted = await Vmm.adopt(record)
    vmms.started.append(adopted)
    assert await adopted.status() == "running"
    await vmms.until(adopted, "sum=")
    for _ in range(2):  # the port serves one at a time
        (await adopted.channel()).close()
    await adopted.kill()
    with pytest.raises(SandboxLost, match="gone"):
        await Vmm.adopt(record)


async def test_records_of_another_time_are_not_taken_for_this_one(vmms: Vmms) -> None:
    import msgspec

    vmm = await vmms.start(vmms.machine())
    with pytest.raises(SandboxLost):
        await Vmm.adopt(msgspec.structs.replace(vmm.record, start_time=vmm.record.start_time + 1))
    with pytest.raises(SandboxLost):
        await Vmm.adopt(msgspec.structs.replace(vmm.record, boot_id="another"))


async def test_killed_it_says_so(vmms: Vmms) -> None:
    vmm = await vmms.start(vmms.machine())
    os.kill(vmm.pid, signal.SIGKILL)
    assert await asyncio.wait_for(vmm.died, 10) == "QEMU was killed by signal 9"
    assert not vmm.alive()
    with pytest.raises(SandboxLost, match="signal 9"):
        await vmm.call("query-status")
    with pytest.raises(SandboxLost):
        await vmm.channel()


async def test_killed_while_a_command_waits(vmms: Vmms) -> None:
    machine, state = await vmms.template()
    vmm = await vmms.start(machine.clone(machine.ram.path, ()))
    os.kill(vmm.pid, signal.SIGSTOP)
    task = asyncio.ensure_future(vmm.load(state))
    await asyncio.sleep(0)
    os.kill(vmm.pid, signal.SIGKILL)
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(task, 20)


async def test_the_death_of_the_spawner_is_nothing_to_it(vmms: Vmms) -> None:
    vmm = await vmms.start(vmms.machine())
    os.kill(vmms.spawner.pid, signal.SIGKILL)
    await vmms.spawner.died
    seen = counts(await vmms.until(vmm, "n=1"))[-1]
    await vmms.until(vmm, f"n={seen + 2}")
    os.kill(vmm.pid, signal.SIGKILL)
    assert (await asyncio.wait_for(vmm.died, 10)).startswith("QEMU ended")


async def test_a_guest_that_resets_ends_the_machine(vmms: Vmms) -> None:
    vmm = await vmms.start(vmms.machine(more="reset"))
    assert await asyncio.wait_for(vmm.died, 20) == "the guest reset the machine"


async def test_at_its_memory_limit_it_is_killed_and_says_so(vmms: Vmms) -> None:
    machine = vmms.machine(pages=12_000, shared=False)
    vmm = await vmms.start(machine, vmms.place(machine, memory_bytes=32 << 20))
    assert await asyncio.wait_for(vmm.died, 90) == "QEMU was killed: its memory limit was reached"


def make_disks(folder: Path) -> None:
    (folder / "base.raw").write_bytes(b"\0" * (1 << 20))
    for name in ("one", "two"):
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", folder / name, "1M"], check=True, timeout=30)


async def test_disks_lie_on_one_another_and_take_an_overlay_while_they_live(vmms: Vmms) -> None:
    make_disks(vmms.folder)
    scratch = Disk("scratch", str(vmms.folder / "one"), "qcow2", backing=(Image(str(vmms.folder / "base.raw")),))
    layers = tuple(Disk(f"layer{n}", str(vmms.folder / "base.raw"), read_only=True) for n in range(12))
    vmm = await vmms.start(vmms.machine(disks=(*layers, scratch)))
    await vmm.stop()
    before = digest(vmms.folder / "one")
    await vmm.push_overlay("scratch", vmms.folder / "one", vmms.folder / "two", "scratch-two")
    assert not written_to(vmms.folder / "one") and written_to(vmms.folder / "two")
    await vmm.cont()
    nodes = await vmm.call("query-named-block-nodes", flat=True)
    assert isinstance(nodes, list)
    found = {node["node-name"]: node for node in nodes}
    assert found["scratch-two"]["ro"] is False and found["scratch"]["ro"] is True and found["layer0"]["ro"] is True
    assert digest(vmms.folder / "one") == before
    many = tuple(Disk(f"d{n}", str(vmms.folder / "base.raw"), read_only=True) for n in range(20))
    more = await vmms.start(vmms.machine(disks=many))
    assert await more.status() == "running"


async def test_a_full_machine_shows_its_screen(vmms: Vmms) -> None:
    ram = vmms.folder / "ram-q35"
    ram.touch()
    os.truncate(ram, MEMORY)
    machine = Machine(kind="q35", cpus=1, memory_bytes=MEMORY, ram=Ram(str(ram), shared=True), display=Display(), agent=True)
    vmm = await vmms.start(machine)
    assert (await vmm.screendump()).startswith(b"\x89PNG")
    viewer = await vmm.vnc()
    with viewer:
        assert (await asyncio.wait_for(asyncio.get_running_loop().sock_recv(viewer, 12), 10)).startswith(b"RFB 003")
    (await vmm.agent()).close()
    assert procfs.cmdline(vmm.pid)[0] == b"/usr/bin/qemu-system-x86_64"
