# SPDX-License-Identifier: Apache-2.0
"""The sessions of a sandbox: opened, run in, closed. What a session is and does: `session.py`."""

from __future__ import annotations

import asyncio
import os
import resource

from opendsec.api.errors import Conflict, NotFound, QuotaExceeded
from opendsec.api.exec import Command, ExecResult, SessionInfo, SessionRequest, SessionRun
from opendsec.api.ids import PROCESS, SESSION, new_id
from opendsec.edge import shell
from opendsec.edge.process import Process
from opendsec.edge.processes import ProcessTable, ignore
from opendsec.edge.session import Session
from opendsec.edge.streams import input_pipe, output_pipe

MAX_SESSIONS = 64  # living ones of a sandbox
MAX_CLOSED = 64  # closed ones that are still known


class SessionTable:
    """The sessions of one sandbox."""

    def __init__(self, table: ProcessTable) -> None:
        self._table = table
        self._sessions: dict[str, Session] = {}
        self._open_files = min(table.limits.open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])

    async def open(self, request: SessionRequest, *, session_id: str | None = None) -> SessionInfo:
        """Start a shell and wait until it is ready. Raises Unsupported without bash, InvalidRequest if the user or the directory does not
        exist, QuotaExceeded, SandboxLost, Unavailable."""
        session = Session(self._table, session_id or new_id(SESSION))
        living = [other for other in self._sessions.values() if not other.closed]
        if len(living) >= MAX_SESSIONS:
            raise QuotaExceeded(
                f"at most {MAX_SESSIONS} sessions of a sandbox at once", data={"resource": "sessions", "limit": MAX_SESSIONS}
            )
        for closed in [other for other in self._sessions.values() if other.closed and not other.lingers][:-MAX_CLOSED]:
            del self._sessions[closed.id]
        self._sessions[session.id] = session
        launch = self._table.execution.spawn(self._launch(session, request))
        try:
            await asyncio.shield(launch)
            await session.ready
        except BaseException:
            # Nobody has its id: it must not stay. If its start is still under way, that finds it closed.
            launch.add_done_callback(ignore)
            session.kill_all("it was not opened")
            self._sessions.pop(session.id, None)
            raise
        return session.info()

    async def _launch(self, session: Session, request: SessionRequest) -> None:
        command = Command(argv=shell.argv(self._open_files), cwd=request.cwd, env=request.env, user=request.user)
        ours: list[int] = []
        theirs: list[int] = []
        try:
            try:
                for make in (output_pipe, output_pipe, input_pipe, output_pipe):
                    end, other = make()
                    ours.append(end)
                    theirs.append(other)
                stdout, stderr, *extra = theirs
                running = await self._table.exec(
                    self._table.plan(command, session.id), stdin=None, stdout=stdout, stderr=stderr, extra=extra
                )
            finally:
                for fd in theirs:
                    os.close(fd)
        except BaseException:
            for fd in ours:
                os.close(fd)
            raise
        session.connect(running, *ours)
        if session.closed:
            session.kill_all(session.closed)

    def get(self, session_id: str) -> Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFound(f"no session {session_id[:80]!r} here", field="session_id")
        return session

    async def run(self, session_id: str, request: SessionRun, *, process_id: str | None = None) -> ExecResult:
        """Run a command in a session and wait for its end; a caller who goes away leaves it running. Raises NotFound, Conflict (the session
        is busy or closed), SandboxLost."""
        session = self.get(session_id)
        if session.closed:
            raise Conflict(f"the session is closed: {session.closed}")
        if session.process is not None:
            raise Conflict("the session is busy with another command", data={"process_id": session.process.id})
        command = Command(
            shell=request.shell,
            timeout_s=request.timeout_s,
            capture_bytes=request.capture_bytes,
            output_limit_bytes=request.output_limit_bytes,
            action_id=request.action_id,
        )
        process = Process(self._table, process_id or new_id(PROCESS), command, in_session=True)
        self._table.add(process)
        with process.pinning():
            session.begin(process, request.shell)
            self._table.execution.emit(
                "exec.started",
                self._table.sandbox_id,
                process_id=process.id,
                command=process.text,
                action_id=process.action_id,
                session_id=session.id,
            )
            return await process.wait()

    def info(self, session_id: str) -> SessionInfo:
        """Raises NotFound."""
        return self.get(session_id).info()

    def list(self) -> tuple[SessionInfo, ...]:
        return tuple(session.info() for session in self._sessions.values())

    def end(self, session_id: str) -> SessionInfo:
        """Close a session: its shell and all its jobs are killed. May be repeated. Raises NotFound."""
        session = self.get(session_id)
        session.kill_all("closed by the caller")
        return session.info()

    def close(self) -> None:
        """Let go of everything, before the process table does; may be repeated."""
        for session in self._sessions.values():
            session.abandon("the sandbox has ended, or the edge was stopped")
