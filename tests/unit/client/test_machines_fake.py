# SPDX-License-Identifier: Apache-2.0
"""Machines through the SDK, over the fake edge: copies and snapshots by the contract, screens by what the machine was told."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator

import pytest

from opendsec.api.errors import InvalidRequest, NotFound, Unsupported
from opendsec.api.spec import VM, MicroVM
from opendsec.client.aio import Client
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
