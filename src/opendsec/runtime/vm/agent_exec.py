# SPDX-License-Identifier: Apache-2.0
"""A command through QEMU's guest agent: begun whole, asked after until it has ended, its output handed on then."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from opendsec.api.errors import OpenDSecError, SandboxLost, Unavailable, Unsupported
from opendsec.runtime.backend import ExecPlan, Exit, Running
from opendsec.runtime.container.handle import NotStarted
from opendsec.runtime.guest.qga import AgentRefused, packed, unpacked

if TYPE_CHECKING:
    from opendsec.runtime.vm.agent import AgentChannel

MAX_INPUT_BYTES = 4 << 20
MAX_OUTPUT_ANSWER = 48 << 20  # two times 16 MiB in base64, which is the agent's own bound
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
ROOM_BYTES = 1 << 20
CUT = b"\n[the guest's agent cut this output]\n"
HOMES = ("", "/")
USERS = ("", "root")
LAST_SIGNAL = 64
ENDING = (1, 2, 3, 9, 15)  # signals that mean the end where there are none


class _Begun(msgspec.Struct, frozen=True):
    pid: int


class _Status(msgspec.Struct, frozen=True, rename="kebab"):
    exited: bool
    exitcode: int | None = None
    signal: int | None = None
    out_data: str | None = None
    err_data: str | None = None
    out_truncated: bool = False
    err_truncated: bool = False


def check(plan: ExecPlan, fds: Sequence[int | None]) -> None:
    """Raises Unsupported for what this agent cannot do, by name."""
    if plan.pty is not None:
        raise Unsupported("QEMU's guest agent has no terminals", field="pty")
    if any(fd is not None for fd in fds[3:]):
        raise Unsupported("QEMU's guest agent has no sessions: each command stands alone", field="sandbox_id")
    if plan.cwd not in HOMES:
        raise Unsupported("QEMU's guest agent begins commands in its own directory", field="cwd")
    if plan.user not in USERS:
        raise Unsupported("QEMU's guest agent runs commands as its own user", field="user")


async def start(channel: AgentChannel, plan: ExecPlan, fds: Sequence[int | None]) -> Running:
    """See `backend.Handle.exec`. Raises SandboxLost, Unavailable (no agent, or none yet), Unsupported."""
    check(plan, fds)
    await channel.line.ready()
    environment = await environment_of(channel, plan) if plan.env else None
    running = AgentRunning(channel, plan, environment, *(None if fd is None else os.dup(fd) for fd in (*fds, None, None, None)[:3]))
    try:
        if running.input is None and (refused := await running.begin(b"")):
            running.close()
            return NotStarted(refused)
    except BaseException:
        running.close()
        raise
    channel.begin_task(running.task())
    return running


async def environment_of(channel: AgentChannel, plan: ExecPlan) -> list[str]:
    """The agent's own, and what the command has besides: what is given takes the place of all of it, and without its own few programs of
    Windows run."""
    windows = await channel.system() == "mswindows"
    path, words = ("cmd.exe", ["/d", "/u", "/c", "set"]) if windows else ("/usr/bin/env", ["-0"])
    found: dict[str, str] = {}
    with contextlib.suppress(AgentRefused):
        said = await whole(channel, path, words)
        text = said.decode("utf-16-le" if windows else "utf-8", "surrogateescape" if not windows else "replace")
        for line in text.split("\r\n" if windows else "\0"):
            name, equals, value = line.partition("=")
            if name and equals:
                found[name] = value
    return [f"{name}={value}" for name, value in (found | dict(plan.env)).items()]


async def whole(channel: AgentChannel, path: str, words: list[str]) -> bytes:
    """What a short command of ours writes. Raises AgentRefused."""
    begun = await channel.call("guest-exec", _Begun, {"path": path, "arg": words, "capture-output": True})
    status = await ended(channel, begun.pid)
    return told(channel, status.out_data)


async def ended(channel: AgentChannel, pid: int) -> _Status:
    """Wait for its end. Raises AgentRefused (nobody knows of it any more), SandboxLost."""
    pause = FIRST_PAUSE_S
    while True:
        try:
            status = await channel.call("guest-exec-status", _Status, {"pid": pid}, limit=MAX_OUTPUT_ANSWER)
            if status.exited:
                return status
        except Unavailable:
            pass  # it may be back soon
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, LONGEST_PAUSE_S)


def told(channel: AgentChannel, text: str | None) -> bytes:
    data = unpacked(text)
    if data is None:
        channel.nonsense()
        raise SandboxLost("the sandbox has ended: the guest's agent said what no agent says")
    return data


class AgentRunning:
    """Implements `backend.Running`; owns the descriptors."""

    pid = 0
    terminal = None

    def __init__(
        self, channel: AgentChannel, plan: ExecPlan, environment: list[str] | None, input: int | None, out: int | None, err: int | None
    ) -> None:
        self.input = input
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._channel, self._plan, self._environment = channel, plan, environment
        self._outputs = [out, err]
        self._guest_pid: int | None = None
        self.killed = 0  # by which signal

    def task(self) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        for fd in (self.input, *self._outputs):
            if fd is not None:
                os.close(fd)
        self.input, self._outputs = None, [None, None]

    # --- its life ----------------------------------------------------------------------------------------------------

    async def begin(self, data: bytes) -> str:
        """Why it cannot be begun, or ""."""
        words = [os.fsencode(word).decode("utf-8", "replace") for word in self._plan.argv]
        wanted: dict[str, object] = {"path": words[0], "arg": words[1:]}
        wanted["capture-output"] = any(fd is not None for fd in self._outputs)
        if self._environment is not None:
            wanted["env"] = self._environment
        if data:
            wanted["input-data"] = packed(data)
        try:
            begun = await self._channel.call("guest-exec", _Begun, wanted)
        except AgentRefused as error:
            return f"cannot execute {self._plan.argv[0]!r}: {error}"
        self._guest_pid = begun.pid
        return ""

    async def _run(self) -> None:
        ended_as = Exit(signal=9)  # unless better is known: the sandbox was lost
        try:
            if self.input is not None:
                data = await self._read(self.input)
                why = f"more input than {MAX_INPUT_BYTES} bytes, which QEMU's guest agent takes at once" if data is None else ""
                if self._was_killed():
                    return
                if why or data is None or (why := await self.begin(data)):
                    ended_as = Exit(not_started=why)
                    return
                if number := self._was_killed():
                    self._end(number)
            assert self._guest_pid is not None
            status = await ended(self._channel, self._guest_pid)
            outs = ((status.out_data, status.out_truncated), (status.err_data, status.err_truncated))
            for index, (text, cut) in enumerate(outs):
                await self._write(index, told(self._channel, text) + (CUT if cut else b""))
            ended_as = self._exit(status)
        except AgentRefused:
            ended_as = Exit(lost=True)  # the guest began anew, or its agent
        except Unavailable as error:
            ended_as = Exit(not_started=error.message)
        except OpenDSecError:
            pass
        finally:
            self.close()
            if not self.exited.done():
                self.exited.set_result(ended_as)

    def _was_killed(self) -> int:
        return self.killed

    def _exit(self, status: _Status) -> Exit:
        if self.killed and status.signal is None:
            return Exit(signal=self.killed)
        if status.signal is not None and 0 < status.signal <= LAST_SIGNAL:
            return Exit(signal=status.signal)
        code = status.exitcode if status.exitcode is not None else status.signal
        return Exit(code=(code or 0) & 0xFFFF_FFFF)

    async def _read(self, fd: int) -> bytes | None:
        """All of it; None if that is too much."""
        data = bytearray()
        while True:
            await self._when(fd, select.EPOLLIN)
            try:
                part = os.read(fd, 1 << 16)
            except BlockingIOError:
                continue
            data += part
            if not part or self.killed:
                return bytes(data)
            if len(data) > MAX_INPUT_BYTES:
                return None

    async def _write(self, index: int, data: bytes) -> None:
        fd = self._outputs[index]
        if fd is None:
            return
        with contextlib.suppress(OSError):  # so that it is told to have ended whoever reads this when
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, ROOM_BYTES)
        rest = memoryview(data)
        try:
            while rest and not self.killed:
                await self._when(fd, select.EPOLLOUT)
                rest = rest[os.write(fd, rest[: select.PIPE_BUF]) :]  # not more: what is ready for writing takes as much at once
        except OSError:
            pass  # nobody reads it any more
        os.close(fd)
        self._outputs[index] = None

    async def _when(self, fd: int, events: int) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        poller = self._channel.poller
        try:
            poller.watch(fd, events, lambda: None if ready.done() else ready.set_result(None))
        except PermissionError:
            return  # a regular file
        try:
            await ready
        finally:
            poller.unwatch(fd)

    # --- signals -----------------------------------------------------------------------------------------------------

    def signal(self, number: int, *, tree: bool = False, since_mark: bool = False) -> None:
        if self.exited.done() or not number:
            return
        if number == 9 and not self.killed:
            self.killed = number
        if self._guest_pid is not None:
            self._end(number)

    def _end(self, number: int) -> None:
        self._channel.begin_task(asyncio.get_running_loop().create_task(self._signal(number)))

    async def _signal(self, number: int) -> None:
        with contextlib.suppress(OpenDSecError, AgentRefused):
            if await self._channel.system() == "mswindows":
                if number in ENDING:
                    self.killed = number
                    await whole(self._channel, "taskkill.exe", ["/T", "/F", "/PID", str(self._guest_pid)])
            else:
                await whole(self._channel, "/bin/kill", [f"-{number}", str(self._guest_pid)])

    def mark(self) -> None:
        """There are no sessions here."""

    def kill_since_mark(self) -> None:
        """There are no sessions here."""

    def resize(self, rows: int, columns: int) -> None:
        """There is no terminal."""

    def kill_tree(self) -> None:
        self.signal(9, tree=True)

    def alive_children(self) -> bool:
        return not self.exited.done()

    async def release(self) -> None:
        """The agent forgets a command once its end was told."""
