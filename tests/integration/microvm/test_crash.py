# SPDX-License-Identifier: Apache-2.0
"""Whoever dies, at whatever moment: a sandbox is as it was before or after what was under way, or it is lost and says so, and nothing
stays behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from opendsec.api.errors import SandboxLost, Unavailable
from opendsec.api.ids import SNAPSHOT, new_id
from opendsec.runtime.backend import Handle, Record
from opendsec.runtime.microvm.backend import MicroVMBackend
from opendsec.runtime.vmm.records import record_of
from opendsec.testing.contracts.backend import Setup, output, plan
from tests.vms import VmNode

pytestmark = pytest.mark.slow

ROUNDS = 10


async def is_whole(handle: Handle, number: int) -> None:
    """All that it was told to write until `number`, and at most one line more that it was just told."""
    text, ended = await output(handle, "cat", "/root/lines")
    lines = text.decode().split()
    assert ended.code == 0 and lines[: number + 1] == [str(one) for one in range(number + 1)] and len(lines) <= number + 2, lines


async def test_qemu_dies_in_the_midst(vms: Setup) -> None:
    """It is killed while something is done with it: that fails by SandboxLost, or it was done before; then it is gone for good."""
    dice = random.Random(5)

    async def pausing(handle: Handle) -> None:
        await vms.backend.resume(await handle.pause())

    async def keeping(handle: Handle) -> None:
        snapshot = await handle.snapshot(new_id(SNAPSHOT), memory=dice.random() < 0.5)
        await vms.backend.remove_snapshot(snapshot)

    async def running(handle: Handle) -> None:
        await output(handle, "sh", "-c", "for i in 1 2 3 4 5 6 7 8; do echo $i >>/root/file; done; cat /root/file")

    async def frozen(handle: Handle) -> None:
        await handle.freeze()
        await handle.thaw()

    for number in range(ROUNDS):
        handle = await vms.backend.create(vms.placement())
        doing = asyncio.ensure_future((pausing, keeping, running, frozen)[number % 4](handle))
        await asyncio.wait([doing], timeout=dice.uniform(0.0, 0.4))
        pid = handle.record.pid
        if handle.record.vm is not None and handle.record.vm.state == "running" and pid:
            os.kill(pid, signal.SIGKILL)
        try:
            await doing
        except (SandboxLost, Unavailable):
            pass
        if handle.record.pid == pid:
            assert await handle.died
            with pytest.raises(SandboxLost):
                await handle.exec(plan("true"), stdin=None, stdout=None, stderr=None)
        await handle.destroy()
        for snapshot_id in vms.backend.snapshots():
            assert isinstance(vms.backend, MicroVMBackend)
            found = vms.backend.store.read_snapshot(snapshot_id)
            assert found is not None
            await vms.backend.remove_snapshot(found.record)
        assert vms.backend.leftovers() == []


async def test_a_guest_that_crashes_is_lost_with_the_reason(vms: Setup) -> None:
    async with vms.box() as handle:
        await handle.exec(plan("sh", "-c", "echo c >/proc/sysrq-trigger"), stdin=None, stdout=None, stderr=None)
        assert "guest" in await handle.died
        assert not handle.alive()
        with pytest.raises(SandboxLost):
            await handle.exec(plan("true"), stdin=None, stdout=None, stderr=None)


async def test_a_guest_whose_root_kills_guestd_goes_on_or_is_lost(vms: Setup) -> None:
    """The kernel lets nobody inside kill process 1."""
    async with vms.box() as handle:
        await output(handle, "sh", "-c", "kill -9 1; kill -SEGV 1; kill -STOP 1; kill -TERM 1")
        assert (await output(handle, "echo", "on"))[0] == b"on\n"


EDGE = """
import asyncio, sys
from pathlib import Path
from opendsec.images.store import ImageStore
from opendsec.testing.contracts.backend import Setup, output
from opendsec.api.ids import SNAPSHOT, new_id
from tests.images import BASE, base_store
from tests.vms import LIMITS, VmNode

async def main(folder, edge_id):
    node = VmNode(Path(folder), edge_id=edge_id)
    await node.containers.start()
    vms = Setup(make=node.make, layers=ImageStore(base_store()).resolve(BASE).layers, murder=lambda _: None, limits=LIMITS)
    await vms.start()
    handle = await vms.backend.create(vms.placement())
    for number in range(1000):
        assert (await output(handle, "sh", "-c", f"echo {number} >>/root/lines"))[1].code == 0
        print(number, flush=True)
        if number % 3 == 0:
            await vms.backend.resume(await handle.pause())
        elif number % 3 == 1:
            snapshot = await handle.snapshot(new_id(SNAPSHOT), memory=number % 2 == 0)
            if number % 4:
                await vms.backend.remove_snapshot(snapshot)
        else:
            other = await vms.backend.create(vms.placement())
            print("ends", other.sandbox_id, flush=True)  # as the journal has it before it is done
            await other.destroy()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_the_edge_dies_at_any_moment() -> None:
    dice = random.Random(7)
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            async with VmNode(Path(folder)) as node:
                await node.containers.close()
                number, ending = await _killed_edge(node, after_s=dice.uniform(0.0, 4.0))
                await node.containers.start()  # waits for the spawner of the one that died
                backend = await node.make()
                try:
                    await _take_stock(backend, number, ending)
                finally:
                    for sandbox_id in backend.leftovers():
                        await backend.clear(sandbox_id, None)
                    await backend.close()


async def _killed_edge(node: VmNode, *, after_s: float) -> tuple[int, set[str]]:
    """Run one, kill it some time after its first word; the last number it had written down, and the sandboxes that it was about to end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", EDGE, str(node.directory), node.edge_id, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert process.stdout is not None
    said = [await process.stdout.readline()]
    asyncio.get_running_loop().call_later(after_s, process.kill)
    while line := await process.stdout.readline():
        said.append(line)
    assert await process.wait() == -signal.SIGKILL
    words = [line.decode().split() for line in said]
    return max(int(one[0]) for one in words if len(one) == 1), {one[1] for one in words if len(one) == 2}


async def _take_stock(backend: MicroVMBackend, number: int, ending: set[str]) -> None:
    """What the next edge does: adopt or resume what is there, clear what is not whole or was to end."""
    whole = []
    for sandbox_id in backend.leftovers():
        box = backend.store.read_box(sandbox_id)
        if box is None or box.state == "making" or sandbox_id in ending:
            await backend.clear(sandbox_id, None)
            continue
        record: Record = record_of(box, backend.name)
        handle = await (backend.resume(record) if box.state == "paused" else backend.adopt(record))
        whole.append(handle)
    assert whole
    lines = [handle for handle in whole if (await output(handle, "test", "-e", "/root/lines"))[1].code == 0]
    assert len(lines) == 1
    await is_whole(lines[0], number)
    for name in backend.snapshots():
        found = backend.store.read_snapshot(name)
        assert found is not None
        await backend.remove_snapshot(found.record)
    for handle in whole:
        await handle.destroy()
    assert list(backend.leftovers()) == [] and list(backend.snapshots()) == []
    assert not [path for path in (backend.store.root / "disks").iterdir() if not path.name.startswith("template-")]
    assert not list((backend.store.root / "memory").iterdir())
