# SPDX-License-Identifier: Apache-2.0
"""Patience with a store: retries with exponential backoff and jitter, until a deadline.

A store that answers no (missing, denied, full) is taken at its word. One that does not answer, or answers something else than was
asked for, is asked again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from opendsec.images.remote.store import RemoteStore, StoreError, ignore

T = TypeVar("T")

_WORTH_IT = ("unreachable", "damaged")


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds."""

    attempt_s: float = 10.0  # for an answer
    deadline_s: float = 60.0  # for one call with all its attempts
    attempts: int = 8
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0
    slowest_bytes_s: float = 1 << 20  # large transfers have this much longer


class Patient:
    """A store that is asked again. See `store.RemoteStore`."""

    def __init__(
        self,
        store: RemoteStore,
        patience: Patience = Patience(),  # noqa: B008  # frozen
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._store, self._patience = store, patience
        self._clock, self._sleep, self._jitter = clock, sleep, jitter

    @property
    def name(self) -> str:
        return self._store.name

    @property
    def writable(self) -> bool:
        return self._store.writable

    async def get(self, key: str, *, limit: int) -> bytes:
        return await self._ask(key, lambda: self._store.get(key, limit=limit), expected_bytes=limit)

    async def get_range(self, key: str, start: int, length: int) -> bytes | memoryview:
        async def attempt() -> bytes | memoryview:
            data = await self._store.get_range(key, start, length)
            if len(data) != length:
                raise StoreError("damaged", self.name, key, f"the answer has {len(data)} bytes instead of {length}")
            return data

        return await self._ask(key, attempt, expected_bytes=length)

    async def put(self, key: str, content: bytes | Path, *, progress: Callable[[int], None] = ignore) -> None:
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        await self._ask(key, lambda: self._store.put(key, content, progress=progress), expected_bytes=size)

    async def size(self, key: str) -> int:
        return await self._ask(key, lambda: self._store.size(key))

    async def list(self, prefix: str) -> AsyncIterator[str]:
        async def attempt() -> list[str]:
            return [key async for key in self._store.list(prefix)]

        for key in await self._ask(prefix, attempt):
            yield key

    async def delete(self, key: str) -> None:
        await self._ask(key, lambda: self._store.delete(key))

    async def close(self) -> None:
        await self._store.close()

    async def _ask(self, key: str, attempt: Callable[[], Awaitable[T]], *, expected_bytes: int = 0) -> T:
        patience = self._patience
        more = expected_bytes / patience.slowest_bytes_s
        began = self._clock()
        end = began + patience.deadline_s + more
        tries = 0
        while True:
            for_this = min(patience.attempt_s + more, max(end - self._clock(), 0.001))
            try:
                async with asyncio.timeout(for_this):
                    return await attempt()
            except TimeoutError:
                error = StoreError("unreachable", self.name, key, f"no answer within {for_this:.3g} s")
            except StoreError as caught:
                if caught.kind not in _WORTH_IT:
                    raise
                error = caught
            tries += 1
            longest = min(patience.longest_pause_s, patience.first_pause_s * 2 ** (tries - 1))
            pause = longest * (0.5 + self._jitter() / 2)
            if tries >= patience.attempts or self._clock() + pause >= end:
                waited = self._clock() - began
                raise StoreError(error.kind, self.name, key, f"{error.why} (tried {tries} times in {waited:.1f} s)") from None
            await self._sleep(pause)
