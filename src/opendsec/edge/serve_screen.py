# SPDX-License-Identifier: Apache-2.0
"""Routes about what a machine shows, its pointer and keyboard, and its VNC server.

VNC goes through the edge's own connections, as a request whose body and answer flow at the same time: whoever may talk to the edge has
shown that already (the socket's mode, or the bearer token over TCP), a gateway can pass it on, and no port is opened that any local user
could connect to. A ticket binds such a connection to one sandbox, once, for a short time, so that it can be given to a viewer's helper.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator

from opendsec.api.errors import NotFound, Unsupported
from opendsec.api.screen import Button, Click, InputEvent, InputRequest, Key, Move, ScreenSize, Scroll, Text, VncTicket
from opendsec.edge.http import Disconnected, Duplex, Handler, Raw, Request
from opendsec.edge.node import Node
from opendsec.edge.pausing import awake
from opendsec.runtime.backend import Screen

TICKET_S = 60.0  # from its making until it must be used
PIECE_BYTES = 64 << 10


class ScreenRoutes:
    """Handlers for one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._tickets: dict[str, tuple[str, float]] = {}  # sandbox and when it expires

    def handlers(self) -> dict[str, Handler]:
        return {
            "SCREEN": self.png,
            "SCREEN_SIZE": self.size,
            "SCREEN_RESIZE": self.resize,
            "INPUT": self.input,
            "VNC": self.ticket,
            "VNC_STREAM": self.vnc,
        }

    @contextlib.asynccontextmanager
    async def _screen(self, sandbox_id: str) -> AsyncIterator[Screen]:
        async with awake(self._node, sandbox_id) as (box, handle):
            if handle.screen is None:
                raise Unsupported(f"sandbox {box.id} ({box.backend}) has no screen", field="sandbox_id")
            yield handle.screen

    async def png(self, request: Request) -> Raw:
        async with self._screen(request.params[0]) as screen:
            image = await screen.png()

        async def whole() -> AsyncGenerator[bytes, None]:
            yield image

        return Raw(whole(), len(image), lambda: None, content_type=b"image/png")

    async def size(self, request: Request) -> ScreenSize:
        async with self._screen(request.params[0]) as screen:
            return _size(screen)

    async def resize(self, request: Request) -> ScreenSize:
        wanted = await request.json(ScreenSize)
        wanted.check()
        async with self._screen(request.params[0]) as screen:
            request.intent.begin()
            await screen.resize(wanted.width, wanted.height)
            return _size(screen)

    async def input(self, request: Request) -> ScreenSize:
        wanted = await request.json(InputRequest)
        wanted.check()
        async with self._screen(request.params[0]) as screen:
            request.intent.begin()
            for event in wanted.events:
                await _do(screen, event)
            return _size(screen)

    # --- VNC -------------------------------------------------------------------------------------------------------------

    async def ticket(self, request: Request) -> VncTicket:
        await request.no_body()
        sandbox_id = request.params[0]
        async with self._screen(sandbox_id):
            pass
        now = self._node.clock.time()
        self._tickets = {token: one for token, one in self._tickets.items() if one[1] > now}
        token, expires_at = secrets.token_urlsafe(24), now + TICKET_S
        self._tickets[token] = (sandbox_id, expires_at)
        return VncTicket(token=token, expires_at=expires_at)

    async def vnc(self, request: Request) -> Duplex:
        sandbox_id, expires_at = self._tickets.pop(request.params[0], ("", 0.0))
        if expires_at <= self._node.clock.time():
            raise NotFound("no such ticket: each is for one connection, and must be used soon", field="token")
        async with self._screen(sandbox_id) as screen:
            connection = await screen.vnc()
        connection.setblocking(False)
        return Duplex(self._passed(request, sandbox_id, connection), content_type=b"application/octet-stream")

    async def _passed(self, request: Request, sandbox_id: str, connection: socket.socket) -> AsyncGenerator[bytes, None]:
        """What the server says, while what the client says is passed on to it. The sandbox is in use meanwhile."""
        loop = asyncio.get_running_loop()

        async def pass_on() -> None:
            async for chunk in request.chunks():
                await loop.sock_sendall(connection, chunk)
            connection.shutdown(socket.SHUT_WR)

        passing = asyncio.ensure_future(pass_on())
        try:
            with self._node.use(self._node.box(sandbox_id)):
                while True:
                    reading = asyncio.ensure_future(loop.sock_recv(connection, PIECE_BYTES))
                    waiting = {reading} if passing.done() else {reading, passing}
                    try:
                        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                        if passing.done():
                            passing.result()  # the client went away: Disconnected
                        data = await reading
                    finally:
                        reading.cancel()
                    if not data:
                        return
                    yield data
        except OSError:
            return  # the machine ended, or was paused: an end, not a hang
        finally:
            passing.cancel()
            with contextlib.suppress(asyncio.CancelledError, Disconnected, OSError):
                await passing
            connection.close()


def _size(screen: Screen) -> ScreenSize:
    width, height = screen.size
    return ScreenSize(width=width, height=height)


async def _do(screen: Screen, event: InputEvent) -> None:
    match event:
        case Move():
            await screen.move(event.x, event.y)
        case Button():
            await screen.button(event.button, down=event.down)
        case Click():
            await screen.click(event.x, event.y, button=event.button, count=event.count)
        case Scroll():
            await screen.scroll(event.x, event.y, dx=event.dx, dy=event.dy)
        case Key():
            await screen.key(event.keys)
        case Text():
            await screen.text(event.text)
