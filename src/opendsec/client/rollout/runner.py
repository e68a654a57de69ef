# SPDX-License-Identifier: Apache-2.0
"""Running tasks: the agent's sandbox, the outputs, the judge's sandbox, the verdict; many at a time.

A task never waits for room on the edge while it holds a sandbox, so tasks cannot block each other: the agent's sandbox is ended before
the judge's is asked for.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from opendsec.api.errors import (
    CallerError,
    NotFound,
    OpenDSecError,
    PolicyError,
    QuotaExceeded,
    SandboxError,
    Unavailable,
)
from opendsec.api.spec import AnySpec
from opendsec.client.aio import KILL_TIMEOUT_S, Client, Sandbox
from opendsec.client.results import Result
from opendsec.client.rollout.carry import Outputs, TooLarge
from opendsec.client.rollout.places import Places
from opendsec.client.rollout.results import Failure, FailureKind, Step, TaskResult, Timings
from opendsec.client.rollout.tasks import Agent, BadTask, Task, Verdict

TAIL_CHARACTERS = 4000
CAPTURE_BYTES = 64 << 10  # of each command; only tails are kept
ADMISSION_TIMEOUT_S = 1800.0
ADMISSION_PAUSE_S = (0.1, 5.0)  # the first and the longest pause between two tries


class _Failed(Exception):
    """A task that ends here. What the agent brought about is a "no"; for the rest there is no verdict."""

    def __init__(self, kind: FailureKind, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.failure = Failure(kind=kind, message=message, code=code)
        self.verdict: Verdict | None = "fail" if kind == "agent" else None


@dataclass
class _Progress:
    """What is known of a task so far; kept apart so that it survives an error half-way."""

    started_at: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)
    create_ms: float = 0.0
    wait_ms: float = 0.0
    actions_ms: float = 0.0
    carry_ms: float = 0.0
    verify_ms: float = 0.0
    actions: list[Step] = field(default_factory=list)
    agent: Step | None = None
    agent_tail: str = ""
    missing: tuple[str, ...] = ()
    carried_bytes: int = 0
    verify: Step | None = None
    verify_tail: str = ""

    def timings(self) -> Timings:
        total = (time.monotonic() - self.began) * 1000
        return Timings(
            create_ms=round(self.create_ms, 3),
            wait_ms=round(self.wait_ms, 3),
            actions_ms=round(self.actions_ms, 3),
            carry_ms=round(self.carry_ms, 3),
            verify_ms=round(self.verify_ms, 3),
            total_ms=round(total, 3),
        )

    def agent_complaint(self) -> str:
        """What went wrong on the agent's side; empty if nothing did."""
        for number, step in enumerate(self.actions, start=1):
            if not step.ok:
                return f"action {number} {step.describe()}"
        if self.agent is not None and not self.agent.ok:
            return f"the agent's command {self.agent.describe()}"
        if self.missing:
            return f"missing output: {', '.join(self.missing)}"
        return ""


class Runner:
    """Runs tasks on one edge. `address` is what agents on this machine are told to connect to."""

    def __init__(
        self,
        client: Client,
        *,
        labels: dict[str, str] | None = None,
        address: str = "",
        token: str = "",
        admission_timeout_s: float = ADMISSION_TIMEOUT_S,
    ) -> None:
        self._client = client
        self._labels = labels or {}
        self._address = address
        self._token = token
        self._admission_timeout_s = admission_timeout_s
        self._room = asyncio.Condition()  # told whenever one of our sandboxes ends

    async def run_all(
        self,
        tasks: Sequence[Task | BadTask],
        *,
        parallel: int,
        ended: Callable[[TaskResult], None],
        began: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Run tasks, `parallel` at a time, and call `ended` with each result as it comes. Raises what `ended` raises, and stops then."""
        waiting = iter(tasks)

        async def work() -> None:
            for task in waiting:
                began(task.id)
                ended(await self.run(task))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(parallel, len(tasks))):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            if isinstance(error := errors.exceptions[0], OpenDSecError):
                raise error from None
            raise

    async def run(self, task: Task | BadTask) -> TaskResult:
        """The result of one task. Raises nothing of OpenDSec: every error is part of the result."""
        progress = _Progress()
        if isinstance(task, BadTask):
            return _result(task, progress, None, Failure(kind="task", message=task.message))
        try:
            verdict = await self._judged(task, progress)
        except _Failed as failed:
            return _result(task, progress, failed.verdict, failed.failure)
        except OpenDSecError as error:
            kind: FailureKind = "task" if isinstance(error, (CallerError, PolicyError)) else "infrastructure"
            return _result(task, progress, None, Failure(kind=kind, message=str(error), code=error.code))
        complaint = progress.agent_complaint() if verdict == "fail" else ""
        return _result(task, progress, verdict, Failure(kind="agent", message=complaint) if complaint else None)

    async def _judged(self, task: Task, progress: _Progress) -> Verdict:
        # Whose fault a refused file is depends on who was there before: once an agent has been at work, what it left may be the cause
        # (a directory where the judge's file belongs), and an agent must not be able to have its own task masked.
        maker: FailureKind = "agent" if task.has_agent_phase else "task"
        with Outputs(limit_bytes=task.agent_spec({}).limits().disk_bytes) as outputs:
            if task.has_agent_phase:
                async with self._sandbox(task.agent_spec(self._task_labels(task, "agent")), progress) as box:
                    async with _blaming("task", box):
                        await _write_files(box, task.files)
                    async with _blaming("infrastructure", box):
                        await self._act(task, box, progress)
                    begun = time.monotonic()
                    async with _blaming("agent", box):
                        for path in task.outputs:
                            await outputs.take(box, path)
                    progress.carry_ms += _since(begun)
                    progress.missing, progress.carried_bytes = tuple(outputs.missing), outputs.total_bytes
            async with self._sandbox(task.verify_spec(self._task_labels(task, "verify")), progress) as box:
                begun = time.monotonic()
                async with _blaming(maker, box):
                    if not task.has_agent_phase:
                        await _write_files(box, task.files)
                    before = [await Places(box).of(path) for path in task.verify.files] if outputs.may_have_links else []
                    await outputs.give(box)
                    await _refuse_detours(box, task.verify.files, before)
                    await _write_files(box, task.verify.files)
                progress.carry_ms += _since(begun)
                async with _blaming("infrastructure", box):
                    return await self._verify(task, box, progress)

    async def _act(self, task: Task, box: Sandbox, progress: _Progress) -> None:
        begun = time.monotonic()
        try:
            for action in task.actions:
                result = await box.run(
                    action.run,
                    timeout_s=action.timeout_s,
                    cwd=action.cwd,
                    env=action.env,
                    user=action.user,
                    capture_bytes=CAPTURE_BYTES,
                )
                progress.actions.append(_step(result))
            if task.agent is not None:
                progress.agent, progress.agent_tail = await self._run_agent(task.id, task.agent, box)
        finally:
            progress.actions_ms += _since(begun)

    async def _verify(self, task: Task, box: Sandbox, progress: _Progress) -> Verdict:
        judge = task.verify
        begun = time.monotonic()
        result = await box.run(
            judge.run, timeout_s=judge.timeout_s, cwd=judge.cwd, env=judge.env, user=judge.user, capture_bytes=CAPTURE_BYTES
        )
        progress.verify_ms += _since(begun)
        progress.verify = _step(result)
        progress.verify_tail = _tail(result)
        if result.outcome == "not_started" and not task.has_agent_phase:  # with an agent it may be the agent's doing
            raise _Failed("task", f"the judge cannot start: {result.message}")
        return "pass" if result.ok else "fail"

    async def _run_agent(self, task_id: str, agent: Agent, box: Sandbox) -> tuple[Step, str]:
        """Run the agent's command on this machine, in a process group of its own, which is killed at the end."""
        environment = {
            **os.environ,
            **agent.env,
            "OPENDSEC_SANDBOX": box.id,
            "OPENDSEC_TASK": task_id,
            "OPENDSEC_ADDRESS": self._address,
            "OPENDSEC_TOKEN": self._token,
        }
        argv = ("/bin/sh", "-c", agent.command) if isinstance(agent.command, str) else agent.command
        begun = time.monotonic()
        # A file rather than a pipe: a child of it that stays could hold a pipe open for ever.
        with tempfile.TemporaryFile() as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={name: value for name, value in environment.items() if value},
                    cwd=agent.cwd,
                    start_new_session=True,
                )
            except OSError as error:
                return Step(outcome="not_started", message=str(error)), ""
            timed_out = False
            try:
                async with asyncio.timeout(agent.timeout_s):
                    await process.wait()
            except TimeoutError:
                timed_out = True
            finally:
                try:
                    os.killpg(process.pid, signal.SIGKILL)  # and what it left behind in its process group
                except ProcessLookupError:
                    pass
                code = await process.wait()
            output.seek(max(0, output.seek(0, os.SEEK_END) - CAPTURE_BYTES))
            tail = output.read().decode("utf-8", "replace")[-TAIL_CHARACTERS:]
        duration = _since(begun)
        if timed_out:
            return Step(outcome="timed_out", duration_ms=duration, limits_hit=("time",)), tail
        if code < 0:
            return Step(outcome="signalled", signal=-code, duration_ms=duration), tail
        return Step(outcome="exited", exit_code=code, duration_ms=duration), tail

    # --- sandboxes

    def _task_labels(self, task: Task, phase: str) -> dict[str, str]:
        return {**self._labels, "task": task.id[:200], "phase": phase}

    @asynccontextmanager
    async def _sandbox(self, spec: AnySpec, progress: _Progress) -> AsyncIterator[Sandbox]:
        box = await self._create(spec, progress)
        try:
            yield box
        finally:
            await _end(box)
            async with self._room:
                self._room.notify()

    async def _create(self, spec: AnySpec, progress: _Progress) -> Sandbox:
        """Create, and wait for room where there is none now. Raises what the edge says once waiting is hopeless or too long."""
        deadline = time.monotonic() + self._admission_timeout_s
        pause = ADMISSION_PAUSE_S[0]
        while True:
            begun = time.monotonic()
            try:
                box = await self._client.create(spec)
            except (QuotaExceeded, Unavailable) as error:
                if _hopeless(error):
                    raise
                if time.monotonic() > deadline:
                    raise Unavailable(f"no room after {self._admission_timeout_s:g} s: {error}") from None
                await self._wait_for_room(pause)
                pause = min(ADMISSION_PAUSE_S[1], pause * 2)
                progress.wait_ms += _since(begun)
                continue
            progress.create_ms += _since(begun)
            return box

    async def _wait_for_room(self, pause_s: float) -> None:
        """Until one of our own sandboxes ends; others use the edge too, so no longer than `pause_s`."""
        try:
            async with asyncio.timeout(pause_s), self._room:
                await self._room.wait()
        except TimeoutError:
            pass


def _hopeless(error: OpenDSecError) -> bool:
    """Whether even an empty edge would refuse."""
    asked, limit = error.data.get("asked"), error.data.get("limit")
    return isinstance(asked, (int, float)) and isinstance(limit, (int, float)) and asked > limit


async def end_leftovers(client: Client, labels: dict[str, str]) -> int:
    """End sandboxes that an earlier run with these labels left when it was killed; how many."""
    boxes = await client.list(labels=labels, state="running")

    async def end(box: Sandbox) -> None:
        try:
            await box.kill()
        except (NotFound, SandboxError):
            pass

    await asyncio.gather(*(end(box) for box in boxes))
    return len(boxes)


async def _refuse_detours(box: Sandbox, files: Iterable[str], before: Sequence[str]) -> None:
    """The judge's files belong where they would be without the agent: no link that it left may take them elsewhere."""
    places = Places(box)
    for path, expected in zip(files, before, strict=False):
        place = await places.of(path)
        if place not in (expected, posixpath.normpath(path)):
            raise _Failed("agent", f"the judge's {path} would have become {place}, by a link among the outputs")


async def _write_files(box: Sandbox, files: dict[str, str]) -> None:
    for path, text in files.items():
        await box.files.write(path, text, parents=True)


async def _end(box: Sandbox) -> None:
    """End it, also when this task is cancelled. A verdict stands even if that fails: the sandbox has an absolute TTL."""
    ending = asyncio.ensure_future(box.kill())
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        await asyncio.wait((ending,), timeout=KILL_TIMEOUT_S)
        ending.cancel()
        raise
    except OpenDSecError:
        pass


@asynccontextmanager
async def _blaming(kind: FailureKind, box: Sandbox) -> AsyncIterator[None]:
    """Refusals in here are the fault of `kind`, unless the sandbox has gone, which is nobody's here."""
    try:
        yield
    except TooLarge as error:
        raise _Failed("agent", str(error)) from None
    except (CallerError, PolicyError) as error:
        try:
            state = (await box.refresh()).state
        except CallerError:
            state = "stopped"
        if state != "running":
            raise _Failed("infrastructure", f"the sandbox was ended by somebody else: {error}", error.code) from None
        raise _Failed(kind, str(error), error.code) from None


def _step(result: Result) -> Step:
    if result.outcome == "unknown":
        raise _Failed("infrastructure", f"nobody knows how a command ended: {result.message}")
    return Step(
        outcome=result.outcome,
        exit_code=result.exit_code,
        signal=result.signal,
        duration_ms=round(result.duration_ms, 3),
        limits_hit=result.limits_hit,
        message=result.message,
    )


def _tail(result: Result) -> str:
    return (result.stdout + result.stderr)[-TAIL_CHARACTERS:]


def _since(begun: float) -> float:
    return (time.monotonic() - begun) * 1000


def _result(task: Task | BadTask, progress: _Progress, verdict: Verdict | None, failure: Failure | None) -> TaskResult:
    return TaskResult(
        id=task.id,
        verdict=verdict,
        expected=task.expect,
        matched=verdict == task.expect,
        failure=failure,
        timings=progress.timings(),
        actions=tuple(progress.actions),
        agent=progress.agent,
        agent_tail=progress.agent_tail,
        missing_outputs=progress.missing,
        carried_bytes=progress.carried_bytes,
        verify=progress.verify,
        verify_tail=progress.verify_tail,
        started_at=progress.started_at,
    )
