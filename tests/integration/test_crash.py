# SPDX-License-Identifier: Apache-2.0
"""kill -9 of the edge in the middle of everything, then a restart, again and again. Nothing that lived is lost, nothing half-made stays.

Bounds of SPECIFICATION.md that are checked here, each over all rounds: edge.crash.lost, edge.crash.half_made, edge.crash.leaked,
edge.crash.replayed, edge.crash.misreported.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import opendsec as od
from benchmarks import spec
from opendsec.kernel import cgroups, namespaces, procfs
from opendsec.runtime.container.plan import edge_group
from tests.edges import EdgeProcess
from tests.images import BASE

ROUNDS = 20
VETERANS = 10  # sandboxes that live through all rounds
BURST = 200
COMMANDS = 200

SMALL = od.Container(image=BASE, memory="16MiB", disk="4MiB", pids=64)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def edge(test_images: Path) -> Iterator[EdgeProcess]:
    process = EdgeProcess(test_images)
    process.start()
    try:
        yield process
    finally:
        process.remove()


class Tally:
    """What went wrong, by the bound it counts against, with what it was."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.details: list[str] = []

    def add(self, bound: str, detail: str) -> None:
        self.counts[bound] += 1
        self.details.append(f"{bound}: {detail}")

    def check(self) -> None:
        for name, bound in spec.load().items():
            if name.startswith("edge.crash."):
                assert bound.holds(self.counts[name]), "\n".join(self.details[:40])


async def test_kill_during_bursts(edge: EdgeProcess) -> None:
    tally, rng = Tally(), random.Random(20261129)
    mounts_before = {mount.mount_point for mount in procfs.mountinfo()}
    async with edge.client() as client:
        edge_id = (await client.info()).edge_id
        veterans = [box for box in await client.create_many(SMALL, VETERANS) if isinstance(box, od.Sandbox)]
        assert len(veterans) == VETERANS
        for box in veterans:
            await box.files.write("/marker", box.id)
    for turn in range(ROUNDS):
        await one_round(edge, veterans, turn, rng, tally)
        await check_leaks(edge, edge_id, mounts_before, tally)
    tally.check()


async def one_round(edge: EdgeProcess, veterans: list[od.Sandbox], turn: int, rng: random.Random, tally: Tally) -> None:
    burst_id = f"burst/{turn}"
    async with edge.client() as client:
        boxes = [client.sandbox(box.id) for box in veterans]
        # Actions that have ended before the crash, and what they left: one line each.
        ended = {f"ended/{turn}/{number}": boxes[number % VETERANS] for number in range(20)}
        recorded = {
            action: (await box.run(f"echo {action} >> /log; echo {action}", action_id=action)).process_id for action, box in ended.items()
        }
        # Now everything at once, and the crash when a part of the burst is there.
        after = [event.seq async for event in client.events()][-1]
        running = [asyncio.ensure_future(box_run(boxes[number % VETERANS], turn, number)) for number in range(COMMANDS)]
        burst = asyncio.ensure_future(client.create_many(SMALL, BURST, action_id=burst_id))
        await seen(client, after, started=COMMANDS // 2, created=rng.randrange(0, BURST // 2))
        edge.kill()
        await asyncio.gather(*running, burst, return_exceptions=True)
    edge.start()
    async with edge.client() as client:
        for veteran in veterans:
            try:
                box = await client.get(veteran.id)
                alive = (await box.run(["cat", "/marker"])).stdout == veteran.id
            except od.OpenDSecError as error:
                tally.add("edge.crash.lost", f"round {turn}: {veteran.id}: {error!r}")
                continue
            if not alive:
                tally.add("edge.crash.lost", f"round {turn}: {veteran.id} has not its files")
        for box in await client.list():
            assert box.info is not None
            if box.info.state in ("creating", "stopping"):
                tally.add("edge.crash.half_made", f"round {turn}: {box.id} is {box.info.state}")
        for action, old in ended.items():
            box = client.sandbox(old.id)
            again = await box.run(f"echo {action} >> /log; echo {action}", action_id=action)
            lines = (await box.run(["grep", "-cxF", action, "/log"])).stdout.strip()
            if (again.process_id, again.stdout, lines) != (recorded[action], f"{action}\n", "1"):
                tally.add("edge.crash.replayed", f"round {turn}: {action}: {again}, run {lines} times")
        for veteran in veterans:
            await client.sandbox(veteran.id).files.write(f"/over/{turn}", "", parents=True)
        cut = await asyncio.gather(*(box_run(client.sandbox(veterans[number % VETERANS].id), turn, number) for number in range(COMMANDS)))
        for number, result in enumerate(cut):
            # One that never reached the edge runs now, for the first time, and ends at once; one that began must not begin again.
            if result.outcome not in ("unknown", "exited"):
                tally.add("edge.crash.misreported", f"round {turn}: command {number}: {result}")
        begun = Counter("".join([(await client.sandbox(box.id).run(["cat", "/begun"])).stdout for box in veterans]).split())
        for number in range(COMMANDS):
            if begun[f"{turn}/{number}"] > 1:
                tally.add("edge.crash.replayed", f"round {turn}: command {number} ran {begun[f'{turn}/{number}']} times")
        await check_burst(client, burst_id, turn, tally)


async def box_run(box: od.Sandbox, turn: int, number: int) -> od.Result:
    """Writes that it began, then waits for the crash, unless that is over."""
    return await box.run(f"echo {turn}/{number} >> /begun; [ -e /over/{turn} ] || exec sleep 1000", action_id=f"cut/{turn}/{number}")


async def seen(client: od.Client, after: int, *, started: int, created: int) -> None:
    """Return once so many commands have been started and so many sandboxes created after event `after`."""
    counts: Counter[str] = Counter()
    async for event in client.events(after=after, follow=True):
        counts[event.kind] += 1
        if counts["exec.started"] >= started and counts["sandbox.created"] >= created:
            return


async def check_burst(client: od.Client, burst_id: str, turn: int, tally: Tally) -> None:
    """The repeated request gives the sandboxes that were made, which work, and errors for the rest; it makes no new ones."""
    before = {box.id for box in await client.list()}
    slots = await client.create_many(SMALL, BURST, action_id=burst_id)
    made = [slot for slot in slots if isinstance(slot, od.Sandbox)]
    fresh = {box.id for box in made} - before
    if fresh and len(fresh) != BURST:  # all of them: then the request had not reached the edge, and is a first one now
        tally.add("edge.crash.replayed", f"round {turn}: the burst made {len(fresh)} new sandboxes when repeated")

    async def works(box: od.Sandbox) -> bool:
        return (await box.refresh()).state != "running" or (await box.run(["true"])).exit_code == 0

    for box, good in zip(made, await asyncio.gather(*(works(box) for box in made)), strict=True):
        if not good:
            tally.add("edge.crash.half_made", f"round {turn}: {box.id} does not work")
    await asyncio.gather(*(box.kill() for box in made))


async def check_leaks(edge: EdgeProcess, edge_id: str, mounts_before: set[bytes], tally: Tally) -> None:
    """Everything of this edge on the machine belongs to a living sandbox."""
    async with edge.client() as client:
        living = {box.id for box in await client.list(state="running")}
        info = await client.info()
    if info.sandboxes != len(living):
        tally.add("edge.crash.leaked", f"{info.sandboxes} promised, {len(living)} living")
    hierarchies = cgroups.discover()
    top = hierarchies.group(edge_group(edge_id))
    groups = {group.name.rpartition("/")[2] for group in top.children()}
    if groups != living:
        tally.add("edge.crash.leaked", f"cgroups {groups ^ living}")
    for controller, (version, root) in hierarchies.homes.items():
        if version == 1 and controller in cgroups.CONTROLLERS:
            there = {path.name for path in Path(root, edge_group(edge_id)).iterdir() if path.is_dir()}
            if there != living:
                tally.add("edge.crash.leaked", f"{root}: {there ^ living}")
    inside = set(top.procs())
    strays = {pid: cmdline for pid in procfs.pids() if pid not in inside and (cmdline := stray(pid, edge_id)) is not None}
    if strays:
        tally.add("edge.crash.leaked", f"processes {strays}")
    if len(inside) != len(living):
        tally.add("edge.crash.leaked", f"{len(inside)} processes in {len(living)} idle sandboxes")
    mounts = {mount.mount_point for mount in procfs.mountinfo() if os.fsencode(edge.folder) in mount.mount_point}
    if extra := mounts - mounts_before:
        tally.add("edge.crash.leaked", f"mounts {extra}")


def stray(pid: int, edge_id: str) -> list[bytes] | None:
    """The command line of an orphan in a user namespace that is not ours, unless it is in a sandbox of another edge."""
    try:
        if procfs.stat(pid).ppid != 1:
            return None  # somebody's child: a concurrent test's
        if namespaces.namespace_ids(pid)["user"] == namespaces.namespace_ids()["user"]:
            return None
        group = procfs.cgroup(pid).get("", b"").decode()
        return None if group.startswith("/opendsec-") and edge_group(edge_id) not in group else procfs.cmdline(pid)
    except OSError:
        return None  # it has ended meanwhile
