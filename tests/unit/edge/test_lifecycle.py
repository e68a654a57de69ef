# SPDX-License-Identifier: Apache-2.0
"""The lifecycle is pure, so a small model node can drive it through every order of events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opendsec.api.sandboxes import SandboxState
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


def paused(ttl_s: float | None = None, ttl_idle_s: float | None = None) -> State:
    state, _ = handle(running(ttl_s, ttl_idle_s), lc.PauseRequested(T0 + 1))
    state, _ = handle(state, lc.Paused(T0 + 2))
    return state


def test_pausing_and_resuming() -> None:
    state, instructions = handle(running(), lc.PauseRequested(T0))
    assert (state.phase, state.pending, instructions) == ("running", "pause", [lc.Save(), lc.Pause()])
    assert handle(state, lc.PauseRequested(T0)) == (state, []) == handle(state, lc.ResumeRequested(T0))
    state, instructions = handle(state, lc.Paused(T0))
    assert (state.phase, state.pending, instructions) == ("paused", "", [lc.Save(), lc.Emit("sandbox.paused")])
    state, instructions = handle(state, lc.ResumeRequested(T0))
    assert (state.phase, state.pending, instructions) == ("paused", "resume", [lc.Save(), lc.Resume()])
    state, instructions = handle(state, lc.Resumed(T0))
    assert (state.phase, state.pending, instructions) == ("running", "", [lc.Save(), lc.Emit("sandbox.resumed")])


def test_what_fails_to_pause_runs_on_and_what_fails_to_resume_stays_paused() -> None:
    state, _ = handle(running(), lc.PauseRequested(T0))
    after, instructions = handle(state, lc.PauseFailed(T0, "no space"))
    assert (after.phase, after.pending) == ("running", "") and lc.Emit("sandbox.pause_failed", "no space") in instructions
    after, instructions = handle(state, lc.PauseFailed(T0, "it crashed", lost=True))
    assert (after.phase, instructions) == ("lost", [lc.Save(), lc.Emit("sandbox.lost", "it crashed"), lc.Destroy()])
    state, _ = handle(paused(), lc.ResumeRequested(T0))
    after, instructions = handle(state, lc.ResumeFailed(T0, "no memory"))
    assert (after.phase, after.pending) == ("paused", "") and lc.Emit("sandbox.resume_failed", "no memory") in instructions
    after, instructions = handle(state, lc.ResumeFailed(T0, "damaged", lost=True))
    assert (after.phase, instructions) == ("lost", [lc.Save(), lc.Emit("sandbox.lost", "damaged"), lc.Destroy()])


def test_a_paused_sandbox_is_never_idle_but_its_time_runs_out() -> None:
    state = paused(ttl_s=100, ttl_idle_s=10)
    assert state.idle_expires_at is None and state.deadline() == T0 + 100
    state, instructions = handle(state, lc.TimerFired(T0 + 10))
    assert (state.phase, instructions) == ("paused", [lc.SetTimer(T0 + 100)])
    ended, instructions = handle(state, lc.TimerFired(T0 + 100))
    assert (ended.phase, ended.message, instructions) == ("stopping", "its ttl_s has passed", [lc.Save(), lc.Destroy()])
    state, _ = handle(state, lc.ResumeRequested(T0 + 50))
    state, instructions = handle(state, lc.Resumed(T0 + 51))
    assert state.deadline() == T0 + 61 and lc.SetTimer(T0 + 61) in instructions


def test_a_deadline_that_passes_while_pausing_is_not_forgotten() -> None:
    state, _ = handle(running(ttl_s=10), lc.PauseRequested(T0))
    state, instructions = handle(state, lc.TimerFired(T0 + 10))
    assert (state.phase, instructions) == ("running", [])
    state, instructions = handle(state, lc.Paused(T0 + 11))
    assert (state.phase, state.message) == ("stopping", "its ttl_s has passed") and lc.Destroy() in instructions


def test_a_command_survives_a_pause() -> None:
    state, _ = handle(running(ttl_idle_s=10), lc.UseStarted(T0))
    state, _ = handle(state, lc.PauseRequested(T0))
    state, _ = handle(state, lc.Paused(T0))
    assert state.busy == 1
    state, _ = handle(state, lc.ResumeRequested(T0 + 90))
    state, _ = handle(state, lc.Resumed(T0 + 90))
    assert (state.busy, state.deadline()) == (1, None)
    state, _ = handle(state, lc.UseEnded(T0 + 95))
    assert state.deadline() == T0 + 105


@pytest.mark.parametrize("event", [lc.PauseRequested, lc.ResumeRequested])
def test_killed_while_turning_it_is_destroyed_with_the_outcome(event: type[lc.PauseRequested] | type[lc.ResumeRequested]) -> None:
    state, _ = handle(running() if event is lc.PauseRequested else paused(), event(T0))
    state, instructions = handle(state, lc.KillRequested(T0))
    assert (state.phase, instructions) == ("stopping", [lc.Save()])
    for outcome in (lc.Paused(T0), lc.PauseFailed(T0, "?"), lc.Resumed(T0), lc.ResumeFailed(T0, "?", lost=True)):
        after, instructions = handle(state, outcome)
        fits = isinstance(outcome, lc.Paused | lc.PauseFailed) == (event is lc.PauseRequested)
        assert (after.phase, instructions) == ("stopping", [lc.Destroy()] if fits else [])


def test_death_while_turning_is_told_by_the_outcome_alone() -> None:
    state, _ = handle(running(), lc.PauseRequested(T0))
    assert handle(state, lc.Died(T0, "gone")) == (state, [])


def test_a_restart_keeps_what_was_paused() -> None:
    state = State(phase="paused", created_at=T0, used_at=T0, expires_at=T0 + 50, ttl_idle_s=1.0)
    after, instructions = handle(state, lc.Restarted(T0 + 10))
    assert (after.phase, instructions) == ("paused", [lc.SetTimer(T0 + 50)])
    after, instructions = handle(state, lc.Restarted(T0 + 60))
    assert (after.phase, instructions) == ("stopping", [lc.Save(), lc.Destroy()])


@pytest.mark.parametrize(("phase", "pending"), [("running", "pause"), ("paused", "resume")])
def test_a_restart_in_between_looks_for_it_running_or_paused(phase: SandboxState, pending: lc.Pending) -> None:
    state = State(phase=phase, pending=pending, created_at=T0, used_at=T0)
    state, instructions = handle(state, lc.Restarted(T0))
    assert (state.phase, state.pending, instructions) == ("running", "adopt", [lc.Adopt()])
    assert handle(state, lc.Adopted(T0))[0].phase == "running"
    assert handle(state, lc.FoundPaused(T0))[0].phase == "paused"
    assert handle(state, lc.Died(T0, "gone"))[0].phase == "lost"


# --- any order of events ---------------------------------------------------------------------------------------------------

MOVES = ("answer", "fail", "lose", "die", "kill", "touch", "use", "unuse", "wait", "restart", "stray", "pause", "resume")


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
                case lc.Create() | lc.Adopt() | lc.Destroy() | lc.Pause() | lc.Resume():
                    assert not self.pending, f"{instruction} while {self.pending}"
                    if not isinstance(instruction, lc.Adopt):  # which is of what was saved
                        assert self.saved == self.told(), "a side effect before its intent was saved"
                    self.pending = type(instruction).__name__.lower()
                case lc.Release():
                    assert not self.state.held
                    self.released += 1
                case lc.Save():
                    self.saved = self.told()
                case lc.SetTimer(at):
                    self.timer = at
                case lc.CancelTimer():
                    assert self.timer is not None
                    self.timer = None
                case _:
                    pass

    def told(self) -> tuple[SandboxState, bool, lc.Turning]:
        """What the journal is to have."""
        return self.state.phase, self.state.held, self.state.turning

    def feed(self, event: lc.Event) -> None:
        before = self.state
        answers = isinstance(event, ANSWERS)
        if answers or (isinstance(event, lc.Died) and self.pending == "adopt"):
            self.pending = ""
        self.state, instructions = handle(before, event)
        self.obey(instructions)
        if before.phase in ("stopped", "lost"):
            assert self.state.phase == before.phase
        if (self.state.phase, self.state.held) != (before.phase, before.held) and not isinstance(event, lc.Restarted):
            assert self.saved is not None and self.saved[:2] == (self.state.phase, self.state.held)
        assert self.pending == self.state.pending
        assert self.timer == self.state.timer_at
        assert self.released == (0 if self.state.held else 1)
        deadline = self.state.deadline()
        if self.state.phase in ("running", "paused") and not self.pending and deadline is not None:
            assert self.timer is not None and self.timer <= deadline

    def answer(self) -> None:
        match self.pending:
            case "create":
                self.feed(lc.Created(self.now))
            case "adopt":
                self.feed(lc.Adopted(self.now))
            case "pause":
                self.feed(lc.Paused(self.now))
            case "resume":
                self.feed(lc.Resumed(self.now))
            case "destroy":
                self.feed(lc.Destroyed(self.now))

    def lose(self) -> None:
        match self.pending:
            case "pause":
                self.feed(lc.PauseFailed(self.now, "gone", lost=True))
            case "resume":
                self.feed(lc.ResumeFailed(self.now, "gone", lost=True))
            case "adopt":
                self.feed(lc.FoundPaused(self.now))

    def fail(self) -> None:
        match self.pending:
            case "create":
                self.feed(lc.CreateFailed(self.now, "failed"))
            case "adopt":
                self.feed(lc.Died(self.now, "gone"))
            case "pause":
                self.feed(lc.PauseFailed(self.now, "failed"))
            case "resume":
                self.feed(lc.ResumeFailed(self.now, "failed"))
            case "destroy":
                self.feed(lc.DestroyFailed(self.now, "failed"))

    def restart(self) -> None:
        """Only what was saved is known to the next edge; work under way is cut."""
        assert self.saved is not None
        phase, held, pending = self.saved
        expires_at = None if self.ttl_s is None else T0 + self.ttl_s
        loaded = State(
            phase=phase,
            held=held,
            pending=pending,
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
            case "lose":
                self.lose()
            case "die" if self.state.phase == "running" and not self.pending:
                self.feed(lc.Died(self.now, "died"))
            case "pause":
                self.feed(lc.PauseRequested(self.now))
            case "resume":
                self.feed(lc.ResumeRequested(self.now))
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


ANSWERS = (
    lc.Created
    | lc.CreateFailed
    | lc.Adopted
    | lc.FoundPaused
    | lc.Paused
    | lc.PauseFailed
    | lc.Resumed
    | lc.ResumeFailed
    | lc.Destroyed
    | lc.DestroyFailed
)
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
    living = model.state.phase
    if living in ("running", "paused") and deadline is not None:
        if model.now < deadline:
            model.wait(max(0.0, (deadline - model.now) * 0.999 - 1e-6))
            assert model.state.phase == living
        model.wait(deadline - model.now + 1)
        assert model.state.phase == "stopping"
    elif living in ("running", "paused"):
        model.wait(1e6)
        assert model.state.phase == living
        model.feed(lc.KillRequested(model.now))
    for _ in range(3):
        model.answer()
        model.wait(120)
    assert model.state.phase in ("stopped", "lost")
    assert (model.state.held, model.released, model.timer, model.pending) == (False, 1, None, "")
