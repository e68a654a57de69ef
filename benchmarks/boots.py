# SPDX-License-Identifier: Apache-2.0
"""Boots of microVMs: ours, of templates, and plain ones of the same kernel."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path

import opendsec as od
from benchmarks.report import Report
from benchmarks.support import IMAGE, timed
from opendsec.images.store import ImageStore
from opendsec.kernel import cgroups, procfs
from opendsec.runtime.container.plan import edge_group
from opendsec.runtime.microvm.backend import MicroVMBackend
from opendsec.runtime.vmm.parts import Parts
from opendsec.runtime.vmm.store import Layer, VmStore
from opendsec.runtime.vmm.templates import Wanted, kernel_arguments
from tests.vms import LIMITS, VmNode, kept

QEMU = "qemu-system-x86_64"
MIB = 1 << 20


async def plain_boots(report: Report, count: int) -> None:
    """QEMU boots the same kernel until that looks for its first program, and there is none."""
    with tempfile.TemporaryDirectory(prefix="dsec-bench-") as folder:
        boot = Parts(VmStore(Path(folder)), shared=kept()).boot_image()
    append = f"{kernel_arguments(0, accel='tcg', khz=round(procfs.cpu_khz(), -3))} rdinit=/none"
    command = [QEMU, "-machine", "microvm,rtc=on,isa-serial=on,pit=off,pic=off", "-accel", "tcg,thread=multi", "-cpu", "max"]
    command += ["-m", f"{LIMITS.memory_bytes // MIB}M", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]
    command += ["-serial", "stdio", "-kernel", str(boot.path), "-append", append]
    samples = []
    for _ in range(count):
        began = time.perf_counter()
        done = await asyncio.to_thread(subprocess.run, command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
        samples.append((time.perf_counter() - began) * 1000)
        if b"panic" not in done.stdout:
            raise RuntimeError(f"the kernel did not come to its end: {done.stdout[-300:]!r} {done.stderr[-300:]!r}")
    report.distribution("qemu.boot", samples)


class Boots:
    """Templates that are made and thrown away again."""

    def __init__(self, images: Path, node: VmNode, backend: MicroVMBackend) -> None:
        self.samples: list[float] = []
        self.failed = 0
        self._node, self._backend = node, backend
        self._layers = tuple(Layer(one.digest, str(one.meta), str(one.data)) for one in ImageStore(images).resolve(IMAGE).layers)

    async def run(self, lane: int, turns: Iterator[int]) -> None:
        wanted = Wanted(
            accel=self._backend.accel,
            layers=self._layers,
            cpus=1,
            memory_bytes=LIMITS.memory_bytes + (lane + 1) * MIB,  # a size that nobody else has
            disk_bytes=LIMITS.disk_bytes,
            inodes=LIMITS.inodes,
        )
        for turn in turns:
            try:
                template, took = await timed(self._backend.templates.get(wanted))
            except od.OpenDSecError as error:
                self.failed += 1
                print(f"boot {turn}: {error!r}", file=sys.stderr)
                continue
            self.samples.append(took)
            shutil.rmtree(self._node.store.template(template.key))
            self._node.store.disk(template.disk).unlink()

    def things(self) -> set[str]:
        """What is there of this edge, and this process's descriptors and children."""
        root, run = self._node.store.root, self._node.directory / "run"
        found = {str(path) for parent in (root, run) for path in parent.glob("*/*") if path.suffix != ".lock"}
        found |= {f"descriptor {number} {os.fsdecode(target)}" for number, target in procfs.fds().items()}
        found |= {f"child {pid}" for pid in procfs.children(os.getpid())}
        top = cgroups.discover().group(f"{edge_group(self._node.edge_id)}-microvm")
        found |= {f"group {group.name}" for group in (top.children() if top.exists() else ())}
        return found | {f"mount {os.fsdecode(one.mount_point)}" for one in procfs.mountinfo()}


async def boots(images: Path, report: Report, count: int, beside: Coroutine[None, None, None]) -> None:
    """As many at a time as there are cores. `beside`: what is done meanwhile, for no bound is on their time; it leaves nothing either."""
    with tempfile.TemporaryDirectory(prefix="dsec-bench-", dir="/var/tmp") as folder:
        async with VmNode(Path(folder)) as node:
            backend = await node.make()
            try:
                made = Boots(images, node, backend)
                await made.run(0, iter(range(1)))  # warm-up
                made.samples.clear()
                before, booted = made.things(), backend.templates.boots
                turns = iter(range(count))
                await asyncio.gather(beside, *(made.run(lane, turns) for lane in range(os.cpu_count() or 1)))
                left = made.things() - before
                booted = backend.templates.boots - booted
            finally:
                await backend.close()
    report.distribution("microvm.boot", made.samples)
    report.note("microvm.boots_300.count", len(made.samples), "boots")
    report.note("microvm.boots_300.repeated", booted - count, "boots")
    report.add("microvm.boots_300.failed", made.failed)
    if left:
        print(f"left by boots: {left}", file=sys.stderr)
    report.add("microvm.boots_300.leaked", len(left))
