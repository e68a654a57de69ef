# SPDX-License-Identifier: Apache-2.0
"""What happens to a pool, and what it tells to do: the vocabulary of `pool`."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, TypeAlias

import msgspec

from opendsec.api.fn import Reuse

Why = Literal["pool", "platform", "quota"]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What may change while the members stay."""

    size: int
    max: int
    reuse: Reuse
    idle_s: float


# --- events ----------------------------------------------------------------------------------------------------------


class Asked(msgspec.Struct, frozen=True):
    """A call wants a member. `caller`: whose turn it uses. `again`: it goes first, it has waited before."""

    call: int
    caller: Hashable
    tenant: str
    fresh: bool
    at: float
    again: bool = False


class Withdrawn(msgspec.Struct, frozen=True):
    """A waiting call is no longer wanted."""

    call: int
    at: float


class Started(msgspec.Struct, frozen=True):
    number: int
    at: float


class StartFailed(msgspec.Struct, frozen=True):
    """`fault`: "pool" if it will fail again as long as the pool is as it is."""

    number: int
    at: float
    message: str
    fault: Literal["pool", "platform"]


class NoRoom(msgspec.Struct, frozen=True):
    """Admission refused it. `hope`: somebody else's member is about to make room."""

    number: int
    at: float
    message: str
    hope: bool


class RoomMade(msgspec.Struct, frozen=True):
    at: float


class Ended(msgspec.Struct, frozen=True):
    """A member's call has ended; `lost`: so has the member, or it must not serve another."""

    number: int
    at: float
    lost: str = ""


class Lost(msgspec.Struct, frozen=True):
    """A member that served nobody has died."""

    number: int
    at: float
    message: str


class Gone(msgspec.Struct, frozen=True):
    """Nothing of it is left."""

    number: int
    at: float


class Reshaped(msgspec.Struct, frozen=True):
    """`replace`: members as they are now are of no more use."""

    shape: Shape
    replace: bool
    at: float


class Drained(msgspec.Struct, frozen=True):
    """No more calls come; those that wait are served."""

    at: float


class Evicted(msgspec.Struct, frozen=True):
    """Give up a member beyond `keep` for the sake of another pool: an idle one, else one that has served for a while, after its call."""

    keep: int
    at: float


class Ticked(msgspec.Struct, frozen=True):
    at: float


Event: TypeAlias = (
    Asked | Withdrawn | Started | StartFailed | NoRoom | RoomMade | Ended | Lost | Gone | Reshaped | Drained | Evicted | Ticked
)

# --- instructions ----------------------------------------------------------------------------------------------------


class Create(msgspec.Struct, frozen=True):
    """Ends with Started, StartFailed or NoRoom."""

    number: int


class Destroy(msgspec.Struct, frozen=True):
    """Ends with Gone."""

    number: int


class Assign(msgspec.Struct, frozen=True):
    """Ends with Ended. `cold`: the call had to wait for this member to be started."""

    number: int
    call: int
    cold: bool


class Fail(msgspec.Struct, frozen=True):
    call: int
    why: Why
    message: str


class SetTimer(msgspec.Struct, frozen=True):
    """Ticked at `at`, instead of what was set before."""

    at: float


class Empty(msgspec.Struct, frozen=True):
    """Drained, and nothing is left of it."""


Instruction: TypeAlias = Create | Destroy | Assign | Fail | SetTimer | Empty
