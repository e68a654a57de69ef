# SPDX-License-Identifier: Apache-2.0
"""The node: executes what the lifecycle decides, and feeds back what became of it.

One event loop, no locks: between two awaits nothing else happens, so admission, uid ranges and the journal's intent are one step.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TypeVar

from opendsec import __version__
from opendsec.api import wire
from opendsec.api.errors import Conflict, NotFound, SandboxLost, Unavailable
from opendsec.api.images import Collected
from opendsec.api.sandboxes import CreateResponse, EdgeInfo, EdgeState, SandboxInfo, SandboxState
from opendsec.api.spec import CreateRequest
from opendsec.edge import admission, creating, lifecycle, pausing
from opendsec.edge.actions import Action, Actions, request_digest
from opendsec.edge.box import Box
from opendsec.edge.clock import Clock
from opendsec.edge.images import Catalog
from opendsec.edge.journal import Journal
from opendsec.edge.log import Log
from opendsec.edge.snapshots import Snapshots
from opendsec.edge.tables import Retention
from opendsec.edge.uids import UidRanges
from opendsec.images.store import GRACE_S
from opendsec.observe.events import EventSink
from opendsec.runtime.backend import Backend, Handle

T = TypeVar("T")

FLUSH_S = 1.0  # last uses are written this late at most; a crash in between makes an idle deadline that much early
PRUNE_S = 300.0


class Node:
    """All sandboxes of this edge. `start` before anything else, `close` at the end."""

    def __init__(
        self,
        *,
        edge_id: str,
        journal: Journal,
        actions: Actions,
        backends: Mapping[str, Backend],
        images: Catalog,
        policy: admission.Policy,
        uids: UidRanges,
        events: EventSink,
        clock: Clock,
        log: Log,
        retention: Retention,
        scratch_driver: str,
    ) -> None:
        self.edge_id, self.journal, self.actions, self.backends, self.images = edge_id, journal, actions, backends, images
        self.policy, self.uids, self.events, self.clock, self.log = policy, uids, events, clock, log
        self.boxes: dict[str, Box] = {}
        self.promised = admission.Promised()
        self.started_at = clock.time()
        self.phase: EdgeState = "starting"
        self.on_shutdown: Callable[[], None] = lambda: None
        self.on_destroy: list[Callable[[Box], None]] = []  # before a sandbox is destroyed
        self.on_destroyed: list[Callable[[Box], None]] = []  # once nothing of it is left
        self.flushers: list[Callable[[], None]] = []  # each writes what may be written late
        self.members: Callable[[], int] = lambda: 0  # of pools: promised memory as sandboxes are, but none of a caller's
        self.layer_users: list[Callable[[], frozenset[str]]] = []  # digests that others than sandboxes use
        self.snapshots = Snapshots(self)
        self._retention, self._scratch_driver = retention, scratch_driver
        self._dirty: set[Box] = set()
        self._closed = False
        self._flush_timer: asyncio.TimerHandle | None = None
        self._prune_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[object]] = set()

    # --- the machine's driver ----------------------------------------------------------------------------------------

    def apply(self, box: Box, event: lifecycle.Event) -> None:
        """Let something happen to a sandbox."""
        box.state, instructions = lifecycle.handle(box.state, event)
        if instructions:
            self.execute(box, instructions)

    def execute(self, box: Box, instructions: Sequence[lifecycle.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case lifecycle.Save():
                    self._save(box)
                case lifecycle.SaveSoon():
                    self._dirty.add(box)
                    self.flush_soon()
                case lifecycle.SetTimer(at):
                    if box.timer is not None:
                        box.timer.cancel()
                    box.timer = self.clock.call_at(at, lambda: self._timer_fired(box))
                case lifecycle.CancelTimer():
                    if box.timer is not None:
                        box.timer.cancel()
                        box.timer = None
                case lifecycle.Pause():
                    pausing.begin_pause(self, box)
                case lifecycle.Resume():
                    pausing.begin_resume(self, box)
                case lifecycle.Destroy():
                    self.spawn(self._destroy(box))
                case lifecycle.Release():
                    self.uids.give_back(box.uid_base)
                    self.promised = self.promised.minus(box.charged)
                    box.handle = None
                    for let_go in self.on_destroyed:
                        let_go(box)
                    box.tell_ended()
                case lifecycle.Emit(kind, message):
                    if message:
                        self.events.emit(kind, box.id, message=message)
                    else:
                        self.events.emit(kind, box.id)
                case lifecycle.Create() | lifecycle.Adopt():
                    raise AssertionError("creating and adopting are done where they are asked for")

    def _save(self, box: Box) -> None:
        if not box.state.held and box.ended_at is None:
            box.ended_at = self.clock.time()
        try:
            self.journal.update_sandbox(box.row())
            self._dirty.discard(box)
        except Unavailable as error:
            # What has happened has happened, and destroying must go on with a full disk, too: try again later.
            self.log.error("journal.not_written", sandbox_id=box.id, reason=str(error))
            self._dirty.add(box)
            self.flush_soon()

    def _timer_fired(self, box: Box) -> None:
        box.timer = None
        self.apply(box, lifecycle.TimerFired(self.clock.time()))

    def flush_soon(self) -> None:
        if self._flush_timer is None:
            self._flush_timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Write what waits to be written: last uses, events."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        dirty, self._dirty = self._dirty, set()
        lost = self.events.store_failures
        try:
            with self.journal.transaction():
                for box in dirty:
                    if box.id in self.boxes:
                        self.journal.update_sandbox(box.row())
                for write in self.flushers:
                    write()
                self.events.flush()
        except Unavailable as error:
            self.log.error("journal.not_written", reason=str(error))
            self._dirty |= dirty
            self.flush_soon()
        if self.events.store_failures > lost:
            self.log.error("events.not_stored", count=self.events.store_failures - lost)
        if self.journal.checkpoint_due():
            self.spawn(self._checkpoint())

    async def _checkpoint(self) -> None:
        try:
            await asyncio.to_thread(self.journal.checkpoint)
        except Exception as error:
            self.log.error("journal.no_checkpoint", reason=str(error))

    async def settle(self) -> None:
        """What the journal has by now outlives a loss of power. If the disk refuses that, it still outlives the edge."""
        try:
            await asyncio.to_thread(self.journal.settle)
        except OSError as error:
            self.log.error("journal.not_settled", reason=str(error))

    def spawn(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        """Run something in the background; `close` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _destroy(self, box: Box) -> None:
        for begin in self.on_destroy:
            begin(box)
        try:
            if box.handle is not None:
                await box.handle.destroy()
            else:
                await self.backends[box.backend].clear(box.id, box.record)
        except Exception as error:
            self.log.error("sandbox.destroy_failed", sandbox_id=box.id, reason=f"{type(error).__name__}: {error}")
            box.handle = None  # the next attempt goes by what is left on the machine
            with self.transaction():
                self.apply(box, lifecycle.DestroyFailed(self.clock.time(), str(error)))
            box.tell_ended()
            return
        with self.transaction():
            self.apply(box, lifecycle.Destroyed(self.clock.time()))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """One commit for several saves of what has happened already. If the disk refuses, all is saved later (see `_save`)."""
        with contextlib.ExitStack() as stack:
            stack.push(self._save_all_later)
            try:
                stack.enter_context(self.journal.transaction())
            except Unavailable as error:
                self.log.error("journal.not_written", reason=str(error))
            yield

    def _save_all_later(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        """For the exit of a transaction whose commit failed."""
        if not isinstance(error, Unavailable):
            return False
        self.log.error("journal.not_written", reason=str(error))
        self._dirty |= set(self.boxes.values())
        self.flush_soon()
        return True

    def save_use(self, box: Box) -> None:
        """Write now what `SaveSoon` would write later: for an intent that must not be found beside an old deadline."""
        if box in self._dirty:
            self.journal.update_sandbox(box.row())
            self._dirty.discard(box)

    def charge(self, box: Box, promise: admission.Promise) -> None:
        """Count this for the sandbox from now on."""
        before, after = box.charged, promise
        self.promised = admission.Promised(
            self.promised.memory_bytes - before.memory_bytes + after.memory_bytes,
            self.promised.disk_bytes - before.disk_bytes + after.disk_bytes,
            self.promised.sandboxes,
        )
        box.charged = promise

    def store(self, stored_bytes: int) -> None:
        """Count so much more disk for a snapshot, or less if it is negative."""
        before = self.promised
        disk_bytes = before.disk_bytes + admission.stored(stored_bytes, self.policy)
        self.promised = admission.Promised(before.memory_bytes, disk_bytes, before.sandboxes)

    def hold(self, box: Box, handle: Handle) -> None:
        """Keep a backend's handle and hear of the sandbox's death."""
        known = box.handle is handle  # it was paused, and is resumed
        box.hold(handle)
        if known:
            return

        def died(future: asyncio.Future[str]) -> None:
            if not future.cancelled() and box.handle is handle and not self._closed:
                self.apply(box, lifecycle.Died(self.clock.time(), future.result()))

        handle.died.add_done_callback(died)

    # --- create ----------------------------------------------------------------------------------------------------------

    async def create(self, request: CreateRequest) -> CreateResponse:
        """Create `request.count` sandboxes, see `creating`."""
        return await creating.create(self, request)

    # --- reading ---------------------------------------------------------------------------------------------------------

    def box(self, sandbox_id: str) -> Box:
        """Raises NotFound."""
        box = self.boxes.get(sandbox_id)
        if box is None:
            raise NotFound(f"no sandbox with id {sandbox_id[:80]!r}", field="sandbox_id")
        return box

    def running(self, sandbox_id: str) -> tuple[Box, Handle]:
        """A sandbox that runs. Raises NotFound, SandboxLost, Conflict."""
        box = self.box(sandbox_id)
        phase = box.state.phase
        if phase == "running" and box.handle is not None:
            return box, box.handle
        message = f"sandbox {box.id} is {phase}" + (f": {box.state.message}" if box.state.message else "")
        if phase == "lost":
            raise SandboxLost(message, field="sandbox_id", data={"state": phase})
        raise Conflict(message, field="sandbox_id", data={"state": phase})

    def list(self, states: frozenset[SandboxState], label: tuple[str, str | None] | None) -> list[SandboxInfo]:
        """Those in one of the states and with the label (any value if None), the oldest first."""
        found = []
        for box in self.boxes.values():
            if box.state.phase in states:
                labels = box.template.spec.labels
                if label is None or (label[0] in labels and label[1] in (None, labels[label[0]])):
                    found.append(box.info(full=False))
        return found

    def info(self) -> EdgeInfo:
        return EdgeInfo(
            edge_id=self.edge_id,
            version=__version__,
            api=wire.API_GENERATION,
            state=self.phase,
            pid=os.getpid(),
            started_at=self.started_at,
            sandboxes=self.promised.sandboxes - self.members(),
            memory_promised_bytes=self.promised.memory_bytes,
            memory_limit_bytes=self.policy.memory_bytes,
            disk_promised_bytes=self.promised.disk_bytes,
            disk_limit_bytes=self.policy.disk_bytes,
            scratch_driver=self._scratch_driver,
        )

    def layers_in_use(self) -> frozenset[str]:
        """Digests of layers of living sandboxes."""
        of_sandboxes = frozenset(digest for box in self.boxes.values() if box.state.held for digest in box.template.layers)
        return of_sandboxes.union(*(users() for users in self.layer_users))

    async def collect(self, *, dry_run: bool, grace_s: float = GRACE_S) -> Collected:
        """Remove layers that neither a name nor a living sandbox uses, and let go of their mounts."""
        collected = await self.images.collect(self.layers_in_use(), dry_run=dry_run, grace_s=grace_s)
        if not dry_run:
            await self._unmount_unused()
        return collected

    async def _unmount_unused(self) -> None:
        for name, backend in self.backends.items():
            try:
                await backend.unmount_unused()
            except Exception as error:
                self.log.error("layers.not_unmounted", backend=name, reason=str(error))

    # --- use -------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def use(self, box: Box) -> Iterator[None]:
        """While somebody talks to the sandbox it is not idle."""
        self.apply(box, lifecycle.UseStarted(self.clock.time()))
        try:
            yield
        finally:
            self.apply(box, lifecycle.UseEnded(self.clock.time()))

    # --- the end ---------------------------------------------------------------------------------------------------------

    async def kill(self, sandbox_id: str, *, action_id: str | None = None, message: str = "killed by the caller") -> SandboxInfo:
        """End a sandbox; returns when nothing is left of it (or destroying it failed once: it then is `stopping`, and tried again).

        One that has ended already is returned as it is.
        """
        box = self.box(sandbox_id)

        async def work(action: Action[SandboxInfo]) -> SandboxInfo:
            try:
                action.begin("", self.clock.time())
            except Unavailable as error:
                # To end a sandbox is what helps against a full disk, and to do it twice does no harm.
                self.log.error("journal.not_written", sandbox_id=box.id, reason=str(error))
            self.apply(box, lifecycle.KillRequested(self.clock.time(), message))
            await box.wait_ended()
            return box.info()

        digest = request_digest("kill", sandbox_id.encode())
        return await self.actions.once(
            action_id, work, result=SandboxInfo, kind="kill", digest=lambda: digest, sandbox_id=sandbox_id, replay=lambda _: box.info()
        )

    async def kill_all(self, message: str) -> None:
        """End all sandboxes."""
        living = [box for box in self.boxes.values() if box.state.held]
        with self.transaction():
            for box in living:
                self.apply(box, lifecycle.KillRequested(self.clock.time(), message))
        await asyncio.gather(*(box.wait_ended() for box in living))

    def drain(self) -> None:
        """Take no new sandboxes from now on."""
        if self.phase != "draining":
            self.phase = "draining"
            self.events.emit("edge.draining")

    # --- life of the node --------------------------------------------------------------------------------------------------

    def prune(self) -> None:
        """Forget old ended sandboxes, actions and events, and layers that nobody uses now."""
        self.spawn(self._unmount_unused())
        try:
            for sandbox_id in self.journal.prune(self.clock.time(), self._retention):
                self.boxes.pop(sandbox_id, None)
            self.spawn(self.actions.trim(self._retention.results_bytes))
        except Unavailable as error:
            self.log.error("journal.not_pruned", reason=str(error))
        self._prune_timer = asyncio.get_running_loop().call_later(PRUNE_S, self.prune)

    def ready(self) -> None:
        """Take requests."""
        self.phase = "ready"
        self.events.emit("edge.started")
        self.prune()

    async def close(self) -> None:
        """Write everything down and let go; living sandboxes stay."""
        self.drain()
        await self.actions.close()
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._closed = True
        self.events.emit("edge.stopped")
        for box in self.boxes.values():
            if box.timer is not None:
                box.timer.cancel()
        if self._prune_timer is not None:
            self._prune_timer.cancel()
        self.flush()
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        for backend in reversed(list(self.backends.values())):  # later ones use earlier ones
            await backend.close()
