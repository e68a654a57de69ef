# SPDX-License-Identifier: Apache-2.0
"""Routes about commands and sessions."""

from __future__ import annotations

from opendsec.api.exec import (
    TIMEOUT_S,
    Command,
    ExecResult,
    ProcessInfo,
    ProcessList,
    Pty,
    SessionInfo,
    SessionRequest,
    SessionRun,
    SignalRequest,
)
from opendsec.edge.commands import Commands
from opendsec.edge.http import Handler, Lines, Request
from opendsec.edge.node import Node

OFFSET = (0, 1 << 62)


class ExecRoutes:
    """Handlers for one node."""

    def __init__(self, node: Node, commands: Commands) -> None:
        self._node, self._commands = node, commands

    def handlers(self) -> dict[str, Handler]:
        return {
            "RUN": self.run,
            "STREAM": self.stream,
            "START": self.start,
            "PROCESSES": self.processes,
            "PROCESS": self.process,
            "WAIT": self.wait,
            "ATTACH": self.attach,
            "STDIN": self.stdin,
            "SIGNAL": self.signal,
            "RESIZE": self.resize,
            "OPEN_SESSION": self.open_session,
            "SESSION": self.session,
            "SESSION_RUN": self.run_in_session,
            "SESSION_CLOSE": self.close_session,
        }

    async def run(self, request: Request) -> ExecResult:
        return await self._commands.run(request.params[0], await _command(request))

    async def stream(self, request: Request) -> Lines:
        return Lines(await self._commands.stream(request.params[0], await _command(request)))

    async def start(self, request: Request) -> ProcessInfo:
        return await self._commands.start(request.params[0], await _command(request))

    async def processes(self, request: Request) -> ProcessList:
        return self._commands.list(request.params[0])

    async def process(self, request: Request) -> ProcessInfo:
        return self._commands.info(request.params[0], request.params[1])

    async def wait(self, request: Request) -> ExecResult:
        sandbox_id, process_id = request.params
        box, _ = self._commands.seen(sandbox_id)
        timeout_s = request.number("timeout_s", TIMEOUT_S)
        with self._node.use(box):
            return await request.while_wanted(self._commands.wait(sandbox_id, process_id, timeout_s))

    async def attach(self, request: Request) -> Lines:
        stdout_offset = request.integer("stdout_offset", OFFSET) or 0
        stderr_offset = request.integer("stderr_offset", OFFSET) or 0
        sandbox_id, process_id = request.params
        return Lines(await self._commands.attach(sandbox_id, process_id, stdout_offset, stderr_offset, hold=request.flag("hold")))

    async def stdin(self, request: Request) -> None:
        close = request.flag("close")
        box, table = await self._commands.table(request.params[0])
        process = table.get(request.params[1])
        with self._node.use(box):
            request.intent.begin()
            async for chunk in request.chunks():
                await process.write_stdin(chunk, close=False)
            await process.write_stdin(b"", close=close)

    async def signal(self, request: Request) -> ProcessInfo:
        wanted = await request.json(SignalRequest)
        wanted.check()
        box, table = await self._commands.table(request.params[0])
        table.get(request.params[1])
        with self._node.use(box):
            request.intent.begin()
            return table.signal(request.params[1], wanted.signal, tree=wanted.tree)

    async def resize(self, request: Request) -> ProcessInfo:
        size = await request.json(Pty)
        size.check()
        box, table = await self._commands.table(request.params[0])
        table.get(request.params[1])
        with self._node.use(box):
            request.intent.begin()
            return table.resize(request.params[1], size)

    # --- sessions --------------------------------------------------------------------------------------------------------

    async def open_session(self, request: Request) -> SessionInfo:
        wanted = await request.json(SessionRequest)
        wanted.check()
        return await self._commands.open_session(request.params[0], wanted)

    async def session(self, request: Request) -> SessionInfo:
        _, sessions = await self._commands.sessions(request.params[0])
        return sessions.info(request.params[1])

    async def run_in_session(self, request: Request) -> ExecResult:
        wanted = await request.json(SessionRun)
        wanted.check()
        return await self._commands.run_in_session(request.params[0], request.params[1], wanted)

    async def close_session(self, request: Request) -> SessionInfo:
        await request.no_body()
        box, sessions = await self._commands.sessions(request.params[0])
        sessions.get(request.params[1])
        with self._node.use(box):
            request.intent.begin()
            return sessions.end(request.params[1])


async def _command(request: Request) -> Command:
    command = await request.json(Command)
    command.check()
    return command
