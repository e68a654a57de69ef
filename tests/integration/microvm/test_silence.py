# SPDX-License-Identifier: Apache-2.0
"""Who is root inside can make guestd say nothing any more: then the sandbox is lost, in time, and says why. Who merely gets no time to
answer is waited for."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from opendsec.api.errors import SandboxLost
from opendsec.runtime.guest import silence
from opendsec.runtime.vmm import process
from opendsec.runtime.vmm.handle import VmHandle
from opendsec.testing.contracts.backend import Setup, output, plan

pytestmark = pytest.mark.slow

ATTACH = "import ctypes, time; assert not ctypes.CDLL(None).ptrace(16, 1, 0, 0); time.sleep(1000)"
SILENCED = {
    "stopped by a tracer": ("python3", "-c", ATTACH),
    "without its device": (
        "sh",
        "-c",
        "cd /sys/bus/virtio/drivers/virtio_console; for one in virtio*; do echo $one >unbind; done; sleep 1000",
    ),
}


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("QUIET_S", 0.3), ("REST_S", 0.6), ("STEP_S", 0.1), ("SILENT_S", 1.0)):
        monkeypatch.setattr(silence, name, seconds)


@pytest.mark.parametrize("how", SILENCED)
async def test_a_guest_that_says_nothing_is_lost(vms: Setup, hasty: None, how: str) -> None:
    async with vms.box() as handle:
        running = await handle.exec(plan(*SILENCED[how]), stdin=None, stdout=None, stderr=None)
        async with asyncio.timeout(30):
            assert "guest" in await handle.died
            await running.exited
        assert not handle.alive()
        with pytest.raises(SandboxLost):
            await handle.exec(plan("true"), stdin=None, stdout=None, stderr=None)


async def test_a_guest_that_gets_no_time_is_waited_for(vms: Setup, hasty: None) -> None:
    async with vms.box() as handle:
        assert isinstance(handle, VmHandle)
        pid, group = handle.vmm.pid, process.group_of(handle.vmm.record.place)
        said = asyncio.Event()
        asked = 0.0

        def served(seconds: float) -> float:
            nonlocal asked
            asked += seconds
            if asked > 2 * silence.SILENT_S:
                said.set()
            return handle.vmm.served(seconds)

        handle.channel.silence.served = served

        async def overdue() -> None:
            """Until it has been silent for much longer than a guest may be."""
            nonlocal asked
            asked = 0.0
            said.clear()
            await said.wait()
            assert handle.alive()

        async with asyncio.timeout(60):
            await handle.freeze()
            waiting = asyncio.ensure_future(output(handle, "echo", "frozen"))
            await overdue()
            await handle.thaw()
            assert (await waiting)[0] == b"frozen\n"

            os.kill(pid, signal.SIGSTOP)
            waiting = asyncio.ensure_future(output(handle, "echo", "stopped"))
            await overdue()
            os.kill(pid, signal.SIGCONT)
            assert (await waiting)[0] == b"stopped\n"

            busy = await handle.exec(plan("sh", "-c", "while :; do :; done"), stdin=None, stdout=None, stderr=None)
            group.update({"cpu_cores": 0.01})
            waiting = asyncio.ensure_future(output(handle, "echo", "starved"))
            await overdue()
            group.update({"cpu_cores": 1.0})
            assert (await waiting)[0] == b"starved\n"
            busy.kill_tree()
            await busy.exited
            await busy.release()
