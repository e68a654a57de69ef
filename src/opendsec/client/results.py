# SPDX-License-Identifier: Apache-2.0
"""How a command ended, and what it says while it runs."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import msgspec

from opendsec.api.errors import CommandFailed
from opendsec.api.exec import ExecResult, Outcome, StreamName


class Result:
    """How a command ended. A failing command is a result like any other; `check()` raises for those who want it."""

    def __init__(self, raw: ExecResult, command: str = "") -> None:
        self.raw = raw
        self.command = command  # for people

    @property
    def outcome(self) -> Outcome:
        return self.raw.outcome

    @property
    def exit_code(self) -> int | None:
        """None unless the outcome is `exited`."""
        return self.raw.exit_code

    @property
    def signal(self) -> int | None:
        return self.raw.signal

    @property
    def ok(self) -> bool:
        """Exited by itself, with 0."""
        return self.raw.outcome == "exited" and self.raw.exit_code == 0

    @cached_property
    def stdout(self) -> str:
        """What was kept of standard output, as text; bytes that are not UTF-8 become U+FFFD."""
        return self.raw.stdout.text()

    @cached_property
    def stderr(self) -> str:
        return self.raw.stderr.text()

    @property
    def stdout_bytes(self) -> bytes:
        """What was kept of standard output, as it was written."""
        return self.raw.stdout.data()

    @property
    def stderr_bytes(self) -> bytes:
        return self.raw.stderr.data()

    @property
    def stdout_total_bytes(self) -> int:
        """How much was written, kept or not."""
        return self.raw.stdout.total_bytes

    @property
    def stderr_total_bytes(self) -> int:
        return self.raw.stderr.total_bytes

    @property
    def truncated(self) -> bool:
        """Whether the middle of a stream was left out; the text says where and how much."""
        return self.raw.stdout.truncated or self.raw.stderr.truncated

    @property
    def duration_ms(self) -> float:
        return self.raw.duration_ms

    @property
    def cpu_ms(self) -> float:
        return self.raw.cpu_ms

    @property
    def max_rss_bytes(self) -> int:
        return self.raw.max_rss_bytes

    @property
    def limits_hit(self) -> tuple[str, ...]:
        """Limits it ran into: time, memory, pids, disk, inodes, output. (Of open files the program itself is told: EMFILE.)"""
        return self.raw.limits_hit

    @property
    def message(self) -> str:
        """Why it did not start, or what cut it short."""
        return self.raw.message

    @property
    def process_id(self) -> str:
        return self.raw.process_id

    @property
    def action_id(self) -> str | None:
        return self.raw.action_id

    def check(self) -> Result:
        """Itself if it exited with 0; raises CommandFailed otherwise."""
        if self.ok:
            return self
        raise CommandFailed(
            f"{self.command or 'the command'} {self.describe()}",
            data={
                "outcome": self.outcome,
                "exit_code": self.exit_code,
                "signal": self.signal,
                "stderr_tail": self.stderr[-2000:],
            },
        )

    def describe(self) -> str:
        """The end of it in a few words: `exited with 1`, `was ended by signal 9`, `ran out of time`."""
        words = {
            "exited": f"exited with {self.exit_code}",
            "signalled": f"was ended by signal {self.signal}",
            "timed_out": "ran out of time",
            "memory_limit": "ran out of memory",
            "output_limit": "wrote more than its output limit",
            "killed": "was killed",
            "not_started": "could not start",
            "unknown": "has an unknown end",
        }[self.outcome]
        return f"{words}: {self.message}" if self.message else words

    def shell_code(self) -> int:
        """The exit code a shell would show: 128 + signal, 124 for time-outs, 126/127 for what cannot start, 125 if unknown."""
        if self.outcome == "exited":
            return self.exit_code if self.exit_code is not None else 125
        if self.outcome == "timed_out":
            return 124
        if self.outcome == "not_started":
            return 127 if "no such" in self.message.lower() or "not found" in self.message.lower() else 126
        if self.outcome == "unknown":
            return 125
        return 128 + (self.signal or 9)

    def __repr__(self) -> str:
        return f"<Result {self.describe()}, {self.duration_ms:.1f} ms>"


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One thing a running command did.

    "started" comes first and "exit" last. "output": `data` is what was written to `stream` at `offset`, `text` the same decoded,
    where a character that is not complete yet waits for the next event. "gap": `missing_bytes` that nobody read in time.
    """

    kind: Literal["started", "output", "gap", "exit"]
    process_id: str
    stream: StreamName | None = None
    offset: int = 0
    data: bytes = b""
    text: str = ""
    missing_bytes: int = 0
    result: Result | None = None  # of "exit"; its captured output is left out
