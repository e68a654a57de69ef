# SPDX-License-Identifier: Apache-2.0
"""A clock that stands still until a test moves it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class FakeTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class FakeClock:
    """`advance` runs the timers that come due, in order."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._timers: list[tuple[float, int, FakeTimer]] = []
        self._count = itertools.count()

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(callback)
        heapq.heappush(self._timers, (when, next(self._count), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Let time pass. Each timer sees the time it was set to."""
        until = self._now + seconds
        while self._timers and self._timers[0][0] <= until:
            when, _, timer = heapq.heappop(self._timers)
            self._now = max(self._now, when)
            if timer.callback is not None:
                callback, timer.callback = timer.callback, None
                callback()
        self._now = until

    def pending(self) -> list[float]:
        """When living timers will fire."""
        return sorted(when for when, _, timer in self._timers if timer.callback is not None)
