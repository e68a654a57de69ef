# SPDX-License-Identifier: Apache-2.0
"""The channel to a guest in which QEMU's own agent runs, as on Windows: commands and files, as far as that agent goes.

A command is begun with all of its input, so it begins when that has ended; its output comes at its end, 16 MiB of each stream at most. It
runs as the agent does, where the agent does. There are no terminals and no sessions. What an earlier edge began goes on.

The agent may come late, go for a while (the guest starts anew) or never be there: that is Unavailable, and the sandbox lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from opendsec.api.errors import SandboxLost, Unavailable, Unsupported
from opendsec.api.spec import Limits
from opendsec.runtime.backend import ExecPlan, FileAccess, Running
from opendsec.runtime.guest.channel import PARK_S, RECEIVE_BYTES
from opendsec.runtime.guest.qga import MAX_ANSWER, AgentRefused, Line, T
from opendsec.runtime.vm.silent import SilentChannel

if TYPE_CHECKING:
    from opendsec.runtime.poller import Poller

WHY = "QEMU's guest agent cannot do it"
WINDOWS = "mswindows"
DRIVE = re.compile(rb"/[A-Za-z]:(?=/|$)")
CLOCK_S = 5.0


class _System(msgspec.Struct, frozen=True):
    id: str = ""


class AgentChannel(SilentChannel):
    """See the module."""

    why = WHY

    def __init__(self, sock: socket.socket, poller: Poller | None) -> None:
        self.line = Line(self.send, self.give_up_later)
        self._system: str | None = None
        self._agent_files: FileAccess | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        super().__init__(sock, poller)

    # --- life --------------------------------------------------------------------------------------------------------

    def _on_ready(self) -> None:
        if self._out:
            self._flush()
        if self._sock is None:
            return
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.line.heard(data)
        else:
            self._unattach()  # its machine is ending, and whoever holds that will say so

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def nonsense(self) -> None:
        """Its answer is of the right form and cannot be true: as if the form were wrong. From any thread."""
        self.call_soon(lambda: self.give_up("the guest's agent said what no agent says"))

    def give_up_later(self, why: str) -> None:
        self._loop.call_soon(self.give_up, why)

    def give_up(self, reason: str) -> None:
        super().give_up(reason)
        self.line.end()
        for task in self._tasks:
            task.cancel()

    async def park(self) -> None:
        await self.line.hold(PARK_S)

    def unpark(self) -> None:
        self.line.go_on()

    async def detach(self) -> None:
        await self.park()
        self._unattach()

    def resume(self, sock: socket.socket) -> None:
        self._out.clear()
        self._out_bytes = 0
        self.line.reset()
        super().resume(sock)

    # --- asking ------------------------------------------------------------------------------------------------------

    async def call(self, command: str, kind: type[T], arguments: Mapping[str, object] | None = None, *, limit: int = MAX_ANSWER) -> T:
        """See `Line.call`. Raises Unsupported for a command that this agent has not."""
        if self.lost:
            raise SandboxLost("the sandbox has ended")
        try:
            return await self.line.call(command, arguments or {}, kind, limit=limit)
        except AgentRefused as error:
            if error.kind == "CommandNotFound":
                raise Unsupported(f"this guest's agent has no {command}", field="sandbox_id") from error
            raise

    async def system(self) -> str:
        """What the agent calls its system, such as `mswindows`; "" if it does not say."""
        if self._system is None:
            try:
                self._system = (await self.call("guest-get-osinfo", _System)).id
            except (AgentRefused, Unsupported):
                self._system = ""
        return self._system

    async def path(self, path: bytes) -> str:
        """A path as the guest has it: on Windows `/C:/x` is `C:/x`."""
        if await self.system() == WINDOWS and DRIVE.match(path):
            path = path[1:]
        try:
            return path.decode()
        except UnicodeDecodeError:
            raise Unsupported("paths must be UTF-8 here", field="path") from None

    def begin_task(self, task: asyncio.Task[None]) -> None:
        """One that ends with the channel."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- what there is -----------------------------------------------------------------------------------------------

    async def exec(self, plan: ExecPlan, fds: Sequence[int | None], limits: Limits) -> Running:
        from opendsec.runtime.vm.agent_exec import start

        return await start(self, plan, fds)

    @property
    def files(self) -> FileAccess:
        if self._agent_files is None:
            from opendsec.runtime.vm.agent_files import AgentFiles

            self._agent_files = AgentFiles(self)
        return self._agent_files

    async def clock(self, wall_clock_ns: int | None = None, seed: bytes | None = None) -> None:
        """Set it if the agent is there and can; it need not be."""
        self.begin_task(self._loop.create_task(self._set_clock(wall_clock_ns)))

    async def _set_clock(self, wall_clock_ns: int | None) -> None:
        with contextlib.suppress(AgentRefused, Unsupported, Unavailable, SandboxLost):
            await self.line.ready(CLOCK_S)
            now = time.time_ns() if wall_clock_ns is None else wall_clock_ns
            await self.call("guest-set-time", dict[str, object], {"time": now})
