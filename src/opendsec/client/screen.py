# SPDX-License-Identifier: Apache-2.0
"""What a machine shows, and its pointer and keyboard. Points are pixels from the upper left corner of the screen.

Raises Unsupported for a sandbox without a screen.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable

from opendsec.api import routes, wire
from opendsec.api.errors import Unavailable, Unsupported
from opendsec.api.screen import InputRequest, MouseButton, ScreenSize, VncTicket
from opendsec.client import _core
from opendsec.client.link import Link
from opendsec.client.transport import ConnectionBroken


class Screen:
    """The screen of one sandbox."""

    def __init__(self, link: Link, sandbox_id: str) -> None:
        self._link = link
        self._ids = {"sandbox_id": sandbox_id}

    async def png(self) -> bytes:
        """A picture of it now, as a PNG file."""
        async with self._link.download(routes.SCREEN, self._ids, query={}) as answer:
            return b"".join([chunk async for chunk in answer.chunks()])

    async def size(self) -> tuple[int, int]:
        """Width and height."""
        return _pair(await self._link.call(routes.SCREEN_SIZE, ScreenSize, self._ids))

    async def resize(self, width: int, height: int, *, action_id: str | None = None) -> tuple[int, int]:
        """Ask for another size; the size that came of it. Raises Unsupported where the guest does not follow."""
        body = wire.convert({"width": width, "height": height}, ScreenSize)
        body.check()
        return _pair(await self._link.call(routes.SCREEN_RESIZE, ScreenSize, self._ids, body=body, query={"action_id": action_id}))

    async def vnc(self, said: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
        """A connection to the machine's VNC server: what it says, while it is told what `said` gives. `dsec vnc` makes a port of this."""
        if not self._link.transport.duplex:
            raise Unsupported("this connection cannot send and receive at once; use the unix socket of the edge")
        ticket = await self._link.call(routes.VNC, VncTicket, self._ids)
        request = _core.request(routes.VNC_STREAM, {"token": ticket.token}, body=said)
        try:
            async with self._link.transport.stream(request) as answer:
                if answer.status >= 400:
                    _core.read_nothing(answer.status, b"".join([chunk async for chunk in answer.chunks()]))
                async for chunk in answer.chunks():
                    yield chunk
        except ConnectionBroken as error:
            raise Unavailable(str(error), data={"sent": error.sent}) from None


class _Input:
    def __init__(self, link: Link, sandbox_id: str) -> None:
        self._link = link
        self._ids = {"sandbox_id": sandbox_id}

    async def _send(self, kind: str, **fields: object) -> None:
        body = wire.convert({"events": [{"kind": kind, **fields}]}, InputRequest)
        body.check()
        await self._link.call(routes.INPUT, ScreenSize, self._ids, body=body)


class Mouse(_Input):
    """Its pointer. Each call returns once the machine has been told."""

    async def move(self, x: int, y: int) -> None:
        """Go there."""
        await self._send("move", x=x, y=y)

    async def click(self, x: int, y: int, *, button: MouseButton = "left", count: int = 1) -> None:
        """Press and release a button there, `count` times: 2 is a double click."""
        await self._send("click", x=x, y=y, button=button, count=count)

    async def down(self, button: MouseButton = "left") -> None:
        """Press a button where the pointer is, and keep it down: to drag, `down`, `move`, `up`."""
        await self._send("button", button=button, down=True)

    async def up(self, button: MouseButton = "left") -> None:
        """Let the button go."""
        await self._send("button", button=button, down=False)

    async def scroll(self, x: int, y: int, *, dx: int = 0, dy: int = 0) -> None:
        """Turn the wheel there, by notches: positive is right and down."""
        await self._send("scroll", x=x, y=y, dx=dx, dy=dy)


class Keyboard(_Input):
    """Its keyboard. Each call returns once the machine has been told."""

    async def press(self, keys: str) -> None:
        """Press and release a key, or several together: `enter`, `f5`, `ctrl+s`."""
        await self._send("key", keys=keys)

    async def type(self, text: str) -> None:
        """Type text, as a keyboard of the United States has it."""
        await self._send("text", text=text)


def _pair(size: ScreenSize) -> tuple[int, int]:
    return size.width, size.height
