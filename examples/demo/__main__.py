# SPDX-License-Identifier: Apache-2.0
"""The demo, from an empty machine to two tables: `make demo`, or `python -m examples.demo [--work DIR] [--parallel N] [--part NAME]
[--backend NAME]`.

    1. an edge with a state of its own beneath the work directory
    2. the base image, by mmdebstrap from this machine's own apt sources
    3. a layer for each workspace and toolkit, from PyPI's source distributions and wheels
    4. HumanEval: 164 canonical solutions that must pass, 164 mutated ones that must fail, a container each; with `--backend fncall`
       each is a function call in a pool of warm interpreters instead (`make demo BACKEND=fncall`)
    5. repository tasks: an idle agent must fail, a recorded one must pass, judged by upstream tests in a second container; with
       `--backend microvm` each sandbox is a microVM instead

It ends with exit code 0 only if not one of them was judged otherwise (humaneval.mistaken, repository.tasks and repository.mistaken of
SPECIFICATION.md). Images and downloads are kept for the next run.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

import opendsec as od
from examples.demo import humaneval, repos
from examples.demo.fetch import fetch
from examples.demo.lines import BASE_IMAGE, TaskLine, write_lines
from opendsec.api.images import BuildEvent, DebianSource, DirectorySource, LayerKind

PACKAGES = ("python3",)
POOL = "humaneval"
EMULATED = 10  # times as long
KINDS: dict[str, LayerKind] = {"workspace": "workspace", "toolkit": "toolkit"}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def progress(event: BuildEvent) -> None:
    if event.kind == "step":
        say(f"    {event.message}")


async def build_images(client: od.Client, layers: dict[str, Path]) -> None:
    """The base image and the layers that are not there yet."""
    known = await client.images.list()
    if not any(image.name.partition(":")[0] == BASE_IMAGE for image in known.images):
        say(f"building the base image {BASE_IMAGE}")
        await client.images.build(BASE_IMAGE, DebianSource(packages=PACKAGES), progress=progress)
    names = {name for layer in known.layers for name in layer.names}
    for ref, directory in sorted(layers.items()):
        if ref in names:
            continue
        kind, _, rest = ref.partition(":")
        name, _, version = rest.partition("@")
        say(f"building {ref}")
        await client.images.build(
            name, DirectorySource(path=str(directory.resolve())), kind=KINDS[kind], version=version, progress=progress
        )


def dsec(run_dir: Path, *words: str) -> bool:
    """Run a command of ours on the demo's edge; whether it found everything as expected."""
    program = str(Path(sys.executable).with_name("dsec"))
    environment = {"OPENDSEC_RUN_DIR": str(run_dir), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    return subprocess.run([program, *words], env=environment, check=False).returncode == 0


def patient(task: TaskLine) -> TaskLine:
    """With time enough for a machine whose processor is emulated."""
    replace = msgspec.structs.replace
    actions = tuple(replace(one, timeout_s=EMULATED * one.timeout_s) for one in task.actions)
    return replace(task, actions=actions, verify=replace(task.verify, timeout_s=EMULATED * task.verify.timeout_s))


def rollout(work: Path, name: str, *, run_dir: Path, parallel: int, backend: str = "container") -> bool:
    """Run `dsec rollout` over the task file `name`.jsonl; whether every task was judged as expected."""
    say(f"\n=== {name} ===" if backend == "container" else f"\n=== {name}, in sandboxes that are each a {backend} ===")
    results = work / f"{name}.results.jsonl"
    results.unlink(missing_ok=True)
    options = ("--parallel", str(parallel), "--backend", backend, "--out", str(results))
    return dsec(run_dir, "rollout", str(work / f"{name}.jsonl"), *options)


async def judge(client: od.Client, work: Path, name: str, *, run_dir: Path, parallel: int) -> bool:
    """Run `dsec judge` over `name`.calls.jsonl in a pool made for it; whether every program was judged as expected."""
    say(f"\n=== {name}, as function calls ===")
    await client.pools.set(POOL, image=BASE_IMAGE, size=parallel, max=parallel, memory="640MiB")
    try:
        return await asyncio.to_thread(
            dsec, run_dir, "judge", str(work / f"{name}.calls.jsonl"), "--parallel", str(2 * parallel), "--quiet"
        )
    finally:
        await client.pools.remove(POOL)


async def main(work: Path, parallel: int, parts: Iterable[str], backend: str) -> int:
    began = time.monotonic()
    work.mkdir(parents=True, exist_ok=True)
    cache = work / "downloads"
    data = repos.load()
    wanted = set(parts)
    if "humaneval" in wanted:
        problems = humaneval.load_problems(fetch(humaneval.RELEASE, cache))
        write_lines(humaneval.tasks(problems), work / "humaneval.jsonl")
        write_lines(humaneval.calls(problems, pool=POOL), work / "humaneval.calls.jsonl")
    layers: dict[str, Path] = {}
    if "repositories" in wanted:
        say("fetching source distributions")
        layers = repos.build_layers(data, work / "layers", cache)
        tasks = repos.tasks(data, cache)
        write_lines(map(patient, tasks) if backend == "microvm" else tasks, work / "repositories.jsonl")
    right = True
    run_dir = Path(tempfile.mkdtemp(prefix="dsec-demo-"))  # short: a socket's path has at most 107 bytes
    async with od.Client(run_dir=run_dir, state_dir=work / "state") as client:
        try:
            await build_images(client, layers)
            for name in ("humaneval", "repositories"):
                if name == "humaneval" and name in wanted and backend == "fncall":
                    right = await judge(client, work, name, run_dir=run_dir, parallel=parallel) and right
                elif name in wanted:
                    kind = backend if name == "repositories" and backend == "microvm" else "container"
                    right = await asyncio.to_thread(rollout, work, name, run_dir=run_dir, parallel=parallel, backend=kind) and right
        finally:
            await client.shutdown(kill=True)
            shutil.rmtree(run_dir, ignore_errors=True)
    say(f"\n{'none mistaken' if right else 'SOME WERE MISTAKEN'}, {time.monotonic() - began:.0f} s in all")
    return 0 if right else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path(".cache/demo"), help="keeps downloads, images and results")
    parser.add_argument("--parallel", type=int, default=4, help="sandboxes at a time")
    parser.add_argument("--part", action="append", choices=["humaneval", "repositories"], help="only this part")
    kinds = ["container", "fncall", "microvm"]
    parser.add_argument("--backend", choices=kinds, default="container", help="fncall: HumanEval's programs; microvm: repository tasks")
    options = parser.parse_args()
    sys.exit(asyncio.run(main(options.work.resolve(), options.parallel, options.part or ["humaneval", "repositories"], options.backend)))
