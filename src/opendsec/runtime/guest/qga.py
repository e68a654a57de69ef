# SPDX-License-Identifier: Apache-2.0
"""The protocol of QEMU's guest agent, for systems that guestd does not run on: one JSON object a line, one request at a time.

Whoever connects finds what a former host left in the line, or an agent that is not there yet. So a conversation begins with a number that
the agent has to say back behind a byte that JSON cannot contain (`guest-sync-delimited`). All before that is dropped, and a request that
had no answer in time makes another beginning necessary. An answer that is none, or is too long, breaks the line: that is no agent.

Nothing comes unasked in this protocol. What does is dropped; a guest that sends much of it costs its own time only.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import secrets
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from opendsec.api.errors import SandboxLost, Unavailable

SYNC_S = 10.0  # for an agent that is there
ANSWER_S = 30.0
MAX_ANSWER = 1 << 20
MAX_SKIPPED = 64 << 20  # while a beginning is awaited
MAX_SYNC_LINE = 256  # ten times what it is
MARK = b"\xff"
T = TypeVar("T")


class AgentRefused(Exception):
    """The agent's own error: `kind` is its class, the text is for people."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class _Error(msgspec.Struct, frozen=True):
    kind: str = msgspec.field(default="GenericError", name="class")
    desc: str = ""


class _Answer(msgspec.Struct, frozen=True):
    value: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="return")
    error: _Error | None = None


class Line:
    """`send` takes bytes for the agent; `broken` is told why, once, when the line broke. `heard` and `reset` are called by whoever has the
    connection: with what came, and when it is another one."""

    def __init__(self, send: Callable[[bytes], None], broken: Callable[[str], None]) -> None:
        self._send, self._broken = send, broken
        self._turn = asyncio.Lock()
        self._buffer = bytearray()
        self._limit = 0  # of the answer that is awaited
        self._skipped = 0
        self._sync: re.Pattern[bytes] | None = None  # what is looked for
        self._synced = False
        self._waiting: asyncio.Future[bytes] | None = None
        self._still = False
        self._ended = False

    # --- life --------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """There is another connection. Requests wait while there is none (`hold`)."""
        self._buffer.clear()
        self._synced = False

    async def hold(self, timeout_s: float) -> None:
        """Come to a stop: no request is under way when this returns, and none begins before `go_on`. Raises Unavailable."""
        if self._still:
            return
        if self._sync is not None:
            self._fail(Unavailable("the guest's agent does not answer"))
        try:
            async with asyncio.timeout(timeout_s):
                await self._turn.acquire()
        except TimeoutError:
            raise Unavailable(f"the guest's agent did not finish within {timeout_s:g} s") from None
        self._still = True

    def go_on(self) -> None:
        if self._still:
            self._still = False
            self._turn.release()

    def end(self) -> None:
        """The sandbox is gone."""
        self._ended = True
        self._buffer.clear()
        self._fail(SandboxLost("the sandbox has ended"))

    def _fail(self, error: Exception) -> None:
        waiting, self._waiting, self._sync = self._waiting, None, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)

    def _break(self, why: str) -> None:
        self.end()
        self._broken(why)

    # --- asking ------------------------------------------------------------------------------------------------------

    async def ready(self, timeout_s: float = SYNC_S) -> None:
        """Returns when the agent is there. Raises Unavailable, SandboxLost."""
        async with self._turn:
            if not self._synced:
                await self._begin(timeout_s)

    async def call(
        self, command: str, arguments: Mapping[str, object], kind: type[T], *, limit: int = MAX_ANSWER, timeout_s: float = ANSWER_S
    ) -> T:
        """Raises AgentRefused, Unavailable (no agent, no answer in time), SandboxLost."""
        async with self._turn:
            if not self._synced:
                await self._begin(SYNC_S)
            request = msgspec.json.encode({"execute": command, "arguments": dict(arguments)})
            said = await self._exchange(request + b"\n", limit, timeout_s)
            try:
                answer = msgspec.json.decode(said, type=_Answer)
                if answer.error is None:
                    return msgspec.json.decode(answer.value, type=kind)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                answer = None
            if answer is None or answer.error is None:
                self._break("the guest's agent said what no agent says")
                raise SandboxLost("the sandbox has ended: the guest's agent said what no agent says")
            raise AgentRefused(answer.error.kind[:80], answer.error.desc[:500] or "refused")

    async def _begin(self, timeout_s: float) -> None:
        number = secrets.randbits(52)
        request = msgspec.json.encode({"execute": "guest-sync-delimited", "arguments": {"id": number}})
        self._buffer.clear()
        self._skipped, self._sync = 0, re.compile(rb'\xff\s*{\s*"return"\s*:\s*%d\s*}\s*\n' % number)
        try:
            # The mark makes the agent forget whatever half a request it has heard so far.
            await self._exchange(MARK + request + b"\n", MAX_SYNC_LINE, timeout_s)
        finally:
            self._sync = None
        self._synced = True

    async def _exchange(self, request: bytes, limit: int, timeout_s: float) -> bytes:
        if self._ended:
            raise SandboxLost("the sandbox has ended")
        self._waiting, self._limit = asyncio.get_running_loop().create_future(), limit
        waiting = self._waiting
        try:
            self._send(request)
            async with asyncio.timeout(timeout_s):
                return await waiting
        except TimeoutError:
            raise Unavailable(f"the guest's agent does not answer (within {timeout_s:g} s)") from None
        finally:
            if not waiting.done() or waiting.cancelled() or waiting.exception() is not None:
                self._synced = False  # an answer may come yet
            self._waiting = None

    # --- hearing -----------------------------------------------------------------------------------------------------

    def heard(self, data: bytes | memoryview) -> None:
        if self._waiting is None:
            self._synced = False
            return
        at = len(self._buffer)
        self._buffer += data
        if self._sync is not None:
            self._seek()
            return
        end = self._buffer.find(b"\n", at)
        if (end if end >= 0 else len(self._buffer)) > self._limit:
            self._break("the guest's agent answers without end")
        elif end >= 0:
            if end + 1 < len(self._buffer):
                self._synced = False  # more than was asked for
            self._give(bytes(self._buffer[:end]))

    def _seek(self) -> None:
        """Look for the beginning."""
        if self._sync is not None and self._sync.search(self._buffer):
            self._give(b"")
        elif len(self._buffer) > MAX_SYNC_LINE:
            self._skip(len(self._buffer) - MAX_SYNC_LINE)

    def _skip(self, count: int) -> None:
        del self._buffer[:count]
        self._skipped += count
        if self._skipped > MAX_SKIPPED:
            self._break("the guest's agent says much, and not what it was asked")

    def _give(self, line: bytes) -> None:
        waiting, self._waiting = self._waiting, None
        self._buffer.clear()
        if waiting is not None and not waiting.done():
            waiting.set_result(line)


def packed(data: bytes) -> str:
    return base64.b64encode(data).decode()


def unpacked(text: str | None) -> bytes | None:
    """None for what is no base64."""
    try:
        return base64.b64decode(text or "", validate=True)
    except (binascii.Error, ValueError):
        return None
