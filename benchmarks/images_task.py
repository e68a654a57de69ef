# SPDX-License-Identifier: Apache-2.0
"""Real tasks on a cold image: the repositories of the demo, their suites run by the judge's command.

A cold run is compared with one where all of the image is here and in memory. Both are the first of a fresh edge; they take turns, and what
counts is the median of the pairs: a noisy neighbour disturbs both halves of one, mostly.

What a task touches is counted apart from the loader: the same sandboxes run over layers that are all here, whose files nobody has read
since they were written, and then the kernel says which pages of the data files it has in memory (mincore).
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import opendsec as od
from benchmarks.edges import STORE, edge, stores
from benchmarks.large_image import LARGE, large_store
from benchmarks.report import Report, percentile
from examples.demo import repos
from opendsec.api.images import DirectorySource
from tests.services import Nginx, nginx_server

PROJECTS = ("marshmallow", "sqlparse")
LATENCY_MS, RATE_MBIT = 20, 1000
PAIRS = 6  # of each project, traced; one of the others
MIB = 1 << 20


@dataclass(frozen=True)
class Task:
    """One run of a project's whole suite: the image that holds all of it, and the command."""

    image: str
    layers: tuple[str, ...]
    script: str

    @property
    def argv(self) -> list[str]:
        return ["/bin/sh", "-c", self.script]


@dataclass(frozen=True)
class Ran:
    seconds: float
    bytes: int
    cached_s: float  # its pair's other half

    @property
    def slowdown(self) -> float:
        return self.seconds / self.cached_s


def tasks(cache: Path, projects: Sequence[str]) -> tuple[dict[str, Path], list[Task]]:
    """The directories of the layers, and the suite of each project as it stands in its workspace."""
    data = repos.load()
    directories = repos.build_layers(data, cache / "layers", cache)
    found = []
    for name in projects:
        project = data.find_project(name)
        paths = [f"{project.workspace_path}/{project.source}", *(data.find_toolkit(ref).path for ref in project.toolkits)]
        script = f"cd {project.workspace_path} && PYTHONPATH={':'.join(paths)} python3 -m pytest -q -p no:cacheprovider tests"
        found.append(Task(f"task-{name}", (project.workspace_ref, *project.toolkits), script))
    return directories, found


async def build(client: od.Client, directories: dict[str, Path], chosen: Sequence[Task]) -> None:
    for label in dict.fromkeys(label for task in chosen for label in task.layers):
        kind, _, rest = label.partition(":")
        name, _, version = rest.partition("@")
        source = DirectorySource(path=str(directories[label].resolve()))
        await client.images.build(name, source, kind="workspace" if kind == "workspace" else "toolkit", version=version)
    for task in chosen:
        await client.images.compose(task.image, LARGE, task.layers)


async def run(client: od.Client, task: Task) -> float:
    """Seconds from `create` to the end of the suite."""
    began = time.perf_counter()
    async with await client.create(od.Container(image=task.image, memory="1GiB")) as box:
        result = await box.run(task.argv, timeout_s=300)
        took = time.perf_counter() - began
    if result.exit_code not in (0, 1) or " passed" not in result.stdout:  # a test that cannot pass there is part of the work
        raise RuntimeError(f"{task.image}: {result.stdout[-500:]} {result.stderr[-500:]}")
    return took


def resident_bytes(files: Sequence[Path]) -> int:
    """Of these files, what is in the page cache."""
    done = subprocess.run(["fincore", "--bytes", "--noheadings", "--output", "RES", *map(str, files)], capture_output=True, check=True)
    return sum(map(int, done.stdout.split()))


def forget(files: Sequence[Path]) -> None:
    """Nothing of them in the page cache."""
    for file in files:
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def task(report: Report, remote: Path, folder: Path, *, quick: bool) -> None:
    cache = Path(os.environ.get("OPENDSEC_TEST_IMAGES", "/var/tmp/opendsec-test-images")) / "downloads"
    projects = PROJECTS[:1] if quick else PROJECTS
    directories, chosen = await asyncio.to_thread(tasks, cache, projects)
    depot, local = folder / "depot", folder / "local"
    subprocess.run(["cp", "-r", "--link", str(remote), str(depot)], check=True)
    runs: dict[str, list[Ran]] = {"untraced": [], "traced": []}
    hot: list[float] = []
    touched = 0
    async with edge(large_store(), ["--scratch-size", "1GiB"], store=stores(depot, writable=True)) as (here, process):
        await build(here, directories, chosen)
        images = process.state_dir / "images"
        subprocess.run(["cp", "-r", "--link", str(images), str(local)], check=True)
        for one in chosen:
            files = list((images / "layers").glob("*/data.blob"))
            await _unmounted(here)
            forget(files)
            before = resident_bytes(files)
            await run(here, one)
            touched += resident_bytes(files) - before
            await here.images.push(one.image, f"store:{STORE}/{one.image}")
        with nginx_server(depot, latency_ms=LATENCY_MS, rate_mbit=RATE_MBIT) as web:
            for one in chosen:
                runs["untraced"].append(await pair(web, local, one, cold_first=True))
            for one in chosen:
                await here.images.trace(one.image, one.argv, timeout_s=300)
                await here.images.push(one.image, f"store:{STORE}/{one.image}")
            for number in range(PAIRS):
                for one in chosen:
                    hot.append(await run(here, one))
                    runs["traced"].append(await pair(web, local, one, cold_first=number % 2 == 0))
    fetched = {what: sum(one.bytes for one in some) / len(some) * len(chosen) for what, some in runs.items()}
    report.note("images.task.cached", statistics.median(one.cached_s for one in runs["traced"]), "s")
    report.note("images.task.hot", statistics.median(one.seconds / was for one, was in zip(runs["traced"], hot, strict=True)), "x")
    report.note("images.task.untraced_slowdown", statistics.median(one.slowdown for one in runs["untraced"]), "x")
    report.note("images.task.touched", touched / MIB, "MiB")
    report.note("images.task.untraced_fetched", fetched["untraced"] / touched, "x")
    for name, share in (("low", 0.25), ("high", 0.75)):
        report.note(f"images.task.slowdown_{name}", percentile([one.slowdown for one in runs["traced"]], share), "x")
    report.add("images.task.fetched", fetched["traced"] / touched)
    report.add("images.task.slowdown", statistics.median(one.slowdown for one in runs["traced"]))


async def pair(web: Nginx, local: Path, one: Task, *, cold_first: bool) -> Ran:
    """The same on two fresh edges: one has the image's metadata, the other all of it."""

    async def cold() -> tuple[float, int]:
        async with edge(None, ["--scratch-size", "1GiB"], store=stores(web.url)) as (client, _):
            await client.images.pull(f"store:{STORE}/{one.image}")
            before = web.counts().sent_bytes
            return await run(client, one), web.counts().sent_bytes - before

    async def cached() -> float:
        async with edge(local, ["--scratch-size", "1GiB"]) as (client, _):
            await client.images.inspect(one.image)
            return await run(client, one)

    if cold_first:
        seconds, fetched = await cold()
        return Ran(seconds, fetched, await cached())
    near = await cached()
    seconds, fetched = await cold()
    return Ran(seconds, fetched, near)


async def _unmounted(client: od.Client) -> None:
    """Let go of mounts: a mount of its own has a page cache of its own, which would hide what is read from the files."""
    await client.images.gc(grace_s=1e6)
