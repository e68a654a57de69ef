# SPDX-License-Identifier: Apache-2.0
"""What a machine shows, and its pointer and keyboard. Points are pixels from the upper left corner of the screen."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from opendsec.api.errors import InvalidRequest
from opendsec.api.spec import SCREEN_PIXELS, check_integer, check_pixels, check_text

MAX_EVENTS = 1000
MAX_TEXT_BYTES = 16 << 10
MAX_KEYS_BYTES = 128

MouseButton = Literal["left", "middle", "right"]


class Move(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="move"):
    """The pointer goes there."""

    x: int
    y: int


class Button(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="button"):
    """A button goes down, or up, where the pointer is."""

    down: bool
    button: MouseButton = "left"


class Click(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="click"):
    x: int
    y: int
    button: MouseButton = "left"
    count: int = 1  # 2: a double click


class Scroll(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="scroll"):
    """The wheel turns by notches, positive is right and down, with the pointer there."""

    x: int
    y: int
    dx: int = 0
    dy: int = 0


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="key"):
    """A key is pressed and released, or several together: `enter`, `ctrl+s`."""

    keys: str


class Text(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="text"):
    """Text is typed."""

    text: str


InputEvent: TypeAlias = Move | Button | Click | Scroll | Key | Text


class InputRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to be done with pointer and keyboard, one after the other. If one fails, those before it have happened."""

    events: tuple[InputEvent, ...]

    def check(self) -> None:
        """Raises InvalidRequest naming the field and the rule."""
        if not 1 <= len(self.events) <= MAX_EVENTS:
            raise InvalidRequest(f"must be 1 to {MAX_EVENTS} events; got {len(self.events)}", field="events")
        for index, event in enumerate(self.events):
            _check(event, f"events[{index}]")


def _check(event: InputEvent, field: str) -> None:
    if isinstance(event, Move | Click | Scroll):
        check_integer(event.x, f"{field}.x", (0, SCREEN_PIXELS[0][1] - 1))
        check_integer(event.y, f"{field}.y", (0, SCREEN_PIXELS[1][1] - 1))
    match event:
        case Click():
            check_integer(event.count, f"{field}.count", (1, 3))
        case Scroll():
            check_integer(event.dx, f"{field}.dx", (-100, 100))
            check_integer(event.dy, f"{field}.dy", (-100, 100))
            if not event.dx and not event.dy:
                raise InvalidRequest("give dx or dy or both", field=f"{field}.dx")
        case Key():
            if not event.keys:
                raise InvalidRequest("must name a key, or several with + between them", field=f"{field}.keys")
            check_text(event.keys, f"{field}.keys", limit=MAX_KEYS_BYTES)
        case Text():
            if not event.text:
                raise InvalidRequest("must not be empty", field=f"{field}.text")
            check_text(event.text, f"{field}.text", limit=MAX_TEXT_BYTES)


class ScreenSize(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a screen, in pixels."""

    width: int
    height: int

    def check(self) -> None:
        """Raises InvalidRequest naming the field and the rule."""
        check_pixels(self.width, self.height, ("width", "height"))


class VncTicket(msgspec.Struct, frozen=True, kw_only=True):
    """The right to one connection to the machine's VNC server, by the route VNC_STREAM, until it expires (unix seconds) or is used."""

    token: str
    expires_at: float
