# SPDX-License-Identifier: Apache-2.0
"""The accelerator is what was seen to boot, for a reason that is told, and remembered for this boot of the machine."""

from __future__ import annotations

import pytest

from opendsec.kernel import features, kvm
from opendsec.runtime.vmm import probe
from opendsec.runtime.vmm.machine import Machine
from opendsec.runtime.vmm.probe import Accelerator
from tests.vmms import Vmms

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


async def boot(vmms: Vmms, *, accel: str = "tcg") -> Accelerator:
    machine = Machine(kind="microvm", cpus=1, memory_bytes=probe.MEMORY_BYTES, kernel=str(vmms.guest))
    return await probe.boot(vmms.spawner, vmms.guest, vmms.place(machine), accel="kvm" if accel == "kvm" else "tcg")


async def test_a_guest_that_comes_to_life(vmms: Vmms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ALIVE", ("n=1",))
    assert await boot(vmms) == Accelerator(name="tcg", reason="a guest's kernel booted")


async def test_one_that_dies(vmms: Vmms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "APPEND", "reset")
    assert "died: the guest reset the machine" in (await boot(vmms)).reason


async def test_one_that_hangs(vmms: Vmms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "APPEND", "quiet")
    monkeypatch.setattr(probe, "BOOT_TIMEOUT_S", 0.5)
    assert "did not boot within 0.5 s, after 'up'" in (await boot(vmms)).reason


async def test_kvm_is_used_only_where_a_guest_boots_on_it(vmms: Vmms, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine's /dev/kvm is: the answer fits to what is seen, and a second question asks nothing."""
    monkeypatch.setattr(probe, "ALIVE", ("n=1",))
    machine = Machine(kind="microvm", cpus=1, memory_bytes=probe.MEMORY_BYTES, kernel=str(vmms.guest))
    memory = vmms.folder / "accelerator.json"
    found = await probe.accelerator(vmms.spawner, vmms.programs, vmms.guest, vmms.place(machine), memory)
    assert found.reason
    if not features.probe("kvm").present:
        assert found.name == "tcg" and found.reason.startswith("no KVM: ") and not memory.exists()
    monkeypatch.setattr(probe, "by_loop", lambda: Accelerator(name="kvm", reason="forced"))
    first = await probe.accelerator(vmms.spawner, vmms.programs, vmms.guest, vmms.place(machine), memory)

    async def never(*args: object, **kwargs: object) -> Accelerator:
        raise AssertionError("asked again")

    monkeypatch.setattr(probe, "boot", never)
    assert await probe.accelerator(vmms.spawner, vmms.programs, vmms.guest, vmms.place(machine), memory) == first
    vmms.guest.touch()  # another kernel, for all one knows
    with pytest.raises(AssertionError, match="asked again"):
        await probe.accelerator(vmms.spawner, vmms.programs, vmms.guest, vmms.place(machine), memory)


async def test_forced_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(features.FORCE_MISSING, "kvm")
    assert probe.by_loop() == Accelerator(name="tcg", reason=f"no KVM: forced by {features.FORCE_MISSING}")


def test_the_loop_ends_or_says_why() -> None:
    try:
        assert kvm.time_loop(100) > 0
    except OSError as error:
        assert error.strerror
