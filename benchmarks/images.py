# SPDX-License-Identifier: Apache-2.0
"""Images that start before they are downloaded, beside whole pulls; composed layers beside archives; packing.

    dsec bench images [--json] [--quick] [--plot FILE.png]

The image has over 1 GiB (`large_image`). Its store is nginx behind a line of 20 ms and 1 Gbit/s. Each cold start is that of a fresh edge
which has pulled the image's metadata and nothing else. Bytes are those that crossed the line, headers included.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import opendsec as od
from benchmarks.edges import STORE, edge, stores
from benchmarks.large_image import LARGE, large_store
from benchmarks.report import Report, command_line, percentile
from opendsec.api.images import DirectorySource
from tests.images import BASE, base_store
from tests.services import FaultServer, Nginx, nginx_server

LATENCY_MS, RATE_MBIT = 20, 1000
MIB = 1 << 20
COMMAND = ["python3", "-c", "import json"]
SMALL = {"memory": "64MiB", "disk": "16MiB"}


@dataclass(frozen=True)
class Start:
    """One start of a cold image: seconds from `create` to the answer, and the bytes that came until then."""

    seconds: float
    create_s: float
    bytes: int


# --- cold starts ------------------------------------------------------------------------------------------------------


async def publish(remote: Path, traced: Path) -> None:
    """Push the image to a store, and to another one with the trace of a start beside it, as its builder would. Both are kept."""
    if (traced / "published").exists():
        return
    shutil.rmtree(remote, ignore_errors=True)
    shutil.rmtree(traced, ignore_errors=True)
    remote.mkdir(parents=True)
    async with edge(large_store(), ["--scratch-size", "1GiB"], store=stores(remote, writable=True)) as (client, _):
        await client.images.push(LARGE, f"store:{STORE}/{LARGE}")
    subprocess.run(["cp", "-r", "--link", str(remote), str(traced)], check=True)
    async with edge(large_store(), ["--scratch-size", "1GiB"], store=stores(traced, writable=True)) as (client, _):
        await client.images.trace(LARGE, COMMAND)
        await client.images.push(LARGE, f"store:{STORE}/{LARGE}")
    (traced / "published").touch()


async def cold_start(web: Nginx) -> Start:
    async with edge(None, ["--scratch-size", "1GiB"], store=stores(web.url)) as (client, _):
        await client.images.pull(f"store:{STORE}/{LARGE}")
        before = web.counts().sent_bytes
        began = time.perf_counter()
        box = await client.create(od.Container(image=LARGE))
        created = time.perf_counter()
        await box.run(COMMAND, check=True)
        took = time.perf_counter() - began
        return Start(took, created - began, web.counts().sent_bytes - before)


async def whole_pull(web: Nginx, enough_s: float) -> float:
    """The peer: all of the image first, then the command. Given up after `enough_s`: it takes at least that."""
    async with edge(None, ["--scratch-size", "1GiB"], store=stores(web.url)) as (client, _):
        began = time.perf_counter()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(enough_s):
                await client.images.pull(f"store:{STORE}/{LARGE}", lazy=False)
                box = await client.create(od.Container(image=LARGE))
                await box.run(COMMAND, check=True)
        return time.perf_counter() - began


async def starts(report: Report, remote: Path, traced_remote: Path, *, rounds: int, enough: float) -> None:
    """`enough`: give the peer up when it has taken so many times what a traced start takes."""
    image_bytes = sum(file.stat().st_size for file in large_store().glob("layers/*/*.[be]*"))
    report.note("images.large.size", image_bytes / (1 << 30), "GiB")
    with nginx_server(remote, latency_ms=LATENCY_MS, rate_mbit=RATE_MBIT) as web:
        cold = [await cold_start(web) for _ in range(rounds)]
    with nginx_server(traced_remote, latency_ms=LATENCY_MS, rate_mbit=RATE_MBIT) as web:
        traced = [await cold_start(web) for _ in range(rounds)]
        traced_s = percentile([one.seconds for one in traced], 0.5)
        whole_s = await whole_pull(web, traced_s * enough)
    report.distribution("images.cold", [one.seconds * 1000 for one in cold])
    report.distribution("images.traced", [one.seconds * 1000 for one in traced])
    report.note("images.whole_pull", whole_s, "s")
    report.note("images.cold.bytes", percentile([one.bytes for one in cold], 0.5) / MIB, "MiB")
    report.note("images.traced.bytes", percentile([one.bytes for one in traced], 0.5) / MIB, "MiB")
    report.add("images.cold.first_command", percentile([one.seconds for one in cold], 0.5))
    report.add("images.cold.share", 100 * percentile([one.bytes for one in cold], 0.5) / image_bytes)
    report.add("images.traced.first_command", traced_s)
    report.add("images.traced.advantage", whole_s / traced_s)


# --- many at once -----------------------------------------------------------------------------------------------------


async def burst(report: Report, remote: Path, count: int = 64) -> None:
    """All at once on one cold image: which chunks were fetched more than once."""
    with FaultServer(remote) as web:
        async with edge(None, ["--scratch-size", "2GiB"], store=stores(web.url)) as (client, _):
            await client.images.pull(f"store:{STORE}/{LARGE}")
            detail = (await client.images.inspect(LARGE)).layers[0]
            web.reset()
            began = time.perf_counter()
            boxes = await client.create_many(od.Container(image=LARGE, memory="64MiB", disk="16MiB"), count)
            alive = [box for box in boxes if isinstance(box, od.Sandbox)]
            await asyncio.gather(*(box.run(COMMAND, check=True) for box in alive))
            report.note(f"images.burst_{count}.all_answered", time.perf_counter() - began, "s")
            fetched: Counter[int] = Counter()
            for request in list(web.requests):
                if request.path.endswith("data.blob") and request.length:
                    first, last = request.start // detail.chunk_bytes, (request.start + request.length - 1) // detail.chunk_bytes
                    fetched.update(range(first, last + 1))
    report.note(f"images.burst_{count}.chunks", len(fetched), "chunks")
    report.add("images.burst_64.lost", count - len(alive))
    report.add("images.burst_64.repeated", sum(times - 1 for times in fetched.values()))


# --- warm reads -------------------------------------------------------------------------------------------------------

READER = """
import os, sys, time
small, large = [], []
for folder, _, names in os.walk("/usr"):
    if len(small) >= FILES and len(large) >= FILES // 500:
        break
    for name in names:
        path = os.path.join(folder, name)
        if os.path.islink(path):
            continue
        size = os.path.getsize(path)
        if size <= 16384 and len(small) < FILES:
            small.append(path)
        elif size >= 8 << 20 and len(large) < FILES // 500:
            large.append(path)
small.sort(), large.sort()
buffer = bytearray(1 << 20)
def read(path):
    total = 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            total += count
    return total
for path in small + large:
    read(path)
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    if line.strip() == "small":
        done = sum(1 for path in small if read(path) >= 0)
    else:
        done = sum(read(path) for path in large)
    print(done / (time.perf_counter() - began), flush=True)
"""


class Reader:
    """The program above in a sandbox: rates of reading what is in the page cache."""

    def __init__(self, box: od.Sandbox, files: int) -> None:
        self._box, self._text, self._program = box, "", READER.replace("FILES", str(files))

    async def start(self) -> None:
        self._process = await self._box.start(["python3", "-u", "-c", self._program], stdin_stream=True)
        self._events = self._process.attach()
        await self._line()

    async def rate(self, what: str) -> float:
        await self._process.write(f"{what}\n")
        return float(await self._line())

    async def _line(self) -> str:
        async for event in self._events:
            self._text += event.text if event.kind == "output" else ""
            line, newline, rest = self._text.partition("\n")
            if newline:
                self._text = rest
                return line
            if event.kind == "exit":
                raise RuntimeError(f"the reader ended: {event}")
        raise RuntimeError("the reader ended")

    async def stop(self) -> None:
        await self._events.aclose()


async def warm(report: Report, remote: Path, rounds: int, files: int) -> None:
    """Reads of content that was loaded on demand, beside the same layer fully local; both in the page cache."""
    with nginx_server(remote) as web:
        async with (
            edge(large_store(), ["--scratch-size", "1GiB"]) as (here, _),
            edge(None, ["--scratch-size", "1GiB"], store=stores(web.url)) as (there, _),
        ):
            await there.images.pull(f"store:{STORE}/{LARGE}")
            readers = [Reader(await client.create(od.Container(image=LARGE, memory="1GiB")), files) for client in (here, there)]
            for reader in readers:
                await reader.start()
            rates: dict[str, list[tuple[float, float]]] = {"small": [], "large": []}
            for _ in range(rounds):
                for what, found in rates.items():
                    found.append((await readers[0].rate(what), await readers[1].rate(what)))
            for reader in readers:
                await reader.stop()
    # Of each pair, which was read within moments: a noisy neighbour disturbs both sides alike.
    ratios = {what: percentile([there / here for here, there in found], 0.5) for what, found in rates.items()}
    report.note("images.warm.local_throughput", percentile([pair[0] for pair in rates["large"]], 0.5) / MIB, "MiB/s")
    report.note("images.warm.local_small_files", percentile([pair[0] for pair in rates["small"]], 0.5), "per s")
    report.add("images.warm.throughput", ratios["large"])
    report.add("images.warm.small_files", ratios["small"])


# --- composition ------------------------------------------------------------------------------------------------------


def tree(root: Path, name: str, files: int, size: int) -> Path:
    """A directory as of a tool: `files` of text that compresses a little."""
    for number in range(files):
        path = root / name / "opt" / name / f"part{number % 16}" / f"file{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size // 2).hex().encode())
    return root / name


async def compose(report: Report, folder: Path, *, workspaces: int, boxes: int, rounds: int, files: int) -> None:
    """`files`: of each toolkit."""
    layers = {"workspace:w@1": 2 * files, "toolkit:a@1": files, "toolkit:b@1": files, "toolkit:c@1": files}
    async with edge(base_store(), ["--scratch-size", "4GiB"]) as (client, _):
        for label, count in layers.items():
            kind, _, name = label.partition(":")
            source = DirectorySource(path=str(tree(folder, name[0], count, 8192)))
            await client.images.build(name[0], source, kind="workspace" if kind == "workspace" else "toolkit", version="1")
        await creation(report, client, tuple(layers), rounds)
        await written(report, client, folder, tuple(layers), boxes)
        await upgrade(report, client, folder, workspaces)


async def creation(report: Report, client: od.Client, layers: tuple[str, ...], rounds: int) -> None:
    """Created in turns: the base alone, and with a workspace and three toolkits."""
    took: dict[str, list[float]] = {"base": [], "composed": []}
    for turn in range(rounds + 5):
        pair: list[tuple[str, tuple[str, ...]]] = [("base", ()), ("composed", layers)]
        for what, on_top in pair if turn % 2 else reversed(pair):
            began = time.perf_counter()
            box = await client.create(od.Container(image=BASE, layers=on_top))
            if turn >= 5:
                took[what].append((time.perf_counter() - began) * 1000)
            await box.kill()
    for what, samples in took.items():
        report.distribution(f"images.compose.create_{what}", samples)
    report.add("images.compose.extra", percentile(took["composed"], 0.5) - percentile(took["base"], 0.5))


async def written(report: Report, client: od.Client, folder: Path, layers: tuple[str, ...], count: int) -> None:
    """What sandboxes of the same content write: layers, beside archives unpacked in each of them."""
    archive = folder / "layers.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for label in layers:
            name = label.partition(":")[2][0]
            tar.add(folder / name, arcname=".")
    known = {name: layer for layer in (await client.images.list()).layers for name in layer.names}
    ours = sum(known[label].meta_bytes + known[label].data_bytes for label in layers)
    peer = 0
    unpack_ms, composed_ms = [], []
    for _ in range(count):
        began = time.perf_counter()
        async with await client.create(od.Container(image=BASE, layers=layers, disk="64MiB")) as box:
            await box.run("ls /opt", check=True)
            composed_ms.append((time.perf_counter() - began) * 1000)
            ours += (await box.usage()).disk_bytes
        began = time.perf_counter()
        async with await client.create(od.Container(image=BASE, disk="64MiB")) as box:
            before = (await box.usage()).disk_bytes
            process = await box.start(["tar", "-xzf", "-", "-C", "/"], stdin_stream=True)
            await process.write(archive.read_bytes())
            await process.close_stdin()
            (await process.wait()).check()
            unpack_ms.append((time.perf_counter() - began) * 1000)
            peer += (await box.usage()).disk_bytes - before
    report.distribution("images.compose.ready", composed_ms)
    report.distribution("images.tar_gz.ready", unpack_ms)
    report.add("images.compose.written", peer / ours)


async def upgrade(report: Report, client: od.Client, folder: Path, count: int) -> None:
    """A new base under many workspaces: which layers were made for it."""
    name = "old-base"
    await client.images.build(name, DirectorySource(path=str(tree(folder, "old", 8, 4096))))
    for number in range(count):
        path = folder / f"ws{number}"
        path.mkdir()
        (path / "id").write_text(f"{number}\n")
        await client.images.build(f"ws{number}", DirectorySource(path=str(path), prefix="/workspace"), kind="workspace")
        await client.images.compose(f"task{number}", name, [f"workspace:ws{number}@1"])
    before = {layer.digest for layer in (await client.images.list()).layers}
    began = time.perf_counter()
    await client.images.build(name, DirectorySource(path=str(tree(folder, "new", 8, 4096))))
    for number in range(count):
        await client.images.compose(f"task{number}", name, [f"workspace:ws{number}@1"])
    report.note(f"images.compose.upgrade_{count}", time.perf_counter() - began, "s")
    after = await client.images.list()
    tops = {image.layers[0] for image in after.images if image.name.startswith("task")}
    if len(tops) != 1 or tops & before:
        raise RuntimeError("the images were not upgraded")
    report.add("images.compose.rebuilt", len({layer.digest for layer in after.layers} - before))


# --- packing ----------------------------------------------------------------------------------------------------------


async def pack(report: Report, rounds: int, mib: int = 1024) -> None:
    """So much in the upper of a sandbox that is packed again and again."""
    frozen, took = [], []
    arguments = ["--scratch-driver", "btrfs", "--scratch-size", "4GiB"]
    async with edge(base_store(), arguments) as (client, _):  # noqa: SIM117 (reads better so)
        async with await client.create(od.Container(image=BASE, memory="1GiB", disk="3GiB")) as box:
            await box.run(f"dd if=/dev/urandom of=/root/big bs=1M count={mib} 2>/dev/null; sync", timeout_s=120, check=True)
            for number in range(rounds):
                began = time.perf_counter()
                packed = await box.pack(f"big@{number}")
                took.append(time.perf_counter() - began)
                frozen.append(packed.frozen_ms)
                if packed.layer.data_bytes < mib << 20:
                    raise RuntimeError(f"not all was packed: {packed.layer}")
    report.note("images.pack.took", percentile(took, 0.5), "s")
    report.add("images.pack.frozen", max(frozen))


# --- all of it --------------------------------------------------------------------------------------------------------


async def measure(*, quick: bool, only: Sequence[str]) -> Report:
    from benchmarks import images_task

    report = Report(
        "images", {"nginx": _version("nginx", "-v"), "tar": _version("tar", "--version"), "skopeo": _version("skopeo", "--version")}
    )
    kept = await asyncio.to_thread(large_store)  # which may have to build it, in a loop of its own
    remote, traced = (kept.parent / f"{kept.name}-{what}" for what in ("remote", "traced"))
    await publish(remote, traced)
    with tempfile.TemporaryDirectory(prefix="dsec-bench-", dir="/var/tmp") as folder:
        parts: dict[str, Callable[[], Awaitable[None]]] = {
            "starts": lambda: starts(report, remote, traced, rounds=1 if quick else 5, enough=12 if quick else math.inf),
            "burst": lambda: burst(report, remote),
            "warm": lambda: warm(report, remote, 25 if quick else 40, 1500 if quick else 4000),
            "compose": lambda: (
                compose(report, Path(folder), workspaces=5, boxes=14, rounds=60, files=60)
                if quick
                else compose(report, Path(folder), workspaces=100, boxes=20, rounds=200, files=300)
            ),
            "pack": lambda: pack(report, 1, 128) if quick else pack(report, 3),
            "task": lambda: images_task.task(report, remote, Path(folder), quick=quick),
        }
        for name, part in parts.items():
            if name in only or not (only or (quick and name == "task")):
                began = time.perf_counter()
                await part()
                report.note(f"images.bench.{name}", time.perf_counter() - began, "s")
    return report


def _version(program: str, flag: str) -> str:
    try:
        done = subprocess.run([program, flag], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "not here"
    return (done.stdout or done.stderr).splitlines()[0]


def main(arguments: list[str] | None = None) -> int:
    parser = command_line("images", __doc__)
    parser.add_argument("--only", action="append", choices=["starts", "burst", "warm", "compose", "pack", "task"], help="only this part")
    options = parser.parse_args(arguments)
    return asyncio.run(measure(quick=options.quick, only=options.only or ())).finish(options)


if __name__ == "__main__":
    sys.exit(main())
