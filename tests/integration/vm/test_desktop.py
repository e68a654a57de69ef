# SPDX-License-Identifier: Apache-2.0
"""A desktop used by screen and keyboard: an editor is opened, typed into, saved."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

from opendsec.api.ids import PROCESS, new_id
from opendsec.images.store import ImageStore
from opendsec.runtime.backend import ExecPlan, VmOptions
from opendsec.runtime.vmm.handle import VmHandle
from opendsec.testing.contracts.backend import Setup
from tests.full_vms import DESKTOP, LIMITS, FullNode, debian_desktop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first makes the disk and its template, which are kept
OPTIONS = VmOptions(profile="linux-uefi", width=1280, height=800)
ENV = {"PATH": "/usr/bin:/bin", "DISPLAY": ":0", "HOME": "/home/user", "NO_AT_BRIDGE": "1"}  # else GTK waits 25 s for a bus
FILE = "/home/user/note.txt"
TEXT = "Typed: 2 + 2 = 4!"
PATIENCE_S = 300.0  # an emulated machine on a busy one


async def run(handle: VmHandle, *argv: str, user: str = "root") -> str:
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        plan = ExecPlan(process_id=new_id(PROCESS), argv=argv, env=ENV, cwd="/", user=user)
        running = await handle.exec(plan, stdin=None, stdout=writing, stderr=None)
    finally:
        os.close(writing)
    try:
        await running.exited
        await running.release()
        return (await asyncio.to_thread(os.read, reading, 4096)).decode()
    finally:
        os.close(reading)


async def test_an_editor_is_used_as_a_person_would() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with FullNode(Path(folder)) as node:
            setup = Setup(make=node.make, layers=ImageStore(debian_desktop()).resolve(DESKTOP).layers, murder=lambda _: None, limits=LIMITS)
            await setup.start()
            placement = setup.placement(vm=OPTIONS)
            try:
                handle = await setup.backend.create(placement)
                assert isinstance(handle, VmHandle)
                await use(handle)
            finally:
                await setup.backend.clear(placement.sandbox_id, None)
                await setup.backend.close()


async def use(handle: VmHandle) -> None:
    screen = handle.screen
    assert screen is not None
    empty = await screen.png()
    assert screen.size == (1280, 800)
    await run(handle, "install", "-o", "user", "-m", "644", "/dev/null", FILE)
    plan = ExecPlan(process_id=new_id(PROCESS), argv=("l3afpad", FILE), env=ENV, cwd="/home/user", user="user")
    editor = await handle.exec(plan, stdin=None, stdout=None, stderr=None)
    last = now = empty
    async with asyncio.timeout(PATIENCE_S):
        # A window changes what is shown a lot; when it is complete only a cursor blinks.
        while len(last) < len(empty) * 3 // 2 or abs(len(now) - len(last)) * 20 > len(last):
            await asyncio.sleep(1)
            await screen.click(640, 400)  # a clone's desktop may show what it has drawn only with the next event
            last, now = now, await screen.png()
    await screen.click(640, 400)
    await screen.text(TEXT)
    await screen.key("ctrl+s")
    async with asyncio.timeout(PATIENCE_S):
        while not (held := await run(handle, "cat", FILE)):
            await asyncio.sleep(0.5)
    assert held.strip() == TEXT
    editor.kill_tree()
    await editor.release()
