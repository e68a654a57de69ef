# SPDX-License-Identifier: Apache-2.0
"""What a pool of members does next, as a state machine without I/O: events in, instructions out.

    (none) ──Create──▶ starting ──Started──▶ idle ◀──Ended── busy
                          │                   │  └──Assign──▶ ┘ │
                     StartFailed,             └───Destroy───────┴──▶ ending ──Gone──▶ (none)
                     NoRoom: (none)

Which call next. Calls wait in lines, one for each caller (a batch, a judge task, all single calls of a tenant), and lines take turns:
whoever sends ten thousand calls waits for them and nobody else does. A member that has served a tenant serves no other; a call that
wants a member of its own (`fresh`) gets one that has served nobody, and the member is destroyed after it.

How many members. A fork pool holds `size` members, a pool whose members are used once has `size` of them ready; both grow up to `max`
while calls wait that no starting member is for. An idle member that no waiting call may use makes way if there is no room otherwise.
Members beyond `size` go after `idle_s` without a call.

What fails. Starting is tried again later and later (BACKOFF_S). A call fails only when nothing is left to wait for: no living member,
and the start failed by the pool's own fault or GIVE_UP times; or no room, and nothing that will make any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Literal

import msgspec

from opendsec.edge.fn.events import (
    Asked,
    Assign,
    Create,
    Destroy,
    Drained,
    Empty,
    Ended,
    Event,
    Evicted,
    Fail,
    Gone,
    Instruction,
    Lost,
    NoRoom,
    Reshaped,
    RoomMade,
    SetTimer,
    Shape,
    Started,
    StartFailed,
    Ticked,
    Why,
    Withdrawn,
)

BACKOFF_S = (1.0, 60.0)  # doubles from the first to the last
GIVE_UP = 3  # failed starts in a row after which waiting calls fail
STARTING = 8  # members that are started at the same time
EVICT_AGE_S = 2.0  # a younger member is not given up while it is busy: two pools would do nothing but start members
ROOM_S = 1.0  # so often room is looked for again


class Slot(msgspec.Struct):
    """One member."""

    number: int
    phase: Literal["starting", "idle", "busy", "ending"] = "starting"
    tenant: str | None = None  # whom it has served
    calls: int = 0
    idle_at: float = 0.0
    started_at: float = 0.0
    retire: bool = False  # after the call that it serves


class Line:
    """The waiting calls of one caller, all for the same tenant."""

    __slots__ = ("calls", "fresh", "key", "tenant")

    def __init__(self, key: Hashable, tenant: str, fresh: bool) -> None:
        self.key, self.tenant, self.fresh = key, tenant, fresh
        self.calls: deque[int] = deque()


class Pool:
    """One pool. `handle` is the only way in; everything else is for reading."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.slots: dict[int, Slot] = {}
        self.waiting = 0
        self.idle = self.busy = self.starting = 0
        self.calls = self.cold = self.lost = 0
        self.failures = 0
        self.fault: Why | None = None
        self.message = ""
        self.starved = False
        self.draining = False
        self._numbers = 0
        self._idle: dict[str | None, list[Slot]] = {}  # by the tenant served, None for fresh ones; the last is the warmest
        self._lines: dict[Hashable, Line] = {}
        self._turns: deque[Line] = deque()  # lines that are not empty, the next first
        self._of: dict[int, Line] = {}  # of a waiting call
        self._retry_at = 0.0
        self._timer_at: float | None = None
        self._out: list[Instruction] = []

    @property
    def living(self) -> int:
        return self.idle + self.busy + self.starting

    @property
    def state(self) -> Literal["ready", "filling", "draining", "failing"]:
        if self.draining:
            return "draining"
        if self.failures:
            return "failing"
        ready = self.living - self.starting if self.shape.reuse == "fork" else self.idle
        return "filling" if ready < self.shape.size else "ready"

    def handle(self, event: Event) -> list[Instruction]:
        """What is to be done now. An event that comes too late changes nothing."""
        self._out = []
        match event:
            case Asked():
                if self._ask(event):
                    return self._out  # the common case, in which nothing else can have changed
            case Ended(number, at, lost):
                self._ended(self.slots[number], at, lost)
            case Withdrawn(call):
                self._withdraw(call)
            case Started(number, at):
                self._started(number, at)
            case StartFailed():
                self._start_failed(event)
            case NoRoom():
                self._no_room(event)
            case RoomMade():
                self.starved = False
            case Lost(number, at, message):
                self._died(number, at, message)
            case Gone(number):
                self.slots.pop(number, None)
            case Reshaped(shape, replace):
                self._reshape(shape, replace)
            case Drained():
                self.draining = True
            case Evicted(keep, at):
                self._evict(keep, at)
            case Ticked():
                self._timer_at = None
                self.starved = False
        self._settle(event.at)
        return self._out

    # --- calls -----------------------------------------------------------------------------------------------------------

    def _ask(self, event: Asked) -> bool:
        if not event.fresh:
            idle = self._idle.get(event.tenant) or self._idle.get(None)
        else:
            idle = self._idle.get(None)
        key = (event.caller, event.tenant, event.fresh)
        if idle and not self.waiting:
            slot = idle.pop()
            self.idle -= 1
            self._assign(slot, event.call, event.tenant, event.fresh, cold=False)
            return self.shape.reuse == "fork" and not event.fresh
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(key, event.tenant, event.fresh)
        if not line.calls:
            self._turns.append(line)
        if event.again:
            line.calls.appendleft(event.call)
        else:
            line.calls.append(event.call)
        self._of[event.call] = line
        self.waiting += 1
        return False

    def _withdraw(self, call: int) -> None:
        line = self._of.pop(call, None)
        if line is None:
            return
        line.calls.remove(call)
        self.waiting -= 1
        if not line.calls:
            self._turns.remove(line)
            del self._lines[line.key]

    def _assign(self, slot: Slot, call: int, tenant: str, fresh: bool, *, cold: bool) -> None:
        slot.phase, slot.tenant = "busy", tenant
        if fresh or self.shape.reuse == "never":
            slot.retire = True
        self.busy += 1
        self.calls += 1
        self.cold += cold
        self._out.append(Assign(slot.number, call, cold))

    def _next_for(self, slot: Slot) -> tuple[int, Line] | None:
        """The next call, by turns, that this member may serve."""
        turns = self._turns
        for _ in range(len(turns)):
            line = turns[0]
            turns.rotate(-1)
            if slot.calls == 0 if line.fresh else (slot.tenant is None or slot.tenant == line.tenant):
                call = line.calls.popleft()
                del self._of[call]
                self.waiting -= 1
                if not line.calls:
                    turns.pop()
                    del self._lines[line.key]
                return call, line
        return None

    def _ended(self, slot: Slot, at: float, lost: str) -> None:
        if slot.phase != "busy":
            return
        self.busy -= 1
        slot.calls += 1
        if lost:
            self.lost += 1
            self.message = lost
        else:
            self.failures, self.fault = 0, None
        if lost or slot.retire:
            slot.phase = "ending"
            self._out.append(Destroy(slot.number))
            return
        self._free(slot, at, started=False)

    def _free(self, slot: Slot, at: float, *, started: bool) -> None:
        """A member can serve: a waiting call, or the next that comes."""
        following = self._next_for(slot) if self.waiting else None
        if following is not None:
            call, line = following
            self._assign(slot, call, line.tenant, line.fresh, cold=started)
            return
        slot.phase, slot.idle_at = "idle", at
        self.idle += 1
        self._idle.setdefault(slot.tenant, []).append(slot)

    def _fail_waiting(self, why: Why, message: str) -> None:
        for line in self._turns:
            self._out += [Fail(call, why, message) for call in line.calls]
        self._turns.clear()
        self._lines.clear()
        self._of.clear()
        self.waiting = 0

    # --- members ---------------------------------------------------------------------------------------------------------

    def _started(self, number: int, at: float) -> None:
        slot = self.slots.get(number)
        if slot is None or slot.phase != "starting":
            return
        self.starting -= 1
        slot.started_at = at
        self.failures, self.fault, self.message = 0, None, ""
        if slot.retire:
            slot.phase = "ending"
            self._out.append(Destroy(number))
            return
        self._free(slot, at, started=True)

    def _start_failed(self, event: StartFailed) -> None:
        slot = self.slots.pop(event.number, None)
        if slot is None:
            return
        self.starting -= 1
        self._failed(event.at, event.message, event.fault)

    def _failed(self, at: float, message: str, fault: Why) -> None:
        self._retry_at = at + min(BACKOFF_S[0] * 2.0 ** min(self.failures, 16), BACKOFF_S[1])
        self.failures += 1
        self.message, self.fault = message, fault

    def _no_room(self, event: NoRoom) -> None:
        if self.slots.pop(event.number, None) is None:
            return
        self.starting -= 1
        self.starved, self.message = True, event.message
        if not event.hope and not self.living and not self.slots:
            self._fail_waiting("quota", event.message)

    def _died(self, number: int, at: float, message: str) -> None:
        slot = self.slots.get(number)
        if slot is None or slot.phase != "idle":
            return
        self.lost += 1
        self._destroy(slot)
        if not slot.calls:  # it served nobody: the next may be no better
            self._failed(at, message, "platform")

    def _destroy(self, slot: Slot) -> None:
        """An idle member."""
        self._idle[slot.tenant].remove(slot)
        self.idle -= 1
        slot.phase = "ending"
        self._out.append(Destroy(slot.number))

    def _evict(self, keep: int, at: float) -> None:
        if self.living <= keep:
            return
        if (slot := self._oldest_idle()) is not None:
            return self._destroy(slot)
        busy = [slot for slot in self.slots.values() if slot.phase == "busy"]
        if not any(slot.retire for slot in busy):
            oldest = min(busy, key=lambda slot: slot.started_at, default=None)
            if oldest is not None and at - oldest.started_at >= EVICT_AGE_S:
                oldest.retire = True

    def _oldest_idle(self) -> Slot | None:
        slots = [slot for idle in self._idle.values() for slot in idle]
        return min(slots, key=lambda slot: slot.idle_at, default=None)

    def _reshape(self, shape: Shape, replace: bool) -> None:
        replace = replace or shape.reuse != self.shape.reuse
        self.shape = shape
        self.failures, self.fault, self._retry_at = 0, None, 0.0
        if replace:
            for slot in list(self.slots.values()):
                if slot.phase == "idle":
                    self._destroy(slot)
                slot.retire = True

    # --- the balance -----------------------------------------------------------------------------------------------------

    def _settle(self, at: float) -> None:
        """Bring the number of members to what is wanted, as far as may be."""
        if self.waiting and self.idle:
            self._serve_idle()
        if self.failures and self.waiting and not self.living and (self.fault == "pool" or self.failures >= GIVE_UP):
            assert self.fault is not None
            self._fail_waiting(self.fault, self.message)
        if self.draining and not self.waiting:
            while (slot := self._oldest_idle()) is not None:
                self._destroy(slot)
            if not self.slots:
                self._out.append(Empty())
            return
        wanted = self._wanted()
        if wanted > 0 and (self.idle or self.living < self.shape.max):
            self._grow(wanted, at)
        if self.idle and self.living > self.shape.max:
            self._shrink(self.living - self.shape.max)
        if self.idle and self._surplus() > 0:
            self._shrink_idle(at)

    def _serve_idle(self) -> None:
        for slots in list(self._idle.values()):
            for slot in list(reversed(slots)):
                if slot.phase == "idle" and (following := self._next_for(slot)) is not None:
                    slots.remove(slot)
                    self.idle -= 1
                    self._assign(slot, following[0], following[1].tenant, following[1].fresh, cold=False)

    def _wanted(self) -> int:
        """How many members more are wanted; idle ones that are there are of no use to calls that wait."""
        size = 0 if self.draining else self.shape.size
        if self.shape.reuse == "never":
            return size + self.waiting - self.idle - self.starting
        return max(size - self.living, self.waiting - self.starting)

    def _grow(self, wanted: int, at: float) -> None:
        if self.failures and at < self._retry_at:
            return self._set_timer(self._retry_at)
        if self.starved:
            self._set_timer(at + ROOM_S)
        unserved = self.waiting - self.starting
        for _ in range(min(wanted, STARTING)):
            if self.starting >= STARTING:
                return
            if self.living >= self.shape.max or self.starved:
                # An idle member that is here while calls wait serves another tenant, or is no fresh one.
                slot = self._oldest_idle() if unserved > 0 else None
                if slot is None:
                    return
                self._destroy(slot)
                if self.starved:
                    return  # it makes room first
            self._numbers += 1
            unserved -= 1
            self.starting += 1
            self.slots[self._numbers] = Slot(self._numbers)
            self._out.append(Create(self._numbers))

    def _shrink(self, count: int) -> None:
        for _ in range(count):
            slot = self._oldest_idle()
            if slot is None:
                return
            self._destroy(slot)

    def _surplus(self) -> int:
        return (self.idle if self.shape.reuse == "never" else self.living) - self.shape.size

    def _shrink_idle(self, at: float) -> None:
        while self._surplus() > 0 and (slot := self._oldest_idle()) is not None:
            deadline = slot.idle_at + self.shape.idle_s
            if at < deadline:
                return self._set_timer(deadline)
            self._destroy(slot)

    def _set_timer(self, at: float) -> None:
        """Unless it fires early enough by itself; too early is harmless."""
        if self._timer_at is None or at < self._timer_at:
            self._timer_at = at
            self._out.append(SetTimer(at))
