# SPDX-License-Identifier: Apache-2.0
"""Commands of sandboxes as the node runs them: a journaled intent before each, its outcome after, action ids on top.

The process table (`processes`) knows how to run one; this module knows which must not run twice, and what an edge that has since died
had begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from opendsec.api import ids, wire
from opendsec.api.errors import Conflict, NotFound, OpenDSecError, Unavailable
from opendsec.api.exec import (
    Captured,
    Command,
    ExecEvent,
    ExecResult,
    ProcessInfo,
    ProcessList,
    SessionInfo,
    SessionRequest,
    SessionRun,
    StreamName,
)
from opendsec.edge import lifecycle
from opendsec.edge.actions import Action, request_digest
from opendsec.edge.box import Box
from opendsec.edge.node import Node
from opendsec.edge.pausing import awake, wake
from opendsec.edge.process import summary
from opendsec.edge.processes import Defaults, Execution, ProcessTable
from opendsec.edge.sessions import SessionTable
from opendsec.edge.tables import CommandRow

R = TypeVar("R", ExecResult, ProcessInfo)
UNKNOWN = "the edge ended while the command ran"


class Commands:
    """Of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.execution = Execution(emit=self._emit, turns=node.actions.turns)
        node.flushers.append(self._write_outcomes)
        node.on_destroy.append(_begin_kill)
        node.on_destroyed.append(_let_go)
        self._outcomes: list[tuple[str, float, ExecResult]] = []  # of commands that ended since the last flush

    async def close(self) -> None:
        """After the last request. Commands under way are killed, and end unknown; sandboxes live on. Those of a paused sandbox cannot be
        killed now: they stay under way in the journal, by which the edge that resumes it ends them."""
        kept: set[str] = set()
        for box in self._node.boxes.values():
            if box.sessions is not None:
                box.sessions.close()
            if box.commands is not None:
                if box.state.phase == "paused":
                    kept |= {one.id for one in box.commands.list() if one.state == "running"}
                box.commands.close()
        self._outcomes = [one for one in self._outcomes if one[0] not in kept]
        await self.execution.close()

    def _emit(self, kind: str, sandbox_id: str | None = None, **data: str | int | float | bool | None) -> None:
        self._node.events.emit(kind, sandbox_id, **data)
        if kind == "exec.ended" and sandbox_id is not None:
            box, process_id = self._node.boxes.get(sandbox_id), data["process_id"]
            if box is not None and box.commands is not None and isinstance(process_id, str):
                # A command without an action id has no promise to keep: its outcome may wait for other writes.
                result = box.commands.get(process_id).result(output=False)
                self._outcomes.append((process_id, self._node.clock.time(), result))

    def _write_outcomes(self) -> None:
        outcomes, self._outcomes = self._outcomes, []
        for process_id, at, result in outcomes:
            self._node.journal.end_command(process_id, at, msgspec.json.encode(result))

    async def table(self, sandbox_id: str) -> tuple[Box, ProcessTable]:
        """Of a sandbox that runs, or runs again. Raises NotFound, SandboxLost, Conflict, QuotaExceeded."""
        box = self._node.box(sandbox_id)
        handle = await wake(self._node, box)
        if box.commands is None:
            template = box.template
            defaults = Defaults(env=template.env, cwd=template.workdir, user=template.user)
            active = 0

            def on_active(count: int) -> None:
                nonlocal active
                now = self._node.clock.time()
                self._node.apply(box, lifecycle.UseStarted(now) if count > active else lifecycle.UseEnded(now))
                active = count

            box.commands = ProcessTable(self.execution, handle, defaults, on_active=on_active, awake=lambda: awake(self._node, sandbox_id))
            self._earlier(box)  # now: once this edge has begun commands of its own, the journal has those too
        return box, box.commands

    def seen(self, sandbox_id: str) -> tuple[Box, ProcessTable | None]:
        """Of a sandbox that runs or is paused, which it stays; None: nothing has run in it. Raises NotFound, SandboxLost, Conflict."""
        box = self._node.box(sandbox_id)
        if box.state.phase != "paused":
            self._node.running(sandbox_id)
        return box, box.commands

    # --- start -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _intended(self, box: Box, table: ProcessTable, kind: str, command: Command, action: Action[R]) -> Iterator[str]:
        """Journal the intent to start a command under the id that is given; forget it if that came to nothing."""
        process_id, now = ids.new_id(ids.PROCESS), self._node.clock.time()
        journal = self._node.journal
        with self._node.use(box):
            with journal.transaction():
                journal.begin_command(process_id, box.id, kind, command.action_id, summary(command), now)
                action.begin(process_id, now)
                self._node.save_use(box)
            try:
                yield process_id
            except OpenDSecError:
                if not _knows(table, process_id):
                    journal.drop_command(process_id)
                raise

    async def run(self, sandbox_id: str, command: Command) -> ExecResult:
        """Start and wait."""
        box, table = await self.table(sandbox_id)

        async def work(action: Action[ExecResult]) -> ExecResult:
            with self._intended(box, table, "run", command, action) as process_id:
                return await table.run(command, process_id=process_id)

        return await self._once(box, command, "run", work, ExecResult)

    async def start(self, sandbox_id: str, command: Command) -> ProcessInfo:
        """Start, and leave it running."""
        box, table = await self.table(sandbox_id)

        async def work(action: Action[ProcessInfo]) -> ProcessInfo:
            with self._intended(box, table, "run", command, action) as process_id:
                return (await table.start(command, process_id=process_id)).info()

        recorded = await self._once(box, command, "start", work, ProcessInfo)
        try:
            return self.info(sandbox_id, recorded.id)  # a repetition sees it as it is now
        except NotFound:
            return recorded

    async def stream(self, sandbox_id: str, command: Command) -> AsyncGenerator[ExecEvent, None]:
        """Start and follow. A repeated action id follows the running command, or tells the recorded result."""
        box, table = await self.table(sandbox_id)
        started: asyncio.Future[AsyncGenerator[ExecEvent, None]] = asyncio.get_running_loop().create_future()
        before = None if command.action_id is None else self._node.actions.running(command.action_id)

        async def work(action: Action[ExecResult]) -> ExecResult:
            with self._intended(box, table, "run", command, action) as process_id:
                started.set_result(await table.stream(command, process_id=process_id))
                if command.action_id is None:
                    return ExecResult(outcome="unknown", process_id=process_id)  # nobody will ask
                return await table.wait(process_id)

        ending = asyncio.ensure_future(self._once(box, command, "stream", work, ExecResult))
        if before is not None and before == self._digest(box, command, "stream"):
            for info in table.list():
                if info.action_id == command.action_id and not started.done():
                    started.set_result(table.get(info.id).events(announce=True))
        await asyncio.wait((started, ending), return_when=asyncio.FIRST_COMPLETED)
        if started.done():
            ending.add_done_callback(_seen)  # its result is for the journal, this caller reads the events
            return started.result()
        return _replay(await ending)

    async def _once(self, box: Box, command: Command, kind: str, work: Callable[[Action[R]], Awaitable[R]], result: type[R]) -> R:
        return await self._node.actions.once(
            command.action_id,
            work,
            result=result,
            kind=kind,
            digest=lambda: self._digest(box, command, kind),
            sandbox_id=box.id,
            outlived=True,
        )

    @staticmethod
    def _digest(box: Box, command: Command, kind: str) -> bytes:
        return request_digest(kind, box.id.encode(), wire.encode(command))

    # --- sessions --------------------------------------------------------------------------------------------------------

    async def sessions(self, sandbox_id: str) -> tuple[Box, SessionTable]:
        """As `table`."""
        box, table = await self.table(sandbox_id)
        if box.sessions is None:
            box.sessions = SessionTable(table)
        return box, box.sessions

    async def open_session(self, sandbox_id: str, request: SessionRequest) -> SessionInfo:
        box, sessions = await self.sessions(sandbox_id)

        async def work(action: Action[SessionInfo]) -> SessionInfo:
            session_id = ids.new_id(ids.SESSION)
            with self._node.use(box):
                action.begin(session_id, self._node.clock.time())
                return await sessions.open(request, session_id=session_id)

        def now(recorded: SessionInfo) -> SessionInfo:
            try:
                return sessions.info(recorded.id)
            except NotFound:
                return msgspec.structs.replace(recorded, state="closed", message="the edge that held it has ended")

        return await self._node.actions.once(
            request.action_id,
            work,
            result=SessionInfo,
            kind="session",
            digest=lambda: request_digest("session", box.id.encode(), wire.encode(request)),
            sandbox_id=box.id,
            replay=now,
        )

    async def run_in_session(self, sandbox_id: str, session_id: str, request: SessionRun) -> ExecResult:
        box, table = await self.table(sandbox_id)
        _, sessions = await self.sessions(sandbox_id)

        async def work(action: Action[ExecResult]) -> ExecResult:
            info = sessions.info(session_id)
            if info.state != "open":  # looked at before the intent: a refusal must not become the action's result
                raise Conflict(f"the session is {info.state}" + (f": {info.message}" if info.message else ""))
            command = Command(shell=request.shell, action_id=request.action_id)
            with self._intended(box, table, "session", command, action) as process_id:
                return await sessions.run(session_id, request, process_id=process_id)

        return await self._node.actions.once(
            request.action_id,
            work,
            result=ExecResult,
            kind="session_run",
            digest=lambda: request_digest("session_run", box.id.encode(), session_id.encode(), wire.encode(request)),
            sandbox_id=box.id,
            outlived=True,
        )

    # --- those that run or ran ---------------------------------------------------------------------------------------------

    def _earlier(self, box: Box) -> dict[str, ProcessInfo]:
        """Commands that earlier edges ran in an adopted sandbox."""
        if box.earlier is None:
            box.earlier = {row.process_id: _earlier(row) for row in self._node.journal.commands_of(box.id)} if box.adopted else {}
        return box.earlier

    def list(self, sandbox_id: str) -> ProcessList:
        box, table = self.seen(sandbox_id)
        return ProcessList((*self._earlier(box).values(), *(table.list() if table is not None else ())))

    def info(self, sandbox_id: str, process_id: str) -> ProcessInfo:
        """Raises NotFound."""
        box, table = self.seen(sandbox_id)
        found = self._earlier(box).get(process_id)
        if found is not None:
            return found
        if table is None:
            raise NotFound(f"no command {process_id[:80]!r} here", field="process_id")
        return table.info(process_id)

    async def wait(self, sandbox_id: str, process_id: str, timeout_s: float | None) -> ExecResult:
        """Raises Unavailable if it has not ended after `timeout_s`."""
        box, _ = self.seen(sandbox_id)
        earlier = self._earlier(box).get(process_id)
        if earlier is not None and earlier.result is not None:
            return earlier.result
        _, table = await self.table(sandbox_id)
        try:
            return await table.wait(process_id, timeout_s)
        except TimeoutError:
            raise Unavailable(f"the command has not ended within {timeout_s:g} s", data={"state": "running"}) from None

    async def attach(
        self, sandbox_id: str, process_id: str, stdout_offset: int, stderr_offset: int, *, hold: bool = False
    ) -> AsyncGenerator[ExecEvent, None]:
        box, _ = self.seen(sandbox_id)
        earlier = self._earlier(box).get(process_id)
        if earlier is not None and earlier.result is not None:
            return _replay(earlier.result, announce=False)
        _, table = await self.table(sandbox_id)
        return table.attach(process_id, stdout_offset=stdout_offset, stderr_offset=stderr_offset, hold=hold)


async def _replay(result: ExecResult, *, announce: bool = True) -> AsyncGenerator[ExecEvent, None]:
    """A recorded result as the events that once told it."""
    if announce:
        yield ExecEvent(kind="started", process_id=result.process_id)
    streams: tuple[tuple[StreamName, Captured], ...] = (("stdout", result.stdout), ("stderr", result.stderr))
    for name, captured in streams:
        at = len(captured.head)
        if captured.head:
            yield ExecEvent(kind="output", process_id=result.process_id, stream=name, data=captured.head)
        if captured.truncated:
            yield ExecEvent(kind="gap", process_id=result.process_id, stream=name, offset=at, missing_bytes=captured.omitted_bytes)
            at += captured.omitted_bytes
        if captured.tail:
            yield ExecEvent(kind="output", process_id=result.process_id, stream=name, offset=at, data=captured.tail)
    bare = msgspec.structs.replace(result, stdout=Captured(), stderr=Captured())
    yield ExecEvent(kind="exit", process_id=result.process_id, result=bare)


def _earlier(row: CommandRow) -> ProcessInfo:
    if row.result is None:
        result = ExecResult(outcome="unknown", process_id=row.process_id, action_id=row.action_id, message=UNKNOWN)
    else:
        result = msgspec.json.decode(row.result, type=ExecResult)
    return ProcessInfo(
        id=row.process_id,
        sandbox_id=row.sandbox_id,
        state="ended",
        command=row.command,
        started_at=row.started_at,
        action_id=row.action_id,
        result=result,
    )


def _knows(table: ProcessTable, process_id: str) -> bool:
    try:
        table.get(process_id)
    except NotFound:
        return False
    return True


def _begin_kill(box: Box) -> None:
    if box.commands is not None and box.state.phase == "stopping":
        box.commands.begin_kill(box.state.message)


def _let_go(box: Box) -> None:
    if box.sessions is not None:
        box.sessions.close()
        box.sessions = None
    if box.commands is not None:
        box.commands.close()
        box.commands.forget_all()
        box.commands = None


def _seen(task: asyncio.Future[ExecResult]) -> None:
    if not task.cancelled():
        task.exception()
