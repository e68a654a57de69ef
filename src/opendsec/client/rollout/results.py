# SPDX-License-Identifier: Apache-2.0
"""What came of a task, the file that keeps it, and the summary of many.

The three ways to go wrong are kept apart. `task`: the line is wrong, or names an image or layer that does not exist. `agent`: it was
told no by the judge, and before that an action failed, or an output was missing or too large. `infrastructure`: a platform error or
a lost sandbox; the verdict is null, so that a trainer can mask it. A plain "no" of the judge is no failure at all but a verdict.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Literal

import msgspec

from opendsec.api.errors import Conflict, InvalidRequest, Unavailable
from opendsec.api.exec import Outcome
from opendsec.client.rollout.tasks import Verdict

FailureKind = Literal["task", "agent", "infrastructure"]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    kind: FailureKind
    message: str
    code: str | None = None  # of the error, if there was one


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """How one command ended: an action, the agent's command, or the judge."""

    outcome: Outcome
    exit_code: int | None = None
    signal: int | None = None
    duration_ms: float = 0.0
    limits_hit: tuple[str, ...] = ()
    message: str = ""

    @property
    def ok(self) -> bool:
        return self.outcome == "exited" and self.exit_code == 0

    def describe(self) -> str:
        if self.outcome == "exited":
            return f"exited with {self.exit_code}"
        return self.outcome.replace("_", " ") + (f": {self.message}" if self.message else "")


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds. `create_ms`: of all its sandboxes; `wait_ms`: for room on the edge, apart from that."""

    create_ms: float = 0.0
    wait_ms: float = 0.0
    actions_ms: float = 0.0
    carry_ms: float = 0.0
    verify_ms: float = 0.0
    total_ms: float = 0.0


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the results file."""

    id: str
    verdict: Verdict | None
    expected: Verdict
    matched: bool
    failure: Failure | None = None
    timings: Timings = Timings()
    actions: tuple[Step, ...] = ()
    agent: Step | None = None
    agent_tail: str = ""  # the end of what the agent's command wrote on this machine
    missing_outputs: tuple[str, ...] = ()
    carried_bytes: int = 0
    verify: Step | None = None
    verify_tail: str = ""  # the end of the judge's output, stdout then stderr
    started_at: float = 0.0  # unix seconds

    @property
    def done(self) -> bool:
        """Whether running it again could say nothing new. Infrastructure may be back, and a wrong line or a missing image be put right:
        neither has a verdict, and both are run again."""
        return self.failure is None or self.failure.kind == "agent"

    def describe(self) -> str:
        """Why it is not what was expected, in a line."""
        if self.failure is not None:
            return " ".join(self.failure.message.split())
        if self.verify is None:
            return f"judged {self.verdict}"
        return f"judged {self.verdict}, expected {self.expected}: the judge's command {self.verify.describe()}"


class ResultFile:
    """The results file: appended to as tasks end, each line whole and handed to the kernel before the next task is told of.

    Opening it again resumes: `done` has what is recorded already, the last line of an id counts, and a half line that a crash left
    is cut off. Only one program may hold it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[str, TaskResult] = {}
        self._file: IO[bytes] | None = None

    def __enter__(self) -> ResultFile:
        try:
            # A FIFO without a reader would block here, and a device could be read for ever.
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise InvalidRequest(f"{self.path} is not a regular file", field="out")
        except OSError as error:
            raise InvalidRequest(f"cannot write {self.path}: {error.strerror}", field="out") from None
        self._file = os.fdopen(fd, "a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise Conflict(f"another rollout writes to {self.path}", field="out") from None
        try:
            self._recall(self._file)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def _recall(self, file: IO[bytes]) -> None:
        file.seek(0)
        whole = 0
        decoder = msgspec.json.Decoder(TaskResult)
        for number, line in enumerate(file.readlines(), start=1):
            if not line.endswith(b"\n"):
                os.ftruncate(file.fileno(), whole)
                break
            whole += len(line)
            if line.strip():
                try:
                    result = decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise InvalidRequest(f"line {number} of {self.path} is no result: {error}; give another file", field="out") from None
                self.done[result.id] = result

    def append(self, result: TaskResult) -> None:
        """Raises Unavailable if the disk refuses: what follows could not be recorded either. The next run goes on from here."""
        assert self._file is not None
        line = memoryview(msgspec.json.encode(result) + b"\n")
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise Unavailable(f"cannot write {self.path}: {error.strerror}", field="out") from None
        self.done[result.id] = result


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Counts over a set of results. `matrix`: how many by `expected` and then verdict (`pass`, `fail`, `none`)."""

    tasks: int
    matched: int
    matrix: dict[str, dict[str, int]]
    failures: dict[str, int]
    create_ms: tuple[float, float] | None  # median and 90th percentile, of tasks that made sandboxes
    verify_ms: tuple[float, float] | None
    total_ms: tuple[float, float] | None
    mistaken: tuple[str, ...]  # ids of those that did not match

    @property
    def ok(self) -> bool:
        return self.matched == self.tasks


def summarize(results: Iterable[TaskResult]) -> Summary:
    """The summary of `results`, pure."""
    all_of_them = list(results)
    matrix = {expected: {"pass": 0, "fail": 0, "none": 0} for expected in ("pass", "fail")}
    failures = {"task": 0, "agent": 0, "infrastructure": 0}
    for one in all_of_them:
        matrix[one.expected][one.verdict or "none"] += 1
        if one.failure is not None:
            failures[one.failure.kind] += 1
    ran = [one.timings for one in all_of_them if one.timings.create_ms > 0]
    return Summary(
        tasks=len(all_of_them),
        matched=sum(one.matched for one in all_of_them),
        matrix=matrix,
        failures=failures,
        create_ms=_middle(timing.create_ms for timing in ran),
        verify_ms=_middle(timing.verify_ms for timing in ran),
        total_ms=_middle(timing.total_ms for timing in ran),
        mistaken=tuple(one.id for one in all_of_them if not one.matched),
    )


def _middle(values: Iterator[float]) -> tuple[float, float] | None:
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 9 // 10)]
