# SPDX-License-Identifier: Apache-2.0
"""An edge dies at every point; the next one finds out what is true."""

from __future__ import annotations

import asyncio

import pytest

from opendsec.api.errors import Unavailable
from opendsec.api.exec import Command
from opendsec.api.files import Written
from opendsec.api.sandboxes import CreateResponse
from opendsec.api.spec import CreateRequest
from opendsec.edge.actions import decode_result
from opendsec.edge.commands import Commands
from opendsec.edge.node import Node
from opendsec.runtime.backend import Placement
from tests.unit.edge.conftest import World, create, spec


def commands(world: World) -> Commands:
    return world.routes.commands


async def test_running_sandboxes_are_adopted(world: World, node: Node) -> None:
    before = await create(node, 3, ttl_s=100, labels={"a": "b"})
    node = await world.restart()
    after = [node.box(one.id).info(full=False) for one in before]
    assert after == before
    assert node.promised.sandboxes == 3
    assert world.clock.pending() == [before[0].expires_at] * 3
    assert all(node.running(one.id) for one in before)
    # Their uid ranges are taken.
    made = await create(node, 2)
    bases = [row.uid_base for row in world.journal.sandboxes() if row.held]
    assert len(set(bases)) == len(bases) == 5 and made


async def test_gone_sandboxes_are_lost(world: World, node: Node) -> None:
    (dead,) = await create(node)
    (alive,) = await create(node)
    world.crash()
    world.machine.sandboxes[dead.id].die()
    node = await world.boot()
    assert node.box(dead.id).info().state == "lost"
    assert node.box(alive.id).info().state == "running"
    assert set(world.machine.sandboxes) == {alive.id}
    assert node.promised.sandboxes == 1


async def test_a_reboot_loses_all(world: World, node: Node) -> None:
    made = await create(node, 3)
    world.crash()
    world.machine.boot_id = "fake-boot-2"
    node = await world.boot()
    assert {node.box(one.id).info().state for one in made} == {"lost"}
    assert "restarted" in node.box(made[0].id).info().message
    assert node.promised.sandboxes == 0 and not world.machine.sandboxes


async def test_half_made_ones_are_cleared_and_their_action_is_unknown(world: World, node: Node) -> None:
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    world.backend.before_create = lambda placement: never
    making = asyncio.ensure_future(node.create(CreateRequest(spec=spec(), count=2, action_id="a")))
    while len(world.machine.sandboxes) < 2:
        await asyncio.sleep(0)
    row = world.journal.action("a")
    assert row is not None and len(row.detail.split()) == 2
    node = await world.restart()
    assert not world.machine.sandboxes and node.promised.sandboxes == 0
    assert {box.info().state for box in node.boxes.values()} == {"stopped"}
    response = await node.create(CreateRequest(spec=spec(), count=2, action_id="a"))
    assert [slot.error and (slot.error.code, slot.error.data["outcome"]) for slot in response.slots] == [("unavailable", "unknown")] * 2
    assert world.backend.created == []
    never.cancel()
    await asyncio.wait((making,))


async def test_a_created_one_is_told_by_its_unfinished_action(world: World, node: Node) -> None:
    """The edge died after the first of two chunks was journaled."""
    (info,) = await create(node)
    world.journal.begin_action("a", sandbox_id=None, kind="create", digest=b"", detail=f"{info.id} sb_0000000000000000 -", at=1.0)
    node = await world.restart()
    row = world.journal.action("a")
    assert row is not None and row.state == "unknown" and row.result is not None
    slots = decode_result(row.result, CreateResponse).slots
    assert slots[0].sandbox is not None and slots[0].sandbox.id == info.id
    assert [slot.error and slot.error.code for slot in slots] == [None, "unavailable", "quota_exceeded"]


async def test_half_destroyed_ones_are_finished(world: World, node: Node) -> None:
    (info,) = await create(node)
    world.backend.handles[info.id].fail_destroy = 1
    assert (await node.kill(info.id)).state == "stopping"
    node = await world.restart()
    assert node.box(info.id).info().state == "stopped"
    assert not world.machine.sandboxes and node.promised.sandboxes == 0


async def test_leftovers_that_nobody_knows_are_cleared(world: World, node: Node) -> None:
    (known,) = await create(node)
    world.crash()
    (placement,) = world.backend.created
    stray = Placement(
        sandbox_id="sb_stray00000000000",
        uid_base=0,
        limits=placement.limits,
        layers=(),
        config=placement.config,
        env={},
        user="root",
        workdir="/",
        hostname="x",
    )
    await world.backend.create(stray)
    await world.boot()
    assert set(world.machine.sandboxes) == {known.id}


async def test_deadlines_that_passed_meanwhile_end_at_once(world: World, node: Node) -> None:
    (absolute,) = await create(node, ttl_s=10)
    (idle,) = await create(node, ttl_idle_s=10)
    (later,) = await create(node, ttl_s=1000)
    world.crash()
    world.clock.advance(50)
    node = await world.boot()
    assert [node.box(one.id).info().state for one in (absolute, idle, later)] == ["stopped", "stopped", "running"]
    assert set(world.machine.sandboxes) == {later.id}
    assert world.clock.pending() == [later.expires_at]


async def test_what_was_in_use_is_not_idle_since_long(world: World, node: Node) -> None:
    (info,) = await create(node, ttl_idle_s=10)
    await commands(world).start(info.id, Command(argv=("sleep", "1000")))
    world.clock.advance(100)
    node = await world.restart()
    assert node.box(info.id).info().idle_expires_at == world.clock.time() + 10
    world.clock.advance(11)
    await node.box(info.id).wait_ended()


async def test_commands_of_a_dead_edge_are_unknown(world: World, node: Node) -> None:
    (info,) = await create(node)
    run = asyncio.ensure_future(commands(world).run(info.id, Command(argv=("sleep", "1000"), action_id="r")))
    started = await commands(world).start(info.id, Command(argv=("sleep", "1000"), action_id="s"))
    done = await commands(world).run(info.id, Command(argv=("echo", "hi"), action_id="d"))
    unnamed = await commands(world).start(info.id, Command(argv=("sleep", "1000")))
    while len(commands(world).list(info.id).processes) < 4:
        await asyncio.sleep(0)
    world.journal._db.execute("PRAGMA query_only = 1")  # the dying edge writes nothing more
    await world.restart()
    await asyncio.wait((run,))
    again = commands(world)
    assert (await again.run(info.id, Command(argv=("sleep", "1000"), action_id="r"))).outcome == "unknown"
    repeated = await again.start(info.id, Command(argv=("sleep", "1000"), action_id="s"))
    assert repeated.id == started.id and repeated.result is not None and repeated.result.outcome == "unknown"
    assert await again.run(info.id, Command(argv=("echo", "hi"), action_id="d")) == done
    events = [event async for event in await again.stream(info.id, Command(argv=("true",), action_id="t"))]
    assert events[-1].result is not None and events[-1].result.outcome == "exited"
    assert (await again.wait(info.id, unnamed.id, None)).outcome == "unknown"
    assert [event.kind async for event in await again.attach(info.id, unnamed.id, 0, 0)] == ["exit"]


async def test_other_actions_of_a_dead_edge_are_unknown(world: World, node: Node) -> None:
    (info,) = await create(node)
    world.journal.begin_action("w", sandbox_id=info.id, kind="write", digest=b"", detail="", at=1.0)
    node = await world.restart()
    row = world.journal.action("w")
    assert row is not None and row.state == "unknown"
    with pytest.raises(Unavailable) as error:
        decode_result(row.result or b"", Written)
    assert error.value.data == {"outcome": "unknown"}


async def test_event_numbers_go_on(world: World, node: Node) -> None:
    await create(node)
    node.flush()
    last = node.events.seq
    node = await world.restart()
    assert node.events.seq > last
