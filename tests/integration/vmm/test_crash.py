# SPDX-License-Identifier: Apache-2.0
"""kill -9 of QEMU, the spawner and the edge, at any moment: the right error, and nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from opendsec.api.errors import Internal, OpenDSecError, SandboxLost, Unavailable
from opendsec.kernel import cgroups, procfs
from opendsec.runtime.spawn import Spawner
from opendsec.runtime.vmm.machine import Machine
from opendsec.runtime.vmm.process import Place, Vmm, VmmRecord, remove
from tests.support import NATIVE_INIT, ROOT
from tests.vmms import Vmms

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

EDGE = """
import asyncio, sys
from tests.integration.vmm.test_crash import be_an_edge
asyncio.run(be_an_edge(sys.argv[1]))
"""


async def be_an_edge(request: str) -> None:
    """In a process of its own: start a machine, tell its record, wait to be killed."""
    machine, place = msgspec.json.decode(request, type=tuple[Machine, Place])
    vmm = await Vmm.start(await Spawner.start(NATIVE_INIT), machine, place, accel="tcg")
    os.write(1, msgspec.json.encode(vmm.record) + b"\n")
    await vmm.died


async def test_of_the_edge(vmms: Vmms) -> None:
    machine = vmms.machine(pages=10)
    request = msgspec.json.encode((machine, vmms.place(machine))).decode()
    edge = subprocess.Popen([sys.executable, "-c", EDGE, request], stdout=subprocess.PIPE, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert edge.stdout is not None
    with edge, edge.stdout:
        record = msgspec.json.decode(await asyncio.to_thread(edge.stdout.readline), type=VmmRecord)
        edge.kill()
    vmm = await Vmm.adopt(record)
    vmms.started.append(vmm)
    assert await vmm.status() == "running"
    await vmms.until(vmm, "sum=55")
    os.kill(vmm.pid, signal.SIGKILL)
    # Nobody's child any more: how it ended cannot be known.
    assert await asyncio.wait_for(vmm.died, 10) == "QEMU ended"


async def test_of_qemu_while_no_edge_is_there(vmms: Vmms) -> None:
    vmm = await vmms.start(vmms.machine())
    record = vmm.record
    await vmm.let_go()
    os.kill(record.pid, signal.SIGKILL)
    with pytest.raises(SandboxLost):
        await Vmm.adopt(record)
    await remove(record.place)
    await remove(record.place)
    assert not Path(record.place.directory).exists() and not cgroups.discover().group(record.place.group).exists()


def qemu_of(place: Place) -> int | None:
    """The process in the group, once there is one."""
    group = cgroups.discover().group(place.group)
    try:
        pid = next(iter(group.procs()), None) if group.exists() else None
        return None if pid is None or procfs.stat(pid).comm == b"python3" else pid
    except OSError:
        return None


async def time_to_load(vmms: Vmms, machine: Machine, state: Path) -> float:
    """How long a clone takes on this machine to be there, in seconds."""
    began = time.monotonic()
    clone = machine.clone(machine.ram.path, ())
    vmm = await vmms.start(clone, vmms.place(clone))
    await vmm.load(state)
    took_s = time.monotonic() - began
    await vmm.kill()
    return took_s


async def test_of_qemu_at_any_moment(vmms: Vmms) -> None:
    """Each round a clone lives through all that is done with machines, until it is killed somewhere on the way."""
    machine, state = await vmms.template(pages=200)
    rounds = random.Random(5)
    ends: dict[str, int] = {}
    unit_s = await time_to_load(vmms, machine, state)
    for number in range(25):
        clone = machine.clone(machine.ram.path, ())
        place = vmms.place(clone)

        async def kill(after_s: float, place: Place = place) -> None:
            await asyncio.sleep(after_s)  # the moment is what is being varied
            while (pid := qemu_of(place)) is None:
                await asyncio.sleep(0.001)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

        killing = asyncio.ensure_future(kill(rounds.uniform(0.2, 4) * unit_s))
        where = "start"
        vmm = None
        try:
            vmm = await vmms.start(clone, place)
            where = "load"
            await vmm.load(state)
            where = "run"
            for turn in range(1000):
                await vmm.cont()
                await vmm.stop()
                await vmm.save_devices(vmms.folder / f"d{number}-{turn}")
                await vmm.dump_memory(vmms.folder / f"m{number}-{turn}")
                (vmms.folder / f"m{number}-{turn}").unlink()
        except (SandboxLost, Internal) as error:
            assert where == "start" or isinstance(error, SandboxLost), error
            assert where != "start" or "start" in error.message or isinstance(error, SandboxLost), error
        except Unavailable as error:
            raise AssertionError(f"{where}: {error}") from error
        finally:
            killing.cancel()
        ends[where] = ends.get(where, 0) + 1
        if vmm is not None:
            assert await asyncio.wait_for(vmm.died, 10) == "QEMU was killed by signal 9"
            await vmm.kill()
        assert not Path(place.directory).exists() and not cgroups.discover().group(place.group).exists()
    assert ends.get("run", 0) > 0 and len(ends) > 1, ends


async def test_of_the_spawner_at_any_moment(vmms: Vmms) -> None:
    """A start that it dies in fails, and what was half there can be cleared away."""
    rounds = random.Random(7)
    for _ in range(8):
        spawner = await Spawner.start(NATIVE_INIT)
        machine = vmms.machine()
        place = vmms.place(machine)
        timer = asyncio.get_running_loop().call_later(rounds.uniform(0.0, 0.08), os.kill, spawner.pid, signal.SIGKILL)
        try:
            vmms.started.append(await Vmm.start(spawner, machine, place, accel="tcg"))
        except OpenDSecError as error:
            assert isinstance(error, Unavailable), error
            assert not Path(place.directory).exists() and not cgroups.discover().group(place.group).exists()
        finally:
            timer.cancel()
            await spawner.close()
