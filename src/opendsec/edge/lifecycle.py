# SPDX-License-Identifier: Apache-2.0
"""The life of one sandbox as a pure state machine: `handle(state, event) -> (state, instructions)`.

No await, clock, socket or path in here: times come in with the events, work goes out as instructions, and the node feeds what
became of it back as further events.

    creating ──Created──▶ running ──KillRequested, TTL──▶ stopping ──Destroyed──▶ stopped
        │                 │ ▲└──Died───────────────────▶ lost (its remains are cleared away; it stays lost)
        │            Paused Resumed
        │                 ▼ │
        │                paused ──KillRequested, ttl_s──▶ stopping
        └──CreateFailed──▶ stopped

`held` says whether the sandbox still occupies anything of the host (uid range, promised memory and disk, cgroups). It turns false
exactly once, with the `Release` instruction; until then a failed `Destroy` is tried again, later and later.

Deadlines. `expires_at` is absolute. The idle deadline exists only while nothing uses the sandbox (`busy` counts commands, streams
and requests in flight) and lies `ttl_idle_s` after the last use. One timer serves both, and it is lazy: a use moves the deadline but
not the timer, and a timer that fires too early is set anew. So a use costs no timer operation, and a wall clock that jumps is noticed
when the timer fires.

Pausing. While it is being paused it is still `running`, while it is being resumed still `paused`; `pending` tells. What comes in between
waits for the outcome: a kill, a deadline, and whoever wants to talk to it. A paused sandbox is never idle, and `busy` goes on counting
(commands survive a pause, and those who wait for them wait on). Both intents are saved: an edge that comes after a crash in between finds
the sandbox running, or what is stored of it.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from opendsec.api.sandboxes import SandboxState

RETRY_S = (1.0, 60.0)  # between attempts to destroy: doubles from the first to the last
LIVING: frozenset[SandboxState] = frozenset(("creating", "running", "paused", "stopping"))
Turning = Literal["", "pause", "resume"]
Pending = Literal["", "create", "adopt", "destroy", "pause", "resume"]


class State(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox. All times are unix seconds."""

    phase: SandboxState = "creating"
    created_at: float
    expires_at: float | None = None
    ttl_idle_s: float | None = None
    used_at: float
    busy: int = 0
    held: bool = True
    timer_at: float | None = None  # what the node's timer is set to
    failures: int = 0  # of destroying it
    pending: Pending = ""  # the instruction whose end the node has not told yet
    message: str = ""

    @property
    def turning(self) -> Turning:
        """What the journal is to know of `pending`."""
        if self.phase in ("running", "paused") and (self.pending == "pause" or self.pending == "resume"):
            return self.pending
        return ""

    @property
    def idle_expires_at(self) -> float | None:
        """When it will have been idle for too long; None while it is in use or has no idle TTL."""
        if self.ttl_idle_s is None or self.busy or self.phase != "running":
            return None
        return self.used_at + self.ttl_idle_s

    def deadline(self) -> float | None:
        """The earlier of the two deadlines."""
        idle, absolute = self.idle_expires_at, self.expires_at
        if idle is None or absolute is None:
            return absolute if idle is None else idle
        return min(idle, absolute)


# --- events: what happened ---------------------------------------------------------------------------------------------


class Created(msgspec.Struct, frozen=True):
    at: float


class CreateFailed(msgspec.Struct, frozen=True):
    at: float
    message: str


class Died(msgspec.Struct, frozen=True):
    """Its first process is gone, or it could not be found again after a restart of the edge."""

    at: float
    message: str


class KillRequested(msgspec.Struct, frozen=True):
    at: float
    message: str = "killed by the caller"


class Destroyed(msgspec.Struct, frozen=True):
    at: float


class DestroyFailed(msgspec.Struct, frozen=True):
    at: float
    message: str


class PauseRequested(msgspec.Struct, frozen=True):
    at: float


class Paused(msgspec.Struct, frozen=True):
    at: float


class PauseFailed(msgspec.Struct, frozen=True):
    """It runs on, unless it was `lost`."""

    at: float
    message: str
    lost: bool = False


class ResumeRequested(msgspec.Struct, frozen=True):
    at: float


class Resumed(msgspec.Struct, frozen=True):
    at: float


class ResumeFailed(msgspec.Struct, frozen=True):
    """It stays paused, unless it was `lost`."""

    at: float
    message: str
    lost: bool = False


class TimerFired(msgspec.Struct, frozen=True):
    """`ttl_elapsed`, perhaps: the state decides whether a deadline has really passed."""

    at: float


class UseStarted(msgspec.Struct, frozen=True):
    """A command started, or somebody began to talk to the sandbox."""

    at: float


class UseEnded(msgspec.Struct, frozen=True):
    at: float


class Restarted(msgspec.Struct, frozen=True):
    """A new edge process has read this state from the journal."""

    at: float


class Adopted(msgspec.Struct, frozen=True):
    at: float


class FoundPaused(msgspec.Struct, frozen=True):
    """An earlier edge was pausing or resuming it, and it does not run: what is stored of it can be resumed."""

    at: float


Event: TypeAlias = (
    Created
    | CreateFailed
    | Died
    | KillRequested
    | Destroyed
    | DestroyFailed
    | PauseRequested
    | Paused
    | PauseFailed
    | ResumeRequested
    | Resumed
    | ResumeFailed
    | TimerFired
    | UseStarted
    | UseEnded
    | Restarted
    | Adopted
    | FoundPaused
)

# --- instructions: what to do ------------------------------------------------------------------------------------------


class Create(msgspec.Struct, frozen=True):
    """Ends with Created or CreateFailed."""


class Adopt(msgspec.Struct, frozen=True):
    """Ends with Adopted or Died."""


class Pause(msgspec.Struct, frozen=True):
    """Ends with Paused or PauseFailed."""


class Resume(msgspec.Struct, frozen=True):
    """Ends with Resumed or ResumeFailed."""


class Destroy(msgspec.Struct, frozen=True):
    """Kill everything inside and give everything back. Ends with Destroyed or DestroyFailed."""


class Release(msgspec.Struct, frozen=True):
    """Nothing of it is left: its uid range and what was promised to it are free again."""


class Save(msgspec.Struct, frozen=True):
    """Write the state to the journal before anything else is done."""


class SaveSoon(msgspec.Struct, frozen=True):
    """Only the last use changed: write it within a second or so."""


class SetTimer(msgspec.Struct, frozen=True):
    at: float


class CancelTimer(msgspec.Struct, frozen=True):
    pass


class Emit(msgspec.Struct, frozen=True):
    kind: str
    message: str = ""


Instruction: TypeAlias = Create | Adopt | Pause | Resume | Destroy | Release | Save | SaveSoon | SetTimer | CancelTimer | Emit
Step: TypeAlias = tuple[State, list[Instruction]]


def requested(at: float, *, ttl_s: float | None, ttl_idle_s: float | None) -> Step:
    """A new sandbox: its intent is saved, then it is created."""
    state = State(created_at=at, expires_at=None if ttl_s is None else at + ttl_s, ttl_idle_s=ttl_idle_s, used_at=at, pending="create")
    return state, [Save(), Create()]


def handle(state: State, event: Event) -> Step:
    """What the event makes of the state, and what is to be done. An event that comes too late changes nothing."""
    match event:
        case UseStarted() | UseEnded():
            return _use(state, event)
        case TimerFired(at):
            return _timer(replace(state, timer_at=None), at)
        case KillRequested(at, message):
            return _kill(state, message)
        case Died(at, message):
            return _died(state, message)
        case Created(at) if state.pending == "create":
            return _live(replace(state, used_at=max(at, state.used_at)), at, "sandbox.created")
        case Adopted(at) if state.pending == "adopt":
            return _live(state, at, "sandbox.adopted")
        case CreateFailed(_, message) if state.pending == "create":
            return _ended(replace(state, phase="stopped", message=message), [Emit("sandbox.create_failed", message)])
        case Destroyed() if state.pending == "destroy":
            if state.phase == "lost":
                return _ended(state, [])
            return _ended(replace(state, phase="stopped"), [Emit("sandbox.stopped", state.message)])
        case DestroyFailed(at, message) if state.pending == "destroy":
            again_at = at + min(RETRY_S[0] * 2.0 ** min(state.failures, 16), RETRY_S[1])
            state = replace(state, pending="", failures=state.failures + 1, timer_at=again_at)
            return state, [SetTimer(again_at), Emit("sandbox.destroy_failed", message)]
        case PauseRequested() if state.phase == "running" and not state.pending:
            return replace(state, pending="pause"), [Save(), Pause()]
        case Paused(at) if state.pending == "pause":
            return _turned(replace(state, used_at=max(at, state.used_at)), at, "paused", "sandbox.paused")
        case PauseFailed(at, message, lost) if state.pending == "pause":
            return _turned(state, at, "running", "sandbox.pause_failed", message, lost=lost)
        case ResumeRequested() if state.phase == "paused" and not state.pending:
            return replace(state, pending="resume"), [Save(), Resume()]
        case Resumed(at) if state.pending == "resume":
            return _turned(replace(state, used_at=max(at, state.used_at)), at, "running", "sandbox.resumed")
        case ResumeFailed(at, message, lost) if state.pending == "resume":
            return _turned(state, at, "paused", "sandbox.resume_failed", message, lost=lost)
        case FoundPaused(at) if state.pending == "adopt":
            return _turned(state, at, "paused", "sandbox.paused")
        case Restarted(at) if state.pending in ("", "pause", "resume"):
            return _restarted(state, at)
    return state, []


def _use(state: State, event: UseStarted | UseEnded) -> Step:
    if state.phase not in ("running", "paused"):
        return state, []
    # A wall clock that was set back must not bring the deadline nearer.
    used_at = max(state.used_at, event.at)
    busy = max(0, state.busy + (1 if isinstance(event, UseStarted) else -1))
    state = replace(state, used_at=used_at, busy=busy)
    if state.ttl_idle_s is None:
        return state, []
    if busy:
        return state, [SaveSoon()] if busy == 1 else []
    if state.pending:  # the timer is seen to with the outcome
        return state, [SaveSoon()]
    state, instructions = _arm(state)
    return state, [SaveSoon(), *instructions]


def _arm(state: State) -> Step:
    """Set the timer unless it fires early enough by itself."""
    deadline = state.deadline()
    if deadline is None or (state.timer_at is not None and state.timer_at <= deadline):
        return state, []
    return replace(state, timer_at=deadline), [SetTimer(deadline)]


def _timer(state: State, at: float) -> Step:
    if state.phase in ("running", "paused") and not state.pending:
        deadline = state.deadline()
        if deadline is None:
            return state, []
        if at < deadline:
            return _arm(state)
        absolute = state.expires_at is not None and at >= state.expires_at
        return _kill(state, "its ttl_s has passed" if absolute else "it was idle for ttl_idle_s")
    if state.phase in ("stopping", "lost") and state.held and not state.pending:  # time to try again
        return replace(state, pending="destroy"), [Destroy()]
    return state, []


def _live(state: State, at: float, kind: str) -> Step:
    if state.phase != "creating" and state.phase != "running":  # it was killed while it was being made or found
        return replace(state, pending="destroy"), [Destroy()]
    state = replace(state, phase="running", pending="", busy=0)
    deadline = state.deadline()
    if deadline is not None and at >= deadline:
        state, instructions = _timer(state, at)
    else:
        state, instructions = _arm(state)
        instructions.insert(0, Save())
    return state, [*instructions, Emit(kind)]


def _turned(state: State, at: float, phase: SandboxState, kind: str, message: str = "", *, lost: bool = False) -> Step:
    """Pausing or resuming has ended, with the sandbox in `phase`."""
    if state.phase == "stopping":  # it was killed in the meantime
        return replace(state, pending="destroy"), [Destroy()]
    if lost:
        return _end(state, "lost", message, [Emit("sandbox.lost", message)])
    state = replace(state, phase=phase, pending="")
    deadline = state.deadline()
    if deadline is not None and at >= deadline:
        state, instructions = _timer(state, at)
    else:
        state, instructions = _arm(state)
        instructions.insert(0, Save())
    return state, [*instructions, Emit(kind, message)]


def _died(state: State, message: str) -> Step:
    if state.pending in ("pause", "resume"):  # what becomes of that tells
        return state, []
    if state.phase in ("running", "paused"):
        return _end(state, "lost", message, [Emit("sandbox.lost", message)])
    if state.pending == "adopt":  # killed while it was being looked for: there is no handle, but perhaps remains
        return replace(state, pending="destroy"), [Destroy()]
    return state, []


def _kill(state: State, message: str) -> Step:
    if state.phase == "creating" or (state.phase in ("running", "paused") and state.pending):
        return replace(state, phase="stopping", message=message), [Save()]  # destroyed as soon as it is there
    if state.phase in ("running", "paused"):
        return _end(state, "stopping", message, [])
    return state, []


def _end(state: State, phase: SandboxState, message: str, more: list[Instruction]) -> Step:
    """The beginning of the end: whatever was pending is answered, so that destroying is the one thing under way."""
    cancel: list[Instruction] = [] if state.timer_at is None else [CancelTimer()]
    state = replace(state, phase=phase, message=message, pending="destroy", busy=0, timer_at=None)
    return state, [*cancel, Save(), *more, Destroy()]


def _ended(state: State, more: list[Instruction]) -> Step:
    cancel: list[Instruction] = [] if state.timer_at is None else [CancelTimer()]
    return replace(state, held=False, pending="", timer_at=None, busy=0), [*cancel, Save(), Release(), *more]


def _restarted(state: State, at: float) -> Step:
    """What an earlier edge process left: adopt what ran, clear away the rest. What was in use begins to be idle now."""
    state = replace(state, used_at=max(at, state.used_at) if state.busy else state.used_at, busy=0, timer_at=None, failures=0)
    if not state.held:
        return state, []
    if state.phase == "running" or state.turning:
        return replace(state, phase="running", pending="adopt"), [Adopt()]
    if state.phase == "paused":
        deadline = state.deadline()
        return _timer(state, at) if deadline is not None and at >= deadline else _arm(state)
    if state.phase == "creating":
        return _end(state, "stopping", "the edge ended while it was being created", [])
    return replace(state, pending="destroy"), [Destroy()]
