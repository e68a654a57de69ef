# SPDX-License-Identifier: Apache-2.0
"""How a command or a function call ended, and what a command says while it runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import msgspec

from opendsec.api import fn
from opendsec.api.errors import CommandFailed, Denied, Unavailable
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


class FnResult:
    """How a function call ended. A program that fails is a result like any other; `check()` raises for those who want it."""

    def __init__(self, raw: fn.FnResult) -> None:
        self.raw = raw

    @property
    def outcome(self) -> fn.FnOutcome:
        return self.raw.outcome

    @property
    def index(self) -> int:
        """Of a batch: the place of its input."""
        return self.raw.index

    @property
    def ok(self) -> bool:
        return self.raw.outcome == "ok"

    @property
    def exit_code(self) -> int | None:
        return self.raw.exit_code

    @property
    def signal(self) -> int | None:
        return self.raw.signal

    @property
    def stdout(self) -> str:
        """What was kept of standard output, its beginning, as text; bytes that are not UTF-8 become U+FFFD."""
        return self.raw.stdout.data.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.raw.stderr.data.decode("utf-8", "replace")

    @property
    def stdout_bytes(self) -> bytes:
        return self.raw.stdout.data

    @property
    def stderr_bytes(self) -> bytes:
        return self.raw.stderr.data

    @property
    def stdout_total_bytes(self) -> int:
        """How much was written until the call was ended, kept or not."""
        return self.raw.stdout.total_bytes

    @property
    def stderr_total_bytes(self) -> int:
        return self.raw.stderr.total_bytes

    @property
    def truncated(self) -> bool:
        """Whether the end of a stream was not kept."""
        return any(stream.total_bytes > len(stream.data) for stream in (self.raw.stdout, self.raw.stderr))

    @cached_property
    def value(self) -> object:
        """What a function returned; None if it returned nothing or did not end well."""
        return json.loads(bytes(self.raw.value) or b"null")

    @property
    def files(self) -> Mapping[str, bytes]:
        """What `outputs` asked for and was there."""
        return self.raw.files

    @property
    def cpu_ms(self) -> float:
        return self.raw.cpu_ms

    @property
    def wall_ms(self) -> float:
        return self.raw.wall_ms

    @property
    def peak_memory_bytes(self) -> int:
        return self.raw.peak_memory_bytes

    @property
    def limits_hit(self) -> tuple[fn.Hit, ...]:
        return self.raw.limits_hit

    @property
    def message(self) -> str:
        """One sentence for a person: what went wrong, and whose fault it is."""
        return self.raw.message

    @property
    def cold(self) -> bool:
        """Whether a member had to be started for it."""
        return self.raw.cold

    @cached_property
    def compile(self) -> FnResult | None:
        """How the compiler fared, of a compiled language."""
        return FnResult(self.raw.compile) if self.raw.compile is not None else None

    def check(self) -> FnResult:
        """Itself if it is `ok`. Else CommandFailed (the program's fault), Denied (the policy's), Unavailable (the platform's)."""
        if self.ok:
            return self
        message = f"the call {self.describe()}"
        if self.outcome in ("platform_error", "cancelled"):
            raise Unavailable(message, data={"outcome": self.outcome})
        if self.outcome == "denied":
            raise Denied(message, data={"outcome": self.outcome})
        failed = self.compile if self.outcome == "compile_error" and self.compile is not None else self
        data = {"outcome": self.outcome, "exit_code": self.exit_code, "signal": self.signal, "stderr_tail": failed.stderr[-2000:]}
        raise CommandFailed(message, data=data)

    def describe(self) -> str:
        """The end of it in a few words: `exited with 1`, `ran out of time`."""
        if self.message:
            how = "failed"  # the message says the rest
        elif self.signal is not None:
            how = f"was ended by signal {self.signal}"
        elif self.exit_code is not None:
            how = f"exited with {self.exit_code}"
        else:
            how = "failed"
        words = {
            "ok": "ended well",
            "wrong_answer": "gave a wrong answer",
            "runtime_error": how,
            "time_limit": "ran out of time",
            "memory_limit": "ran out of memory",
            "output_limit": "wrote more than its output limit",
            "compile_error": "could not be compiled",
            "denied": "was denied what it tried",
            "platform_error": "failed by the platform's fault",
            "cancelled": "was cancelled",
        }[self.outcome]
        return f"{words}: {self.message}" if self.message else words

    def shell_code(self) -> int:
        """The exit code a shell would show: 128 + signal, 124 for time-outs, 126 for what could not start, 125 for the platform."""
        if self.outcome == "ok":
            return 0
        if self.outcome in ("runtime_error", "wrong_answer"):
            return 128 + self.signal if self.signal is not None else self.exit_code or 1
        codes = {"time_limit": 124, "memory_limit": 137, "output_limit": 137, "compile_error": 126, "denied": 126}
        return codes.get(self.outcome, 125)

    def __repr__(self) -> str:
        return f"<FnResult {self.describe()}, {self.raw.wall_ms:.1f} ms>"


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
