# SPDX-License-Identifier: Apache-2.0
"""Pausing and resuming, and talking to a sandbox that may be paused: whoever needs it alive resumes it.

A paused sandbox is promised no memory; it is asked for again when it is resumed, and may be refused. Commands go on where they were, and
their time-outs stand still meanwhile. Who talks to the sandbox (`awake`) is waited for before it is paused; who waits for a command's end
or follows its output is not: that is told by the edge.

One turn (pausing or resuming) of a sandbox at a time; its task is `box.turn`, and everyone who needs its outcome waits for that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

from opendsec.api.errors import Conflict, Internal, OpenDSecError, SandboxLost, from_body
from opendsec.api.sandboxes import SandboxInfo
from opendsec.edge import admission, lifecycle
from opendsec.edge.admission import Promise
from opendsec.edge.box import Box
from opendsec.edge.shortage import shortage
from opendsec.runtime.backend import Handle

if TYPE_CHECKING:
    from opendsec.edge.node import Node

QUIET_S = 10.0  # so long a pause waits for those who talk to the sandbox


# --- for callers -------------------------------------------------------------------------------------------------------------


async def pause(node: Node, sandbox_id: str, *, begin: Callable[[], None] = lambda: None) -> SandboxInfo:
    """Save its state and let go of its memory; one that is paused already stays so. `begin` is called right before anything happens.

    Raises Unsupported, Conflict (it does not run, or somebody talks to it all the time), SandboxLost, Unavailable."""
    box = node.box(sandbox_id)
    while box.turn is not None:
        await asyncio.shield(box.turn)
    if box.state.phase != "paused":
        node.running(sandbox_id)
        begin()
        node.apply(box, lifecycle.PauseRequested(node.clock.time()))
        await _outcome(box)
    return box.info()


async def resume(node: Node, sandbox_id: str, *, begin: Callable[[], None] = lambda: None) -> SandboxInfo:
    """Let it run again; one that runs goes on. Raises QuotaExceeded, Conflict (it has ended), SandboxLost, Unavailable."""
    box = node.box(sandbox_id)
    if box.turn is not None or box.state.phase == "paused":
        begin()
    await wake(node, box)
    return box.info()


async def wake(node: Node, box: Box) -> Handle:
    """Its handle once it runs. Nothing has happened between that and the return. Raises as `resume`."""
    while True:
        if box.turn is not None:
            resuming = box.state.pending == "resume"
            error = await asyncio.shield(box.turn)
            if error is not None and resuming:
                raise from_body(error.body())
        elif box.state.phase == "paused":
            node.apply(box, lifecycle.ResumeRequested(node.clock.time()))
        else:
            return node.running(box.id)[1]


@contextlib.asynccontextmanager
async def awake(node: Node, sandbox_id: str) -> AsyncIterator[tuple[Box, Handle]]:
    """A sandbox that runs, and is neither idle nor paused while this is entered. Raises as `resume`, and NotFound."""
    box = node.box(sandbox_id)
    handle = await wake(node, box)
    with talking(node, box):
        yield box, handle


@contextlib.contextmanager
def talking(node: Node, box: Box) -> Iterator[None]:
    """For a sandbox that `wake` has just returned: it is not paused while this is entered."""
    box.talking += 1
    try:
        with node.use(box):
            yield
    finally:
        box.talking -= 1
        if not box.talking:
            box.tell_quiet()


async def _outcome(box: Box) -> None:
    """Of the turn that has just begun."""
    assert box.turn is not None  # the lifecycle has ordered it, for nothing else was under way
    error = await asyncio.shield(box.turn)
    if error is not None:
        raise from_body(error.body())


# --- what the lifecycle orders -------------------------------------------------------------------------------------------------


def begin_pause(node: Node, box: Box) -> None:
    box.turn = node.spawn(_pause(node, box))


def begin_resume(node: Node, box: Box) -> None:
    box.turn = node.spawn(_resume(node, box))


async def _pause(node: Node, box: Box) -> OpenDSecError | None:
    try:
        handle = box.handle
        assert handle is not None
        await _quiet(box)
        if box.state.phase != "running":
            raise Conflict("it was killed")  # which the lifecycle knows
        memory_bytes = box.template.limits.memory_bytes
        admission.check_storing(node.promised, memory_bytes, node.policy)
        storing = admission.at_rest(box.promise, memory_bytes, node.policy)
        node.charge(box, Promise(box.promise.memory_bytes, storing.disk_bytes))
        usage = handle.usage()
        record = await handle.pause()
    except Exception as error:
        box.turn, blame = None, _blame(node, box, error)
        node.charge(box, box.promise)
        with node.transaction():
            node.apply(box, lifecycle.PauseFailed(node.clock.time(), blame.message, lost=isinstance(blame, SandboxLost)))
        return blame
    box.turn = None
    box.remember(record)
    box.used = usage
    node.charge(box, at_rest(node, box))
    if box.commands is not None:
        box.commands.suspend()
    with node.transaction():
        node.apply(box, lifecycle.Paused(node.clock.time()))
    await node.settle()
    return None


def at_rest(node: Node, box: Box) -> Promise:
    """What a paused one counts for."""
    vm = box.record.vm if box.record is not None else None
    return admission.at_rest(box.promise, vm.stored_bytes if vm is not None else 0, node.policy)


async def _quiet(box: Box) -> None:
    """Until nobody talks to the sandbox; nobody begins to, for it is about to be paused. Raises Conflict."""
    if not box.talking:
        return
    box.quiet = asyncio.get_running_loop().create_future()
    try:
        async with asyncio.timeout(QUIET_S):
            await box.quiet
    except TimeoutError:
        raise Conflict(
            f"{box.talking} requests, such as transfers of files, have been talking to the sandbox for {QUIET_S:g} s", field="sandbox_id"
        ) from None
    finally:
        box.quiet = None


async def _resume(node: Node, box: Box) -> OpenDSecError | None:
    fresh = box.handle is None  # an earlier edge paused it: nobody hears its commands any more
    try:
        admission.readmit(node.promised, box.charged, box.promise, node.policy)
        node.charge(box, box.promise)
        if box.record is None:
            raise SandboxLost("the edge no longer has what is needed to resume it")
        cut = node.journal.commands_under_way(box.id) if fresh else frozenset[str]()
        handle = await node.backends[box.backend].resume(box.record, cut=cut)
    except Exception as error:
        box.turn, blame = None, _blame(node, box, error)
        node.charge(box, at_rest(node, box))
        with node.transaction():
            node.apply(box, lifecycle.ResumeFailed(node.clock.time(), blame.message, lost=isinstance(blame, SandboxLost)))
        return blame
    box.turn = None
    node.hold(box, handle)
    if box.commands is not None:
        box.commands.go_on()
    with node.transaction():
        if fresh:
            node.journal.end_all_commands(node.clock.time(), box.id)
        node.apply(box, lifecycle.Resumed(node.clock.time()))
    return None


def _blame(node: Node, box: Box, error: Exception) -> OpenDSecError:
    if isinstance(error, OpenDSecError):
        return error
    node.log.error("sandbox.turn_failed", sandbox_id=box.id, kind=type(error).__name__, reason=str(error))
    if (want := shortage(error)) is not None:
        return want
    doing = "pausing" if box.state.pending == "pause" else "resuming"
    return Internal(f"{doing} the sandbox failed: {type(error).__name__}; the edge's log tells more", data={"sandbox_id": box.id})
