# SPDX-License-Identifier: Apache-2.0
"""What a clone's guest frees comes back to the host, and the memory that it shares stays as it is."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
import time
from pathlib import Path

import msgspec
import pytest

from opendsec.images.store import ImageStore
from opendsec.kernel import process_memory
from opendsec.runtime.backend import ExecPlan, Handle, Placement
from opendsec.runtime.vmm.handle import VmHandle
from tests.boxes import UID_BASE
from tests.images import BASE
from tests.vms import LIMITS, VmNode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MIB = 1 << 20
# The kernel reports blocks of 2 MiB that are free as a whole: in a smaller machine there may be few.
FILL = "x = b'x' * (100 << 20)"


async def run(handle: Handle, code: str) -> None:
    plan = ExecPlan(
        process_id=f"cm_{os.urandom(8).hex()}", argv=("python3", "-c", code), env={"PATH": "/usr/bin:/bin"}, cwd="/", user="root"
    )
    running = await handle.exec(plan, stdin=None, stdout=None, stderr=None)
    ended = await asyncio.wait_for(asyncio.shield(running.exited), 120)
    assert ended.code == 0, ended
    await running.release()


def own_bytes(vmm_pid: int) -> int:
    return sum(
        end - start
        for mapping in process_memory.mappings(vmm_pid)
        if mapping.path == b"/ram"
        for start, end in process_memory.private_pages(vmm_pid, mapping.start, mapping.end)
    )


async def test_freed_memory_comes_back(test_images: Path) -> None:
    image = ImageStore(test_images).resolve(BASE)
    with tempfile.TemporaryDirectory(prefix="vm-", dir="/var/tmp") as folder:
        async with VmNode(Path(folder)) as node:
            backend = await node.make()
            try:
                placement = Placement(
                    sandbox_id="sb_memory",
                    uid_base=UID_BASE,
                    limits=msgspec.structs.replace(LIMITS, memory_bytes=256 * MIB),
                    layers=tuple(image.layers),
                    config=image.config,
                    env={},
                    user="root",
                    workdir="/",
                    hostname="memory",
                )
                handle = await backend.create(placement)
                assert isinstance(handle, VmHandle)
                ram = Path(handle.vmm.record.ram)
                before = hashlib.sha256(ram.read_bytes()).hexdigest()
                await run(handle, FILL)
                most = own_bytes(handle.vmm.pid)
                assert most > 100 * MIB
                # The guest's kernel reports what is free every other second; nothing tells us when.
                deadline = time.monotonic() + 60
                while own_bytes(handle.vmm.pid) > most - 50 * MIB:
                    assert time.monotonic() < deadline, "no memory came back"
                    await asyncio.sleep(0.2)
                await run(handle, f"{FILL}; assert x.count(b'x') == len(x)")
                assert hashlib.sha256(ram.read_bytes()).hexdigest() == before
                await handle.destroy()
            finally:
                await backend.close()
