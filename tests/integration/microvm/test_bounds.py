# SPDX-License-Identifier: Apache-2.0
"""What a machine can make the host hold has an end, whoever its QEMU obeys."""

from __future__ import annotations

import pytest

from opendsec.kernel import procfs
from opendsec.runtime.vmm import console, disks, place
from opendsec.runtime.vmm.handle import VmHandle
from opendsec.runtime.vmm.place import FILE_SLACK
from opendsec.testing.contracts.backend import Setup, output

pytestmark = pytest.mark.slow


async def test_files_that_qemu_writes_have_a_largest_size(vms: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    size = disks.scratch_bytes(vms.limits.disk_bytes, vms.limits.inodes)
    most = size + size // 1024 + FILE_SLACK
    async with vms.box() as handle:
        assert isinstance(handle, VmHandle)
        assert procfs.limits(handle.vmm.pid)["Max file size"] == (most, most)
        # A disk that is full and has been written several times over is far from it.
        await output(handle, "sh", "-c", "for i in 1 2; do head -c 50M /dev/zero >/root/file; sync; rm /root/file; sync; done")
        assert handle.backend.store.own_disk(handle.box).stat().st_size < size + size // 64

    monkeypatch.setattr(place, "file_bytes", lambda machine: size // 2)  # as if a QEMU wrote what no guest can make it write
    async with vms.box() as handle:
        assert isinstance(handle, VmHandle)
        _, ended = await output(
            handle, "sh", "-c", "head -c 60M /dev/zero >/root/file; sync; echo 3 >/proc/sys/vm/drop_caches; cat /root/file"
        )
        assert ended.code != 0
        assert size // 4 < handle.backend.store.own_disk(handle.box).stat().st_size <= size // 2


async def test_a_guest_that_floods_its_console_fills_nothing(vms: Setup) -> None:
    async with vms.box() as handle:
        assert isinstance(handle, VmHandle)
        _, ended = await output(handle, "sh", "-c", "head -c 400000 /dev/zero | tr '\\0' x >/dev/ttyS0")
        assert ended.code == 0
        text = handle.vmm.console()
        assert text.endswith("x" * 1000) and len(text) <= console.KEPT_BYTES
        assert sum(path.stat().st_size for path in handle.vmm.directory.iterdir() if path.is_file()) == 0
        assert sorted(path.name for path in handle.backend.store.box(handle.sandbox_id).iterdir()) == ["box.json", "disk-0.qcow2"]
        assert (await output(handle, "echo", "on"))[0] == b"on\n"
