# SPDX-License-Identifier: Apache-2.0
"""MicroVMs end to end: the SDK, a real edge process, QEMU. What the contract suites say of each is not said again here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

import opendsec as od
from opendsec.client.aio import Sandbox
from opendsec.testing.waiting import eventually
from tests.machine_edges import MachineEdge, machine

pytestmark = pytest.mark.slow
TIMEOUT_S = 100.0


@pytest.fixture(autouse=True)
def _each_leaves_no_machine(edge: MachineEdge) -> Iterator[None]:
    yield
    assert edge.store.boxes() == [], "the edge still has machines"


@asynccontextmanager
async def box_of(edge: MachineEdge, **fields: object) -> AsyncIterator[tuple[od.Client, Sandbox]]:
    async with asyncio.timeout(TIMEOUT_S), edge.client() as client, await client.create(machine(**fields)) as box:
        yield client, box


async def test_it_is_a_machine_and_says_so(edge: MachineEdge) -> None:
    async with box_of(edge, labels={"a": "b"}, hostname="other", env={"GIVEN": "1"}) as (client, box):
        assert box.info is not None and (box.info.backend, box.info.state) == ("microvm", "running")
        assert box.info.accelerator in ("tcg", "kvm")
        inside = await box.run("uname -r; hostname; id -u; echo $GIVEN; cat /proc/1/comm")
        kernel, hostname, uid, given, _ = inside.check().stdout.split("\n", 4)
        assert (hostname, uid, given) == ("other", "0", "1") and kernel
        with open("/proc/sys/kernel/osrelease", encoding="ascii") as file:
            assert kernel != file.read().strip()
        capabilities = {one.name: one for one in (await client.capabilities()).backends["microvm"]}
        assert all(capabilities[name].available for name in ("create", "pause", "fork", "snapshot"))
        assert capabilities["hardware_virtualization"].available == (box.info.accelerator == "kvm")
        features = {one.name: one for one in (await client.capabilities()).features}
        assert features["qemu"].present and features["guest_kernel"].present
        if box.info.accelerator == "tcg":
            with pytest.raises(od.Unsupported, match="hardware"):
                await client.create(machine(hardware_virtualization=True))


async def test_commands_files_and_a_terminal(edge: MachineEdge) -> None:
    async with box_of(edge) as (_, box):
        assert (await box.run("cat; exit 3", stdin="in\n")).exit_code == 3
        await box.files.write("/root/a.py", "print(6 * 7)\n")
        assert (await box.run(["python3", "/root/a.py"])).check().stdout == "42\n"
        assert (await box.run("sleep 1000 & sleep 1000", timeout_s=0.5)).outcome == "timed_out"
        seen = "".join([event.text async for event in box.stream("tty && stty size", pty=od_pty()) if event.kind == "output"])
        assert "20 60" in seen
        shell = await box.session()
        await shell.run("cd /tmp && X=kept")
        assert (await shell.run("echo $PWD $X")).stdout == "/tmp kept\n"


def od_pty() -> object:
    from opendsec.api.exec import Pty

    return Pty(rows=20, cols=60)


async def test_it_ends_by_its_ttl_and_when_it_is_idle(edge: MachineEdge) -> None:
    async with asyncio.timeout(TIMEOUT_S), edge.client() as client:
        short = await client.create(machine(ttl_s=3.0))
        idle = await client.create(machine(ttl_idle_s=1.0))
        ended: dict[str, str] = {}
        async for event in client.events(follow=True):
            if event.kind == "sandbox.stopped" and event.sandbox_id in (short.id, idle.id):
                ended[event.sandbox_id] = str(event.data["message"])
                if len(ended) == 2:
                    break
        assert ended == {short.id: "its ttl_s has passed", idle.id: "it was idle for ttl_idle_s"}


async def test_a_paused_machine_holds_no_process_and_wakes_where_it_was(edge: MachineEdge) -> None:
    async with box_of(edge) as (client, box):
        await box.files.write("/dev/shm/memory", "kept")
        counting = await box.start("i=0; while :; do i=$((i + 1)); echo $i > /tmp/count; sleep 0.1; done")
        while not await box.files.exists("/tmp/count"):
            await asyncio.sleep(0.05)
        before = (await client.info()).memory_promised_bytes
        await box.pause()
        assert (await client.info()).memory_promised_bytes == before - machine().limits().memory_bytes
        await eventually(lambda: edge.machine_processes() == waiting(edge))  # one may be in the making
        assert await box.files.read("/dev/shm/memory") == "kept"
        assert (await box.refresh()).state == "running"
        first = int(await box.files.read("/tmp/count") or 0)
        while int(await box.files.read("/tmp/count") or 0) <= first:
            await asyncio.sleep(0.05)
        assert (await counting.info()).state == "running"
        before_s, told, after_s = time.time(), (await box.run("date +%s.%N")).check().stdout, time.time()
        assert before_s - 1 <= float(told) <= after_s + 1
        await counting.kill()


def waiting(edge: MachineEdge) -> int:
    """QEMUs that wait to become sandboxes."""
    boxes = {box.machine for box in edge.store.box_states()}
    return len(edge.machine_groups() - boxes)


async def test_forks_go_on_and_differ(edge: MachineEdge) -> None:
    async with box_of(edge) as (_, box):
        await box.run("echo shared > /root/file; (while :; do sleep 0.2; echo tick >> /dev/shm/ticks; done) > /dev/null 2>&1 &")
        kids = [one for one in await box.fork(2) if isinstance(one, Sandbox)]
        assert len(kids) == 2
        try:
            tell = "cat /root/file /etc/machine-id /proc/sys/kernel/random/boot_id; hostname; head -c 8 /dev/urandom | od -An -tx8"
            told = [(await one.run(tell)).check().stdout.split() for one in (box, *kids)]
            assert {one[0] for one in told} == {"shared"}
            for column in range(1, 5):
                assert len({one[column] for one in told}) == 3, column
            for one in kids:  # what ran in the background runs in the copies too
                assert (
                    await one.run("n=$(wc -l < /dev/shm/ticks); while [ $(wc -l < /dev/shm/ticks) = $n ]; do sleep 0.1; done")
                ).exit_code == 0
        finally:
            await asyncio.gather(*(one.kill() for one in kids))


async def test_a_snapshot_outlives_its_sandbox_and_the_edge(edge: MachineEdge) -> None:
    async with box_of(edge) as (_, box):
        await box.run("echo disk > /root/disk; echo memory > /dev/shm/memory")
        both, disk = await box.snapshot("both"), await box.snapshot("disk", memory=False)
    edge.stop()
    edge.start()
    async with asyncio.timeout(TIMEOUT_S), edge.client() as client:
        try:
            assert {one.name for one in await client.snapshots.list()} == {"both", "disk"}
            assert isinstance(both.spec, od.MicroVM) and isinstance(disk.spec, od.MicroVM)
            async with await client.create(both.spec) as copy:
                assert (await copy.run("cat /root/disk /dev/shm/memory")).check().stdout == "disk\nmemory\n"
            async with await client.create(disk.spec) as copy:
                assert (await copy.run("cat /root/disk; ls /dev/shm")).check().stdout == "disk\n"
        finally:
            for name in ("both", "disk"):
                await client.snapshots.remove(name)
    assert edge.store.snapshots() == []


@pytest.mark.parametrize("crash", [False, True])
async def test_another_edge_has_the_same_machines(crash: bool, edge: MachineEdge) -> None:
    async with asyncio.timeout(TIMEOUT_S), edge.client() as client:
        running, paused = await client.create(machine()), await client.create(machine())
        for box in (running, paused):
            await box.files.write("/dev/shm/memory", box.id)
        lost = await running.start(["sleep", "1000"])
        await running.run("sleep 1000 > /dev/null 2>&1 &")
        while edge.commands_under_way() != 1:  # ends without an action id of the caller's are written a moment later
            await asyncio.sleep(0.05)
        await paused.pause()
    if crash:
        edge.kill()
    else:
        edge.stop()
    edge.start()
    async with asyncio.timeout(TIMEOUT_S), edge.client() as client:
        try:
            assert {box.id: box.info.state for box in await client.list() if box.info} == {running.id: "running", paused.id: "paused"}
            for one in (running, paused):
                box = client.sandbox(one.id)
                assert await box.files.read("/dev/shm/memory") == box.id
            assert (await client.sandbox(running.id).process(lost.id).wait()).outcome == "unknown"
            alive = await client.sandbox(running.id).run("pgrep -c sleep")
            assert alive.stdout == "1\n", alive.raw  # what nobody hears any more was ended, what a command had left behind lives on
        finally:
            await asyncio.gather(client.sandbox(running.id).kill(), client.sandbox(paused.id).kill())


async def test_a_machine_that_dies_is_lost(edge: MachineEdge) -> None:
    async with asyncio.timeout(TIMEOUT_S), edge.client() as client:
        box = await client.create(machine())
        waiting = asyncio.ensure_future(box.run("sleep 1000"))
        async for event in client.events(sandbox_id=box.id, follow=True):
            if event.kind == "exec.started":
                break
        edge.kill_machines()
        with pytest.raises(od.SandboxLost):
            await waiting
        async for event in client.events(sandbox_id=box.id, follow=True):
            if event.kind == "sandbox.lost":
                break
        for need in (box.run("true"), box.resume()):
            with pytest.raises(od.SandboxLost):
                await need
        await box.kill()  # returns once nothing is left
