# SPDX-License-Identifier: Apache-2.0
"""What a remote store can do, whatever it is made of, and how it fails.

A store holds immutable objects under keys such as `layers/sha256-…/layer.json` (`origins.is_key` says what a key may be). A put is
atomic: others see the whole object or none. Nothing here needs locks, conditional writes or listing to be consistent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Literal, Protocol

from opendsec.api.errors import Internal, NotFound, OpenDSecError, Unavailable

Kind = Literal["missing", "denied", "unreachable", "damaged", "full"]


class StoreError(Exception):
    """A store did not do what was asked. The message is ours from the first letter to the last: what a library or a server said may
    have credentials in it (an address with a password, a signed query), so none of that is ever passed on.

    missing      no such object
    denied       the store refuses us: credentials missing, wrong, or not enough
    unreachable  no answer, an error of the server, or too late
    damaged      an answer that is not the object: cut short, or other bytes than the checksum says
    full         no space left
    """

    def __init__(self, kind: Kind, store: str, key: str, why: str) -> None:
        super().__init__(f"store {store}: {key or 'the store'}: {why}")
        self.kind: Kind = kind
        self.store = store
        self.key = key
        self.why = why

    def to_api(self, field: str | None = None) -> OpenDSecError:
        """The error for a caller of the edge."""
        data = {"store": self.store, "kind": self.kind, "key": self.key}
        if self.kind == "missing":
            return NotFound(str(self), field=field, data=data)
        return (Internal if self.kind == "damaged" else Unavailable)(str(self), field=field, data=data)


def ignore(done: int) -> None:
    """No progress wanted."""


class RemoteStore(Protocol):
    """All methods raise StoreError and nothing else (besides cancellation), end in bounded time, and may be called concurrently from
    one event loop."""

    @property
    def name(self) -> str:
        """As configured."""

    @property
    def writable(self) -> bool: ...

    async def get(self, key: str, *, limit: int) -> bytes:
        """The whole object; `damaged` if it is larger than `limit`."""

    async def get_range(self, key: str, start: int, length: int) -> bytes | memoryview:
        """Exactly `length` bytes; `damaged` if the object does not have them."""

    async def put(self, key: str, content: bytes | Path, *, progress: Callable[[int], None] = ignore) -> None:
        """Make the object at `key` this, at once; it replaces one that is there. `progress` gets the bytes sent so far, from any
        thread; after a retry they start anew."""

    async def size(self, key: str) -> int:
        """In bytes."""

    def list(self, prefix: str) -> AsyncIterator[str]:
        """The keys below `prefix`, which is whole path components, in no order. Stores that cannot list say `denied`."""

    async def delete(self, key: str) -> None:
        """Nothing happens if there is none."""

    async def close(self) -> None: ...


async def exists(store: RemoteStore, key: str) -> bool:
    """Raises StoreError."""
    try:
        await store.size(key)
    except StoreError as error:
        if error.kind != "missing":
            raise
        return False
    return True
