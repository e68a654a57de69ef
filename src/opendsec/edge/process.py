# SPDX-License-Identifier: Apache-2.0
"""One command of a sandbox, from its start to its end and for as long after as it is kept.

Its life is driven by callbacks, not by a task: `begin` once it has started, `settle` once it has ended. It ends when its first process
ends. What is in its pipes then is read without waiting, and that is its output; a child that outlives it and still writes is captured
apart (see `capture.Output`), until it closes the pipe or the sandbox ends.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Protocol

from opendsec.api.errors import Conflict, SandboxLost
from opendsec.api.exec import Captured, Command, ExecEvent, ExecResult, ProcessInfo, Pty, StreamName
from opendsec.edge.capture import Output
from opendsec.edge.outcome import Cause, Observed, Verdict, judge
from opendsec.edge.streams import Reader, Writer
from opendsec.edge.timing import Timer
from opendsec.runtime.backend import Counters, Exit, Running

if TYPE_CHECKING:
    from opendsec.edge.processes import ProcessTable

EVENT_BYTES = 64 << 10
TEXT_CHARACTERS = 200
HOLD_BYTES = 128 << 10  # a reader that holds a command may be this far behind; with a read and a pipe more it is within what is kept
DYING_S = 10.0  # after SIGKILL; only a process stuck in the kernel takes longer


class Control(Protocol):
    """What can be done to the processes of a command: a backend's Running, or a part of a session."""

    def signal(self, number: int, *, tree: bool = False) -> None: ...
    def kill_tree(self) -> None: ...
    def alive_children(self) -> bool: ...
    async def release(self) -> None: ...


def summary(command: Command) -> str:
    """A command for people, at most 200 characters, always valid Unicode."""
    if command.shell is not None:
        text = command.shell[: TEXT_CHARACTERS + 1]
    else:
        text = ""
        for word in command.argv or ():
            text += (" " if text else "") + shlex.quote(word[: TEXT_CHARACTERS + 1])
            if len(text) > TEXT_CHARACTERS:
                break
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return text if len(text) <= TEXT_CHARACTERS else text[: TEXT_CHARACTERS - 1] + "…"


class Process:
    """A command, running or ended. Made by a ProcessTable or a session."""

    __slots__ = (
        "_changed",
        "_done",
        "_dying",
        "_holding",
        "_left_s",
        "_timeout_at",
        "exit",
        "_pins",
        "_readers",
        "_sent",
        "_start",
        "_terminal",
        "_timeout",
        "verdict",
        "action_id",
        "before",
        "cause",
        "cause_message",
        "control",
        "duration_s",
        "ended",
        "held_bytes",
        "id",
        "in_session",
        "lost",
        "note",
        "output_limit",
        "sandbox_id",
        "shelf",
        "started_at",
        "started_monotonic",
        "stderr",
        "stdin",
        "stdout",
        "table",
        "text",
        "timeout_s",
    )

    def __init__(self, table: ProcessTable, process_id: str, command: Command, *, in_session: bool = False) -> None:
        self.table, self.id, self.sandbox_id, self.shelf = table, process_id, table.sandbox_id, table.shelf
        self.text, self.action_id = summary(command), command.action_id
        self.timeout_s, self.output_limit = command.timeout_s, command.output_limit_bytes
        self.in_session = in_session
        self.stdout, self.stderr = (Output(command.capture_bytes, table.execution.captured) for _ in range(2))
        self.started_at, self.started_monotonic = table.clock.wall(), table.clock.monotonic()
        self.duration_s = 0.0
        self.before = Counters()
        self.control: Control | None = None
        self.stdin: Writer | None = None
        self.ended = False
        self.cause: Cause | None = None
        self.cause_message = ""
        self.note = ""  # what else its caller should know
        self.lost = ""  # why the sandbox is gone, if it went under the command
        self.held_bytes = 0
        self._readers: tuple[Reader, ...] = ()
        self._sent: frozenset[int] = frozenset()
        self._start: asyncio.Future[Running] | None = None
        self._timeout: Timer | None = None
        self._timeout_at = 0.0  # by the monotonic clock
        self._left_s: float | None = None  # until the time-out, while the sandbox is paused
        self._dying: Timer | None = None
        self.exit = Exit()
        self.verdict = Verdict("unknown", (), "")
        self._terminal: Running | None = None  # whose terminal the first reader's descriptor belongs to
        self._changed: set[asyncio.Future[None]] = set()  # who waits for output or the end
        self._done: set[asyncio.Future[None]] = set()  # who waits for the end
        self._pins = 0
        self._holding: dict[int, dict[StreamName, int]] = {}  # offsets of readers for which the command is to wait, by their id()

    # --- start -----------------------------------------------------------------------------------------------------

    def starting(self, start: asyncio.Future[Running]) -> None:
        """Its start is under way. That may last, even for ever (root inside may stop a process that has joined), so the time-out counts
        from here, and what stops the command stops its start."""
        self._start = start
        if self.timeout_s is not None:
            self._set_timeout(self.timeout_s)

    def begin(self, running: Running, readers: tuple[Reader, ...], stdin: Writer | None) -> None:
        """It has started, or it could not."""
        self._readers, self.stdin, self._terminal = readers, stdin, None if running.terminal is None else running
        self.started(running)
        running.exited.add_done_callback(self._on_exit)

    def started(self, control: Control) -> None:
        self.control = control
        self._start = None
        self.started_monotonic = self.table.clock.monotonic()
        if self.timeout_s is not None and self._timeout is None:
            self._set_timeout(self.timeout_s)
        if self.cause is not None:
            self._kill()  # it was stopped before it had started

    def feed_stdout(self, data: memoryview) -> None:
        self.stdout.write(data)
        self._on_output()
        if self._holding:
            self._regulate()

    def feed_stderr(self, data: memoryview) -> None:
        self.stderr.write(data)
        self._on_output()
        if self._holding:
            self._regulate()

    def _on_output(self) -> None:
        limit = self.output_limit
        if limit is not None and self.stdout.total + self.stderr.total > limit:
            self.stop("output_limit", f"killed after writing more than {limit} bytes")
        if self._changed:
            _wake(self._changed)

    def on_end_of_output(self) -> None:
        """All who could write to a pipe have closed it."""
        if self.ended and not self.lingers:
            self.table.quiet(self)

    @property
    def lingers(self) -> bool:
        """Somebody may still write to its output."""
        return any(reader.open for reader in self._readers)

    # --- end -------------------------------------------------------------------------------------------------------

    def stop(self, cause: Cause, message: str) -> None:
        """Kill its tree; what lives on of an ended one too. The first cause counts."""
        if self.ended:
            if self.control is not None:
                self.control.kill_tree()
        elif self.cause is None:
            self.cause, self.cause_message = cause, message
            if self.control is not None:
                self._kill()
            elif self._start is not None:
                self._start.cancel()

    def _kill(self) -> None:
        assert self.control is not None
        self.control.kill_tree()
        self._dying = self.table.clock.call_later(DYING_S, self._on_not_dying)

    def _set_timeout(self, seconds: float) -> None:
        self._timeout_at = self.table.clock.monotonic() + seconds
        self._timeout = self.table.clock.call_later(seconds, self._on_timeout)

    def suspend(self) -> None:
        """The sandbox has been paused: its time stands still."""
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None
            self._left_s = max(0.0, self._timeout_at - self.table.clock.monotonic())
        if self._dying is not None:
            self._dying.cancel()

    def go_on(self) -> None:
        if self._left_s is not None and not self.ended:
            self._set_timeout(self._left_s)
        self._left_s = None
        if self._dying is not None and not self.ended:
            self._dying = self.table.clock.call_later(DYING_S, self._on_not_dying)

    def _on_timeout(self) -> None:
        self.stop("timed_out", f"killed with all it had started, after {self.timeout_s:g} s")

    def _on_not_dying(self) -> None:
        self.cause_message += f"; the kernel has not ended it after {DYING_S:g} s"
        self.settle(Exit())

    def signal(self, number: int, *, tree: bool) -> None:
        """A caller's signal. Nothing happens if there is nobody to get it."""
        if self.control is None:
            return
        if not self.ended:
            self._sent |= {number}
        self.control.signal(number, tree=tree)

    def _on_exit(self, exited: asyncio.Future[Exit]) -> None:
        if not self.ended:
            self.table.on_exit(self, exited.result())

    def explains_sigkill(self) -> bool:
        """Whether the edge or a caller asked for its end."""
        return self.cause is not None or signal.SIGKILL in self._sent

    def settle(self, exit: Exit, *, lost: str = "", after: Counters | None = None) -> None:
        """It has ended: read what is left, judge, tell. `lost`: the sandbox went with it."""
        for timer in (self._timeout, self._dying):
            if timer is not None:
                timer.cancel()
        self._timeout = None
        self.duration_s = max(0.0, self.table.clock.monotonic() - self.started_monotonic)
        self._holding.clear()  # children that live on wait for nobody
        self._regulate()
        for reader in self._readers:
            reader.drain()
        # The drain may have passed the output limit and set this one anew.
        if self._dying is not None:
            self._dying.cancel()
            self._dying = None
        self.ended = True
        self.stdout.freeze()
        self.stderr.freeze()
        if self.stdin is not None:
            self.stdin.close("the command has ended")
        self.exit, self.lost = exit, lost
        self.note = "; ".join(filter(None, (self.note, exit.reason)))
        self.verdict = judge(
            Observed(
                exit=exit,
                cause=self.cause,
                cause_message=self.cause_message,
                sent=self._sent,
                before=self.before,
                after=after or self.before,
                truncated=any(output.kept.total > output.kept.held_bytes for output in (self.stdout, self.stderr)),
                in_session=self.in_session,
            ),
            self.table.limits,
        )
        lingers = self.lingers
        self.held_bytes = sum(output.bound_bytes if lingers else output.held_bytes for output in (self.stdout, self.stderr))
        _wake(self._changed)
        _wake(self._done)
        self.table.settled(self, after)

    def abandon(self, exit: Exit, *, lost: str = "") -> None:
        """Nothing more will be heard of it. If it still runs, its tree is killed: what goes on unheard would be nobody's."""
        if not self.ended:
            if self.control is not None:
                self.control.kill_tree()
            self.settle(exit, lost=lost)
        for reader in self._readers:
            reader.drain()
            reader.close()
        self.control = None

    # --- what is kept ----------------------------------------------------------------------------------------------

    @property
    def pinned(self) -> bool:
        return self._pins > 0

    @property
    def forgettable(self) -> bool:
        return not self._pins and not self.lingers

    def drop_output(self) -> None:
        self.stdout.drop()
        self.stderr.drop()
        self.held_bytes = 0

    def forget(self) -> None:
        self.table.forget(self)

    # --- for callers -----------------------------------------------------------------------------------------------

    async def wait(self) -> ExecResult:
        """Its result, once it has ended. Raises SandboxLost."""
        with self.pinning():
            if not self.ended:
                await _wait(self._done)
            self._check_lost()
            return await self.table.execution.turns.do(self.result, self.held_bytes)

    @contextmanager
    def pinning(self) -> Iterator[None]:
        """What is kept of its output stays while this is entered."""
        self._pins += 1
        try:
            yield
        finally:
            self._pins -= 1
            if self.ended:
                self.table.retention.trim(self.shelf)

    def _check_lost(self) -> None:
        if self.lost:
            raise SandboxLost(f"the sandbox was lost while the command ran: {self.lost}", data={"process_id": self.id})

    def result(self, *, output: bool = True) -> ExecResult:
        """How it ended. `output`: with what is kept of it."""
        assert self.ended
        verdict, ended = self.verdict, self.exit
        message = "; ".join(filter(None, (verdict.message, self.note)))
        kept = (self.stdout.kept, self.stderr.kept)
        if output and any(one.dropped for one in kept):
            message = "; ".join(filter(None, (message, "its output was given up to make room for that of later commands")))
        elif output and any(one.halved for one in kept):
            message = "; ".join(filter(None, (message, "less of its output was kept, to make room for that of other commands")))
        return ExecResult(
            outcome=verdict.outcome,
            process_id=self.id,
            exit_code=ended.code,
            signal=ended.signal,
            stdout=self.stdout.kept.snapshot() if output else Captured(),
            stderr=self.stderr.kept.snapshot() if output else Captured(),
            duration_ms=self.duration_s * 1000,
            cpu_ms=ended.cpu_ms,
            max_rss_bytes=ended.max_rss_bytes,
            limits_hit=verdict.limits_hit,
            message=message,
            action_id=self.action_id,
        )

    def info(self, *, output: bool = False) -> ProcessInfo:
        return ProcessInfo(
            id=self.id,
            sandbox_id=self.sandbox_id,
            state="ended" if self.ended else "running",
            command=self.text,
            started_at=self.started_at,
            stdout_bytes=self.stdout.total,
            stderr_bytes=self.stderr.total,
            action_id=self.action_id,
            result=self.result(output=output) if self.ended else None,
        )

    def follow(self) -> None:
        """From now on somebody follows: see `Output`. `events` does this itself unless `followed`, when it is first asked for one."""
        self.stdout.follow()
        self.stderr.follow()

    def _regulate(self) -> None:
        """Read on, or not: the slowest of those that hold the command sets the pace."""
        streams: tuple[tuple[StreamName, Output], ...] = (("stdout", self.stdout), ("stderr", self.stderr))
        for reader, (name, output) in zip(self._readers, streams, strict=False):  # a terminal is one for both
            slowest = min((offsets[name] for offsets in self._holding.values()), default=output.total)
            reader.pause(output.total - slowest > HOLD_BYTES)

    async def events(
        self, stdout_offset: int = 0, stderr_offset: int = 0, *, announce: bool = False, followed: bool = False, hold: bool = False
    ) -> AsyncGenerator[ExecEvent, None]:
        """What it wrote from the offsets on and what it writes until it ends, then its end. `announce`: a `started` event first.

        With `hold` the command waits for this reader, as a full pipe makes it; else what is not taken in time is told as a gap.
        Raises SandboxLost after the last output.
        """
        if not followed:
            self.follow()
        offsets: dict[StreamName, int] = {"stdout": stdout_offset, "stderr": stderr_offset}
        if hold and not self.ended:
            self._holding[id(offsets)] = offsets
        try:
            if announce:
                yield ExecEvent(kind="started", process_id=self.id)
            async with aclosing(self._follow(offsets)) as events:
                async for event in events:
                    yield event
        finally:
            if self._holding.pop(id(offsets), None) is not None:
                self._regulate()
            self.stdout.unfollow()
            self.stderr.unfollow()

    async def _follow(self, offsets: dict[StreamName, int]) -> AsyncGenerator[ExecEvent, None]:
        streams: tuple[tuple[StreamName, Output], ...] = (("stdout", self.stdout), ("stderr", self.stderr))
        ends: dict[StreamName, int] | None = None  # where to stop: children may write for ever
        while True:
            if self.ended and ends is None:
                ends = {name: output.total for name, output in streams}
            progressed = False
            for name, output in streams:
                offset = offsets[name]
                size = EVENT_BYTES if ends is None else min(EVENT_BYTES, ends[name] - offset)
                if size <= 0:
                    continue
                data, following, missing = output.read_from(offset, size)
                if ends is not None and following > ends[name]:  # part of it is missing, so it reaches further
                    data = data[: max(0, len(data) - (following - ends[name]))]
                    following, missing = ends[name], min(missing, ends[name] - offset)
                offsets[name] = following
                if self._holding:
                    self._regulate()
                if missing:
                    progressed = True
                    yield ExecEvent(kind="gap", process_id=self.id, stream=name, offset=offset, missing_bytes=missing)
                if data:
                    progressed = True
                    yield ExecEvent(kind="output", process_id=self.id, stream=name, offset=offset + missing, data=data)
            if progressed:
                continue
            if ends is not None:
                self._check_lost()
                yield ExecEvent(kind="exit", process_id=self.id, result=self.result(output=False))
                return
            if not self.ended:
                await _wait(self._changed)

    async def write_stdin(self, data: bytes, *, close: bool) -> None:
        """Send to its standard input; returns once the pipe has taken all of it. Raises Conflict."""
        stdin = self.stdin
        if stdin is None:
            raise Conflict("its standard input is not a stream: start it with stdin_mode 'stream'")
        if self.ended or not stdin.accepts:
            raise Conflict(stdin.reason or "the command has ended")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stdin.put(data, done, end=close)
        try:
            await done
        except ConnectionError as error:
            raise Conflict(str(error)) from None

    def resize(self, size: Pty) -> None:
        """Raises Conflict if it has no terminal."""
        if self._terminal is None:
            raise Conflict("the command has no terminal")
        if self.ended or not self._readers[0].open:
            raise Conflict("the command has ended")
        self._terminal.resize(size.rows, size.cols)


async def _wait(waiters: set[asyncio.Future[None]]) -> None:
    """Until `_wake`."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiters.add(future)
    try:
        await future
    finally:
        waiters.discard(future)


def _wake(waiters: set[asyncio.Future[None]]) -> None:
    for future in waiters:
        if not future.done():
            future.set_result(None)
    waiters.clear()
