# SPDX-License-Identifier: Apache-2.0
"""A guest of a few lines at the other end of a channel: it answers as a guestd that has nothing to do, and says what a test wants."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import NamedTuple

from opendsec.runtime.guest import wire


class Frame(NamedTuple):
    type: int
    flags: int
    id: int
    payload: bytes


Answer = Callable[[Frame], bytes | None]


def frame(kind: int, number: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return wire.header(kind, number, len(payload), flags) + payload


def answer(asked: Frame, payload: bytes = b"") -> bytes:
    return frame(asked.type | wire.ANSWER, asked.id, payload)


def error(asked: Frame, code: int, text: str) -> bytes:
    return frame(wire.ERROR, asked.id, wire.u32(code) + wire.string(text))


def exit_payload(code: int = 0, *, signal: int = 0, tree_alive: bool = False, ends: tuple[int, ...] = ()) -> bytes:
    counters = wire.u64(0) + wire.u64(0) + wire.u32(0) + wire.u32(0)
    how = wire.u32(1) + wire.u32(signal) if signal else wire.u32(0) + wire.u32(code)
    listed = wire.u32(len(ends)) + b"".join(map(wire.u64, ends))
    return how + wire.u64(1000) + wire.u64(1 << 20) + wire.u32(tree_alive) + counters + listed


class FakeGuest:
    """`replies`: by request type, what to send instead of the usual answer (None: nothing). `received`: all frames so far."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.replies: dict[int, Answer] = {}
        self.received: list[Frame] = []
        self.reading = asyncio.Event()  # cleared: it does not listen
        self.reading.set()
        self._changed = asyncio.Event()
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        loop, data = asyncio.get_running_loop(), b""
        try:
            while got := await loop.sock_recv(self._sock, 1 << 16):
                data += got
                while len(data) >= wire.HEADER_BYTES:
                    head = wire.parse_header(data)
                    whole = wire.HEADER_BYTES + head.length
                    if len(data) < whole:
                        break
                    one = Frame(head.type, head.flags, head.id, data[wire.HEADER_BYTES : whole])
                    data = data[whole:]
                    self.received.append(one)
                    self._changed.set()
                    if (said := self.replies.get(one.type, usual)(one)) is not None:
                        await self.say(said)
                await self.reading.wait()
        except OSError:
            pass  # the host has closed

    async def say(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def hear(self, kind: int, count: int = 1) -> Frame:
        """The `count`th frame of a type."""
        while len(found := [one for one in self.received if one.type == kind]) < count:
            self._changed.clear()
            await self._changed.wait()
        return found[count - 1]

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._sock.close()


def usual(asked: Frame) -> bytes | None:
    if asked.type in wire.STREAM_TYPES:
        return None
    if asked.type == wire.HELLO:
        return answer(asked, wire.u32(wire.VERSION) + wire.u32(0) + asked.payload[8:24] + wire.u64(1) + wire.string("fake"))
    if asked.type in (wire.PING, wire.UNPARK):
        return answer(asked, asked.payload)
    if asked.type == wire.EXEC:
        return answer(asked, wire.u64(7))
    if asked.type in (wire.SIGNAL, wire.MARK, wire.MEMBERS, wire.CUT):
        return answer(asked, wire.u32(0))
    return answer(asked)
