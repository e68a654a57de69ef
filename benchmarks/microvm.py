# SPDX-License-Identifier: Apache-2.0
"""MicroVMs beside a plain boot of the same kernel and beside containers, in the same run.

    dsec bench microvm [--json] [--quick] [--plot FILE.png]

Times are taken through the SDK, over the unix socket of an edge that this benchmark starts; the client's own work is in them. Boots of
templates alone are made below the edge. Which accelerator was used stands among the peers.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import opendsec as od
from benchmarks.boots import QEMU, boots, plain_boots
from benchmarks.container import version
from benchmarks.report import Report, command_line, percentile
from benchmarks.support import IMAGE, timed
from opendsec.kernel import procfs
from tests.images import base_store
from tests.machine_crash import Crashes
from tests.machine_edges import MachineEdge, machine

MIB = 1 << 20
LIVE = 100
FORKS = 8
DIRTY_MIB = 100
LARGER = "256MiB"
SETTLE_S = 10.0

DIRTY = f"""
import os
with open("/dev/shm/dirty", "wb") as file:
    for _ in range({DIRTY_MIB}):
        file.write(os.urandom(65536) * 16)
"""
TICKED = "/dev/shm/ticks"
TICKS = f"while :; do echo tick >> {TICKED}; sleep 0.5; done > /dev/null 2>&1 &"
CONTENT = "tail -c 16M /dev/shm/dirty | cksum"
WHO = (
    "cat /etc/machine-id /proc/sys/kernel/random/boot_id; hostname; head -c 16 /dev/urandom | base64;"
    " python3 -c 'import random; print(random.random())'"
)


@asynccontextmanager
async def machine_edge(images: Path, *arguments: str) -> AsyncIterator[tuple[MachineEdge, od.Client]]:
    """A fresh edge that has the tests' templates, and a client of it."""
    edge = MachineEdge(images, arguments)
    try:
        await asyncio.to_thread(edge.start)
        async with edge.client() as client:
            yield edge, client
    finally:
        await asyncio.to_thread(edge.remove)


# --- create to the first answer -----------------------------------------------------------------------------------------


async def first_answer(client: od.Client, spec: od.Container | od.MicroVM, samples: dict[str, list[float]]) -> None:
    """Create, run `true` twice, end."""
    box, created = await timed(client.create(spec))
    try:
        result, ran = await timed(box.run(["true"]))
        if result.exit_code != 0:
            raise RuntimeError(f"true failed: {result}")
        _, again = await timed(box.run(["true"]))
    finally:
        _, killed = await timed(box.kill())
    for name, value in (("create", created), ("first_run", ran), ("run_true", again), ("kill", killed), ("first_answer", created + ran)):
        samples.setdefault(name, []).append(value)


async def clones(edge: MachineEdge, client: od.Client, report: Report, count: int) -> None:
    """One after another, none from those that wait; beside containers. Nothing more is there afterwards than was before."""
    samples: dict[str, list[float]] = {}
    peers: dict[str, list[float]] = {}
    for _ in range(3):  # warm-up, and the template if there is none yet
        await first_answer(client, machine(), {})
        await first_answer(client, od.Container(image=IMAGE), {})
    before, failed = held(edge), 0
    for turn in range(count):
        try:
            async with asyncio.timeout(30):
                await first_answer(client, machine(), samples)
        except (od.OpenDSecError, RuntimeError, TimeoutError) as error:
            failed += 1
            print(f"clone {turn}: {error!r}", file=sys.stderr)
        if turn % 5 == 0:
            await first_answer(client, od.Container(image=IMAGE), peers)
    for name, values in samples.items():
        report.distribution(f"microvm.{name}", values)
    report.distribution("container.first_answer", peers["first_answer"])
    median = percentile(samples["first_answer"], 0.5)
    report.add("microvm.create.median_ms", median)
    report.add("microvm.create.p99_ms", percentile(samples["first_answer"], 0.99))
    report.add("microvm.clones_300.failed", failed)
    report.add("microvm.clones_300.leaked", await leaked(edge, before))
    boot = next(float(str(one["value"])) for one in report.results if one["name"] == "qemu.boot.median")
    report.add("microvm.create.ratio", boot / median)
    report.note("microvm.create.containers", median / percentile(peers["first_answer"], 0.5), "x of a container's")


def held(edge: MachineEdge) -> int:
    """Descriptors of the edge and of its children, and children. Not those of its journal: SQLite keeps the one of a checkpoint's
    connection for the next."""
    children = procfs.children(edge.pid)
    names = [name for pid in (edge.pid, *children) for name in procfs.fds(pid).values()]
    return len(children) + sum(not name.startswith(os.fsencode(edge.state_dir / "journal.db")) for name in names)


async def leaked(edge: MachineEdge, before: int) -> int:
    """What is there beyond that, and what belongs to no sandbox. What is about to go may."""
    until = time.monotonic() + SETTLE_S
    while True:
        strays, more = edge.strays([]), held(edge) - before
        if not strays and more <= 0:
            return 0
        if time.monotonic() > until:
            print(f"left: {strays}, {more} descriptors and children", file=sys.stderr)
            return len(strays) + max(more, 0)
        await asyncio.sleep(0.1)


async def from_the_pool(edge: MachineEdge, client: od.Client, report: Report, count: int) -> None:
    """The same, each with a machine that waits."""
    samples: dict[str, list[float]] = {}
    await first_answer(client, machine(), {})
    missed = 0
    while len(samples.get("first_answer", [])) < count:
        waiting = await at_rest(edge)
        taken: dict[str, list[float]] = {}
        await first_answer(client, machine(), taken)
        if waiting & edge.machine_groups():  # it waits still, so it was not the one
            missed += 1
            continue
        for name, values in taken.items():
            samples.setdefault(name, []).extend(values)
    report.distribution("microvm.pool.create", samples["create"])
    report.distribution("microvm.pool.first_answer", samples["first_answer"])
    report.add("microvm.pool.median_ms", percentile(samples["first_answer"], 0.5))
    report.note("microvm.pool.missed", missed, "creates")


async def at_rest(edge: MachineEdge) -> set[str]:
    """The machines that wait, once there is one and it has come to rest."""
    async with asyncio.timeout(120):
        before: tuple[set[str], int] | None = None
        while True:
            now = edge.machine_groups(), edge.machine_cpu_us()
            if now[0] and now == before:
                return now[0]
            before = now
            await asyncio.sleep(0.15)


# --- many at once -------------------------------------------------------------------------------------------------------


async def live(edge: MachineEdge, client: od.Client, report: Report, count: int) -> None:
    """So many at once: what each takes while it idles, and whether each answers."""
    made, took = await timed(client.create_many(machine(), count))
    boxes = [box for box in made if isinstance(box, od.Sandbox)]
    for error in [box for box in made if not isinstance(box, od.Sandbox)][:3]:
        print(f"live: {error!r}", file=sys.stderr)
    try:
        idle = [procfs.pss_bytes(pid) / MIB for pid in edge.machines()]
        unanswered, latency_ms = count - len(boxes), []
        for box in boxes:
            try:
                result, ran = await timed(box.run(["true"], timeout_s=60))
            except od.OpenDSecError as error:
                print(f"live: {error!r}", file=sys.stderr)
                unanswered += 1
                continue
            unanswered += result.exit_code != 0
            latency_ms.append(ran)
        used = [procfs.pss_bytes(pid) / MIB for pid in edge.machines()]
    finally:
        await asyncio.gather(*(box.kill() for box in boxes))
    report.note("microvm.live_100.count", count, "machines")
    report.note("microvm.live_100.rate", len(boxes) / took * 1000, "per s")
    report.distribution("microvm.live_100.first_run", latency_ms)
    report.add("microvm.live_100.unanswered", unanswered)
    report.add("microvm.idle.memory", percentile(idle, 0.5))
    report.note("microvm.used.memory", percentile(used, 0.5), "MiB")


# --- standing still, and going on twice ---------------------------------------------------------------------------------


async def forks(client: od.Client, report: Report, rounds: int) -> None:
    times, alike, harmed = [], 0, 0
    for _ in range(rounds):
        box = await client.create(machine(memory=LARGER))
        kids: list[od.Sandbox] = []
        try:
            (await box.run(["python3", "-c", DIRTY], timeout_s=60)).check()
            (await box.run(TICKS)).check()
            content = (await box.run(CONTENT, timeout_s=60)).check().stdout
            before = (await box.run(WHO)).check().stdout.split()
            made, took = await timed(box.fork(FORKS))
            kids = [one for one in made if isinstance(one, od.Sandbox)]
            for one in made:
                if not isinstance(one, od.Sandbox):
                    raise one
            times.append(took)
            told = [(await one.run(WHO, timeout_s=60)).check().stdout.split() for one in (box, *kids)]
            alike += sum(len(told) - len({one[column] for one in told}) for column in range(len(told[0])))
            harmed += told[0][:3] != before[:3]  # who it is, and that the rest differs from what it drew before
            harmed += sum(a == b for a, b in zip(told[0][3:], before[3:], strict=True))
            goes_on = f"n=$(wc -l < {TICKED}); while [ $(wc -l < {TICKED}) = $n ]; do sleep 0.2; done; {CONTENT}"
            harmed += (await box.run(goes_on, timeout_s=60)).check().stdout != content
            for kid in kids[:2]:
                if (await kid.run(goes_on, timeout_s=60)).check().stdout != content:
                    raise RuntimeError("a fork has other memory than its source")
        finally:
            await asyncio.gather(*(one.kill() for one in (box, *kids)))
    report.distribution("microvm.fork_8", times)
    report.add("microvm.fork_8.all", max(times) / 1000)
    report.add("microvm.fork_8.alike", alike)
    report.add("microvm.fork_8.harmed", harmed)


async def pauses(client: od.Client, report: Report, rounds: int) -> None:
    paused, resumed, answered = [], [], []
    async with await client.create(machine(memory=LARGER)) as box:
        await box.files.write("/dev/shm/marker", box.id)
        for _ in range(rounds):
            paused.append((await timed(box.pause()))[1])
            resumed.append((await timed(box.resume()))[1])
            text, took = await timed(box.run(["cat", "/dev/shm/marker"]))
            answered.append(resumed[-1] + took)
            if text.check().stdout != box.id:
                raise RuntimeError("it does not remember")
    report.distribution("microvm.pause", paused)
    report.distribution("microvm.resume", resumed)
    report.distribution("microvm.resume_and_run", answered)
    report.add("microvm.pause.median_ms", percentile(paused, 0.5))
    report.add("microvm.resume.median_ms", percentile(resumed, 0.5))


# --- all ----------------------------------------------------------------------------------------------------------------


async def crashes(images: Path, report: Report, rounds: int) -> None:
    async with machine_edge(images) as (edge, _):
        tally = await Crashes(edge, seed=20261130).run(rounds)
    for detail in tally.details:
        print(detail, file=sys.stderr)
    report.note("microvm.crash.rounds", tally.rounds.total(), "rounds")
    for kind in ("state", "misreported", "left"):
        report.add(f"microvm.crash.{kind}", tally.counts[kind])


async def measure(images: Path, *, quick: bool) -> Report:
    report = Report("microvm", {"qemu": version(QEMU), "container": "this edge's container backend"})
    await plain_boots(report, 2 if quick else 10)
    async with machine_edge(images, "--vm-waiting", "0") as (edge, client):
        accelerator = (await client.capabilities()).backends["microvm"]
        hardware = next(one for one in accelerator if one.name == "hardware_virtualization")
        report.peers["accelerator"] = "kvm" if hardware.available else "tcg"
        await clones(edge, client, report, 20 if quick else 300)
        await live(edge, client, report, 10 if quick else LIVE)
        await forks(client, report, 1 if quick else 3)
        await pauses(client, report, 5 if quick else 40)
    async with machine_edge(images) as (edge, client):
        await from_the_pool(edge, client, report, 8 if quick else 50)
    await boots(images, report, 4 if quick else 300, crashes(images, report, 3 if quick else 50))
    return report


def main(arguments: list[str] | None = None) -> int:
    options = command_line("microvm", __doc__).parse_args(arguments)
    return asyncio.run(measure(base_store(), quick=options.quick)).finish(options)


if __name__ == "__main__":
    sys.exit(main())
