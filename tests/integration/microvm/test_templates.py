# SPDX-License-Identifier: Apache-2.0
"""Templates: one for all that ask for the same, another for whoever asks for something else, and none that does not boot."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from opendsec.api.errors import InvalidRequest, NotFound, Unavailable, Unsupported
from opendsec.api.ids import SNAPSHOT, new_id
from opendsec.runtime.backend import VmOptions
from opendsec.runtime.microvm.backend import MicroVMBackend
from opendsec.runtime.vmm import arguments
from opendsec.runtime.vmm.parts import Parts
from opendsec.testing.contracts.backend import Setup, output
from tests.vms import kept

pytestmark = pytest.mark.slow


def backend_of(setup: Setup) -> MicroVMBackend:
    assert isinstance(setup.backend, MicroVMBackend)
    return setup.backend


async def test_many_who_want_the_same_wait_for_one_boot(vms: Setup) -> None:
    backend = backend_of(vms)
    placement = vms.placement()
    key = backend.templates.key(backend.wanted(vms.layers, placement))
    shutil.rmtree(backend.store.template(key), ignore_errors=True)  # the kept one
    backend.store.disk(f"template-{key}").unlink(missing_ok=True)
    await asyncio.gather(*(backend.prepare(placement) for _ in range(5)))
    assert backend.templates.boots == 1
    await vms.restart()
    await backend_of(vms).prepare(placement)
    assert backend_of(vms).templates.boots == 0  # it is there still


async def test_another_command_line_makes_another_key(vms: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(vms)
    wanted = backend.wanted(vms.layers, vms.placement())
    key = backend.templates.key(wanted)
    monkeypatch.setattr(arguments, "TB_MIB", arguments.TB_MIB * 2)
    assert backend.templates.key(wanted) != key


async def test_every_input_makes_another_key(vms: Setup, tmp_path: Path) -> None:
    backend = backend_of(vms)
    placement = vms.placement()
    wanted = backend.wanted(vms.layers, placement)
    key = backend.templates.key(wanted)
    assert backend.templates.key(backend.wanted(vms.layers, vms.placement())) == key
    others = [
        replace(wanted, accel="kvm"),
        replace(wanted, cpus=2),
        replace(wanted, memory_bytes=wanted.memory_bytes + (1 << 20)),
        replace(wanted, disk_bytes=wanted.disk_bytes + 1),
        replace(wanted, inodes=wanted.inodes + 1),
        replace(wanted, layers=wanted.layers * 2),
        replace(wanted, disks=("other",)),
    ]
    assert len({key, *(backend.templates.key(other) for other in others)}) == len(others) + 1
    guestd = tmp_path / "dsec-guestd"
    guestd.write_bytes(b"\x7fELF another one")
    backend.templates._parts = Parts(backend.store, guestd=guestd, shared=tmp_path)
    (tmp_path / "kernels").symlink_to(kept() / "kernels")
    (tmp_path / "qemu").symlink_to(kept() / "qemu")
    assert backend.templates.key(wanted) != key


HANGS = 'void _start(void) { for (;;) __asm__ volatile("movl $34, %eax\\n syscall"); }'  # pause(2)
DIES = 'void _start(void) { __asm__ volatile("movl $60, %eax\\n xorl %edi, %edi\\n syscall"); }'


@pytest.mark.parametrize(("program", "reason"), [(HANGS, "did not answer"), (DIES, "Attempted to kill init")], ids=["hangs", "dies"])
async def test_what_does_not_boot_is_tried_once_more_and_then_told(
    vms: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, reason: str
) -> None:
    guestd = tmp_path / "dsec-guestd"
    (tmp_path / "guestd.c").write_text(program)
    subprocess.run(["cc", "-static", "-nostdlib", "-o", guestd, tmp_path / "guestd.c"], check=True)
    (tmp_path / "kernels").symlink_to(kept() / "kernels")
    (tmp_path / "qemu").symlink_to(kept() / "qemu")
    backend = backend_of(vms)
    backend.templates._parts = backend.parts = Parts(backend.store, guestd=guestd, shared=tmp_path)
    monkeypatch.setattr(backend.templates, "boot_timeout_s", 4.0 if program is HANGS else 60.0)
    with pytest.raises(Unavailable, match=reason) as caught:
        await backend.create(vms.placement())
    assert "its console" in caught.value.message
    assert backend.templates.boots == 2
    assert backend.leftovers() == [] and list((backend.store.root / "templates").glob(".*")) == []


async def test_hardware_that_is_required_and_not_there_is_refused(vms: Setup) -> None:
    with pytest.raises(Unsupported, match="emulated"):
        await vms.backend.create(vms.placement(vm=VmOptions(hardware_required=True)))


async def test_a_snapshot_is_not_put_where_it_does_not_fit(vms: Setup) -> None:
    async with vms.box() as source:
        snapshot = await source.snapshot(new_id(SNAPSHOT), memory=False)
    bigger = msgspec.structs.replace(vms.limits, memory_bytes=vms.limits.memory_bytes * 2)
    with pytest.raises(InvalidRequest, match="size"):
        await vms.backend.create(vms.placement(snapshot=snapshot, limits=bigger))
    with pytest.raises(InvalidRequest, match="layers"):
        await vms.backend.create(vms.placement(snapshot=snapshot, layers=vms.layers * 2))
    await vms.backend.remove_snapshot(snapshot)
    with pytest.raises(NotFound):
        await vms.backend.create(vms.placement(snapshot=snapshot))
    store = backend_of(vms).store
    assert [path for path in (store.root / "disks").iterdir() if not path.name.startswith("template-")] == []


async def test_machines_wait_and_are_handed_out(vms: Setup) -> None:
    backend = backend_of(vms)
    backend.pool.size = 1
    async with vms.box() as direct:
        assert (await output(direct, "echo", "on"))[0] == b"on\n"
    while not backend.pool.waiting():
        backend.pool.changed.clear()
        await backend.pool.changed.wait()
    [machine] = [waiting for shelf in backend.pool._shelves.values() for waiting in shelf.machines]
    assert machine.name not in backend.leftovers()
    async with vms.box() as handle:
        assert handle.record.pid == machine.vmm.pid
        assert (await output(handle, "hostname"))[0].decode().strip() == handle.sandbox_id.replace("_", "-")
        record = handle.record
        again = await (await vms.restart()).adopt(record)
        assert (await output(again, "hostname"))[0].decode().strip() == handle.sandbox_id.replace("_", "-")
        await again.destroy()


async def test_who_died_while_it_waited_is_not_handed_out(vms: Setup) -> None:
    backend = backend_of(vms)
    backend.pool.size = 1
    async with vms.box():
        pass
    while not backend.pool.waiting():
        backend.pool.changed.clear()
        await backend.pool.changed.wait()
    [machine] = [waiting for shelf in backend.pool._shelves.values() for waiting in shelf.machines]
    await machine.vmm.kill()
    async with vms.box() as handle:
        assert (await output(handle, "echo", "on"))[0] == b"on\n"
    await backend.pool.close()
    assert not list((backend.store.root / "waiting").iterdir())
