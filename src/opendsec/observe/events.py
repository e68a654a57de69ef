# SPDX-License-Identifier: Apache-2.0
"""Where events go: numbered, given to a store, and handed to whoever follows them.

An emitter never waits. What is emitted lies in a pending list until `flush` gives it to the store; a follower that reads too slowly
loses events, never memory of ours, and is told how many.

Kinds (dotted, append-only): `sandbox.created`, `sandbox.adopted`, `sandbox.create_failed`, `sandbox.stopped`, `sandbox.lost`,
`sandbox.destroy_failed`, `pool.declared`, `pool.removed`, `pool.failing`, `pool.member_lost`, `fn.denied`, `fn.platform_error`,
`exec.started`, `exec.ended`, `limit.<name>`, `edge.started`, `edge.draining`, `edge.stopped`, `events.lost`,
`image.pulled`, `image.pushed`, `image.traced`, `layer.fetch_failed`, `layer.damaged`, `layer.lost`, `loader.restarted`, `cache.full`,
`trace.damaged` (docs/images.md).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

from opendsec.api.sandboxes import Event

PENDING = 2048
SEQUENCE_GAP = 2 * PENDING  # more than can be lost between two flushes, so that no number is given twice after a crash


class EventSink:
    """Numbers events and distributes them. `store` writes some, in order; `schedule` is called when a first one waits for `flush`."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        store: Callable[[Sequence[Event]], None] = lambda events: None,
        schedule: Callable[[], None] = lambda: None,
        last_seq: int = 0,
    ) -> None:
        self._clock, self._store, self._schedule = clock, store, schedule
        self._seq = last_seq + SEQUENCE_GAP if last_seq else 0
        self._pending: list[Event] = []
        self._subscriptions: set[Subscription] = set()
        self.store_failures = 0

    @property
    def seq(self) -> int:
        """Number of the last event."""
        return self._seq

    def emit(self, kind: str, sandbox_id: str | None = None, **data: str | int | float | bool | None) -> None:
        """Something happened."""
        self._seq += 1
        event = Event(seq=self._seq, at=self._clock(), kind=kind, sandbox_id=sandbox_id, data=data)
        self._pending.append(event)
        for subscription in self._subscriptions:
            subscription.offer(event)
        if len(self._pending) == 1:
            self._schedule()
        elif len(self._pending) >= PENDING:
            self.flush()

    def flush(self) -> None:
        """Give what waits to the store. What it refuses is seen by those who follow alone, and `store_failures` counts it."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        try:
            self._store(pending)
        except Exception:  # an edge that cannot write its history must go on serving; its callers hear of it by other writes
            self.store_failures += len(pending)

    def subscribe(self, *, sandbox_id: str | None = None, capacity: int = 4096) -> Subscription:
        """Follow what is emitted from now on; to be closed (it is a context manager)."""
        subscription = Subscription(self._subscriptions, sandbox_id, capacity)
        self._subscriptions.add(subscription)
        return subscription


class Subscription:
    """Events from `EventSink.subscribe` on. Iterate it; a loss shows as an event `events.lost` with `missing`."""

    def __init__(self, others: set[Subscription], sandbox_id: str | None, capacity: int) -> None:
        self._others, self._sandbox_id, self._capacity = others, sandbox_id, capacity
        self._queue: deque[Event] = deque()
        self._ready = asyncio.Event()
        self._last_lost: Event | None = None
        self._missing = 0
        self.lost = 0

    def offer(self, event: Event) -> None:
        """Queue an event, or count it as lost."""
        if self._sandbox_id not in (None, event.sandbox_id):
            return
        if len(self._queue) >= self._capacity:
            self._last_lost = event
            self._missing += 1
            self.lost += 1
        else:
            if self._missing:
                self._mark_loss()
            self._queue.append(event)
        self._ready.set()

    def _mark_loss(self) -> None:
        lost = self._last_lost
        if lost is not None:
            self._queue.append(Event(seq=lost.seq, at=lost.at, kind="events.lost", data={"missing": self._missing}))
        self._missing, self._last_lost = 0, None

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Event:
        while not self._queue:
            if self._missing:
                self._mark_loss()
                break
            self._ready.clear()
            await self._ready.wait()
        return self._queue.popleft()

    def waiting(self) -> int:
        """How many events can be read without waiting."""
        return len(self._queue)

    def close(self) -> None:
        self._others.discard(self)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
