# SPDX-License-Identifier: Apache-2.0
"""The node over a fake backend: admission, batches, ends, deadlines, and what the journal has of them."""

from __future__ import annotations

import asyncio

import pytest

from opendsec.api.errors import Conflict, Internal, InvalidRequest, NotFound, OpenDSecError, QuotaExceeded, SandboxLost, Unavailable
from opendsec.api.spec import CreateRequest
from opendsec.edge.admission import Policy
from opendsec.edge.node import Node
from opendsec.runtime.backend import Placement
from tests.unit.edge.conftest import MIB, World, create, spec


def states(world: World) -> dict[str, tuple[str, bool]]:
    return {row.id: (row.state, row.held) for row in world.journal.sandboxes()}


async def test_a_sandbox_is_placed_as_asked(world: World, node: Node) -> None:
    (info,) = await create(node, env={"B": "2"}, layers=("toolkit:fake@1",), hostname="box", workdir="/w")
    (placement,) = world.backend.created
    assert (placement.sandbox_id, placement.hostname, placement.user, placement.workdir) == (info.id, "box", "root", "/w")
    assert placement.env["FROM_IMAGE"] == "1" and placement.env["B"] == "2"
    assert [layer.digest for layer in placement.layers] == list(info.layers)
    assert placement.uid_base % 65_536 == 0
    (other,) = await create(node)
    assert world.backend.created[1].hostname == other.id.replace("_", "-")
    assert world.backend.created[1].uid_base != placement.uid_base


async def test_the_intent_is_written_before_and_the_outcome_after(world: World, node: Node) -> None:
    seen = []

    def before_create(placement: Placement) -> None:
        seen.append(states(world)[placement.sandbox_id])

    world.backend.before_create = before_create
    (info,) = await create(node)
    assert seen == [("creating", True)]
    assert states(world) == {info.id: ("running", True)}
    await node.kill(info.id)
    assert states(world) == {info.id: ("stopped", False)}


async def test_a_batch_is_few_commits_and_each_outcome_is_written_as_it_comes(world: World, node: Node) -> None:
    statements: list[str] = []
    world.journal._db.set_trace_callback(statements.append)
    await create(node, 20)
    assert statements.count("COMMIT") == 2
    world.journal._db.set_trace_callback(None)
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    world.policy = node.policy = Policy(memory_bytes=1 << 50, disk_bytes=1 << 50, sandboxes=1000)
    world.backend.before_create = lambda placement: None if len(world.machine.sandboxes) < 52 else gate
    making = asyncio.ensure_future(create(node, 40))
    while sum(state == "running" for state, _ in states(world).values()) < 52:
        await asyncio.sleep(0)
    assert sum(state == "creating" for state, _ in states(world).values()) == 8
    gate.set_result(None)
    assert len(await making) == 40


async def test_a_slot_that_fails_leaves_the_others(world: World, node: Node) -> None:
    def before_create(placement: Placement) -> OpenDSecError | None:
        return Unavailable("no more forks") if len(world.machine.sandboxes) == 2 else None

    world.backend.before_create = before_create
    response = await node.create(CreateRequest(spec=spec(), count=3))
    assert [slot.sandbox is not None for slot in response.slots] == [True, True, False]
    error = response.slots[2].error
    assert error is not None and error.code == "unavailable"
    assert sorted(states(world).values()) == [("running", True), ("running", True), ("stopped", False)]
    assert node.promised.sandboxes == 2 and node.promised.memory_bytes == 20 * MIB
    assert len(world.machine.sandboxes) == 2


async def test_a_single_failure_is_raised(world: World, node: Node) -> None:
    world.backend.before_create = lambda placement: Unavailable("no more forks")
    with pytest.raises(Unavailable, match="no more forks"):
        await create(node)
    assert node.promised.sandboxes == 0


async def test_a_bug_in_the_backend_is_ours(world: World, node: Node) -> None:
    def before_create(placement: Placement) -> None:
        raise KeyError("oops")

    world.backend.before_create = before_create
    with pytest.raises(Internal, match="KeyError"):
        await create(node)
    assert node.promised.sandboxes == 0


async def test_what_is_refused_is_not_journaled(world: World, node: Node) -> None:
    for bad, error in (
        (spec(memory=2000 * MIB), QuotaExceeded),
        (spec(image="nothing"), NotFound),
        (spec(layers=("toolkit:nothing@1",)), NotFound),
        (spec(pids=0), InvalidRequest),
    ):
        with pytest.raises(error):
            await node.create(CreateRequest(spec=bad, action_id="a"))
    with pytest.raises(InvalidRequest):
        await node.create(CreateRequest(spec=spec(), count=0))
    assert (world.journal.sandboxes(), world.journal.action("a"), world.backend.created) == ([], None, [])


async def test_the_limit_holds_for_creates_under_way(world: World, node: Node) -> None:
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    world.backend.before_create = lambda placement: gate
    first = asyncio.ensure_future(create(node, memory=600 * MIB))
    while not world.machine.sandboxes:
        await asyncio.sleep(0)
    with pytest.raises(QuotaExceeded):
        await create(node, memory=600 * MIB)
    gate.set_result(None)
    await first
    assert node.promised.memory_bytes == 600 * MIB


async def test_uid_ranges_run_out_by_name(world: World, node: Node) -> None:
    world.policy = node.policy = Policy(memory_bytes=1 << 50, disk_bytes=1 << 50, sandboxes=1000)
    response = await node.create(CreateRequest(spec=spec(), count=61))
    last = response.slots[60].error
    assert last is not None and last.data["resource"] == "uid_ranges"
    assert all(slot.sandbox for slot in response.slots[:60])
    assert len({placement.uid_base for placement in world.backend.created}) == 60


async def test_killed_while_it_is_made(world: World, node: Node) -> None:
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    world.backend.before_create = lambda placement: gate
    making = asyncio.ensure_future(create(node))
    while not node.boxes:
        await asyncio.sleep(0)
    (sandbox_id,) = node.boxes
    killing = asyncio.ensure_future(node.kill(sandbox_id))
    await asyncio.sleep(0)
    with pytest.raises(Conflict, match="is stopping"):
        node.running(sandbox_id)
    gate.set_result(None)
    assert (await killing).state == "stopped"
    assert (await making)[0].state in ("stopping", "stopped")
    assert not world.machine.sandboxes


async def test_many_kills_are_one(world: World, node: Node) -> None:
    (info,) = await create(node)
    ended = await asyncio.gather(*(node.kill(info.id) for _ in range(5)))
    assert {one.state for one in ended} == {"stopped"}
    assert not world.machine.sandboxes and node.promised.sandboxes == 0


async def test_destroying_is_tried_again(world: World, node: Node) -> None:
    (info,) = await create(node)
    world.backend.handles[info.id].fail_destroy = 1
    assert (await node.kill(info.id)).state == "stopping"
    assert node.promised.sandboxes == 1, "what may still be there is still counted"
    assert states(world) == {info.id: ("stopping", True)}
    world.clock.advance(1.0)
    assert (await node.kill(info.id)).state == "stopped"
    assert not world.machine.sandboxes and node.promised.sandboxes == 0


async def test_a_death_is_a_loss_and_frees_everything(world: World, node: Node) -> None:
    (info,) = await create(node)
    world.machine.sandboxes[info.id].die("its first process ended")
    await asyncio.sleep(0)
    with pytest.raises(SandboxLost, match="its first process ended"):
        node.running(info.id)
    await node.boxes[info.id].wait_ended()
    assert node.boxes[info.id].info().state == "lost"
    assert not world.machine.sandboxes and node.promised.sandboxes == 0
    node.flush()
    assert [event.kind for event in node.journal.events(sandbox_id=info.id)] == ["sandbox.created", "sandbox.lost"]


async def test_deadlines_end_sandboxes(world: World, node: Node) -> None:
    (absolute,) = await create(node, ttl_s=10)
    (idle,) = await create(node, ttl_idle_s=5)
    (used,) = await create(node, ttl_idle_s=5)
    (forever,) = await create(node)
    with node.use(node.box(used.id)):
        world.clock.advance(6)
        await node.boxes[idle.id].wait_ended()
        assert node.box(idle.id).state.message == "it was idle for ttl_idle_s"
        world.clock.advance(5)
        await node.boxes[absolute.id].wait_ended()
    world.clock.advance(4.9)
    assert node.box(used.id).state.phase == "running"
    world.clock.advance(0.2)
    await node.boxes[used.id].wait_ended()
    assert node.box(forever.id).state.phase == "running"
    assert world.clock.pending() == []


async def test_draining_takes_no_more(world: World, node: Node) -> None:
    (info,) = await create(node)
    node.drain()
    with pytest.raises(Unavailable, match="draining"):
        await create(node)
    assert node.info().state == "draining"
    assert (await node.kill(info.id)).state == "stopped"


async def test_old_ended_sandboxes_are_forgotten(world: World, node: Node) -> None:
    (old,) = await create(node)
    await node.kill(old.id)
    world.clock.advance(2 * 86_400)
    (young,) = await create(node)
    node.prune()
    assert list(node.boxes) == [young.id]
    with pytest.raises(NotFound):
        node.box(old.id)


async def test_a_journal_that_cannot_be_written_stops_creates_not_ends(world: World, node: Node) -> None:
    (info,) = await create(node)
    world.journal._db.execute("PRAGMA query_only = 1")
    with pytest.raises(Unavailable, match="journal"):
        await create(node)
    assert node.promised.sandboxes == 1 and len(world.machine.sandboxes) == 1
    assert (await node.kill(info.id, action_id="end-it")).state == "stopped"  # also where a repetition could not be told from it
    assert not world.machine.sandboxes
    world.journal._db.execute("PRAGMA query_only = 0")
    node.flush()
    assert states(world) == {info.id: ("stopped", False)}


async def test_layers_are_let_go_when_garbage_is_collected_and_from_time_to_time(world: World, node: Node) -> None:
    await until_idle(node)
    before = world.backend.tidied
    await node.collect(dry_run=True)
    assert world.backend.tidied == before
    await node.collect(dry_run=False)
    assert world.backend.tidied == before + 1
    node.prune()
    await until_idle(node)
    assert world.backend.tidied == before + 2


async def until_idle(node: Node) -> None:
    while node._tasks:
        await asyncio.wait(node._tasks)
