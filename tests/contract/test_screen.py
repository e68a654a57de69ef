# SPDX-License-Identifier: Apache-2.0
"""Screens through the real server, over fake machines: what arrives at the machine, and VNC both ways at once."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import httpx
import pytest

from opendsec.api.errors import InvalidRequest, NotFound, Unsupported
from opendsec.api.spec import VM
from opendsec.client.aio import Client, Sandbox
from opendsec.edge.serve_screen import TICKET_S
from opendsec.testing.fakes.machines import FakeMachineHandle, FakeScreen
from opendsec.testing.fakes.parts import IMAGE
from opendsec.testing.local_edge import LocalEdge
from opendsec.testing.waiting import eventually
from tests.contract.conftest import local_edge


@pytest.fixture
async def local(tmp_path: Path) -> AsyncGenerator[LocalEdge, None]:
    async with local_edge("fake", tmp_path) as local:
        yield local


@pytest.fixture
async def client(local: LocalEdge) -> AsyncGenerator[Client, None]:
    async with asyncio.timeout(60), Client(f"unix:{local.settings.socket}") as client:
        yield client


@pytest.fixture
async def box(client: Client) -> AsyncGenerator[Sandbox, None]:
    async with await client.create(VM(image=IMAGE, memory="128MiB", disk="64MiB", display="640x480")) as box:
        yield box


def screen_of(local: LocalEdge, box: Sandbox) -> FakeScreen:
    assert local.node is not None
    handle = local.node.boxes[box.id].handle
    assert isinstance(handle, FakeMachineHandle) and isinstance(handle.screen, FakeScreen)
    return handle.screen


async def test_pictures_pointer_and_keyboard(local: LocalEdge, box: Sandbox) -> None:
    image = await box.screen.png()
    assert struct.unpack(">II", image[16:24]) == (640, 480) == await box.screen.size()
    await box.pause()
    assert await box.screen.resize(800, 600) == (800, 600)  # which resumes it
    await box.mouse.click(3, 4, button="right", count=2)
    await box.mouse.move(1, 2)
    await box.mouse.down()
    await box.mouse.up()
    await box.mouse.scroll(5, 6, dy=-3)
    await box.keyboard.press("ctrl+s")
    await box.keyboard.type("hé\n")
    with pytest.raises(InvalidRequest, match="no key is called"):
        await box.keyboard.press("hyper+x")
    assert screen_of(local, box).done == [
        ("click", 3, 4, "right", 2),
        ("move", 1, 2),
        ("button", "left", True),
        ("button", "left", False),
        ("scroll", 5, 6, 0, -3),
        ("key", "ctrl+s"),
        ("text", "hé\n"),
    ]


async def test_one_without_a_display_has_no_screen(client: Client) -> None:
    async with await client.create(VM(image=IMAGE, memory="128MiB", disk="64MiB", display="")) as box:
        for need in (box.screen.png(), box.screen.size(), box.mouse.move(1, 1), box.keyboard.type("x")):
            with pytest.raises(Unsupported, match="has no screen"):
                await need


async def test_vnc_goes_both_ways_at_once(box: Sandbox) -> None:
    words: asyncio.Queue[bytes] = asyncio.Queue()

    async def said() -> AsyncIterator[bytes]:
        while word := await words.get():
            yield word

    heard = box.screen.vnc(said())
    assert await anext(heard) == b"RFB 003.008\n"
    for word in (b"one", b"x" * 200_000, b"two"):
        words.put_nowait(word)
        back = b""
        while len(back) < len(word):
            back += await anext(heard)
        assert back == word
    words.put_nowait(b"")
    assert [rest async for rest in heard] == []


async def test_a_viewer_that_goes_away_is_let_go(local: LocalEdge, box: Sandbox) -> None:
    async def said() -> AsyncIterator[bytes]:
        yield b"hello"
        await asyncio.Event().wait()

    heard = box.screen.vnc(said())
    assert await anext(heard) == b"RFB 003.008\n"
    assert local.node is not None and local.node.boxes[box.id].state.busy == 1
    await heard.aclose()
    boxes = local.node.boxes
    await eventually(lambda: not boxes[box.id].state.busy)


async def test_a_ticket_is_for_one_connection_and_not_for_long(local: LocalEdge, box: Sandbox) -> None:
    async with local.http() as http:
        token = (await http.post(f"/v1/sandboxes/{box.id}/screen/vnc")).json()["token"]
        first = await http.post(f"/v1/vnc/{token}", content=b"")
        assert first.content == b"RFB 003.008\n" and first.headers["content-type"] == "application/octet-stream"
        assert await _refused(http, token)
        assert local.node is not None
        token = (await http.post(f"/v1/sandboxes/{box.id}/screen/vnc")).json()["token"]
        clock = local.node.clock.time
        local.node.clock.time = lambda: clock() + TICKET_S  # type: ignore[method-assign]
        assert await _refused(http, token)


async def _refused(http: httpx.AsyncClient, token: str) -> bool:
    response = await http.post(f"/v1/vnc/{token}", content=b"")
    return (response.status_code, response.json()["error"]["code"], response.json()["error"]["field"]) == (404, NotFound.code, "token")
