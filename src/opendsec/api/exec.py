# SPDX-License-Identifier: Apache-2.0
"""Commands, their results, and the events of a running one.

A command that fails is a result. `outcome` says how it ended, `limits_hit` which limits it ran into on the way, so that a
reward function need not guess from an exit code of 137.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from opendsec.api.errors import InvalidRequest
from opendsec.api.ids import check_action_id
from opendsec.api.spec import check_env, check_integer, check_number, check_path, check_text, check_user

DEFAULT_CAPTURE_BYTES = 10 << 20
MAX_CAPTURE_BYTES = 1 << 30
MAX_STDIN_BYTES = 64 << 20  # given with the request; stream more through the stdin route
TIMEOUT_S = (0.001, 30 * 86_400.0)

Outcome = Literal[
    "exited",  # by itself; `exit_code` is set
    "signalled",  # `signal` is set
    "timed_out",  # `timeout_s` passed; its whole process tree was killed
    "memory_limit",  # the kernel's OOM killer ended it at the sandbox's memory limit
    "output_limit",  # it wrote more than `output_limit_bytes`; its tree was killed
    "killed",  # by a caller, or with the sandbox
    "not_started",  # no such program, not executable, no such user or directory; `message` says which
    "unknown",  # the edge or its spawner died in between; it is not run again
]
Stdin = Literal["closed", "stream"]
StreamName = Literal["stdout", "stderr"]


class Pty(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A terminal of its own for the command; stdout and stderr then arrive as one stream, `stdout`."""

    rows: int = 24
    cols: int = 80

    def check(self) -> None:
        check_integer(self.rows, "pty.rows", (1, 4096))
        check_integer(self.cols, "pty.cols", (1, 4096))


class Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One command: `argv`, or `shell` text for `/bin/sh -c`, never both."""

    argv: tuple[str, ...] | None = None
    shell: str | None = None
    cwd: str | None = None  # default: the image's working directory
    env: dict[str, str] = {}  # added to the sandbox's
    user: str | None = None  # default: the sandbox's
    stdin: bytes | None = None  # all of it, given now
    stdin_mode: Stdin = "closed"  # "stream": more comes through the stdin route
    timeout_s: float | None = None
    capture_bytes: int = DEFAULT_CAPTURE_BYTES  # kept of each stream: the first and the last half
    output_limit_bytes: int | None = None  # of both streams together; more ends the command
    pty: Pty | None = None
    action_id: str | None = None

    def check(self) -> None:
        """Raises InvalidRequest naming the field and the rule."""
        if (self.argv is None) == (self.shell is None):
            raise InvalidRequest("give exactly one of argv and shell", field="argv")
        if self.argv is not None:
            if not self.argv or not self.argv[0]:
                raise InvalidRequest("must name a program", field="argv")
            if len(self.argv) > 65_536:
                raise InvalidRequest("at most 65536 arguments", field="argv")
            for index, word in enumerate(self.argv):
                check_text(word, f"argv[{index}]", limit=131_071)
            if sum(len(word) for word in self.argv) > 1 << 20:
                raise InvalidRequest("at most 1 MiB of arguments in all", field="argv")
        if self.shell is not None:
            check_text(self.shell, "shell", limit=131_071)  # one argument may have 128 KiB (MAX_ARG_STRLEN)
        if self.cwd is not None:
            check_path(self.cwd, "cwd")
        check_env(self.env, "env")
        if self.user is not None:
            check_user(self.user, "user")
        if self.stdin is not None and len(self.stdin) > MAX_STDIN_BYTES:
            raise InvalidRequest(f"at most {MAX_STDIN_BYTES} bytes; stream the rest", field="stdin")
        if self.timeout_s is not None:
            check_number(self.timeout_s, "timeout_s", TIMEOUT_S)
        check_integer(self.capture_bytes, "capture_bytes", (0, MAX_CAPTURE_BYTES))
        if self.output_limit_bytes is not None:
            check_integer(self.output_limit_bytes, "output_limit_bytes", (1, 1 << 50))
        if self.pty is not None:
            self.pty.check()
        if self.action_id is not None:
            check_action_id(self.action_id)


class Captured(msgspec.Struct, frozen=True):
    """One output stream as kept: its head, its tail, and how long it really was. Nothing is missing unless `truncated`."""

    head: bytes = b""
    tail: bytes = b""
    total_bytes: int = 0

    @property
    def truncated(self) -> bool:
        return self.total_bytes > len(self.head) + len(self.tail)

    @property
    def omitted_bytes(self) -> int:
        return self.total_bytes - len(self.head) - len(self.tail)

    def data(self) -> bytes:
        """Head and tail; if something lies between them, a line that says how much."""
        if not self.truncated:
            return self.head + self.tail
        return self.head + f"\n[… {self.omitted_bytes} bytes omitted …]\n".encode() + self.tail

    def text(self) -> str:
        """`data()` decoded as UTF-8; what is not UTF-8 becomes U+FFFD. The cut never splits a character."""
        return self.data().decode("utf-8", "replace")


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended."""

    outcome: Outcome
    process_id: str
    exit_code: int | None = None
    signal: int | None = None
    stdout: Captured = Captured()
    stderr: Captured = Captured()
    duration_ms: float = 0.0
    cpu_ms: float = 0.0  # user and system time of the process and the children it waited for
    max_rss_bytes: int = 0  # of its largest process; never below some 9 MiB, what the fork held that became it
    limits_hit: tuple[str, ...] = ()  # of: time, memory, pids, disk, inodes, output
    message: str = ""
    action_id: str | None = None


ProcessState = Literal["running", "ended"]


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One command of a sandbox, running or ended."""

    id: str
    sandbox_id: str
    state: ProcessState
    command: str  # for people: the shell text, or the quoted argv, at most 200 characters
    started_at: float  # unix seconds
    stdout_bytes: int = 0  # written so far
    stderr_bytes: int = 0
    action_id: str | None = None
    result: ExecResult | None = None  # once ended; its captured output is left out in listings


class ProcessList(msgspec.Struct, frozen=True):
    processes: tuple[ProcessInfo, ...]


class ExecEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an output stream. `kind` "output": bytes `data` of `stream` from `offset`; "gap": `missing_bytes` that
    were dropped because nobody read them in time; "exit": the last one, with the result (without captured output)."""

    kind: Literal["started", "output", "gap", "exit"]
    process_id: str
    stream: StreamName | None = None
    offset: int = 0
    data: bytes = b""
    missing_bytes: int = 0
    result: ExecResult | None = None


class SignalRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Send `signal` (1 to 64) to the command's first process, or to every process of its tree."""

    signal: int
    tree: bool = False

    def check(self) -> None:
        check_integer(self.signal, "signal", (1, 64))


class SessionRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Start a shell that keeps its directory, variables, functions and background jobs between commands."""

    cwd: str | None = None
    env: dict[str, str] = {}
    user: str | None = None
    action_id: str | None = None

    def check(self) -> None:
        Command(shell=":", cwd=self.cwd, env=self.env, user=self.user, action_id=self.action_id).check()


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A session. A closed one accepts no further command; `message` says why it closed."""

    id: str
    sandbox_id: str
    state: Literal["open", "busy", "closed"]
    message: str = ""


class SessionRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One command in a session, as shell text."""

    shell: str
    timeout_s: float | None = None
    capture_bytes: int = DEFAULT_CAPTURE_BYTES
    output_limit_bytes: int | None = None
    action_id: str | None = None

    def check(self) -> None:
        Command(
            shell=self.shell,
            timeout_s=self.timeout_s,
            capture_bytes=self.capture_bytes,
            output_limit_bytes=self.output_limit_bytes,
            action_id=self.action_id,
        ).check()
