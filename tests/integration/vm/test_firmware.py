# SPDX-License-Identifier: Apache-2.0
"""Profiles of systems that cannot be had here, as far as that goes: QEMU takes the machine, and its firmware looks for something to start.

What the screen shows then is kept in the directory that OPENDSEC_TEST_ARTEFACTS names, or with what pytest keeps.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import msgspec
import pytest

from opendsec.api.errors import Internal, Unavailable, Unsupported
from opendsec.api.ids import SNAPSHOT, new_id
from opendsec.kernel import procfs
from opendsec.runtime.backend import SnapshotRecord, VmOptions
from opendsec.runtime.vm.answers import Answers
from opendsec.runtime.vm.backend import VMBackend
from opendsec.runtime.vm.operator import MacOS, Operator, Windows
from opendsec.runtime.vmm import tpm
from opendsec.runtime.vmm.arguments import Inside
from opendsec.runtime.vmm.handle import VmHandle
from opendsec.runtime.vmm.place import group_of
from opendsec.testing.contracts.backend import Setup, plan
from tests.full_vms import FullNode
from tests.integration.vm import tiny
from tests.integration.vm.serial import says

pytestmark = pytest.mark.slow
FIRMWARE_S = 180.0  # emulated, on a busy machine
EXTEND = "00 00 01 82"  # TPM2_PCR_Extend, in the TPM's log
OSK = "a key that was made up (c) by nobody".ljust(64, "x")


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncGenerator[Setup, None]:
    answers = Answers(password="secret")
    for name in ("installer", "drivers"):
        (tmp_path / name).write_bytes(answers.disc())
    with tempfile.TemporaryDirectory() as folder:
        async with FullNode(Path(folder)) as node:
            node.operator = Operator(
                windows=Windows(installer=str(tmp_path / "installer"), drivers=str(tmp_path / "drivers"), answers=answers),
                macos=MacOS(apple_hardware=True, osk=OSK),
            )
            async with tiny.started(node) as setup:
                yield setup


async def create(setup: Setup, profile: str, memory_mib: int) -> VmHandle:
    limits = msgspec.structs.replace(tiny.LIMITS, memory_bytes=memory_mib << 20, cpu=2.0)
    placement = setup.placement(vm=VmOptions(profile=profile, width=800, height=600), limits=limits)
    handle = await setup.backend.create(placement)
    assert isinstance(handle, VmHandle)
    return handle


async def keep_screen(handle: VmHandle, path: Path) -> None:
    assert handle.screen is not None
    picture = await handle.screen.png()
    assert picture.startswith(b"\x89PNG")
    folder = Path(os.environ.get("OPENDSEC_TEST_ARTEFACTS") or path.parent)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / path.name).write_bytes(picture)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the TPM notes of what it is asked."""
    path = tmp_path / "log"
    path.touch()
    command: Callable[[], list[str]] = tpm.command
    files: Callable[[Path], list[Inside]] = tpm.files
    monkeypatch.setattr(tpm, "command", lambda: [*command(), "--log", "file=/source,level=20"])
    monkeypatch.setattr(tpm, "files", lambda state: [*files(state), Inside(str(path), "source", writable=True)])
    return path


async def test_windows_machine_has_secure_boot_and_a_tpm(setup: Setup, log: Path, tmp_path: Path) -> None:
    handle = await create(setup, "windows-11-setup", 2048)
    try:
        assert isinstance(setup.backend, VMBackend)
        await says(handle, "DVD-ROM", FIRMWARE_S)  # which has nothing that starts
        await says(handle, "Security Violation", FIRMWARE_S)  # of the firmware's own shell, which nobody has signed
        assert log.read_text().count(EXTEND) > 10, "the firmware has not told the TPM what it has started"
        await keep_screen(handle, tmp_path / "windows-11.png")

        group = group_of(handle.vmm.record.place)
        (beneath,) = group.children()
        (other,) = beneath.procs()
        status = procfs.status(other)
        assert status["Uid"].split()[0] == str(handle.box.uid + 1) != str(handle.box.uid)
        assert status["CapEff"].strip("0") == status["CapBnd"].strip("0") == "" and status["Seccomp"] == "2"
        assert procfs.status(handle.vmm.pid)["Uid"].split()[0] == str(handle.box.uid)

        with pytest.raises(Unavailable, match="agent"):  # none is there: the sandbox lives
            await handle.exec(plan("cmd.exe", env={}, cwd="/"), stdin=None, stdout=None, stderr=None)

        snapshot = await handle.snapshot(new_id(SNAPSHOT), memory=True)
        record = await handle.pause()
        assert not group.exists()
        log.write_text("")
        await setup.backend.resume(record)
        assert "00 00 01 44" not in log.read_text(), "a TPM that comes back is not started up"
        await handle.vmm.call("system_reset")
        async with asyncio.timeout(FIRMWARE_S):
            while log.read_text().count(EXTEND) < 5:
                handle.vmm.said.clear()
                await handle.vmm.said.wait()
        await a_copy_has_a_tpm_of_its_own(setup, snapshot, handle)
        group_of(handle.vmm.record.place).child("tpm").kill()
        with pytest.raises(Internal, match="device state"):
            await handle.pause()
        assert handle.alive() and await handle.vmm.status() == "running"
    finally:
        await handle.destroy()


async def a_copy_has_a_tpm_of_its_own(setup: Setup, snapshot: SnapshotRecord, source: VmHandle) -> None:
    placement = setup.placement(vm=source.box.options, limits=snapshot.limits, snapshot=snapshot)
    copy = await setup.backend.create(placement)
    try:
        assert isinstance(copy, VmHandle)
        pids = [group_of(one.vmm.record.place).child("tpm").procs() for one in (source, copy)]
        assert len(pids[0]) == len(pids[1]) == 1 and pids[0] != pids[1]
        await copy.pause()  # which asks its TPM for what it holds
    finally:
        await copy.destroy()
        await setup.backend.remove_snapshot(snapshot)


async def test_macos_machine_has_the_controller_and_its_key_is_not_seen(setup: Setup, tmp_path: Path) -> None:
    handle = await create(setup, "macos", 4096)
    try:
        await says(handle, "BdsDxe", FIRMWARE_S)
        await keep_screen(handle, tmp_path / "macos.png")
        words = procfs.cmdline(handle.vmm.pid)
        assert not any(OSK.encode() in word for word in words)
        tree = await handle.vmm.call("human-monitor-command", command_line="info qtree")
        assert isinstance(tree, str) and 'dev: isa-applesmc, id "smc"' in tree and OSK in tree
        assert OSK not in repr(handle.record) and OSK.encode() not in msgspec.json.encode(handle.record)
    finally:
        await handle.destroy()


async def test_a_profile_says_what_it_lacks(setup: Setup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert isinstance(setup.backend, VMBackend)
    monkeypatch.setattr(tpm, "PROGRAM", "no-such-program")
    with pytest.raises(Unsupported, match="swtpm") as raised:
        await create(setup, "windows-11", 2048)
    assert raised.value.field == "spec.profile"
    monkeypatch.undo()
    (tmp_path / "drivers").unlink()
    with pytest.raises(Unsupported, match="is not there"):
        await create(setup, "windows-11-setup", 2048)
    setup.backend.operator = Operator()
    for profile, why in (("windows-11-setup", "has not named"), ("macos", "Apple's hardware")):
        with pytest.raises(Unsupported, match=why) as raised:
            await create(setup, profile, 4096)
        assert raised.value.field == "spec.profile"
