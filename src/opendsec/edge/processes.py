# SPDX-License-Identifier: Apache-2.0
"""The commands of a sandbox: started, waited for, attached to, signalled, and kept for a while after their end.

    Execution      what all sandboxes of an edge share: the poller, the clock, the retention, where events go
    ProcessTable   the commands of one sandbox

Every command is a `Process` with an id, whether somebody waits for it (`run`), follows it (`stream`) or neither (`start`). A client that
goes away leaves its command running, until its own time-out or end; it can be waited for and attached to again by its id. That holds
while it starts too: a cancelled `start` ends in a running command, not in a lost one.

Environment: the sandbox's, and the command's on top. HOME, USER, LOGNAME and PATH are added by the backend, for the user that the sandbox
knows, unless they are there; TERM with a terminal. Nothing else is, LANG neither: programs then see the C locale.

Standard input is /dev/null unless given. A terminal cannot be closed, so one without input finds an end-of-file character in it.

When a sandbox dies the kernel kills its commands before its PID 1 can be waited for. A SIGKILL that nobody here asked for is therefore
held against `Handle.alive`; if the sandbox is on its way out, the command ends with it: `killed` if that was asked for, SandboxLost if not.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from signal import SIGKILL
from typing import Protocol

import msgspec

from opendsec.api.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded, SandboxLost
from opendsec.api.exec import Command, ExecEvent, ExecResult, ProcessInfo, Pty
from opendsec.api.ids import PROCESS, new_id
from opendsec.edge.capture import Budget
from opendsec.edge.process import Process
from opendsec.edge.retention import Retention
from opendsec.edge.streams import Poller, Reader, Writer, input_pipe, output_pipe
from opendsec.edge.timing import Clock, LoopClock, Timer
from opendsec.edge.turns import Turns
from opendsec.runtime.backend import Counters, ExecPlan, Exit, Handle, Running

MAX_OPEN = 1024  # commands of a sandbox that run, or whose children hold their output open: descriptors of the edge
CAPTURED_BYTES = 512 << 20  # of output, held by all running commands of an edge together
PARENTS_LOOKED_AT = 8  # at each start, to find that their children are gone
DEATH_S = 5.0  # from the death of a sandbox until the last exit status of its commands has come


class Emit(Protocol):
    def __call__(self, kind: str, sandbox_id: str | None = None, **data: str | int | float | bool | None) -> None: ...


def _no_event(kind: str, sandbox_id: str | None = None, **data: str | int | float | bool | None) -> None:
    """For those who do not want to hear."""


class Execution:
    """Made in the running event loop; one an edge."""

    def __init__(
        self, *, emit: Emit = _no_event, clock: Clock | None = None, retention: Retention | None = None, turns: Turns | None = None
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.emit = emit
        self.clock = clock or LoopClock()
        self.retention = retention or Retention()
        self.captured = Budget(CAPTURED_BYTES)
        self.turns = turns or Turns()
        self.poller = Poller()
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """A task of the edge's own. Whoever waits for it gets its error; one that nobody waits for tells the loop's handler."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """After every table was closed."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self.poller.close()


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a command gets unless it says otherwise: the image's and the spec's, merged."""

    env: Mapping[str, str] = {}
    cwd: str = "/"
    user: str = "root"


class ProcessTable:
    """The commands of one sandbox. `on_active(n)` is told how many run whenever that changes; within `awake` it is not paused."""

    def __init__(
        self,
        execution: Execution,
        handle: Handle,
        defaults: Defaults,
        *,
        on_active: Callable[[int], None] = lambda count: None,
        awake: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    ) -> None:
        self.execution, self.handle, self.defaults = execution, handle, defaults
        self._awake = awake
        self.clock, self.retention = execution.clock, execution.retention
        self.sandbox_id, self.limits = handle.sandbox_id, handle.record.limits
        self.shelf = self.retention.shelf()
        self.active = 0
        self._on_active = on_active
        self._processes: dict[str, Process] = {}
        self._open: set[Process] = set()  # running, or with children that hold output open
        self._parents: set[Process] = set()  # ended, with children that lived at the time
        self.shells = 0  # of sessions, alive
        self._quiet: Counters | None = None  # the counters, if nothing has run since they were read
        self._ending = ""  # why the sandbox is being killed
        self._death = ""  # why it died
        self._orphans: list[tuple[Process, Exit]] = []  # killed with a dying sandbox, waiting for its death
        self._closed = False
        self._burial: Timer | None = None
        handle.died.add_done_callback(self._on_death)

    # --- start -----------------------------------------------------------------------------------------------------

    def plan(self, command: Command, process_id: str) -> ExecPlan:
        """The command with every default resolved."""
        argv = command.argv if command.argv is not None else ("/bin/sh", "-c", command.shell or "")
        return ExecPlan(
            process_id=process_id,
            argv=argv,
            env={**self.defaults.env, **command.env} if command.env else self.defaults.env,
            cwd=command.cwd or self.defaults.cwd,
            user=command.user or self.defaults.user,
            pty=command.pty,
        )

    async def start(self, command: Command, *, process_id: str | None = None) -> Process:
        """Start a (checked) command. One that cannot be executed is a Process too: its outcome is `not_started`.

        Raises SandboxLost, Unavailable, QuotaExceeded (too many at once).
        """
        process = self._take(command, process_id)
        await self._begin(process, command)
        return process

    def _take(self, command: Command, process_id: str | None) -> Process:
        process = Process(self, process_id or new_id(PROCESS), command)
        self.add(process)
        return process

    async def _begin(self, process: Process, command: Command) -> None:
        launch = self.execution.spawn(self._launch(process, command))
        try:
            await asyncio.shield(launch)
        except asyncio.CancelledError:
            launch.add_done_callback(ignore)  # what goes wrong from here on, nobody is there to hear
            raise

    def add(self, process: Process) -> None:
        """Take up one that is about to start. Raises SandboxLost, QuotaExceeded."""
        if self._closed or self._ending or self._death:
            raise SandboxLost(f"the sandbox has ended: {self._death or self._ending or 'it was closed'}")
        if process.id in self._processes:
            raise Conflict(f"there is a command {process.id} already", field="process_id")
        if len(self._open) >= MAX_OPEN:
            raise QuotaExceeded(
                f"at most {MAX_OPEN} commands of a sandbox at once, counting those whose children hold their output open",
                data={"resource": "commands", "limit": MAX_OPEN},
            )
        process.before = self._read_counters()
        self._processes[process.id] = process
        self._open.add(process)
        self._count(1)

    def _read_counters(self) -> Counters:
        quiet, self._quiet = self._quiet, None
        if quiet is not None:
            return quiet
        for process in list(itertools.islice(self._parents, PARENTS_LOOKED_AT)):
            if process.control is None or not process.control.alive_children():
                self._parents.discard(process)
                process.control = None
        return self.handle.counters()

    def _count(self, change: int) -> None:
        self.active += change
        self._on_active(self.active)

    async def _launch(self, process: Process, command: Command) -> None:
        ours: list[int] = []
        theirs: list[int] = []
        stdin = stdout = stderr = None
        wants_stdin = command.stdin is not None or command.stdin_mode == "stream"
        try:
            try:
                if command.pty is None:
                    if wants_stdin:
                        end, stdin = input_pipe()
                        ours.append(end)
                        theirs.append(stdin)
                    for _ in range(2):
                        end, other = output_pipe()
                        ours.append(end)
                        theirs.append(other)
                    stdout, stderr = theirs[-2:]
                plan = self.plan(command, process.id)
                start = asyncio.ensure_future(self.exec(plan, stdin=stdin, stdout=stdout, stderr=stderr))
                process.starting(start)
                running = await start
            finally:
                for fd in theirs:
                    os.close(fd)
        except BaseException as error:
            for fd in ours:
                os.close(fd)
            if isinstance(error, asyncio.CancelledError) and process.cause is not None:
                if not process.ended:
                    process.settle(Exit())  # it was stopped on its way
                return
            self._withdraw(process)
            raise
        if process.ended:  # the table was closed in the meantime
            for fd in ours:
                os.close(fd)
            self._refuse(running)
            return
        self._connect(process, command, running, ours, wants_stdin)
        self.execution.emit("exec.started", self.sandbox_id, process_id=process.id, command=process.text, action_id=process.action_id)

    async def exec(
        self, plan: ExecPlan, *, stdin: int | None, stdout: int | None, stderr: int | None, extra: Sequence[int] = ()
    ) -> Running:
        """As `Handle.exec`, whether it is paused or not."""
        async with self._awake():
            return await self.handle.exec(plan, stdin=stdin, stdout=stdout, stderr=stderr, extra=extra)

    def _connect(self, process: Process, command: Command, running: Running, ours: list[int], wants_stdin: bool) -> None:
        poller = self.execution.poller
        writer: Writer | None = None
        if running.terminal is not None:
            os.set_blocking(running.terminal, False)
            writer = Writer(poller, os.dup(running.terminal), terminal=True)
            readers: tuple[Reader, ...] = (Reader(poller, running.terminal, process.feed_stdout, process.on_end_of_output),)
        elif ours:
            if wants_stdin:
                writer = Writer(poller, ours[0], terminal=False)
            readers = (
                Reader(poller, ours[-2], process.feed_stdout, process.on_end_of_output),
                Reader(poller, ours[-1], process.feed_stderr, process.on_end_of_output),
            )
        else:
            readers = ()  # a terminal was wanted, and the command could not start
        process.begin(running, readers, writer)
        if writer is not None and (command.stdin or command.stdin_mode != "stream"):
            writer.put(command.stdin or b"", end=command.stdin_mode != "stream")

    def _withdraw(self, process: Process) -> None:
        """It never came to be."""
        if self._processes.pop(process.id, None) is not None and not process.ended:
            self._open.discard(process)
            self._count(-1)

    def _refuse(self, running: Running) -> None:
        if running.terminal is not None:
            os.close(running.terminal)
        running.kill_tree()
        self.execution.spawn(running.release())

    # --- pause -----------------------------------------------------------------------------------------------------

    def suspend(self) -> None:
        """The sandbox has been paused: no time passes for its commands."""
        for process in self._open:
            process.suspend()

    def go_on(self) -> None:
        """It has been resumed."""
        for process in self._open:
            process.go_on()

    # --- end -------------------------------------------------------------------------------------------------------

    def on_exit(self, process: Process, exit: Exit) -> None:
        """The first process of a command has ended."""
        if exit.signal == SIGKILL:
            if self._ending and process.cause is None:
                process.cause, process.cause_message = "killed", self._ending
            elif not process.explains_sigkill():
                if self._death:
                    process.settle(exit, lost=self._death)
                    return
                if not self.handle.alive():
                    self._orphans.append((process, exit))
                    return
        process.settle(exit, after=self.handle.counters())

    def settled(self, process: Process, after: Counters | None) -> None:
        """Called by a process that has ended."""
        control = process.control
        if process.in_session or control is None:
            process.control = None
        else:
            if control.alive_children():
                self._parents.add(process)
            else:
                process.control = None
            self.execution.spawn(control.release())
        if not process.lingers:
            self._open.discard(process)
        self._quiet = after if not (self._open or self._parents or self.shells) else None
        self._count(-1)
        self.retention.keep(process)
        outcome, limits_hit = process.verdict.outcome, process.verdict.limits_hit
        for name in limits_hit:
            self.execution.emit(f"limit.{name}", self.sandbox_id, process_id=process.id)
        self.execution.emit(
            "exec.ended",
            self.sandbox_id,
            process_id=process.id,
            outcome=outcome,
            exit_code=process.exit.code,
            duration_ms=round(process.duration_s * 1000, 3),
        )

    def quiet(self, process: Process) -> None:
        """Nobody holds the output of an ended command any more."""
        self._open.discard(process)

    def forget(self, process: Process) -> None:
        self._processes.pop(process.id, None)
        self._parents.discard(process)
        process.control = None

    def _on_death(self, died: asyncio.Future[str]) -> None:
        self._death = died.result()
        orphans, self._orphans = self._orphans, []
        for process, exit in orphans:
            process.settle(exit, lost=self._death)
        # All its processes are dead, and their exits are on the way; a spawner that is gone too will not tell them.
        if not self._closed:
            self._burial = self.clock.call_later(DEATH_S, self.close)

    def begin_kill(self, message: str) -> None:
        """The sandbox is about to be killed on purpose: what ends from now on was `killed`, and nothing new starts."""
        self._ending = self._ending or message

    def kill_all(self, message: str = "killed by the caller") -> None:
        """Kill every command, and what ended ones have left running."""
        for process in list(self._open | self._parents):
            process.stop("killed", message)

    def close(self) -> None:
        """Let go of everything; may be repeated. What still runs ends as `killed` after `begin_kill`, as lost after the sandbox's death,
        else as `unknown`, since nobody will see its end. Results that are kept can still be asked for."""
        if self._burial is not None:
            self._burial.cancel()
        self._closed = True
        for process in list(self._open):
            if self._ending and process.cause is None:
                process.cause, process.cause_message = "killed", self._ending
            gone = bool(self._ending or self._death)
            process.abandon(Exit(signal=SIGKILL) if gone else Exit(lost=True), lost="" if self._ending else self._death)
        self._open.clear()
        self._parents.clear()
        self._orphans.clear()

    def forget_all(self) -> None:
        """Give back what is kept of ended commands, after `close`."""
        for process in list(self._processes.values()):
            self.retention.discard(process)
        self._processes.clear()

    # --- for callers -----------------------------------------------------------------------------------------------

    def get(self, process_id: str) -> Process:
        """Raises NotFound, also for one that was forgotten."""
        process = self._processes.get(process_id)
        if process is None:
            raise NotFound(
                f"no command {process_id[:80]!r} here; of those that ended the last {self.shelf.max_count} are kept", field="process_id"
            )
        return process

    async def run(self, command: Command, *, process_id: str | None = None) -> ExecResult:
        """Start and wait. Raises as `start`, and SandboxLost if the sandbox dies under it."""
        process = self._take(command, process_id)
        with process.pinning():  # it may end, and others after it, before we come to wait for it
            await self._begin(process, command)
            return await process.wait()

    async def stream(self, command: Command, *, process_id: str | None = None) -> AsyncGenerator[ExecEvent, None]:
        """Start, and what happens until its end, after a `started` event. Raises as `start`, before the first event."""
        process = self._take(command, process_id)
        process.follow()
        await self._begin(process, command)
        return process.events(announce=True, followed=True)

    def attach(
        self, process_id: str, *, stdout_offset: int = 0, stderr_offset: int = 0, hold: bool = False
    ) -> AsyncGenerator[ExecEvent, None]:
        """What a command wrote from the offsets on and what happens until its end: see `Process.events`.

        Raises NotFound, InvalidRequest before the first event."""
        for name, offset in (("stdout_offset", stdout_offset), ("stderr_offset", stderr_offset)):
            if offset < 0:
                raise InvalidRequest("must be at least 0", field=name)
        return self.get(process_id).events(stdout_offset, stderr_offset, hold=hold)

    async def wait(self, process_id: str, timeout_s: float | None = None) -> ExecResult:
        """Its result once it has ended. Raises TimeoutError after `timeout_s`, and the command goes on; NotFound, SandboxLost."""
        process = self.get(process_id)
        if timeout_s is None or process.ended:
            return await process.wait()
        async with asyncio.timeout(timeout_s):
            return await process.wait()

    async def stdin(self, process_id: str, data: bytes, *, close: bool = False) -> None:
        """Returns once the command's pipe has taken all of it. Raises NotFound, Conflict."""
        await self.get(process_id).write_stdin(data, close=close)

    def signal(self, process_id: str, number: int, *, tree: bool = False) -> ProcessInfo:
        """Send a signal to the first process or to all of the tree. Nothing happens if there is nobody left. Raises NotFound."""
        process = self.get(process_id)
        process.signal(number, tree=tree)
        return process.info()

    def resize(self, process_id: str, size: Pty) -> ProcessInfo:
        """Raises NotFound, Conflict if it has no terminal or has ended."""
        process = self.get(process_id)
        process.resize(size)
        return process.info()

    def list(self) -> tuple[ProcessInfo, ...]:
        """Those that run and those that are kept, in the order of their start."""
        return tuple(process.info() for process in self._processes.values())

    def info(self, process_id: str) -> ProcessInfo:
        """Raises NotFound."""
        return self.get(process_id).info()


def ignore(task: asyncio.Task[None]) -> None:
    """For a task whose error nobody is left to hear."""
    if not task.cancelled():
        task.exception()
