# SPDX-License-Identifier: Apache-2.0
"""The lifecycle is pure, so a small model node can drive it through every order of events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opendsec.edge import lifecycle as lc
from opendsec.edge.lifecycle import State, handle, requested

T0 = 1000.0


def running(ttl_s: float | None = None, ttl_idle_s: float | None = None) -> State:
    state, _ = requested(T0, ttl_s=ttl_s, ttl_idle_s=ttl_idle_s)
    state, _ = handle(state, lc.Created(T0))
    return state


def test_a_plain_life() -> None:
    state, instructions = requested(T0, ttl_s=None, ttl_idle_s=None)
    assert (state.phase, instructions) == ("creating", [lc.Save(), lc.Create()])
    state, instructions = handle(state, lc.Created(T0 + 1))
    assert (state.phase, instructions) == ("running", [lc.Save(), lc.Emit("sandbox.created")])
    state, instructions = handle(state, lc.KillRequested(T0 + 2, "enough"))
    assert (state.phase, instructions) == ("stopping", [lc.Save(), lc.Destroy()])
    state, instructions = handle(state, lc.Destroyed(T0 + 3))
    assert (state.phase, state.held, state.message) == ("stopped", False, "enough")
    assert instructions == [lc.Save(), lc.Release(), lc.Emit("sandbox.stopped", "enough")]


def test_what_could_not_be_created_is_released() -> None:
    state, _ = requested(T0, ttl_s=1, ttl_idle_s=None)
    state, instructions = handle(state, lc.CreateFailed(T0, "no room"))
    assert (state.phase, state.held, state.message) == ("stopped", False, "no room")
    assert instructions == [lc.Save(), lc.Release(), lc.Emit("sandbox.create_failed", "no room")]


def test_killed_while_being_created_is_destroyed_as_soon_as_it_is_there() -> None:
    state, _ = requested(T0, ttl_s=None, ttl_idle_s=None)
    state, instructions = handle(state, lc.KillRequested(T0))
    assert (state.phase, instructions) == ("stopping", [lc.Save()])
    state, instructions = handle(state, lc.Created(T0))
    assert (state.phase, instructions) == ("stopping", [lc.Destroy()])


def test_death_loses_it_and_clears_the_remains() -> None:
    state, instructions = handle(running(ttl_s=60), lc.Died(T0 + 1, "its first process ended"))
    assert state.phase == "lost"
    assert instructions == [lc.CancelTimer(), lc.Save(), lc.Emit("sandbox.lost", "its first process ended"), lc.Destroy()]
    state, instructions = handle(state, lc.Destroyed(T0 + 2))
    assert (state.phase, state.held, instructions) == ("lost", False, [lc.Save(), lc.Release()])


def test_death_while_being_destroyed_is_no_loss() -> None:
    state, _ = handle(running(), lc.KillRequested(T0))
    assert handle(state, lc.Died(T0, "its first process ended")) == (state, [])


def test_destroying_is_tried_again_later_and_later() -> None:
    state, _ = handle(running(), lc.KillRequested(T0))
    waits = []
    for _ in range(9):
        state, instructions = handle(state, lc.DestroyFailed(T0, "busy"))
        assert state.timer_at is not None
        assert instructions == [lc.SetTimer(state.timer_at), lc.Emit("sandbox.destroy_failed", "busy")]
        waits.append(state.timer_at - T0)
        state, instructions = handle(state, lc.TimerFired(state.timer_at))
        assert instructions == [lc.Destroy()]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    state, _ = handle(state, lc.Destroyed(T0))
    assert (state.phase, state.held) == ("stopped", False)


def test_absolute_ttl_counts_from_the_request() -> None:
    state = running(ttl_s=10)
    assert state.timer_at == state.deadline() == T0 + 10
    state, instructions = handle(state, lc.TimerFired(T0 + 10))
    assert (state.phase, state.message, instructions) == ("stopping", "its ttl_s has passed", [lc.Save(), lc.Destroy()])


def test_idle_ttl_does_not_run_while_in_use() -> None:
    state = running(ttl_idle_s=10)
    assert state.idle_expires_at == T0 + 10
    state, _ = handle(state, lc.UseStarted(T0 + 9))
    assert state.deadline() is None
    state, instructions = handle(state, lc.TimerFired(T0 + 10))
    assert (state.phase, instructions) == ("running", [])
    state, _ = handle(state, lc.UseStarted(T0 + 11))
    state, _ = handle(state, lc.UseEnded(T0 + 50))
    assert state.deadline() is None
    state, instructions = handle(state, lc.UseEnded(T0 + 60))
    assert instructions == [lc.SaveSoon(), lc.SetTimer(T0 + 70)]
    state, _ = handle(state, lc.TimerFired(T0 + 70))
    assert (state.phase, state.message) == ("stopping", "it was idle for ttl_idle_s")


def test_a_use_moves_the_deadline_but_not_the_timer() -> None:
    state = running(ttl_idle_s=10)
    state, _ = handle(state, lc.UseStarted(T0 + 6))
    state, instructions = handle(state, lc.UseEnded(T0 + 6))
    assert instructions == [lc.SaveSoon()]
    assert (state.timer_at, state.deadline()) == (T0 + 10, T0 + 16)
    state, instructions = handle(state, lc.TimerFired(T0 + 10))
    assert (state.phase, instructions) == ("running", [lc.SetTimer(T0 + 16)])


def test_a_clock_set_back_does_not_shorten_anything() -> None:
    state, _ = handle(running(ttl_idle_s=10), lc.UseStarted(T0 - 500))
    state, _ = handle(state, lc.UseEnded(T0 - 500))
    assert state.deadline() == T0 + 10
    state, instructions = handle(state, lc.TimerFired(T0 - 400))
    assert (state.phase, instructions) == ("running", [lc.SetTimer(T0 + 10)])


@pytest.mark.parametrize(("ttl_s", "ttl_idle_s", "message"), [(5, None, "its ttl_s has passed"), (None, 5, "it was idle for ttl_idle_s")])
def test_a_deadline_that_passed_while_no_edge_ran(ttl_s: float | None, ttl_idle_s: float | None, message: str) -> None:
    state, instructions = handle(running(ttl_s=ttl_s, ttl_idle_s=ttl_idle_s), lc.Restarted(T0 + 100))
    assert instructions == [lc.Adopt()]
    state, instructions = handle(state, lc.Adopted(T0 + 101))
    assert (state.phase, state.message) == ("stopping", message)
    assert instructions == [lc.Save(), lc.Destroy(), lc.Emit("sandbox.adopted")]


def test_what_was_in_use_at_a_crash_begins_to_be_idle_at_the_restart() -> None:
    state, _ = handle(running(ttl_idle_s=10), lc.UseStarted(T0))
    state, _ = handle(state, lc.Restarted(T0 + 100))
    state, _ = handle(state, lc.Adopted(T0 + 101))
    assert (state.phase, state.deadline()) == ("running", T0 + 110)


def test_a_restart_finishes_what_was_begun() -> None:
    creating, _ = requested(T0, ttl_s=None, ttl_idle_s=None)
    stopping, _ = handle(running(), lc.KillRequested(T0))
    lost, _ = handle(running(), lc.Died(T0, "gone"))
    for state, phase in ((creating, "stopping"), (stopping, "stopping"), (lost, "lost")):
        loaded = State(phase=state.phase, created_at=T0, used_at=T0, held=True, message=state.message)
        after, instructions = handle(loaded, lc.Restarted(T0))
        assert after.phase == phase
        assert instructions == ([lc.Save(), lc.Destroy()] if state is creating else [lc.Destroy()])
    ended = State(phase="stopped", created_at=T0, used_at=T0, held=False)
    assert handle(ended, lc.Restarted(T0)) == (ended, [])


def test_not_found_again_is_lost() -> None:
    state, _ = handle(running(), lc.Restarted(T0))
    state, instructions = handle(state, lc.Died(T0, "the machine was restarted"))
    assert state.phase == "lost"
    assert instructions == [lc.Save(), lc.Emit("sandbox.lost", "the machine was restarted"), lc.Destroy()]


# --- any order of events ---------------------------------------------------------------------------------------------------

MOVES = ("answer", "fail", "die", "kill", "touch", "use", "unuse", "wait", "restart", "stray")


class Model:
    """A node that keeps count of what it was told to do."""

    def __init__(self, ttl_s: float | None, ttl_idle_s: float | None) -> None:
        self.now, self.released, self.pending, self.timer = T0, 0, "", None
        self.history: list[str] = []
        self.saved = None
        self.ttl_s, self.ttl_idle_s = ttl_s, ttl_idle_s
        self.uses = 0
        state, instructions = requested(self.now, ttl_s=ttl_s, ttl_idle_s=ttl_idle_s)
        self.state = state
        self.obey(instructions)

    def obey(self, instructions: list[lc.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case lc.Create() | lc.Adopt() | lc.Destroy():
                    assert not self.pending, f"{instruction} while {self.pending}"
                    assert self.saved == (self.state.phase, self.state.held), "a side effect before its intent was saved"
                    self.pending = type(instruction).__name__.lower()
                case lc.Release():
                    assert not self.state.held
                    self.released += 1
                case lc.Save():
                    self.saved = (self.state.phase, self.state.held)
                case lc.SetTimer(at):
                    self.timer = at
                case lc.CancelTimer():
                    assert self.timer is not None
                    self.timer = None
                case _:
                    pass

    def feed(self, event: lc.Event) -> None:
        before = self.state
        answers = isinstance(event, lc.Created | lc.CreateFailed | lc.Adopted | lc.Destroyed | lc.DestroyFailed)
        if answers or (isinstance(event, lc.Died) and self.pending == "adopt"):
            self.pending = ""
        self.state, instructions = handle(before, event)
        self.obey(instructions)
        if before.phase in ("stopped", "lost"):
            assert self.state.phase == before.phase
        if (self.state.phase, self.state.held) != (before.phase, before.held):
            assert self.saved == (self.state.phase, self.state.held)
        assert self.pending == self.state.pending
        assert self.timer == self.state.timer_at
        assert self.released == (0 if self.state.held else 1)
        deadline = self.state.deadline()
        if self.state.phase == "running" and not self.pending and deadline is not None:
            assert self.timer is not None and self.timer <= deadline

    def answer(self) -> None:
        match self.pending:
            case "create":
                self.feed(lc.Created(self.now))
            case "adopt":
                self.feed(lc.Adopted(self.now))
            case "destroy":
                self.feed(lc.Destroyed(self.now))

    def fail(self) -> None:
        match self.pending:
            case "create":
                self.feed(lc.CreateFailed(self.now, "failed"))
            case "adopt":
                self.feed(lc.Died(self.now, "gone"))
            case "destroy":
                self.feed(lc.DestroyFailed(self.now, "failed"))

    def restart(self) -> None:
        """Only what was saved is known to the next edge; work under way is cut."""
        assert self.saved is not None
        phase, held = self.saved
        expires_at = None if self.ttl_s is None else T0 + self.ttl_s
        loaded = State(
            phase=phase,
            held=held,
            created_at=T0,
            expires_at=expires_at,
            ttl_idle_s=self.ttl_idle_s,
            used_at=self.state.used_at,
            busy=self.state.busy,
            message=self.state.message,
        )
        self.state, self.pending, self.timer, self.uses = loaded, "", None, 0
        self.feed(lc.Restarted(self.now))

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.timer is not None and self.timer <= until:
            self.now, self.timer = max(self.now, self.timer), None
            self.feed(lc.TimerFired(self.now))
        self.now = until

    def move(self, name: str, amount: float) -> None:
        match name:
            case "answer":
                self.answer()
            case "fail":
                self.fail()
            case "die" if self.state.phase == "running" and not self.pending:
                self.feed(lc.Died(self.now, "died"))
            case "kill":
                self.feed(lc.KillRequested(self.now))
            case "touch":
                self.feed(lc.UseStarted(self.now))
                self.feed(lc.UseEnded(self.now))
            case "use":
                self.feed(lc.UseStarted(self.now))
            case "unuse":
                self.feed(lc.UseEnded(self.now))
            case "wait":
                self.wait(amount)
            case "restart":
                self.restart()
            case "stray":
                for event in (lc.Created(self.now), lc.CreateFailed(self.now, "?"), lc.Adopted(self.now), lc.Destroyed(self.now)):
                    if not self.pending:
                        assert handle(self.state, event) == (self.state, [])


TTL = st.none() | st.floats(min_value=0.5, max_value=100)
STEPS = st.lists(st.tuples(st.sampled_from(MOVES), st.floats(min_value=0, max_value=80)), max_size=40)


@given(TTL, TTL, STEPS)
@settings(max_examples=600)
def test_any_order(ttl_s: float | None, ttl_idle_s: float | None, steps: list[tuple[str, float]]) -> None:
    """Whatever happens in whatever order: one thing under way at a time, intents saved first, terminal states terminal, everything
    released exactly once; and once it is left alone it ends by its deadline, or by the kill, and everything is released."""
    model = Model(ttl_s, ttl_idle_s)
    for name, amount in steps:
        model.move(name, amount)
    while model.pending:
        model.answer()
    while model.state.busy:
        model.move("unuse", 0)
    deadline = model.state.deadline()
    if model.state.phase == "running" and deadline is not None:
        if model.now < deadline:
            model.wait(max(0.0, (deadline - model.now) * 0.999 - 1e-6))
            assert model.state.phase == "running"
        model.wait(deadline - model.now + 1)
        assert model.state.phase == "stopping"
    elif model.state.phase == "running":
        model.wait(1e6)
        assert model.state.phase == "running"
        model.feed(lc.KillRequested(model.now))
    for _ in range(3):
        model.answer()
        model.wait(120)
    assert model.state.phase in ("stopped", "lost")
    assert (model.state.held, model.released, model.timer, model.pending) == (False, 1, None, "")
