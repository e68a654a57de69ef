# SPDX-License-Identifier: Apache-2.0
"""The Debian disk started by BIOS, all the way: template, clone, commands. The machine has the port of QEMU's guest agent as well, and
that agent, once it is started in there, is spoken to as it would be on Windows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from opendsec.api.errors import Unavailable
from opendsec.images.store import ImageStore
from opendsec.runtime.backend import Exit, VmOptions
from opendsec.runtime.vm.agent import AgentChannel
from opendsec.runtime.vm.templates import DiskTemplates
from opendsec.runtime.vmm.handle import VmHandle
from opendsec.runtime.vmm.machine import Machine
from opendsec.testing.contracts.backend import Setup, output, plan, started
from tests import guest_agent
from tests.full_vms import DISK, LIMITS, FullNode, debian_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first makes the disk and its template, which are kept
ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
AGENT_S = 60.0


@pytest.fixture
def _agents_port(monkeypatch: pytest.MonkeyPatch) -> None:
    made = DiskTemplates._machine

    def with_port(*given: object, **named: object) -> Machine:
        return replace(made(*given, **named), agent=True)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskTemplates, "_machine", with_port)


@pytest.mark.usefixtures("_agents_port")
async def test_a_disk_starts_by_bios_and_an_agent_answers() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with FullNode(Path(folder)) as node:
            layers = ImageStore(debian_disk()).resolve(DISK).layers
            setup = Setup(make=node.make, layers=layers, murder=lambda _: None, limits=LIMITS, timeout_s=600)
            await setup.start()
            try:
                async with setup.box(vm=VmOptions(profile="linux-bios")) as handle:
                    assert isinstance(handle, VmHandle)
                    words = ("/bin/sh", "-c", "test -d /sys/firmware/efi || echo none; findmnt -no SOURCE /")
                    said, ended = await output(handle, *words, env=ENV, cwd="/")
                    assert (said, ended.code) == (b"none\n/dev/vda2\n", 0)
                    await use_agent(setup, handle)
                    await reboot(handle)
            finally:
                await setup.backend.close()


async def use_agent(setup: Setup, handle: VmHandle) -> None:
    channel = AgentChannel(await handle.vmm.agent(), None)
    try:
        early = asyncio.ensure_future(channel.line.ready(AGENT_S))  # before it is there
        await install(handle)
        async with started(handle, plan(*guest_agent.start("/opt"), env=ENV, cwd="/")):
            await early
            assert await channel.system() == "debian"
            assert await said_by(channel, "/usr/bin/uname", "-n") == (Exit(code=0), f"{handle.sandbox_id.replace('_', '-')}\n".encode())
            await asyncio.to_thread(write_and_read, channel)
            await channel.detach()
            record = await handle.pause()
            await setup.backend.resume(record)
            channel.resume(await handle.vmm.agent())
            assert await said_by(channel, "/bin/cat", "/root/big") == (Exit(code=0), BIG)
    finally:
        channel.close()


async def reboot(handle: VmHandle) -> None:
    """What runs is ended by it, and says so; what is asked meanwhile waits; it is who it was."""
    words = ("/bin/sh", "-c", "cat /root/kept /dev/shm/gone 2>/dev/null; hostname; cat /proc/sys/kernel/random/boot_id /etc/machine-id")
    await output(handle, "/bin/sh", "-c", "echo kept >/root/kept; echo gone >/dev/shm/gone; sync", env=ENV, cwd="/")
    before = (await output(handle, *words, env=ENV, cwd="/"))[0].split()
    sleeping = await handle.exec(plan("sleep", "1000", env=ENV, cwd="/"), stdin=None, stdout=None, stderr=None)
    with contextlib.suppress(Unavailable):  # it may be too quick to say that it has started
        await handle.exec(plan("reboot", "-ff", env=ENV, cwd="/"), stdin=None, stdout=None, stderr=None)
    assert await sleeping.exited == Exit(signal=9, reason="the machine was rebooted inside")
    with pytest.raises(Unavailable, match="booting"):
        await handle.pause()
    after = (await output(handle, *words, env=ENV, cwd="/"))[0].split()
    assert before[:3] == [b"kept", b"gone", handle.sandbox_id.replace("_", "-").encode()]
    assert after[:2] == [before[0], before[2]] and after[2] != before[3] and after[3] == before[4]
    assert handle.alive()


BIG = os.urandom(300_000)


def write_and_read(channel: AgentChannel) -> None:
    writer = channel.files.open_write(b"/root/big", mode=None, user=None, append=False, parents=False)
    writer.write(BIG)
    assert writer.commit() == len(BIG)
    reader = channel.files.open_read(b"/root/big")
    assert reader.read(0, 1 << 20) == BIG
    reader.close()


async def install(handle: VmHandle) -> None:
    with tempfile.TemporaryFile() as archive:
        archive.write(await asyncio.to_thread(guest_agent.bundle))
        archive.seek(0)
        await asyncio.to_thread(handle.files.extract, b"/opt", archive.fileno(), user=None)


async def said_by(channel: AgentChannel, *argv: str) -> tuple[Exit, bytes]:
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        running = await channel.exec(plan(*argv, env={}, cwd="/"), (None, writing, None), LIMITS)
    finally:
        os.close(writing)
    with open(reading, "rb") as pipe:
        data = await asyncio.to_thread(pipe.read)
    return await running.exited, data
