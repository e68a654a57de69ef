# SPDX-License-Identifier: Apache-2.0
"""Containers beside bwrap and crun, on the same root file system, in the same run.

    dsec bench container [--json] [--quick] [--plot FILE.png]

Samples of all contestants are interleaved, so that a noisy neighbour disturbs all alike. Ours are taken through the SDK, over the
unix socket of an edge that this benchmark starts, with its journal in a state directory of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import opendsec as od
from benchmarks.peers import peers
from benchmarks.report import Report, command_line, percentile
from benchmarks.support import IMAGE, bench_edge, image_layers
from opendsec.kernel import abi, mounts, procfs, syscalls
from tests.images import base_store

IDLE = od.Container(image=IMAGE, memory="16MiB", disk="4MiB")  # small promises, so that 1,000 fit what the edge may promise
MIB = 1 << 20


@contextmanager
def root_directory(layers: list[tuple[Path, Path]]) -> Iterator[Path]:
    """The image's own layers mounted read-only at a path, for the peers."""
    with tempfile.TemporaryDirectory(prefix="dsec-bench-") as folder:
        target = Path(folder)
        fds = [mounts.mount_erofs(meta, data) for meta, data in layers]
        root = mounts.overlay(list(reversed(fds)), None, None) if len(fds) > 1 else fds[0]
        where = os.open(target, os.O_PATH | os.O_DIRECTORY)
        try:
            mounts.attach(root, where)
        finally:
            for fd in {*fds, root, where}:
                os.close(fd)
        try:
            yield target
        finally:
            syscalls.umount2(target, abi.MNT_DETACH)


def bwrap_command(root: Path) -> list[str]:
    program = shutil.which("bwrap")
    assert program is not None, "bwrap is not installed; `make setup` installs it"
    return [program, "--unshare-all", "--ro-bind", str(root), "/", "--proc", "/proc", "--dev", "/dev", "true"]


def crun_command(root: Path, folder: Path) -> list[str] | None:
    """None where crun is not there."""
    program = shutil.which("crun")
    if program is None:
        return None
    subprocess.run([program, "spec"], cwd=folder, check=True)
    config = json.loads((folder / "config.json").read_text())
    config["root"] = {"path": str(root), "readonly": True}
    config["process"].update({"terminal": False, "args": ["true"]})
    config["mounts"] = [mount for mount in config["mounts"] if mount["type"] not in ("cgroup", "sysfs")]
    (folder / "config.json").write_text(json.dumps(config))
    return [program, "--cgroup-manager=disabled", "run", "--bundle", str(folder), "dsec-bench"]


async def latencies(client: od.Client, report: Report, root: Path, rounds: int) -> None:
    """One at a time: create, run in it, kill; beside the peers."""
    create_ms: list[float] = []
    run_ms: list[float] = []
    kill_ms: list[float] = []
    bwrap_ms: list[float] = []
    crun_ms: list[float] = []
    with tempfile.TemporaryDirectory(prefix="dsec-bench-") as folder, peers() as peer:
        bwrap, crun = bwrap_command(root), crun_command(root, Path(folder))
        if crun is not None and peer.time_ms(crun) is None:
            report.peers["crun"] += " (does not run here)"
            crun = None
        for turn in range(rounds + 5):
            began = time.perf_counter()
            box = await client.create(od.Container(image=IMAGE))
            created = time.perf_counter()
            result = await box.run("true" if turn < 5 else ["true"])
            ran = time.perf_counter()
            await box.run(["true"])
            again = time.perf_counter()
            await box.kill()
            killed = time.perf_counter()
            if result.exit_code != 0:
                raise RuntimeError(f"true failed: {result}")
            times = [peer.time_ms(command) for command in (bwrap, crun) if command is not None]
            if None in times:
                raise RuntimeError("a peer failed")
            if turn < 5:
                continue  # warm-up
            create_ms.append((created - began) * 1000)
            run_ms += [(ran - created) * 1000, (again - ran) * 1000]
            kill_ms.append((killed - again) * 1000)
            bwrap_ms += [took for took in times[:1] if took is not None]
            crun_ms += [took for took in times[1:] if took is not None]
    report.distribution("container.create", create_ms)
    report.distribution("container.run_true", run_ms)
    report.distribution("container.kill", kill_ms)
    report.distribution("bwrap.true", bwrap_ms)
    if crun_ms:
        report.distribution("crun.run_true", crun_ms)
    peer_median = percentile(bwrap_ms, 0.5)
    report.add("container.create.ratio", percentile(create_ms, 0.5) / peer_median)
    report.add("container.run_true.ratio", percentile(run_ms, 0.5) / peer_median)


async def burst(client: od.Client, report: Report, count: int, repetitions: int) -> None:
    """`count` containers by one request; the median of some repetitions, and all that were lost in any."""
    rates, lost = [], 0
    for _ in range(repetitions):
        began = time.perf_counter()
        boxes = await client.create_many(IDLE, count)
        rates.append(count / (time.perf_counter() - began))
        alive = [box for box in boxes if isinstance(box, od.Sandbox)]
        lost += count - len(alive)
        await asyncio.gather(*(box.kill() for box in alive))
    report.add("container.burst_300.rate", percentile(rates, 0.5))
    report.add("container.burst_300.lost", lost)


def used_memory() -> int:
    """Bytes of host memory that are not available to anybody else."""
    info = procfs.meminfo()
    return info["MemTotal"] - info["MemAvailable"]


def process_memory(pid: int) -> int:
    """Proportional memory of a process, in bytes."""
    for line in procfs.read(procfs.path_of(pid, "smaps_rollup")).splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return 0


async def density(client: od.Client, report: Report, count: int) -> None:
    """Idle containers: what each costs, and whether each still works."""
    info = await client.info()
    before, edge_before = used_memory(), process_memory(info.pid)
    boxes: list[od.Sandbox] = []
    while len(boxes) < count:
        made = await client.create_many(IDLE, min(200, count - len(boxes)))
        failed = [box for box in made if not isinstance(box, od.Sandbox)]
        if failed:
            raise RuntimeError(f"cannot fill up: {failed[0]}")
        boxes += [box for box in made if isinstance(box, od.Sandbox)]
    grown = used_memory() - before - (process_memory(info.pid) - edge_before)
    latency_ms: list[float] = []
    unusable = 0
    for box in boxes:
        began = time.perf_counter()
        result = await box.run(["true"])
        latency_ms.append((time.perf_counter() - began) * 1000)
        unusable += result.exit_code != 0
    await asyncio.gather(*(box.kill() for box in boxes))
    report.distribution("container.idle_1000.run_true", latency_ms)
    report.add("container.idle_1000.memory", grown / count / MIB)
    report.add("container.idle_1000.unusable", unusable)


async def measure(images: Path, *, quick: bool) -> Report:
    report = Report("container", {"bwrap": version("bwrap"), "crun": version("crun")})
    async with bench_edge(images) as client:
        with root_directory(image_layers(images)) as root:
            await latencies(client, report, root, 30 if quick else 200)
        await burst(client, report, 300, 1 if quick else 5)
        await density(client, report, 1000)
    return report


def version(program: str) -> str:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "not here"
    return done.stdout.splitlines()[0]


def main(arguments: list[str] | None = None) -> int:
    options = command_line("container", __doc__).parse_args(arguments)
    return asyncio.run(measure(base_store(), quick=options.quick)).finish(options)


if __name__ == "__main__":
    sys.exit(main())
