# SPDX-License-Identifier: Apache-2.0
"""The power goes: what was paused or kept is there and whole, and what has run since is not taken for what was paused.

A cut is a copy of the block device that the store's file system lies on, as it is at that moment, without what is in the page cache only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from opendsec.api.ids import SNAPSHOT, new_id
from opendsec.images.store import ImageStore
from opendsec.runtime.backend import Handle
from opendsec.runtime.microvm.backend import MicroVMBackend
from opendsec.runtime.vmm import disks
from opendsec.runtime.vmm.locks import locked
from opendsec.runtime.vmm.store import settle
from opendsec.testing.contracts.backend import Setup, output
from tests.images import BASE, base_store
from tests.vms import LIMITS, VmNode, kept

pytestmark = pytest.mark.slow

DEVICE_BYTES = 1 << 30
WRITE = "head -c 8M /dev/urandom >/dev/shm/memory; head -c 8M /dev/urandom >/root/disk; cd /; cat /dev/shm/memory /root/disk | sha256sum"
SUM = "cat /dev/shm/memory /root/disk | sha256sum"


class Apart(VmNode):
    """On a file system of its own."""

    def borrow(self) -> None:
        self.store.prepare()

    def give_back(self) -> None:
        pass

    def copy(self, key: str) -> None:
        """Have the template, if it is kept."""
        template = f"disks/template-{key}.qcow2", *(f"templates/{key}/{name}" for name in ("ram", "devices", "template.json"))
        with locked(kept() / "lock"):
            for name in (*template, f"scratch/{LIMITS.disk_bytes}-{LIMITS.inodes}.ext4"):
                if (kept() / name).exists():
                    (self.store.root / name).parent.mkdir(exist_ok=True)
                    shutil.copyfile(kept() / name, self.store.root / name)
                    settle([self.store.root / name, (self.store.root / name).parent])


@contextlib.contextmanager
def mounted(device: Path, at: Path) -> Iterator[Path]:
    at.mkdir()
    subprocess.run(["mount", "-o", "loop", device, at], check=True, timeout=60)
    try:
        yield at
    finally:
        subprocess.run(["umount", at], check=True, timeout=60)


@contextlib.asynccontextmanager
async def vms_in(directory: Path, edge_id: str = "") -> AsyncIterator[tuple[Apart, Setup]]:
    async with Apart(directory, edge_id=edge_id) as node:
        vms = Setup(make=node.make, layers=ImageStore(base_store()).resolve(BASE).layers, murder=lambda _: None, limits=LIMITS)
        await vms.start()
        try:
            yield node, vms
        finally:
            for sandbox_id in vms.backend.leftovers():
                await vms.backend.clear(sandbox_id, None)
            await vms.backend.close()


async def sum_of(handle: Handle) -> bytes:
    return (await output(handle, "sh", "-c", SUM))[0]


async def test_what_is_stored_outlives_a_cut_and_is_told_from_what_has_run_since(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    tmp_path.parent.chmod(0o755)
    device = tmp_path / "device"
    device.touch()
    os.truncate(device, DEVICE_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-F", device], check=True, timeout=60)
    with mounted(device, tmp_path / "store") as directory:
        async with vms_in(directory) as (node, vms):
            placement = vms.placement()
            node.copy(node.backend().templates.key(node.backend().wanted(placement.layers, placement)))
            handle = await vms.backend.create(vms.placement())
            kept_sum = (await output(handle, "sh", "-c", WRITE))[0]
            kept_one = await handle.snapshot(new_id(SNAPSHOT), memory=True)
            paused_sum = (await output(handle, "sh", "-c", WRITE))[0]
            paused = await handle.pause()
            await asyncio.to_thread(disks.copy_sparse, device, tmp_path / "while-paused")
            await vms.backend.resume(paused)
            await output(handle, "sh", "-c", WRITE)
            await asyncio.to_thread(disks.copy_sparse, device, tmp_path / "while-running")
    assert len({kept_sum, paused_sum}) == 2
    with mounted(tmp_path / "while-paused", tmp_path / "after") as directory:
        async with vms_in(directory, node.edge_id) as (_, vms):
            backend = vms.backend
            assert isinstance(backend, MicroVMBackend)
            assert list(backend.snapshots()) == [kept_one.snapshot_id] and backend.leftovers() == [paused.sandbox_id]
            assert await sum_of(await backend.resume(paused)) == paused_sum
            async with vms.box(snapshot=kept_one) as other:
                assert await sum_of(other) == kept_sum
    with mounted(tmp_path / "while-running", tmp_path / "later") as directory:
        box = Apart(directory, edge_id=node.edge_id).store.read_box(paused.sandbox_id)
        assert box is not None and box.state == "running"
