# SPDX-License-Identifier: Apache-2.0
"""Pools over members that a test holds in its hand: faults of the platform, room, restarts, devices."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from opendsec.api.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded, Unavailable, Unsupported
from opendsec.api.fn import FnCall, FnLimits, FnResult, JudgeTask, PoolSpec, Test
from opendsec.api.images import ImageConfig
from opendsec.edge.fn import pool
from opendsec.edge.fn.devices import Accelerator
from opendsec.edge.journal import Journal
from opendsec.edge.tables import MemberRow
from opendsec.runtime.fncall.interface import Ended, MemberPlan
from tests.unit.edge_fn.conftest import World


def call(world: World, **fields: object) -> asyncio.Task[FnResult]:
    given: dict[str, object] = {"source": "pass", "pool": "p", **fields}
    return asyncio.ensure_future(world.functions.call(FnCall(**given)))  # type: ignore[arg-type]


async def declare(world: World, **fields: object) -> None:
    given: dict[str, object] = {"name": "p", "image": "fake", "size": 1, "max": 1, **fields}
    await world.pools.set(PoolSpec(**given))  # type: ignore[arg-type]


async def test_a_call_whose_member_dies_is_tried_on_another(world: World) -> None:
    await declare(world)
    running = call(world)
    await world.members.until(lambda: bool(world.members.open))
    first = world.members.jobs[0][0]
    first.die("killed")
    await world.members.until(lambda: len(world.members.jobs) == 2)
    assert world.members.jobs[1][0] is not first
    world.members.end()
    assert (await running).outcome == "ok"
    assert world.pools.get("p").machine.lost == 1


async def test_a_call_that_a_member_refuses_is_the_callers_and_costs_no_member(world: World) -> None:
    await declare(world)
    running = call(world)
    await world.members.until(lambda: bool(world.members.open))
    world.members.running[0].set_exception(InvalidRequest("at most 4096", field="argv"))
    with pytest.raises(InvalidRequest) as caught:
        await running
    assert caught.value.field == "argv"
    again = call(world)
    await world.members.until(lambda: bool(world.members.running))
    world.members.end()
    assert (await again).outcome == "ok"
    assert world.members.jobs[1][0] is world.members.jobs[0][0] and world.pools.get("p").machine.lost == 0


async def test_a_call_that_loses_two_members_is_a_platform_error(world: World) -> None:
    await declare(world)
    running = call(world)
    for number in (1, 2):
        await world.members.until(lambda number=number: len(world.members.jobs) == number)
        world.members.jobs[-1][0].die("killed")
    result = await running
    assert result.outcome == "platform_error" and "it died" in result.message
    assert len(world.members.jobs) == 2
    denied = call(world)
    await world.members.until(lambda: bool(world.members.running))
    world.members.end(Ended(signal=31, denied="mount"))
    assert (await denied).outcome == "denied"
    node = world.pools.node
    node.flush()
    kinds = [event.kind for event in node.journal.events() if event.kind.startswith(("fn.", "pool."))]
    assert kinds == ["pool.declared", "pool.member_lost", "pool.member_lost", "fn.platform_error", "fn.denied"]


async def test_a_call_with_an_action_id_never_runs_twice(world: World) -> None:
    await declare(world)
    running = call(world, action_id="once")
    await world.members.until(lambda: bool(world.members.open))
    world.members.jobs[0][0].die("killed")
    assert (await running).outcome == "platform_error"
    assert len(world.members.jobs) == 1
    assert (await call(world, action_id="once")).outcome == "platform_error", "as it was recorded"


async def test_a_call_that_never_ran_may_be_tried_again_whatever_its_id(world: World) -> None:
    await declare(world)
    running = call(world, action_id="once")
    await world.members.until(lambda: bool(world.members.open))
    world.members.end(Ended(not_started="no memory for its file system"))
    await world.members.until(lambda: len(world.members.jobs) == 2)
    world.members.end()
    assert (await running).outcome == "ok"


async def test_a_spoiled_member_is_replaced_and_its_call_counts(world: World) -> None:
    await declare(world)
    running = call(world)
    await world.members.until(lambda: bool(world.members.open))
    world.members.end(Ended(code=0, spoiled="a process that would not die"))
    assert (await running).outcome == "ok"
    await world.members.until(lambda: world.members.created == 2)


async def test_a_member_that_does_not_end_a_call_in_time_is_given_up(world: World) -> None:
    await declare(world)
    running = call(world)
    await world.members.until(lambda: bool(world.members.open))
    pool = world.pools.get("p")
    pool.watch(asyncio.get_running_loop().time() + 1e6)
    await world.members.until(lambda: len(world.members.jobs) == 2)
    world.members.end()
    assert (await running).outcome == "ok"


async def test_a_member_that_does_not_even_take_a_cancellation_is_killed(world: World) -> None:
    await declare(world)
    world.members.stubborn = True
    running = call(world)
    await world.members.until(lambda: bool(world.members.open))
    pool, now = world.pools.get("p"), asyncio.get_running_loop().time()
    pool.watch(now + 1e6)
    await asyncio.sleep(0)
    assert len(world.members.jobs) == 1
    world.members.stubborn = False
    pool.watch(now + 2e6)
    await world.members.until(lambda: len(world.members.jobs) == 2)
    world.members.end()
    assert (await running).outcome == "ok"


async def test_a_pool_is_not_forgotten_while_its_program_is_compiled(world: World) -> None:
    running = call(world, language="c", pool="")
    await world.members.until(lambda: bool(world.members.running))
    world.members.end(Ended(code=0, files={"main": b"x"}))
    await world.members.until(lambda: bool(world.members.running))
    holders = [holder.member_id for pool in world.pools.implicit.values() for holder in pool.holders.values()]
    assert sorted(holders) == sorted(world.members.members)
    world.members.end()
    assert (await running).outcome == "ok"


async def test_cancelling_ends_a_waiting_and_a_running_call(world: World) -> None:
    await declare(world)
    running, waiting = call(world), call(world)
    await world.members.until(lambda: bool(world.members.open) and world.pools.get("p").machine.waiting == 1)
    for task in (waiting, running):
        task.cancel()
        await asyncio.wait((task,))
    assert not world.members.open and world.pools.get("p").machine.waiting == 0
    again = call(world)
    await world.members.until(lambda: bool(world.members.open))
    world.members.end()
    assert (await again).outcome == "ok"


async def test_a_quota_makes_calls_wait_for_members_of_others(world: World) -> None:
    await declare(world, memory="3GiB")
    first = call(world)
    await world.members.until(lambda: bool(world.members.open))
    world.members.end()
    await first
    small = [call(world, pool="", tenant=f"t{number}") for number in range(3)]  # 512 MiB each; 1 GiB is left
    await world.members.until(lambda: len(world.members.open) == 2)
    assert not any(task.done() for task in small)
    world.members.end()
    await world.members.until(lambda: sum(task.done() for task in small) == 1)
    await world.members.until(lambda: len(world.members.open) == 2)  # the third took the room of the first
    world.members.end()
    world.members.end()
    assert [result.outcome for result in await asyncio.gather(*small)] == ["ok"] * 3


async def test_a_quota_without_hope_is_told(world: World) -> None:
    await declare(world, memory="4GiB")
    await world.members.until(lambda: world.pools.get("p").machine.idle == 1)
    with pytest.raises(QuotaExceeded):
        await call(world, pool="")


async def test_members_that_are_starting_are_hope_for_room(world: World) -> None:
    start = asyncio.Event()

    async def wait(plan: MemberPlan) -> None:
        await start.wait()

    world.members.before_create = wait
    first = call(world, pool="", limits=FnLimits(memory="3GiB"))
    await world.members.until(lambda: len(world.members.plans) == 1)
    second = call(world, pool="", limits=FnLimits(memory="1GiB"))
    await world.members.until(lambda: any(pool.machine.starved for pool in world.pools.implicit.values()))
    start.set()
    for task in (first, second):
        await world.members.until(lambda: bool(world.members.running))
        world.members.end()
        assert (await task).outcome == "ok"


async def test_idle_members_of_unnamed_pools_make_way_for_a_declared_one(world: World) -> None:
    first = call(world, pool="")
    await world.members.until(lambda: bool(world.members.open))
    world.members.end()
    await first
    await declare(world, memory="4GiB")
    await world.members.until(lambda: world.pools.get("p").machine.idle == 1)
    assert all(not pool.machine.living for pool in world.pools.implicit.values())


async def test_what_is_promised_is_given_back(world: World) -> None:
    node = world.pools.node
    before = node.promised
    await declare(world, size=2, max=2)
    await world.members.until(lambda: world.pools.get("p").machine.idle == 2)
    assert node.promised.sandboxes == before.sandboxes + 2
    assert node.promised.memory_bytes == before.memory_bytes + (1 << 30)
    assert len({plan.uid_base for plan in world.members.plans}) == 2
    assert len(node.journal.members()) == 2
    await world.pools.remove("p")
    assert node.promised == before and node.journal.members() == []


async def test_a_dead_edge_leaves_pools_and_its_members_are_cleared(world: World) -> None:
    await declare(world, size=2, max=2, labels={"a": "b"})
    await world.members.until(lambda: world.pools.get("p").machine.idle == 2)
    rows = {row.member_id for row in world.pools.node.journal.members()}
    await world.edge.stop()
    for member_id in rows:  # as if the edge had not come to destroying them
        (world.members.root / member_id).mkdir()
    await world.edge.start()
    await world.members.until(lambda: world.pools.get("p").machine.idle == 2)
    assert world.pools.get("p").spec.labels == {"a": "b"}
    assert not rows & set(world.members.leftovers())
    assert len(world.pools.node.journal.members()) == 2


async def test_a_member_that_cannot_be_cleared_keeps_its_uids(world: World) -> None:
    await world.edge.stop()
    journal = Journal(world.edge.settings.journal)
    uid_base = 0x7FFD0000
    journal.add_member(MemberRow(member_id="sb_stuck", pool="p", uid_base=uid_base, started_at=0.0))
    journal.close()

    async def clear(member_id: str) -> None:
        raise Unavailable("its processes do not die")

    world.members.clear = clear
    await world.edge.start()
    assert [row.member_id for row in world.pools.node.journal.members()] == ["sb_stuck"]
    with pytest.raises(ValueError, match="used twice"):
        world.pools.node.uids.reserve(uid_base)


async def test_starting_that_fails_is_retried_and_calls_learn_of_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "BACKOFF_S", (0.01, 0.02))

    async def fail(plan: MemberPlan) -> None:
        raise Unavailable("no luck today")

    world.members.before_create = fail
    await declare(world, size=0)
    with pytest.raises(Unavailable, match="no luck today"):
        await call(world)
    assert world.pools.get("p").info().state == "failing"
    assert world.pools.node.journal.members() == [] and world.pools.node.promised.sandboxes == 0


async def test_a_pool_that_is_being_removed_takes_no_calls_but_serves_those_it_has(world: World) -> None:
    await declare(world)
    running, waiting = call(world), call(world)
    await world.members.until(lambda: bool(world.members.open) and world.pools.get("p").machine.waiting == 1)
    removing = asyncio.ensure_future(world.pools.remove("p"))
    await asyncio.sleep(0)
    with pytest.raises(Conflict):
        await call(world)
    world.members.end()
    await world.members.until(lambda: len(world.members.jobs) == 2 and bool(world.members.open))
    world.members.end()
    assert [(await task).outcome for task in (running, waiting)] == ["ok", "ok"]
    await removing
    assert "p" not in world.pools.declared and not world.members.members


async def test_changing_what_members_are_made_of_replaces_them(world: World) -> None:
    await declare(world)
    await world.members.until(lambda: world.pools.get("p").machine.idle == 1)
    await declare(world, size=1, max=3)
    assert world.members.created == 1, "numbers alone replace nothing"
    await declare(world, memory="1GiB")
    await world.members.until(lambda: world.members.created == 2 and world.pools.get("p").machine.idle == 1)
    assert world.members.plans[-1].limits.memory_bytes == 1 << 30
    assert world.pools.node.promised.memory_bytes == 1 << 30


async def test_declaring_it_again_takes_the_image_as_it_is_now(world: World) -> None:
    await declare(world)
    await world.members.until(lambda: world.pools.get("p").machine.idle == 1)
    store = world.pools.node.images.store
    layers = {layer.kind: layer.digest for layer in store.list().layers}
    store.name_image("fake", [layers["base"], layers["toolkit"]], ImageConfig())
    world.pools.node.images._fresh.clear()  # a name is trusted for a second
    await declare(world)
    await world.members.until(lambda: world.members.created == 2)
    assert len(world.members.plans[-1].layers) == 2


async def test_an_image_that_comes_late_serves_at_once(world: World) -> None:
    for _ in range(3):
        with pytest.raises(NotFound, match="late"):
            await call(world, pool="", image="late")
    store = world.pools.node.images.store
    store.name_image("late", [layer.digest for layer in store.list().layers if layer.kind == "base"], ImageConfig())
    running = call(world, pool="", image="late")
    await world.members.until(lambda: bool(world.members.running))
    world.members.end()
    assert (await running).outcome == "ok"


async def test_a_draining_edge_takes_no_calls(world: World) -> None:
    await declare(world)
    world.pools.node.drain()
    with pytest.raises(Unavailable):
        await call(world)


async def test_fake_devices_are_leased_to_members_and_refused_where_there_are_none(world: World) -> None:
    """FAKE DEVICES: made up, no machine with such devices took part."""
    with pytest.raises(Unsupported, match="no devices"):
        await declare(world, device="exclusive")
    world.pools.devices = (Accelerator(id="fake-gpu-0"), Accelerator(id="fake-gpu-1"))
    with pytest.raises(Unsupported, match="partitioned"):
        await declare(world, device="mig")
    await declare(world, device="exclusive", size=2, max=3)
    await world.members.until(lambda: world.pools.get("p").machine.idle == 2)
    assert {plan.env["CUDA_VISIBLE_DEVICES"] for plan in world.members.plans} == {"fake-gpu-0", "fake-gpu-1"}
    running = [call(world) for _ in range(3)]
    await world.members.until(lambda: len(world.members.open) == 2)
    assert world.pools.get("p").machine.waiting == 1, "a third member finds no device, and its call waits for the others"
    world.members.end()
    await world.members.until(lambda: len(world.members.jobs) == 3)
    world.members.end()
    world.members.end()
    assert [(await task).outcome for task in running] == ["ok"] * 3
    await world.pools.remove("p")
    assert not world.pools.leases


async def test_fake_devices_do_not_idle_while_a_program_is_compiled(world: World) -> None:
    """FAKE DEVICES, as above: compiled in a pool without one, run in the pool with it."""
    world.pools.devices = (Accelerator(id="fake-gpu-0"),)
    await declare(world, device="exclusive")
    running = call(world, source="int main(){}", language="c")
    await world.members.until(lambda: bool(world.members.open))
    member, job = world.members.jobs[0]
    assert job.argv[0] == "gcc" and "CUDA_VISIBLE_DEVICES" not in member.plan.env
    world.members.end(Ended(code=0, files={"main": b"binary"}))
    await world.members.until(lambda: len(world.members.jobs) == 2)
    member, job = world.members.jobs[1]
    assert job.argv == ("./main",) and member.plan.env["CUDA_VISIBLE_DEVICES"] == "fake-gpu-0"
    assert [(file.path, file.data, file.executable) for file in job.files] == [("main", b"binary", True)]
    world.members.end()
    assert (await running).outcome == "ok"


async def test_the_judged_job_holds_nothing_of_what_is_expected(world: World) -> None:
    await declare(world)
    checker = {"kind": "program", "source": "CHECKER"}
    task = JudgeTask(source="SOURCE", tests=(Test(stdin=b"IN", expected=b"EXPECTED"),), pool="p", checker=checker)  # type: ignore[arg-type]
    judging = asyncio.ensure_future(world.functions.judged(msgspec.json.decode(msgspec.json.encode(task), type=JudgeTask)))
    await world.members.until(lambda: bool(world.members.open))
    judged_by, job = world.members.jobs[0]
    assert b"EXPECTED" not in msgspec.json.encode(job) and "CHECKER" not in job.source
    world.members.end(Ended(code=0, stdout=b"OUT", stdout_total=3))
    await world.members.until(lambda: len(world.members.jobs) == 2)
    checked_by, job = world.members.jobs[1]
    assert {file.path: file.data for file in job.files} == {"input": b"IN", "expected": b"EXPECTED", "output": b"OUT"}
    assert checked_by is not judged_by
    world.members.end()
    assert (await judging).outcome == "ok"
