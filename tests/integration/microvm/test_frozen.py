# SPDX-License-Identifier: Apache-2.0
"""What others stand on does not change any more, not even by the hand of the QEMU that it came of, whoever that obeys by then."""

from __future__ import annotations

import os

import pytest

from opendsec.api.errors import SandboxLost
from opendsec.api.ids import SNAPSHOT, new_id
from opendsec.kernel import procfs
from opendsec.kernel.fds import written_to
from opendsec.runtime.microvm.backend import MicroVMBackend
from opendsec.runtime.vmm.handle import VmHandle
from opendsec.testing.contracts.backend import Setup, output

pytestmark = pytest.mark.slow


def writable(pid: int) -> set[str]:
    """Names of files that a process has open for writing."""
    fds = [int(name) for name in os.listdir(procfs.path_of(pid, "fd"))]
    names = {fd: os.readlink(procfs.path_of(pid, "fd", str(fd))) for fd in fds}
    return {name for fd, name in names.items() if int(procfs.fd_info(pid, fd)["flags"], 8) & os.O_ACCMODE != os.O_RDONLY}


@pytest.mark.parametrize("memory", [True, False])
async def test_a_machine_cannot_write_to_what_was_frozen(vms: Setup, memory: bool) -> None:
    backend = vms.backend
    assert isinstance(backend, MicroVMBackend)
    async with vms.box() as handle:
        assert isinstance(handle, VmHandle)
        taken = [await handle.snapshot(new_id(SNAPSHOT), memory=memory) for _ in range(2)]
        found = {name for name in writable(handle.vmm.pid) if name.endswith((".qcow2", "devices", "ram"))}
        assert found == {str(backend.store.own_disk(handle.box))} and written_to(backend.store.own_disk(handle.box))
        for path in (*map(backend.store.disk, handle.box.disks), *(backend.store.root / "memory").glob("*/*")):
            assert not written_to(path)
        await output(handle, "sh", "-c", "echo on >/root/file; sync")
        await backend.resume(await handle.pause())
        assert {name for name in writable(handle.vmm.pid) if name.endswith((".qcow2", "devices", "ram"))} == found
        for snapshot in taken:
            await backend.remove_snapshot(snapshot)


async def test_one_that_keeps_a_way_to_is_lost_and_nothing_stands_on_it(vms: Setup) -> None:
    backend = vms.backend
    assert isinstance(backend, MicroVMBackend)
    async with vms.box() as handle:
        assert isinstance(handle, VmHandle)
        kept = os.open(backend.store.own_disk(handle.box), os.O_RDWR | os.O_CLOEXEC)  # wherever a QEMU of somebody's might hide it
        try:
            with pytest.raises(SandboxLost, match="taken it over"):
                await handle.snapshot(new_id(SNAPSHOT), memory=True)
        finally:
            os.close(kept)
        assert await handle.died and list(backend.snapshots()) == []
    assert not list((backend.store.root / "memory").iterdir())
