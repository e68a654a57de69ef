# SPDX-License-Identifier: Apache-2.0
"""What is saved takes the room it needs, for as long as it is needed, and stays what it was."""

from __future__ import annotations

import pytest

from opendsec.api.errors import Conflict
from opendsec.api.ids import SNAPSHOT, new_id
from opendsec.runtime.microvm.backend import MicroVMBackend
from opendsec.runtime.vmm import saving
from opendsec.testing.contracts.backend import Setup, output

pytestmark = pytest.mark.slow


async def test_chains_of_disks_stay_short_and_lose_nothing(vms: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "MANY_DISKS", 3)
    backend = vms.backend
    assert isinstance(backend, MicroVMBackend)
    taken = []
    async with vms.box() as handle:
        for number in range(7):
            await output(handle, "sh", "-c", f"echo {number} >>/root/all; head -c 300000 /dev/urandom >/root/file{number}; sync")
            taken.append(await handle.snapshot(new_id(SNAPSHOT), memory=number == 4))
            box = backend.store.read_box(handle.sandbox_id)
            assert box is not None and len(box.disks) <= 1 + 3
        sums, _ = await output(handle, "sh", "-c", "cd /root; sha256sum all file?")
        paused = await handle.pause()
        await backend.resume(paused)
        assert (await output(handle, "sh", "-c", "cd /root; echo 3 >/proc/sys/vm/drop_caches; sha256sum all file?"))[0] == sums
    for number in (1, 4, 6):
        async with vms.box(snapshot=taken[number]) as other:
            everything = "".join(f"{one}\n" for one in range(number + 1)).encode()
            assert (await output(other, "cat", "/root/all"))[0] == everything
            lines = (await output(other, "sh", "-c", "cd /root; sha256sum file?"))[0].splitlines()
            assert lines == [line for line in sums.splitlines() if b"file" in line][: number + 1]
    for snapshot in taken:
        await backend.remove_snapshot(snapshot)
    assert not [path for path in (backend.store.root / "disks").iterdir() if not path.name.startswith("template-")]
    assert not list((backend.store.root / "memory").iterdir())


async def test_there_is_a_most(vms: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "MAX_DISKS", 1)
    async with vms.box() as handle:
        with pytest.raises(Conflict, match="the most is 1"):
            await handle.snapshot(new_id(SNAPSHOT), memory=False)
        assert (await output(handle, "echo", "on"))[0] == b"on\n"


async def test_a_disk_that_is_full_says_so_and_is_as_large_as_asked_for(vms: Setup) -> None:
    async with vms.box() as handle:
        text, ended = await output(handle, "sh", "-c", "head -c 60M /dev/zero >/root/most && echo fits; head -c 20M /dev/zero >/root/more")
        assert text.startswith(b"fits\n") and ended.code != 0
        assert handle.counters().disk_full
        await output(handle, "rm", "/root/most", "/root/more")
        assert (await output(handle, "sh", "-c", "echo on >/root/again; cat /root/again"))[0] == b"on\n"


async def test_limits_hold_inside(vms: Setup) -> None:
    async with vms.box() as handle:
        text, _ = await output(handle, "sh", "-c", "ulimit -n; for i in $(seq 200); do sleep 100 >/dev/null 2>&1 & done")
        assert text.split()[0] == str(vms.limits.open_files).encode()
        assert b"fork" in text and handle.counters().pids_denied > 0
        await output(handle, "python3", "-c", "b = [b'x' * (1 << 20) for _ in range(500)]")
        assert handle.counters().oom_kills > 0
        assert (await output(handle, "echo", "on"))[0] == b"on\n"
