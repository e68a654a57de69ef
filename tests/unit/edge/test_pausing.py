# SPDX-License-Identifier: Apache-2.0
"""Pausing and resuming in the node: what is promised, who wakes a sandbox, what an edge that dies in between leaves."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine

import msgspec
import pytest

from opendsec.api.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded, SandboxLost, Unavailable, Unsupported
from opendsec.api.exec import Command, SessionRequest, SessionRun
from opendsec.api.sandboxes import SandboxInfo
from opendsec.api.snapshots import SnapshotRequest
from opendsec.edge import pausing
from opendsec.edge.admission import Policy
from opendsec.edge.commands import Commands
from opendsec.edge.loading import heard
from opendsec.edge.node import Node
from opendsec.images.lazy.protocol import Event
from opendsec.runtime.backend import Record
from opendsec.testing.fakes.machines import FakeMachineHandle
from tests.unit.edge.conftest import MIB, World, create, create_machines


def commands(world: World) -> Commands:
    return world.routes.commands


def handle(world: World, info: SandboxInfo) -> FakeMachineHandle:
    found = world.machines.handles[info.id]
    assert isinstance(found, FakeMachineHandle)
    return found


async def test_a_paused_sandbox_is_promised_no_memory(world: World, node: Node) -> None:
    (info,) = await create_machines(node)
    assert info.accelerator == "tcg"
    paused = await pausing.pause(node, info.id)
    assert (paused.state, node.promised.memory_bytes, node.promised.disk_bytes, node.promised.sandboxes) == ("paused", 0, 16 * MIB, 1)
    assert await pausing.pause(node, info.id) == paused
    assert [one.id for one in node.list(frozenset(("paused",)), None)] == [info.id]
    assert (world.journal.sandboxes()[0].state, world.journal.sandboxes()[0].turning) == ("paused", "")
    resumed = await pausing.resume(node, info.id)
    assert (resumed.state, node.promised.memory_bytes) == ("running", 100 * MIB)
    assert await pausing.resume(node, info.id) == resumed
    node.flush()
    kinds = [event.kind for event in world.journal.events(sandbox_id=info.id)]
    assert kinds == ["sandbox.created", "sandbox.paused", "sandbox.resumed"]


async def test_what_is_stored_counts_as_disk(world: World, node: Node) -> None:
    (info,) = await create_machines(node)
    world.machines.paused_bytes = 7 * MIB
    await pausing.pause(node, info.id)
    assert (node.promised.memory_bytes, node.promised.disk_bytes) == (0, 23 * MIB)
    node = await world.restart()
    assert (node.promised.memory_bytes, node.promised.disk_bytes) == (0, 23 * MIB)
    await pausing.resume(node, info.id)
    assert (node.promised.memory_bytes, node.promised.disk_bytes) == (100 * MIB, 16 * MIB)
    node.policy = msgspec.structs.replace(node.policy, disk_bytes=115 * MIB)  # its memory may need 100
    with pytest.raises(QuotaExceeded, match=r"100MiB to store its memory asked for, but of the 115MiB .* 99MiB are left"):
        await pausing.pause(node, info.id)
    assert node.box(info.id).info().state == "running" and node.promised.disk_bytes == 16 * MIB
    with pytest.raises(QuotaExceeded, match="to store its memory"):
        await node.snapshots.make(info.id, SnapshotRequest(name="a"))
    (world.machines.handles[info.id].sandbox.root / "file").write_bytes(bytes(5 * MIB))
    made = await node.snapshots.make(info.id, SnapshotRequest(name="a", memory=False))
    assert made.stored_bytes > 5 * MIB and node.promised.disk_bytes == 16 * MIB + made.stored_bytes
    node = await world.restart()
    assert node.promised.disk_bytes == 16 * MIB + made.stored_bytes
    await node.snapshots.remove("a")
    assert node.promised.disk_bytes == 16 * MIB


async def test_containers_cannot_be_paused_and_run_on(node: Node) -> None:
    (info,) = await create(node)
    with pytest.raises(Unsupported, match="cannot be paused"):
        await pausing.pause(node, info.id)
    assert node.box(info.id).info().state == "running"
    with pytest.raises(NotFound):
        await pausing.pause(node, "sb_0000000000000000")


WAKING: dict[str, Callable[[World, str], Coroutine[None, None, object]]] = {
    "run": lambda world, box: commands(world).run(box, Command(argv=("true",))),
    "start": lambda world, box: commands(world).start(box, Command(argv=("true",))),
    "session": lambda world, box: commands(world).open_session(box, SessionRequest()),
    "resume": lambda world, box: pausing.resume(world.node, box),
}


@pytest.mark.parametrize("name", WAKING)
async def test_a_request_that_needs_it_resumes_it(name: str, world: World, node: Node) -> None:
    (info,) = await create_machines(node)
    await pausing.pause(node, info.id)
    await WAKING[name](world, info.id)
    assert node.box(info.id).info().state == "running"


async def test_looking_at_it_leaves_it_paused(world: World, node: Node) -> None:
    (info,) = await create_machines(node)
    done = await commands(world).run(info.id, Command(argv=("echo", "hi")))
    await pausing.pause(node, info.id)
    assert [one.id for one in commands(world).list(info.id).processes] == [done.process_id]
    assert commands(world).info(info.id, done.process_id).state == "ended"
    assert node.box(info.id).info().state == "paused"


async def test_many_who_want_it_resume_it_once(world: World, node: Node) -> None:
    (info,) = await create_machines(node)
    await pausing.pause(node, info.id)
    seen: list[Record] = []
    world.machines.before_resume = seen.append  # type: ignore[assignment]
    await asyncio.gather(*(commands(world).run(info.id, Command(argv=("true",))) for _ in range(8)))
    assert len(seen) == 1


async def test_commands_survive_a_pause_and_their_time_stands_still(world: World, node: Node) -> None:
    (info,) = await create_machines(node, ttl_idle_s=5.0)
    command = Command(shell="read line; echo got $line", stdin_mode="stream", timeout_s=600)
    started = await commands(world).start(info.id, command)
    running = asyncio.ensure_future(commands(world).wait(info.id, started.id, None))
    await asyncio.sleep(0)
    table = node.box(info.id).commands
    assert table is not None
    process = table.get(started.id)
    assert process._timeout is not None
    await pausing.pause(node, info.id)
    assert process._timeout is None and not running.done()
    world.clock.advance(100)
    assert node.box(info.id).info().state == "paused"  # it is never idle
    await pausing.resume(node, info.id)
    assert process._timeout is not None
    await process.write_stdin(b"it\n", close=True)
    assert (await running).stdout.data() == b"got it\n"


async def test_a_session_survives_a_pause(world: World, node: Node) -> None:
    (info,) = await create_machines(node)
    session = await commands(world).open_session(info.id, SessionRequest())
    await commands(world).run_in_session(info.id, session.id, SessionRun(shell="X=kept"))
    await pausing.pause(node, info.id)
    assert (await commands(world).run_in_session(info.id, session.id, SessionRun(shell="echo $X"))).stdout.data() == b"kept\n"


async def test_whoever_talks_to_it_is_waited_for(world: World, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    (info,) = await create_machines(node)
    async with pausing.awake(node, info.id):
        going = asyncio.ensure_future(pausing.pause(node, info.id))
        await asyncio.sleep(0)
        assert node.box(info.id).state.pending == "pause" and not going.done()
        waiting = asyncio.ensure_future(commands(world).run(info.id, Command(argv=("true",))))
        await asyncio.sleep(0)
    await going
    assert (await waiting).exit_code == 0  # and woke it again
    monkeypatch.setattr(pausing, "QUIET_S", 0.001)
    async with pausing.awake(node, info.id):
        with pytest.raises(Conflict, match="talking"):
            await pausing.pause(node, info.id)
    assert node.box(info.id).info().state == "running"


async def test_resuming_asks_for_the_memory_again(world: World, node: Node) -> None:
    (paused,) = await create_machines(node)
    await pausing.pause(node, paused.id)
    node.policy = Policy(memory_bytes=150 * MIB, disk_bytes=1000 * MIB, sandboxes=50)
    (other,) = await create_machines(node)
    for wanting in (pausing.resume(node, paused.id), commands(world).run(paused.id, Command(argv=("true",)))):
        with pytest.raises(QuotaExceeded, match="50MiB are left"):
            await wanting
    assert node.box(paused.id).info().state == "paused" and node.promised.memory_bytes == 100 * MIB
    await node.kill(other.id)
    assert (await commands(world).run(paused.id, Command(argv=("true",)))).exit_code == 0


async def test_what_cannot_be_paused_runs_on_and_what_died_is_lost(world: World, node: Node) -> None:
    (info,) = await create_machines(node)
    handle(world, info).fail_pause = Unavailable("no space left")
    with pytest.raises(Unavailable, match="no space left"):
        await pausing.pause(node, info.id)
    assert node.box(info.id).info().state == "running" and node.promised.memory_bytes == 100 * MIB
    handle(world, info).fail_pause = SandboxLost("it crashed")
    with pytest.raises(SandboxLost, match="it crashed"):
        await pausing.pause(node, info.id)
    await node.box(info.id).wait_ended()
    assert (node.box(info.id).info().state, node.promised.sandboxes, node.promised.memory_bytes) == ("lost", 0, 0)
    with pytest.raises(SandboxLost):
        await pausing.pause(node, info.id)


async def test_what_cannot_be_resumed_stays_paused_or_is_lost(world: World, node: Node) -> None:
    (info,) = await create_machines(node)
    await pausing.pause(node, info.id)
    world.machines.before_resume = lambda record: Unavailable("not now")
    with pytest.raises(Unavailable, match="not now"):
        await pausing.resume(node, info.id)
    assert node.box(info.id).info().state == "paused" and node.promised.memory_bytes == 0
    world.machines.before_resume = lambda record: SandboxLost("what was stored is damaged")
    with pytest.raises(SandboxLost, match="damaged"):
        await commands(world).run(info.id, Command(argv=("true",)))
    await node.box(info.id).wait_ended()
    assert (node.box(info.id).info().state, node.promised.sandboxes, node.promised.disk_bytes) == ("lost", 0, 0)


async def test_a_paused_sandbox_can_be_killed_and_ends_by_its_ttl(world: World, node: Node) -> None:
    one, other = await create_machines(node, 2, ttl_s=100.0)
    for info in (one, other):
        await pausing.pause(node, info.id)
    assert (await node.kill(one.id)).state == "stopped"
    assert node.promised.disk_bytes == 16 * MIB and set(world.machine.sandboxes) == {other.id}
    world.clock.advance(100)
    await node.box(other.id).wait_ended()
    assert node.box(other.id).info().message == "its ttl_s has passed"
    assert not world.machine.sandboxes and node.promised.disk_bytes == 0


async def test_killed_while_it_is_being_paused(world: World, node: Node) -> None:
    (info,) = await create_machines(node)
    async with pausing.awake(node, info.id):
        going = asyncio.ensure_future(pausing.pause(node, info.id))
        await asyncio.sleep(0)
        killing = asyncio.ensure_future(node.kill(info.id))
        await asyncio.sleep(0)
    assert (await killing).state == "stopped"
    with pytest.raises(Conflict):
        await going
    assert not world.machine.sandboxes and node.promised.sandboxes == 0


# --- across edges ----------------------------------------------------------------------------------------------------------


async def test_the_next_edge_has_it_paused_too(world: World, node: Node) -> None:
    (info,) = await create_machines(node)
    started = await commands(world).start(info.id, Command(argv=("sleep", "1000")))
    await pausing.pause(node, info.id)
    world.journal._db.execute("PRAGMA query_only = 1")
    world.node._closed = True
    box = node.box(info.id)
    box.commands, world.lost = None, box.commands  # type: ignore[attr-defined]  # as a kill leaves it: what runs inside runs on
    node = await world.restart()
    assert node.box(info.id).info().state == "paused"
    assert (node.promised.memory_bytes, node.promised.disk_bytes) == (0, 16 * MIB)
    node = await world.restart()  # and the one after that still knows which commands nobody hears
    assert commands(world).info(info.id, started.id).result is not None
    assert len(world.machine.sandboxes[info.id].processes()) == 1
    assert (await commands(world).run(info.id, Command(argv=("echo", "on")))).stdout.data() == b"on\n"
    assert not world.machine.sandboxes[info.id].processes()
    assert commands(world).info(info.id, started.id).result.outcome == "unknown"  # type: ignore[union-attr]
    assert node.promised.memory_bytes == 100 * MIB
    world.lost.close()  # type: ignore[attr-defined]


async def test_a_reboot_does_not_lose_what_was_paused(world: World, node: Node) -> None:
    paused, running = await create_machines(node, 2)
    await pausing.pause(node, paused.id)
    world.crash()
    world.machine.boot_id = "fake-boot-2"
    node = await world.boot()
    assert [node.box(one.id).info().state for one in (paused, running)] == ["paused", "lost"]
    assert (await pausing.resume(node, paused.id)).state == "running"


@pytest.mark.parametrize("stored", [False, True])
async def test_an_edge_that_dies_while_it_pauses(stored: bool, world: World, node: Node) -> None:
    (info,) = await create_machines(node)
    gate: asyncio.Future[Record] = asyncio.get_running_loop().create_future()
    held = handle(world, info)
    really = held.pause

    async def pause() -> Record:
        if stored:
            await really()
        return await gate

    held.pause = pause  # type: ignore[method-assign]
    going = asyncio.ensure_future(pausing.pause(node, info.id))
    while world.journal.sandboxes()[0].turning != "pause" or (stored and held.record.vm.state != "paused"):  # type: ignore[union-attr]
        await asyncio.sleep(0)
    world.journal._db.execute("PRAGMA query_only = 1")
    node = await world.restart()
    assert node.box(info.id).info().state == "running" and node.promised.memory_bytes == 100 * MIB
    assert (await commands(world).run(info.id, Command(argv=("true",)))).exit_code == 0
    gate.set_exception(Unavailable("too late"))
    with pytest.raises(Unavailable):
        await going


@pytest.mark.parametrize("error", [None, Unavailable("not now"), OSError(errno.ENOSPC, "full"), SandboxLost("gone")])
async def test_an_edge_that_dies_while_it_resumes(error: Unavailable | OSError | SandboxLost | None, world: World, node: Node) -> None:
    (info,) = await create_machines(node)
    await pausing.pause(node, info.id)
    node.box(info.id).state, _ = pausing.lifecycle.handle(node.box(info.id).state, pausing.lifecycle.ResumeRequested(0.0))
    world.journal.update_sandbox(node.box(info.id).row())
    node.box(info.id).state = pausing.lifecycle.replace(node.box(info.id).state, pending="")
    world.crash()
    boot = type(world.machines)
    original = boot.resume
    if error is not None:

        async def fail(self: object, record: Record, *, cut: object = ()) -> object:
            raise error

        boot.resume = fail  # type: ignore[assignment,method-assign]
    try:
        node = await world.boot()
    finally:
        boot.resume = original  # type: ignore[method-assign]
    expected = "running" if error is None else "lost" if isinstance(error, SandboxLost) else "paused"
    assert node.box(info.id).info().state == expected
    assert node.promised.memory_bytes == (100 * MIB if expected == "running" else 0)


async def test_the_machine_s_own_rules_for_its_sizes(node: Node) -> None:
    with pytest.raises(InvalidRequest, match="memory: must be from 96MiB"):
        await create_machines(node, memory="64MiB")
    with pytest.raises(Unsupported, match="hardware"):
        await create_machines(node, hardware_virtualization=True)


async def test_an_edge_that_is_stopped_leaves_the_commands_of_a_paused_sandbox_to_the_next(world: World, node: Node) -> None:
    (info,) = await create_machines(node)
    started = await commands(world).start(info.id, Command(argv=("sleep", "1000")))
    await pausing.pause(node, info.id)
    sandbox = world.machine.sandboxes[info.id]
    killed = sandbox.kill_all
    sandbox.kill_all = lambda process_id="": None  # type: ignore[method-assign]  # nobody can in a machine that has no process
    await world.routes.close()
    await node.close()
    sandbox.kill_all = killed  # type: ignore[method-assign]
    assert world.journal.commands_under_way() == {started.id}
    world.journal.close()
    node = await world.boot()
    assert len(sandbox.processes()) == 1
    await pausing.resume(node, info.id)
    assert not sandbox.processes() and not world.journal.commands_under_way()


async def test_a_layer_that_can_no_longer_be_trusted_loses_paused_sandboxes_too(world: World, node: Node) -> None:
    paused, turning = await create_machines(node, 2)
    for info in (paused, turning):
        await pausing.pause(node, info.id)
    going = asyncio.ensure_future(pausing.resume(node, turning.id))
    await asyncio.sleep(0)
    assert node.box(turning.id).state.pending == "resume"
    heard(node, Event(event="load.lost", digest=paused.layers[0], message="it changed"))
    await asyncio.wait((going,))
    for info in (paused, turning):
        await node.box(info.id).wait_ended()
        assert node.box(info.id).info().state == "lost"


async def test_want_of_space_is_told_and_loses_nothing(world: World, node: Node) -> None:
    (info,) = await create_machines(node)
    held = handle(world, info)
    really = held.pause

    async def pause() -> Record:
        raise OSError(errno.ENOSPC, "full")

    held.pause = pause  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="no space"):
        await pausing.pause(node, info.id)
    assert node.box(info.id).info().state == "running"
    held.pause = really  # type: ignore[method-assign]
    assert (await pausing.pause(node, info.id)).state == "paused"
