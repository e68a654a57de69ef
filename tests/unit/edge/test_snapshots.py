# SPDX-License-Identifier: Apache-2.0
"""Snapshots and forks in the node: what is made of them, what does not fit, what half-made ones leave."""

from __future__ import annotations

import asyncio

import pytest

from opendsec.api.errors import Conflict, InvalidRequest, NotFound, OpenDSecError, QuotaExceeded, Unavailable, Unsupported
from opendsec.api.exec import Command
from opendsec.api.sandboxes import SandboxInfo
from opendsec.api.snapshots import ForkRequest, SnapshotInfo, SnapshotRequest
from opendsec.api.spec import MicroVM
from opendsec.edge import pausing
from opendsec.edge.admission import Policy
from opendsec.edge.node import Node
from opendsec.runtime.backend import Placement, SnapshotRecord
from tests.unit.edge.conftest import IMAGE, MIB, World, create, create_machines


async def run(world: World, box: str, shell: str) -> str:
    result = await world.routes.commands.run(box, Command(shell=shell, cwd="/workspace"))
    assert result.exit_code == 0, result
    return result.stdout.data().decode()


async def keep(node: Node, info: SandboxInfo, name: str = "", *, memory: bool = True, action_id: str | None = None) -> SnapshotInfo:
    return await node.snapshots.make(info.id, SnapshotRequest(name=name, memory=memory, action_id=action_id))


async def fork(node: Node, info: SandboxInfo, count: int = 1, action_id: str | None = None) -> list[SandboxInfo]:
    response = await node.snapshots.fork(info.id, ForkRequest(count=count, action_id=action_id))
    made = [slot.sandbox for slot in response.slots]
    assert None not in made, response
    return [one for one in made if one is not None]


async def source(world: World, node: Node, **fields: object) -> SandboxInfo:
    """With something on its disk and something in its memory."""
    (info,) = await create_machines(node, **fields)
    await run(world, info.id, "echo disk >file; echo memory >../dev/shm/file")
    return info


async def test_a_snapshot_keeps_disk_and_memory_together(world: World, node: Node) -> None:
    info = await source(world, node, labels={"a": "b"})
    kept = await keep(node, info, "both")
    assert (kept.name, kept.backend, kept.sandbox_id, kept.memory, kept.image) == ("both", "microvm", info.id, True, IMAGE)
    assert (kept.layers, kept.limits) == (info.layers, info.limits) and kept.stored_bytes > 0 and kept.id.startswith("snap_")
    disk_only = await keep(node, info, memory=False)
    assert disk_only.name == disk_only.id and not disk_only.memory
    await run(world, info.id, "echo more >>file")
    assert isinstance(kept.spec, MicroVM) and kept.spec.snapshot == "both"
    (copy,) = await create_machines(node, labels={"a": "b"}, snapshot="both")
    assert copy.origin == kept.id and world.machines.created[-1].snapshot is not None
    assert await run(world, copy.id, "cat file ../dev/shm/file") == "disk\nmemory\n"
    (copy,) = await create_machines(node, snapshot=disk_only.id)
    assert await run(world, copy.id, "cat file; ls ../dev/shm") == "disk\n"
    assert [one.name for one in node.snapshots.list().snapshots] == ["both", disk_only.name]


async def test_what_does_not_fit_a_snapshot_is_refused_by_the_field(world: World, node: Node) -> None:
    await keep(node, await source(world, node), "s")
    for field, value in {"memory": 120 * MIB, "disk": 17 * MIB, "cpu": 2.0, "pids": 77, "layers": ("toolkit:fake@1",)}.items():
        with pytest.raises(InvalidRequest) as caught:
            await create_machines(node, snapshot="s", **{field: value})
        assert caught.value.field == field
    with pytest.raises(NotFound, match="snapshot: no snapshot 'other'"):
        await create_machines(node, snapshot="other")
    assert node.promised.sandboxes == 1


async def test_an_image_whose_name_means_something_else_now_is_no_matter(world: World, node: Node) -> None:
    info = await source(world, node)
    await keep(node, info, "s")
    await node.images.remove(IMAGE)
    (copy,) = await create_machines(node, snapshot="s")
    assert copy.layers == info.layers
    await node.kill(copy.id)
    await node.kill(info.id)
    assert node.layers_in_use() == set(info.layers)
    await node.snapshots.remove("s")
    assert node.layers_in_use() == set()


async def test_a_name_is_taken_once_and_an_action_runs_once(world: World, node: Node) -> None:
    info = await source(world, node)
    first = await keep(node, info, "s", action_id="a")
    assert await keep(node, info, "s", action_id="a") == first
    with pytest.raises(Conflict, match="already"):
        await keep(node, info, "s")
    assert world.machines.snapshots() == [first.id]
    await node.snapshots.remove("s")
    with pytest.raises(NotFound):
        await node.snapshots.remove("s")
    assert world.machines.snapshots() == [] and world.journal.snapshots() == []
    assert (await keep(node, info, "s")).id != first.id


async def test_a_snapshot_of_a_paused_sandbox_wakes_it(world: World, node: Node) -> None:
    info = await source(world, node)
    await pausing.pause(node, info.id)
    await keep(node, info, "s")
    assert node.box(info.id).info().state == "running"


async def test_containers_have_none(node: Node) -> None:
    (info,) = await create(node)
    with pytest.raises(Unsupported):
        await keep(node, info, "s", action_id="a")
    with pytest.raises(Unsupported):
        await fork(node, info)
    assert node.snapshots.list().snapshots == () and node.journal.snapshots() == []
    assert node.promised.sandboxes == 1


async def test_a_snapshot_that_fails_leaves_nothing(world: World, node: Node) -> None:
    info = await source(world, node)

    async def fail(snapshot_id: str) -> None:
        (world.machines.stored / snapshot_id).mkdir()
        raise Unavailable("no space left")

    world.machines.before_snapshot = fail  # type: ignore[assignment]
    with pytest.raises(Unavailable):
        await keep(node, info, "s")
    with pytest.raises(Unavailable):
        await fork(node, info)
    assert world.machines.snapshots() == [] and world.journal.snapshots() == []
    with pytest.raises(NotFound):
        await create_machines(node, snapshot="s")
    world.machines.before_snapshot = None
    await keep(node, info, "s")


async def test_forks_are_copies_with_lives_of_their_own(world: World, node: Node) -> None:
    info = await source(world, node, labels={"who": "agent"}, ttl_s=100.0)
    world.clock.advance(60)
    forks = await fork(node, info, 3, action_id="f")
    assert {one.origin for one in forks} == {info.id} and len({one.id for one in forks}) == 3
    assert all(one.labels == info.labels and one.limits == info.limits for one in forks)
    assert all(one.expires_at == (info.expires_at or 0) + 60 for one in forks)
    names = [placement.hostname for placement in world.machines.created[-3:]]
    assert len(set(names)) == 3
    for number, one in enumerate(forks):
        assert await run(world, one.id, f"cat file ../dev/shm/file; echo {number} >file") == "disk\nmemory\n"
    assert await run(world, info.id, "cat file") == "disk\n"
    assert world.machines.snapshots() == [] and world.journal.snapshots() == []
    assert [one.id for one in await fork(node, info, 3, action_id="f")] == [one.id for one in forks]
    assert len(world.journal.templates()) == 1
    await node.kill(info.id)
    assert await run(world, forks[0].id, "cat file") == "0\n"


async def test_forks_are_admitted_slot_by_slot(world: World, node: Node) -> None:
    info = await source(world, node)
    node.policy = Policy(memory_bytes=300 * MIB, disk_bytes=1000 * MIB, sandboxes=50)
    response = await node.snapshots.fork(info.id, ForkRequest(count=4))
    assert [slot.sandbox is not None for slot in response.slots] == [True, True, False, False]
    error = response.slots[2].error
    assert error is not None and (error.code, error.field) == ("quota_exceeded", "memory")
    with pytest.raises(QuotaExceeded):
        await fork(node, info)
    assert world.machines.snapshots() == []


async def test_a_fork_that_fails_leaves_the_others(world: World, node: Node) -> None:
    info = await source(world, node)

    def before_create(placement: Placement) -> OpenDSecError | None:
        return Unavailable("no more processes") if len(world.machine.sandboxes) == 2 else None

    world.machines.before_create = before_create
    response = await node.snapshots.fork(info.id, ForkRequest(count=3))
    assert [slot.sandbox is not None for slot in response.slots] == [True, False, False]
    assert node.promised.sandboxes == 2 and world.machines.snapshots() == []


# --- across edges ----------------------------------------------------------------------------------------------------------


async def test_the_next_edge_has_the_snapshots(world: World, node: Node) -> None:
    info = await source(world, node)
    kept = await keep(node, info, "s")
    await node.kill(info.id)
    node = await world.restart()
    node.prune()
    assert node.snapshots.list().snapshots == (kept,)
    assert node.layers_in_use() == set(info.layers)
    (copy,) = await create_machines(node, snapshot="s")
    assert await run(world, copy.id, "cat file") == "disk\n"


@pytest.mark.parametrize("forking", [False, True])
async def test_an_edge_that_dies_while_it_makes_one_leaves_nothing(forking: bool, world: World, node: Node) -> None:
    info = await source(world, node)
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(snapshot_id: str) -> None:
        (world.machines.stored / snapshot_id).mkdir()
        await gate

    world.machines.before_snapshot = wait  # type: ignore[assignment]
    making = asyncio.ensure_future(fork(node, info, action_id="a") if forking else keep(node, info, "s", action_id="a"))  # type: ignore[arg-type]
    while not world.machines.snapshots():
        await asyncio.sleep(0)
    assert len(world.journal.snapshots()) == 1
    world.journal._db.execute("PRAGMA query_only = 1")
    node = await world.restart()
    assert world.machines.snapshots() == [] and world.journal.snapshots() == []
    if not forking:
        with pytest.raises(Unavailable) as caught:
            await keep(node, info, "s", action_id="a")
        assert caught.value.data["outcome"] == "unknown"
    assert (await keep(node, info, "s")).name == "s"
    gate.set_exception(Unavailable("too late"))
    with pytest.raises(Unavailable):
        await making


async def test_what_no_record_names_is_removed_at_start(world: World, node: Node) -> None:
    kept = await keep(node, await source(world, node), "s")
    (world.machines.stored / "snap_0000000000000000").mkdir()
    await world.restart()
    assert world.machines.snapshots() == [kept.id]


async def test_one_of_which_nothing_is_stored_is_forgotten(world: World, node: Node) -> None:
    kept = await keep(node, await source(world, node), "s")
    (world.machines.stored / kept.id).rename(world.directory / "elsewhere")
    node = await world.restart()
    assert node.snapshots.list().snapshots == () and world.journal.snapshots() == []


async def test_a_full_disk_keeps_nobody_from_removing_one(world: World, node: Node) -> None:
    await keep(node, await source(world, node), "s")
    world.journal._db.execute("PRAGMA query_only = 1")
    await node.snapshots.remove("s")
    assert world.machines.snapshots() == [] and node.snapshots.list().snapshots == ()
    world.journal._db.execute("PRAGMA query_only = 0")
    node = await world.restart()
    assert world.journal.snapshots() == []


async def test_two_who_remove_one_take_no_newer_one_of_its_name(world: World, node: Node) -> None:
    info = await source(world, node)
    await keep(node, info, "name")
    remove, going = world.machines.remove_snapshot, asyncio.Event()

    async def slowly(record: SnapshotRecord) -> None:
        await remove(record)
        await going.wait()

    world.machines.remove_snapshot = slowly  # type: ignore[method-assign]
    late = asyncio.ensure_future(node.snapshots.remove("name"))
    await asyncio.sleep(0)
    world.machines.remove_snapshot = remove  # type: ignore[method-assign]
    await node.snapshots.remove("name")
    newer = await keep(node, info, "name")
    going.set()
    assert [one.id for one in (await late).snapshots] == [newer.id]


async def test_a_name_freed_on_a_full_disk_is_free(world: World, node: Node) -> None:
    info = await source(world, node)
    await keep(node, info, "s")
    world.journal._db.execute("PRAGMA query_only = 1")
    await node.snapshots.remove("s")
    world.journal._db.execute("PRAGMA query_only = 0")
    newer = await keep(node, info, "s")
    assert [row.id for row in world.journal.snapshots()] == [newer.id]
