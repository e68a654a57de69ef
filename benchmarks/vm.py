# SPDX-License-Identifier: Apache-2.0
"""Full VMs beside their own boot, in the same run: clones of a Debian system that its firmware has booted once.

    dsec bench vm [--json] [--quick] [--plot FILE.png]

Times are taken through the SDK, over the unix socket of an edge that this benchmark starts; the client's own work is in them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import opendsec as od
from benchmarks.boots import QEMU
from benchmarks.container import version
from benchmarks.report import Report, command_line, percentile
from benchmarks.support import timed
from opendsec.edge.machines import FULL_FOLDER
from opendsec.runtime.vmm.store import VmStore
from tests.edges import EdgeProcess
from tests.full_vms import DISK, LIMITS, borrow, debian_disk, give_back
from tests.vms import kept

PNG = b"\x89PNG\r\n\x1a\n"
SPEC = od.VM(
    image=DISK,
    cpu=LIMITS.cpu,
    memory=LIMITS.memory_bytes,
    disk=LIMITS.disk_bytes,
    inodes=LIMITS.inodes,
    pids=LIMITS.pids,
    open_files=LIMITS.open_files,
)


@asynccontextmanager
async def full_edge(images: Path) -> AsyncIterator[od.Client]:
    """A fresh edge that has the tests' templates, and a client of it."""
    edge = EdgeProcess(images, ["--vm-parts", str(kept()), "--scratch-driver", "tmpfs"])
    edge.folder.chmod(0o755)  # machines are put together below the run directory, as their own users
    store = VmStore(edge.state_dir / FULL_FOLDER)
    await asyncio.to_thread(borrow, store)
    try:
        await asyncio.to_thread(edge.start)
        async with edge.client() as client:
            yield client
        await asyncio.to_thread(give_back, store)
    finally:
        await asyncio.to_thread(edge.remove)


async def measure(images: Path, *, quick: bool) -> Report:
    report = Report("vm", {"qemu": version(QEMU)})
    created: list[float] = []
    answered: list[float] = []
    screens: list[float] = []
    failed = 0
    async with full_edge(images) as client:
        box, booted = await timed(client.create(SPEC))
        await box.kill()
        report.note("vm.first_create", booted, "ms")  # with the boot of the template, unless that is kept
        for turn in range(5 if quick else 100):
            try:
                box, took = await timed(client.create(SPEC))
            except od.OpenDSecError as error:
                failed += 1
                print(f"clone {turn}: {error!r}", file=sys.stderr)
                continue
            try:
                result, ran = await timed(box.run(["true"], timeout_s=60))
                failed += result.exit_code != 0
                created.append(took)
                answered.append(took + ran)
                if turn % 10 == 0:
                    for _ in range(10):
                        picture, shot = await timed(box.screen.png())
                        if not picture.startswith(PNG):
                            raise RuntimeError("a screen is no picture")
                        screens.append(shot)
            finally:
                await box.kill()
    report.distribution("vm.create", created)
    report.distribution("vm.first_answer", answered)
    report.distribution("vm.screen", screens)
    report.add("vm.create.failed", failed)
    report.add("vm.create.median_ms", percentile(created, 0.5))
    report.add("vm.screen.median_ms", percentile(screens, 0.5))
    return report


def main(arguments: list[str] | None = None) -> int:
    options = command_line("vm", __doc__).parse_args(arguments)
    return asyncio.run(measure(debian_disk(), quick=options.quick)).finish(options)


if __name__ == "__main__":
    sys.exit(main())
