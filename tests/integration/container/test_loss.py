# SPDX-License-Identifier: Apache-2.0
"""What the backend makes of a spawner that dies, a sandbox that stands still, callers that give up, and many at once."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from opendsec.api.errors import Internal, SandboxLost, Unavailable
from opendsec.api.spec import Limits
from opendsec.images.layers import LayerRef
from opendsec.kernel import procfs, syscalls
from opendsec.runtime.backend import Handle
from opendsec.runtime.container.plan import group_name
from opendsec.runtime.scratch import ScratchPlan
from opendsec.testing.waiting import eventually
from tests.boxes import Box, Command, Node, Result, until


@pytest.fixture
def own(tmp_path: Path, base_layers: tuple[LayerRef, ...]) -> Iterator[Node]:
    """A node that only this test has, because it will have to start another spawner."""
    node = Node(tmp_path, base_layers)
    yield node
    node.close()


def await_death(pid: int) -> None:
    try:
        pidfd = syscalls.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(10_000)
    os.close(pidfd)


def await_reaping(node: Node) -> None:
    """Until the spawner has no children left, and has looked around once more."""
    for pid in procfs.children(node.spawner.pid):
        await_death(pid)
    while procfs.children(node.spawner.pid):
        node.wait(node.spawner.settle())
    node.wait(node.spawner.settle())


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def frozen(node: Node, box: Box) -> Iterator[None]:
    group = node.container(box).group
    group.freeze()
    try:
        yield
    finally:
        group.thaw()


# --- the spawner dies ----------------------------------------------------------------------------------------------


def test_a_killed_spawner(own: Node) -> None:
    """What waits for it is told, what runs is lost sight of but not ended, and the next call has a new one."""
    box = own.create(own.placement())
    running = box.start("sh", "-c", "echo ready; exec sleep 1000")
    running.expect("ready")
    spawner = own.spawner

    async def scenario() -> BaseException | Command:
        pending = asyncio.ensure_future(box.start_async("true"))
        await asyncio.sleep(0)  # so that it is sent
        os.kill(spawner.pid, signal.SIGKILL)
        return (await asyncio.gather(pending, return_exceptions=True))[0]

    with frozen(own, box):
        pending = own.wait(scenario())
    assert isinstance(pending, Unavailable)
    assert not spawner.alive
    result = running.wait()
    assert result.exit.lost and result.exit.code is None and result.exit.signal is None
    assert running.running.alive_children()  # it still runs
    assert box.works()
    assert own.spawner.pid != spawner.pid
    with own.box() as another:  # layers are mounted anew
        assert another.works()
    box.destroy()


def test_many_wait_for_one_new_spawner(own: Node) -> None:
    box = own.create(own.placement())
    old = own.spawner.pid
    os.kill(old, signal.SIGKILL)
    await_death(old)

    async def burst() -> list[Result]:
        commands = await asyncio.gather(*(box.start_async("echo", str(n)) for n in range(10)))
        return [await command.ended() for command in commands]

    try:
        results = own.wait(burst())
    except Unavailable:  # sent before anybody could know
        results = own.wait(burst())
    assert [result.out for result in results] == [b"%d\n" % n for n in range(10)]
    assert sum(b"dsec-spawner" in b" ".join(procfs.cmdline(pid)) for pid in procfs.children(os.getpid())) == 1
    box.destroy()


def test_a_dead_sandbox_is_lost(node: Node) -> None:
    with node.box() as box:
        os.kill(box.pid, signal.SIGKILL)
        assert node.wait(death_of(box.handle)) == "its first process ended"
        with pytest.raises(SandboxLost):
            box.start("true")
        with pytest.raises(SandboxLost):
            box.handle.usage()


async def death_of(handle: Handle) -> str:
    return await handle.died


# --- a sandbox stands still ----------------------------------------------------------------------------------------


def test_a_frozen_sandbox_holds_up_nobody_else(node: Node, box: Box) -> None:
    with node.box() as other:
        with frozen(node, box):
            pending = [node.loop.create_task(box.start_async("echo", "late")) for _ in range(5)]
            assert all(other.works() for _ in range(5))
            assert not any(task.done() for task in pending)
        for task in pending:
            assert node.wait(finish(task)).out == b"late\n"


def idle(node: Node) -> bool:
    """Let the loop turn once."""
    node.wait(asyncio.sleep(0))
    return True


async def finish(task: asyncio.Task[Command]) -> Result:
    return await (await task).ended()


def test_destroying_a_frozen_sandbox(node: Node) -> None:
    box = node.create(node.placement())
    running = box.start("sleep", "1000")
    node.container(box).group.freeze()
    pending = node.loop.create_task(box.start_async("true"))
    node.wait(asyncio.sleep(0))
    box.destroy()
    assert running.wait().exit.signal == signal.SIGKILL
    with pytest.raises(SandboxLost):  # not a command that could not start
        node.wait(finish(pending))


def test_a_start_that_is_given_up_is_ended(node: Node, box: Box) -> None:
    """A start can hang for ever, because root inside may stop a process that has joined."""
    with frozen(node, box):
        pending = node.loop.create_task(box.start_async("touch", "/ran"))
        node.wait(asyncio.sleep(0))
        pending.cancel()
        node.wait(asyncio.wait([pending]))
        assert pending.cancelled()
        node.wait(node.spawner.settle())
    assert box.sh("test -e /ran").code == 1
    until(lambda: idle(node) and box.handle.processes() == 0, "it runs all the same")


def test_an_exec_given_up_before_the_spawner_has_seen_it(node: Node, box: Box) -> None:
    with stopped(node.spawner.pid):
        pending = node.loop.create_task(box.start_async("sleep", "1000"))
        node.wait(asyncio.sleep(0))
        pending.cancel()
        node.wait(asyncio.wait([pending]))
    assert box.works()
    until(lambda: idle(node) and box.handle.processes() == 0, "it runs all the same")


def test_a_create_given_up_leaves_nothing(node: Node) -> None:
    spawner = node.spawner
    placement = node.placement()

    async def scenario() -> None:
        pending = asyncio.ensure_future(node.backend.create(placement))
        with stopped(spawner.pid):
            for _ in range(10):
                await asyncio.sleep(0)
            pending.cancel()
            for _ in range(10):
                await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await pending

    node.wait(scenario())
    assert node.backend.leftovers() == []
    await_reaping(node)


# --- what cannot be made -------------------------------------------------------------------------------------------


def test_a_layer_that_is_not_there(node: Node) -> None:
    layer = node.layers[0]
    missing = LayerRef("sha256:" + "0" * 64, layer.meta.with_name("nothing"), layer.data)
    for _ in range(2):  # a failure is not remembered as a mount
        with pytest.raises(Internal, match="cannot mount layer"):
            node.create(node.placement(layers=[missing]))
    assert node.backend.leftovers() == []
    assert missing.digest not in node.backend.layers_in_use()


def test_layers_are_let_go_when_unused(node: Node) -> None:
    node.wait(node.backend.unmount_unused())
    await_reaping(node)
    bare = len(procfs.fds(node.spawner.pid))
    with node.box():
        assert node.wait(node.backend.unmount_unused()) == 0
        node.wait(node.spawner.settle())
        assert len(procfs.fds(node.spawner.pid)) == bare + len(node.layers)
    assert node.wait(node.backend.unmount_unused()) == len(node.layers)
    await_reaping(node)
    assert len(procfs.fds(node.spawner.pid)) == bare


# --- many ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_hundreds_at_once(node: Node) -> None:
    """Creates and commands overlap; every one is answered, by itself."""

    async def one(number: int, box: Box) -> Result:
        return await (await box.start_async("sh", "-c", f"echo {number} >> /log; echo {number}; exit {number % 7}")).ended()

    async def scenario() -> None:
        handles = await node.backend.create_many(placements)
        for placement, handle in zip(placements, handles, strict=True):
            assert not isinstance(handle, BaseException), handle
            boxes.append(Box(node, handle, placement))
        results = await asyncio.gather(*(one(n, boxes[n % len(boxes)]) for n in range(count)))
        assert [(r.out, r.exit.code) for r in results] == [(b"%d\n" % n, n % 7) for n in range(count)]
        logs = await asyncio.gather(*(box.start_async("cat", "/log") for box in boxes))
        for index, log in enumerate(logs):
            lines = (await log.ended()).out.split()
            assert sorted(lines) == sorted(b"%d" % n for n in range(index, count, len(boxes)))

    count = 300
    with node.box():
        pass  # the layers are mounted
    await_reaping(node)
    descriptors = len(procfs.fds(node.spawner.pid))
    placements = [node.placement(memory="16MiB", pids=16) for _ in range(100)]
    boxes: list[Box] = []
    try:
        node.wait(scenario())
    finally:
        node.wait(destroy_all(boxes))
    await_reaping(node)
    assert len(procfs.fds(node.spawner.pid)) == descriptors


async def destroy_all(boxes: list[Box]) -> None:
    await asyncio.gather(*(box.handle.destroy() for box in boxes))
    for box in boxes:
        for command in box.commands:
            command.close()


def test_want_of_descriptors_here_is_no_lost_sandbox(box: Box) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # the next number that would be given out
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        with pytest.raises(Unavailable, match="Too many open files"):
            box.handle.files.stat(b"/etc/passwd", follow=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert box.handle.files.stat(b"/etc/passwd", follow=True).kind == "file"


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after the spawner has begun"])
def test_a_scratch_that_cannot_be_had(own: Node, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """It is made beside the sandbox. If there is none, that is the reason given, and nothing of the sandbox stays."""

    async def refuse(sandbox_id: str, uid_base: int, limits: Limits) -> ScratchPlan:
        group = own.backend.hierarchies.group(group_name(own.edge_id, sandbox_id))
        await eventually(lambda: not late or group.exists())
        raise Unavailable("the scratch pool is full")

    with monkeypatch.context() as patch:
        patch.setattr(own.backend.scratch, "take", refuse)
        with pytest.raises(Unavailable, match="the scratch pool is full"):
            own.create(own.placement())
    await_reaping(own)
    assert own.backend.leftovers() == []
    with own.box() as box:
        assert box.works()
