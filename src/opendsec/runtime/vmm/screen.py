# SPDX-License-Identifier: Apache-2.0
"""A machine's screen, pointer and keyboard, by QMP."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence

from opendsec.api.errors import InvalidRequest, Unsupported
from opendsec.api.screen import MouseButton
from opendsec.runtime.vmm import keys
from opendsec.runtime.vmm.process import Vmm

AXIS = 0x7FFF  # both axes of the pointer go from 0 to this
# The machine's keyboard keeps no more than 16 events that its guest has not read, and what does not fit is lost; nothing tells how many
# there are. So time is left for a guest to read them, more where it is emulated.
KEY_S = {"kvm": 0.01, "tcg": 0.05}
BUTTON_S = 0.03
_PNG = b"\x89PNG\r\n\x1a\n"

Event = dict[str, object]


class VmScreen:
    """See `runtime.backend.Screen`. `vmm`: the machine as it is now, which a pause changes; raises SandboxLost, Unavailable."""

    def __init__(self, vmm: Callable[[], Vmm], size: tuple[int, int]) -> None:
        self._vmm, self._size = vmm, size
        self._turn = asyncio.Lock()  # what two type at once does not come out mixed

    @property
    def size(self) -> tuple[int, int]:
        return self._size

    async def png(self) -> bytes:
        image = await self._vmm().screendump()
        self._size = size_of(image, self._size)
        return image

    async def move(self, x: int, y: int) -> None:
        async with self._turn:
            await self._send(self._at(x, y))

    async def button(self, button: MouseButton, *, down: bool) -> None:
        async with self._turn:
            await self._send([_button(button, down)])

    async def click(self, x: int, y: int, *, button: MouseButton = "left", count: int = 1) -> None:
        async with self._turn:
            await self._send(self._at(x, y))
            for _ in range(count):
                for down in (True, False):
                    await asyncio.sleep(BUTTON_S)
                    await self._send([_button(button, down)])

    async def scroll(self, x: int, y: int, *, dx: int = 0, dy: int = 0) -> None:
        async with self._turn:
            await self._send(self._at(x, y))
            for name, count in (("wheel-down" if dy > 0 else "wheel-up", abs(dy)), ("wheel-right" if dx > 0 else "wheel-left", abs(dx))):
                for _ in range(count):
                    await self._send([_button(name, True)])
                    await self._send([_button(name, False)])
                    await self._rest()

    async def key(self, keys_: str) -> None:
        await self._press([keys.pressed(keys_)])

    async def text(self, text: str) -> None:
        await self._press([keys.typed(character) for character in text])

    async def resize(self, width: int, height: int) -> None:
        if (width, height) != self._size:
            raise Unsupported("what a machine's screen is like is said when it is created, by `display`", field="width")

    async def vnc(self) -> socket.socket:
        return await self._vmm().vnc()

    # --- events --------------------------------------------------------------------------------------------------------

    async def _press(self, strokes: Sequence[tuple[str, ...]]) -> None:
        async with self._turn:
            for number, stroke in enumerate(strokes):
                if number:
                    await self._rest()
                for name in stroke:
                    await self._send([_key(name, True)])
                await self._rest()
                await self._send([_key(name, False) for name in reversed(stroke)])

    def _at(self, x: int, y: int) -> list[Event]:
        width, height = self._size
        if not (0 <= x < width and 0 <= y < height):
            raise InvalidRequest(f"the screen has {width}x{height} pixels; ({x}, {y}) is outside", field="x")
        return [
            {"type": "abs", "data": {"axis": axis, "value": round(at * AXIS / max(1, total - 1))}}
            for axis, at, total in (("x", x, width), ("y", y, height))
        ]

    async def _rest(self) -> None:
        await asyncio.sleep(KEY_S.get(self._vmm().record.accel, KEY_S["tcg"]))

    async def _send(self, events: list[Event]) -> None:
        await self._vmm().call("input-send-event", events=events)


def _button(name: str, down: bool) -> Event:
    return {"type": "btn", "data": {"button": name, "down": down}}


def _key(name: str, down: bool) -> Event:
    return {"type": "key", "data": {"key": {"type": "qcode", "data": name}, "down": down}}


def size_of(image: bytes, otherwise: tuple[int, int]) -> tuple[int, int]:
    """Width and height as a PNG says."""
    if image[:8] != _PNG or len(image) < 24:
        return otherwise
    width, height = struct.unpack_from(">II", image, 16)
    return width, height
