# SPDX-License-Identifier: Apache-2.0
"""Machines through the SDK, over the fake edge: copies and snapshots by the contract, screens by what the machine was told."""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from opendsec.api.errors import InvalidRequest, NotFound, Unsupported
from opendsec.api.spec import VM, MicroVM
from opendsec.client.aio import Client
from opendsec.client.cli.vnc import passed
from opendsec.testing.contracts import client_machines as machines
from opendsec.testing.contracts.client import Setup
from opendsec.testing.fakes.edge import FakeEdge


@pytest.mark.parametrize("name", machines.CHECKS)
async def test_contract(name: str, edge: FakeEdge) -> None:
    setup = Setup(make=lambda: Client(f"unix:{edge.socket_path}"), image="debian", kind=MicroVM, memory="128MiB")
    await machines.CHECKS[name](setup)


async def test_pointer_and_keyboard(edge: FakeEdge) -> None:
    async with Client(f"unix:{edge.socket_path}") as client, await client.create(VM(image="debian", display="640x480")) as box:
        image = await box.screen.png()
        assert image.startswith(b"\x89PNG") and struct.unpack(">II", image[16:24]) == (640, 480)
        await box.mouse.move(1, 2)
        await box.mouse.click(3, 4, button="right", count=2)
        await box.mouse.down()
        await box.mouse.up()
        await box.mouse.scroll(5, 6, dy=-3)
        await box.keyboard.press("ctrl+s")
        await box.keyboard.type("hi\n")
        told = edge.machines.screens[box.id].done
        assert told == [(1, 2), (3, 4, "right", 2), (True, "left"), (False, "left"), (5, 6, 0, -3), ("ctrl+s",), ("hi\n",)]
        assert await box.screen.resize(800, 600) == await box.screen.size() == (800, 600)


async def test_what_a_screen_cannot_be_told(edge: FakeEdge) -> None:
    async with Client(f"unix:{edge.socket_path}") as client, await client.create(VM(image="debian")) as box:
        for wrong, field in (
            (lambda: box.mouse.move(-1, 0), "events[0].x"),
            (lambda: box.mouse.move(0, 5000), "events[0].y"),
            (lambda: box.mouse.click(0, 0, count=9), "events[0].count"),
            (lambda: box.mouse.click(0, 0, button="fourth"), "events[0].button"),  # type: ignore[arg-type]
            (lambda: box.mouse.scroll(0, 0), "events[0].dx"),
            (lambda: box.keyboard.press(""), "events[0].keys"),
            (lambda: box.keyboard.type("x" * 20_000), "events[0].text"),
            (lambda: box.screen.resize(10, 600), "width"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await wrong()
            assert caught.value.field == field
        assert box.id not in edge.machines.screens


async def test_vnc_goes_both_ways_at_once(edge: FakeEdge) -> None:
    async with Client(f"unix:{edge.socket_path}") as client, await client.create(VM(image="debian")) as box:
        words: asyncio.Queue[bytes] = asyncio.Queue()

        async def said() -> AsyncIterator[bytes]:
            while word := await words.get():
                yield word

        heard = box.screen.vnc(said())
        assert await anext(heard) == b"RFB 003.008\n"
        for word in (b"one", b"two"):
            words.put_nowait(word)
            assert await anext(heard) == word
        words.put_nowait(b"")
        assert [rest async for rest in heard] == []
        with pytest.raises(Unsupported):
            async with await client.create(MicroVM(image="debian")) as other:
                await anext(other.screen.vnc(said()))
    with pytest.raises(NotFound):
        async with Client(f"unix:{edge.socket_path}") as client:
            await client.snapshots.get("none")


async def test_dsec_vnc_passes_a_viewer_s_bytes_on(edge: FakeEdge, tmp_path: Path) -> None:
    async with Client(f"unix:{edge.socket_path}") as client, await client.create(VM(image="debian")) as box:
        server = await asyncio.start_unix_server(lambda reader, writer: passed(box.screen, reader, writer), str(tmp_path / "vnc"))
        async with server:
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "vnc"))
            assert await reader.readexactly(12) == b"RFB 003.008\n"
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()


@pytest.mark.slow
def test_the_command_line(edge: FakeEdge, tmp_path: Path) -> None:
    def dsec(*words: str) -> str:
        env = {**os.environ, "OPENDSEC_ADDRESS": f"unix:{edge.socket_path}"}
        done = subprocess.run(
            [sys.executable, "-m", "opendsec.client.cli.main", *words], capture_output=True, text=True, env=env, check=False
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    box = dsec("create", "debian", "--backend", "vm", "--memory", "128MiB").strip()
    assert dsec("ls").splitlines()[1].split()[1:3] == ["running", "vm"]
    dsec("pause", box)
    assert dsec("ls").splitlines()[1].split()[1:3] == ["paused", "vm"]
    dsec("resume", box)
    copies = dsec("fork", box, "-n", "2").split()
    assert len(copies) == 2 and dsec("snapshot", "create", box, "first") == "first\n"
    assert "first" in dsec("snapshot", "ls") and "disk and memory" in dsec("snapshot", "ls")
    again = dsec("create", "debian", "--backend", "vm", "--memory", "128MiB", "--snapshot", "first").strip()
    dsec("snapshot", "rm", "first")
    assert "first" not in dsec("snapshot", "ls")
    picture = tmp_path / "p.png"
    assert dsec("screenshot", box, str(picture)).strip() == str(picture) and picture.read_bytes().startswith(b"\x89PNG")
    dsec("pause", again)
    dsec("kill", "--all")
    assert box not in dsec("ls", "-q")
