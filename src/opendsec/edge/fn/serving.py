# SPDX-License-Identifier: Apache-2.0
"""One pool at work: does what `pool` decides, and feeds back what became of it.

A call is served by the task of its member, which goes on with the next call that the pool gives that member: under load there is one
task a member, none a call. Whoever asked hears of the end by a plain function call.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from opendsec.api import ids
from opendsec.api.errors import (
    CallerError,
    Internal,
    InvalidRequest,
    NotFound,
    OpenDSecError,
    QuotaExceeded,
    SandboxLost,
    Unavailable,
    Unsupported,
)
from opendsec.api.fn import FnResult, PoolInfo, PoolSpec
from opendsec.api.spec import Limits
from opendsec.edge import admission
from opendsec.edge.fn import devices, events, outcome
from opendsec.edge.fn.holding import Call, Holder
from opendsec.edge.fn.pool import Pool
from opendsec.edge.tables import MemberRow
from opendsec.runtime.fncall.interface import Ended, Member, MemberPlan

if TYPE_CHECKING:
    from opendsec.edge.fn.pools import Pools

GRACE_S = 15.0  # beyond a call's own wall time: whoever should have ended it by then has failed
RETRY_S = (1.0, 60.0)  # between attempts to destroy a member
MEMBER_PIDS = 4096  # of a member; each call has its own limit within
MEMBER_FILES = 1024


class LivePool:
    """One pool with its members and calls."""

    def __init__(self, pools: Pools, spec: PoolSpec, memory_bytes: int, *, implicit: bool) -> None:
        self._pools, self._node = pools, pools.node
        self.spec, self.memory_bytes, self.implicit = spec, memory_bytes, implicit
        self.machine = Pool(_shape(spec))
        self.holders: dict[int, Holder] = {}
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self.layers: frozenset[str] = frozenset()  # digests
        self.users = weakref.WeakSet[object]()  # whoever has yet to submit calls, or may: it must not be forgotten meanwhile
        self.emptied: asyncio.Future[None] = self._loop.create_future()
        self._failing = False
        self._missing: NotFound | None = None  # what kept the last member from starting

    def info(self) -> PoolInfo:
        state = self.machine
        return PoolInfo(
            spec=self.spec,
            state=state.state,
            idle=state.idle,
            busy=state.busy,
            starting=state.starting,
            calls=state.calls,
            cold=state.cold,
            lost=state.lost,
            waiting=state.waiting,
            message=state.message,
            implicit=self.implicit,
        )

    # --- calls -----------------------------------------------------------------------------------------------------------

    def submit(self, call: Call) -> None:
        """Have it served. `done` may be called before this returns."""
        call.number = next(self._numbers)
        self._calls[call.number] = call
        self.feed(events.Asked(call.number, call.caller, call.tenant, call.fresh, self._loop.time()))

    def cancel(self, call: Call) -> None:
        """Nobody wants it any more: a waiting one ends now, a running one once nothing of it is left."""
        if call.number not in self._calls:
            return
        call.cancelled = True
        if call.holder is None:
            self.feed(events.Withdrawn(call.number, self._loop.time()))
            self._finish(call, outcome.cancelled(call.index))
        elif call.holder.current is call and call.holder.task is not None:
            call.holder.task.cancel()  # one that is not yet in the member's hands is not given to it, see `_one`

    def _finish(self, call: Call, result: FnResult | OpenDSecError) -> None:
        if self._calls.pop(call.number, None) is not None:
            call.done(call, result)

    async def _serve(self, holder: Holder, call: Call | None) -> None:
        while call is not None:
            lost, again = await self._one(holder, call)
            call.holder = None
            # Feeding may give this member its next call.
            self.feed(events.Ended(holder.number, self._loop.time(), lost))
            if again:
                call.again = True
                self.feed(events.Asked(call.number, call.caller, call.tenant, call.fresh, self._loop.time(), again=True))
            call, holder.following = holder.following, None
        holder.task = None

    async def _one(self, holder: Holder, call: Call) -> tuple[str, bool]:
        """Serve one call; why the member must go ("" if it may stay), and whether the call is to be tried on another."""
        assert holder.member is not None
        if self._given_up(call):
            return "", False
        holder.deadline, holder.overdue = self._loop.time() + call.bounds.wall_time_s + GRACE_S, False
        holder.current = call
        try:
            ended = await holder.member.call(call.job)
            result = outcome.result(ended, call.bounds, index=call.index, cold=call.cold)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._pools.closed or task is None or not (call.cancelled or holder.overdue):
                self._finish(call, Unavailable("the edge is stopping"))
                raise
            task.uncancel()
            if self._given_up(call):
                return "", False
            return self._faulty(holder, call, "a member did not end a call in time", started=True)
        except CallerError as error:  # it was not even sent: the member is as it was
            self._finish(call, error)
            return "", False
        except Exception as error:
            if not isinstance(error, (SandboxLost, Internal)):
                self._node.log.error("fn.call_failed", pool=self.spec.name, kind=type(error).__name__, reason=str(error))
            return self._faulty(holder, call, str(error) or type(error).__name__, started=True)
        finally:
            holder.deadline, holder.current = 0.0, None
        if ended.not_started and not ended.caller_fault:
            return self._faulty(holder, call, ended.not_started, started=False)
        if ended.denied:
            self._pools.emit("fn.denied", pool=self.spec.name, member_id=holder.member_id, tenant=call.tenant, what=ended.denied)
        self._finish(call, result)
        return ended.spoiled, False

    def _given_up(self, call: Call) -> bool:
        if call.cancelled:
            self._finish(call, outcome.cancelled(call.index))
        return call.cancelled

    def _faulty(self, holder: Holder, call: Call, why: str, *, started: bool) -> tuple[str, bool]:
        """The platform failed. A call leaves no trace but its result, and nobody has seen one: it may be tried once more, unless it
        has begun and its caller counts on its running once."""
        self._pools.emit("pool.member_lost", pool=self.spec.name, member_id=holder.member_id, message=why)
        if self._given_up(call):
            return why, False
        if not call.again and not (started and call.once):
            return why, True
        self._pools.emit("fn.platform_error", pool=self.spec.name, member_id=holder.member_id, tenant=call.tenant, message=why)
        self._finish(call, outcome.result(Ended(not_started=why), call.bounds, index=call.index, cold=call.cold))
        return why, False

    def watch(self, now: float) -> None:
        """End calls whose member should have ended them."""
        for holder in self.holders.values():
            if not holder.deadline or now <= holder.deadline or holder.task is None or holder.member is None:
                continue
            if not holder.overdue:
                holder.overdue = True
                holder.task.cancel()
            elif now > holder.deadline + GRACE_S:  # it does not even take that: without its process 1 the call ends
                holder.deadline = now
                self._node.log.error("fn.member_stuck", pool=self.spec.name, member_id=holder.member_id)
                self._node.spawn(self._kill(holder.member))

    async def _kill(self, member: Member) -> None:
        try:
            await member.destroy()
        except Exception as error:
            self._node.log.error("pool.member_not_destroyed", member_id=member.member_id, reason=f"{type(error).__name__}: {error}")

    # --- the machine's driver ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.feed(events.Ticked(self._loop.time()))

    def feed(self, event: events.Event) -> None:
        instructions = self.machine.handle(event)
        if instructions:
            self._execute(instructions)
        if self._failing != (self.machine.failures > 0):
            self._failing = not self._failing
            if self._failing:
                self._pools.emit("pool.failing", pool=self.spec.name, message=self.machine.message)
        if self._pools.hungry and self.machine.idle:
            self._pools.share(self)

    def _execute(self, instructions: Sequence[events.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case events.Assign(number, number_of_call, cold):
                    holder, call = self.holders[number], self._calls[number_of_call]
                    call.holder, call.cold = holder, cold
                    if holder.task is not None:
                        holder.following = call
                    else:
                        holder.task = self._loop.create_task(self._serve(holder, call))
                case events.Create(number):
                    self._create(number)
                case events.Destroy(number):
                    self._node.spawn(self._destroy(self.holders[number]))
                case events.Fail(number_of_call, why, message):
                    self._fail(self._calls[number_of_call], why, message)
                case events.SetTimer(at):
                    if self._timer is not None:
                        self._timer.cancel()
                    self._timer = self._loop.call_at(at, self._tick)
                case events.Empty():
                    if not self.emptied.done():
                        self.emptied.set_result(None)

    def _tick(self) -> None:
        self._timer = None
        self.feed(events.Ticked(self._loop.time()))

    def _fail(self, call: Call, why: events.Why, message: str) -> None:
        if why == "quota":
            self._finish(call, QuotaExceeded(f"no room for a member of this pool: {message}", field="pool", data={"resource": "memory"}))
        elif self._missing is not None and self.implicit:
            message = f"{self._missing.message}; build it (docs/fncall.md: languages), or name another with `image` or setting fn_images"
            self._finish(call, NotFound(message, field="image", data=self._missing.data))
        elif why == "pool":
            self._finish(call, InvalidRequest(f"no member of pool {self.spec.name!r} can be started: {message}", field="pool"))
        else:
            self._finish(call, Unavailable(f"no member of pool {self.spec.name!r} can be started: {message}", field="pool"))

    @property
    def hopeless(self) -> bool:
        """It has failed by its own fault, and nothing is left of it: whatever was wrong (an image that was not there) may be right now."""
        return self.machine.fault == "pool" and not self.machine.slots and not self.machine.waiting

    def renew(self) -> None:
        """Try again what was hopeless."""
        self.feed(events.Reshaped(_shape(self.spec), False, self._loop.time()))

    def reshape(self, spec: PoolSpec, memory_bytes: int, *, renewed: bool) -> None:
        """Become what `spec` says; members that do not fit it any more go once they are idle. `renewed`: the image is another."""
        same = msgspec.structs.replace(
            self.spec, size=spec.size, max=spec.max, reuse=spec.reuse, idle_s=spec.idle_s, labels=spec.labels, tenant=spec.tenant
        )
        self.spec, self.memory_bytes = spec, memory_bytes
        self.feed(events.Reshaped(_shape(spec), renewed or same != spec, self._loop.time()))

    def drain(self) -> None:
        self.feed(events.Drained(self._loop.time()))

    def abandon(self, error: OpenDSecError) -> None:
        """The edge stops: whoever waits is told."""
        if self._timer is not None:
            self._timer.cancel()
        for call in list(self._calls.values()):
            self._finish(call, error)

    # --- members -----------------------------------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        """Of one member. What calls write is memory, and counts as such: no disk is promised."""
        spec = self.spec
        return Limits(
            cpu=spec.cpu,
            cpu_weight=100,
            memory_bytes=self.memory_bytes,
            disk_bytes=0,
            inodes=1 << 16,
            pids=MEMBER_PIDS,
            open_files=MEMBER_FILES,
        )

    def _create(self, number: int) -> None:
        """Promise and journal it in one step, then make it."""
        node, limits, now = self._node, self.limits, self._loop.time()
        if self._pools.closed or node.phase == "draining":
            return self.feed(events.NoRoom(number, now, "this edge takes no new sandboxes", hope=False))
        member_id = ids.new_id(ids.SANDBOX)
        uid_base = -1
        try:
            admission.check_one(limits, node.policy)
            promised = admission.admit(node.promised, limits, node.policy)
            lease = devices.place(self._pools.devices, self._pools.leases, self.spec.device)
            uid_base = node.uids.take()
            row = MemberRow(member_id=member_id, pool=self.spec.name, uid_base=uid_base, started_at=node.clock.time())
            node.journal.add_member(row)
        except QuotaExceeded as refusal:
            return self.feed(events.NoRoom(number, now, str(refusal), hope=self._pools.make_room(self)))
        except OpenDSecError as error:
            if uid_base >= 0:
                node.uids.give_back(uid_base)
            return self.feed(events.StartFailed(number, now, str(error), "pool" if isinstance(error, CallerError) else "platform"))
        node.promised = promised
        self._pools.promises[member_id] = admission.promise_for(limits, node.policy)
        if lease is not None:
            self._pools.leases[member_id] = lease
        self.holders[number] = holder = Holder(number, member_id, uid_base, lease)
        starting = self._loop.create_task(self._start(holder, limits))
        self._pools.starts.add(starting)
        starting.add_done_callback(self._pools.starts.discard)

    async def _start(self, holder: Holder, limits: Limits) -> None:
        spec = self.spec
        try:
            resolved = await self._node.images.resolve(spec.image, spec.layers)
            self.layers = frozenset(layer.digest for layer in resolved.layers)
            config = resolved.config
            member = await self._pools.backend.create(
                MemberPlan(
                    member_id=holder.member_id,
                    uid_base=holder.uid_base,
                    limits=limits,
                    layers=resolved.layers,
                    env={**config.env, **(holder.lease.env() if holder.lease else {})},
                    user=spec.user or config.user,
                    workdir=config.workdir,
                    python=spec.python,
                    preload=spec.preload,
                    warmup=spec.warmup,
                )
            )
        except Exception as error:
            self._missing = error if isinstance(error, NotFound) else None
            fault: Literal["pool", "platform"] = "pool" if isinstance(error, (InvalidRequest, NotFound, Unsupported)) else "platform"
            if not isinstance(error, OpenDSecError):
                self._node.log.exception("pool.start_failed", pool=spec.name, kind=type(error).__name__)
            await self._clear(holder)
            self._release(holder)
            self.feed(events.StartFailed(holder.number, self._loop.time(), str(error) or type(error).__name__, fault))
            return
        holder.member, self._missing = member, None
        if self._pools.closed:
            return  # whoever closes has waited for this
        member.died.add_done_callback(lambda died: self._died(holder, died))
        self.feed(events.Started(holder.number, self._loop.time()))

    def _died(self, holder: Holder, died: asyncio.Future[str]) -> None:
        slot = self.machine.slots.get(holder.number)
        if self._pools.closed or died.cancelled() or slot is None or slot.phase != "idle":
            return  # a call that it served tells
        self._pools.emit("pool.member_lost", pool=self.spec.name, member_id=holder.member_id, message=died.result())
        self.feed(events.Lost(holder.number, self._loop.time(), died.result()))

    async def _clear(self, holder: Holder) -> None:
        """Until nothing is left of it, however often that fails."""
        delay_s = RETRY_S[0]
        while not self._pools.closed:
            try:
                if holder.member is not None:
                    await holder.member.destroy()
                else:
                    await self._pools.backend.clear(holder.member_id)
                return
            except Exception as error:
                self._node.log.error("pool.member_not_destroyed", member_id=holder.member_id, reason=f"{type(error).__name__}: {error}")
                holder.member = None  # the next attempt goes by what is left on the machine
            await self._pools.pause(delay_s)
            delay_s = min(delay_s * 2, RETRY_S[1])

    async def _destroy(self, holder: Holder) -> None:
        await self._clear(holder)
        if self._pools.closed:
            return
        self._release(holder)
        self.feed(events.Gone(holder.number, self._loop.time()))
        self._pools.room_made()

    def _release(self, holder: Holder) -> None:
        """Nothing of it is left: what it had is free again."""
        node = self._node
        self.holders.pop(holder.number, None)
        self._pools.leases.pop(holder.member_id, None)
        # Its own size, not the pool's, which may have changed since.
        node.promised = node.promised.minus(self._pools.promises.pop(holder.member_id))
        node.uids.give_back(holder.uid_base)
        try:
            node.journal.drop_member(holder.member_id)
        except Unavailable as error:
            # The next edge will clear what is not there, which does no harm.
            node.log.error("journal.not_written", member_id=holder.member_id, reason=str(error))


def _shape(spec: PoolSpec) -> events.Shape:
    return events.Shape(size=spec.size, max=spec.max, reuse=spec.reuse, idle_s=spec.idle_s)
