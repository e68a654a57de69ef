# SPDX-License-Identifier: Apache-2.0
"""Action ids in queries: what the contract suite over HTTP cannot bring about."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from opendsec.api.errors import Conflict, Internal, Unavailable
from opendsec.api.files import FileInfo
from opendsec.api.routes import ROUTES
from opendsec.edge.actions import Action, Actions
from opendsec.edge.http import Answer, Disconnected, Handler, Message, Request
from opendsec.edge.journal import Journal
from opendsec.edge.log import NullLog
from opendsec.edge.node import Node
from opendsec.edge.once import HELD_BYTES, OWN, Nothing, exactly_once
from tests.unit.edge.conftest import World, create

IDS = ("sb_1", "proc_1")


class Kit:
    def __init__(self, directory: Path) -> None:
        self.journal = Journal(directory / "journal.db")
        (directory / "results").mkdir()
        self.actions = Actions(self.journal, directory / "results", lambda: 1.0, NullLog())
        self.bodies: list[bytes] = []

    async def stdin(self, request: Request) -> Answer:
        request.intent.begin()
        async for chunk in request.chunks():
            self.bodies.append(chunk)
        return None

    def handler(self, name: str, handler: Handler) -> Handler:
        return exactly_once(self.actions, {name: handler})[name]

    async def ask(self, handler: Handler, *parts: bytes, length: int | None = None, action_id: bytes = b"a", cut: bool = False) -> Answer:
        messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        if cut:
            messages.append({"type": "http.disconnect"})
        else:
            messages.append({"type": "http.request", "body": b"", "more_body": False})
        messages.reverse()

        async def receive() -> Message:
            await asyncio.sleep(0)
            return messages.pop()

        request = Request(ROUTES["STDIN"], IDS, {"action_id": action_id}, receive, length, True)
        answer = await handler(request)
        assert not messages or length == 0, "not all of the body was read"
        return answer


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncGenerator[Kit, None]:
    kit = Kit(tmp_path)
    yield kit
    await kit.actions.close()
    kit.journal.close()


def test_the_other_routes_stay_as_they_are(kit: Kit) -> None:
    handlers = dict.fromkeys(ROUTES, kit.stdin)
    wrapped = {name for name, handler in exactly_once(kit.actions, handlers).items() if handler is not handlers[name]}
    assert wrapped == {name for name, route in ROUTES.items() if "action_id" in route.query} - OWN


async def test_a_body_of_known_length_is_taken_whole_first(kit: Kit) -> None:
    handler = kit.handler("STDIN", kit.stdin)
    with pytest.raises(Disconnected):
        await kit.ask(handler, b"ha", length=4, cut=True)
    assert kit.bodies == [] and kit.journal.action("a") is None
    for _ in range(2):
        assert await kit.ask(handler, b"ha", b"lf", length=4) is None
    assert kit.bodies == [b"half"]
    with pytest.raises(Conflict):
        await kit.ask(handler, b"fool", length=4)


async def test_of_a_long_body_only_the_length_counts(kit: Kit) -> None:
    handler = kit.handler("STDIN", kit.stdin)
    length = HELD_BYTES + 1
    await kit.ask(handler, b"x" * HELD_BYTES, b"y", length=length)
    await kit.ask(handler, b"x" * HELD_BYTES, b"z", length=length)  # read and dropped
    assert kit.bodies == [b"x" * HELD_BYTES, b"y"]
    with pytest.raises(Conflict):
        await kit.ask(handler, b"x" * length, b"y", length=length + 1)


async def test_input_that_was_cut_off_is_unknown_and_does_not_come_twice(kit: Kit) -> None:
    handler = kit.handler("STDIN", kit.stdin)
    with pytest.raises(Disconnected):
        await kit.ask(handler, b"half", cut=True)
    with pytest.raises(Internal) as error:
        await kit.ask(handler, b"half")
    assert error.value.data == {"outcome": "unknown"}
    assert kit.bodies == [b"half"]


async def test_a_handler_that_tells_no_beginning_is_recorded_all_the_same(kit: Kit) -> None:
    ran = 0

    async def silent(request: Request) -> Answer:
        nonlocal ran
        ran += 1
        return None

    for _ in range(2):
        await kit.ask(kit.handler("STDIN", silent), length=0)
    assert ran == 1


async def test_input_that_nobody_takes_does_not_hold_up_the_end(kit: Kit) -> None:
    begun = asyncio.Event()

    async def endless(request: Request) -> Answer:
        request.intent.begin()
        begun.set()
        await asyncio.Event().wait()
        return None

    asking = asyncio.ensure_future(kit.ask(kit.handler("STDIN", endless), b"x", length=1))
    await begun.wait()
    await kit.actions.close()
    await asyncio.wait((asking,))
    assert asking.cancelled()
    assert [row.kind for row in kit.journal.pending_actions()] == ["stdin"]


async def test_results_without_content_survive_the_journal(kit: Kit) -> None:
    async def work(action: Action[Nothing]) -> Nothing:
        action.begin()
        return Nothing()

    for _ in range(2):
        assert await kit.actions.once("n", work, result=Nothing, kind="k", digest=lambda: b"") == Nothing()


async def mkdir(world: World, box: str, path: bytes) -> Answer:
    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    route, handler, _, params = world.routes.router.find("POST", f"/v1/sandboxes/{box}/files/mkdir")
    return await handler(Request(route, params, {"path": path, "action_id": b"m"}, receive, 0, True))


async def test_what_a_dead_edge_had_begun_is_unknown_and_not_done_again(world: World, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    (info,) = await create(node)

    def dead(*args: object, **fields: object) -> None:
        raise Unavailable("the edge is dead")

    monkeypatch.setattr(world.journal, "end_action", dead)
    assert isinstance(await mkdir(world, info.id, b"/d"), FileInfo)
    with pytest.raises(Internal) as failure:
        await mkdir(world, info.id, b"/d")
    assert failure.value.data == {"outcome": "unknown"}
    node = await world.restart()
    files = node.running(info.id)[1].files
    await asyncio.to_thread(files.remove, b"/d", recursive=False)
    for _ in range(2):
        with pytest.raises(Unavailable) as error:
            await mkdir(world, info.id, b"/d")
        assert error.value.data == {"outcome": "unknown"}
    assert b"d" not in [entry.raw_name for entry in await asyncio.to_thread(files.list, b"/")]
    with pytest.raises(Conflict):
        await mkdir(world, info.id, b"/other")
