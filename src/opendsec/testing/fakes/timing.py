# SPDX-License-Identifier: Apache-2.0
"""A clock that stands still until a test moves it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class ManualTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    @property
    def waiting(self) -> bool:
        return self._callback is not None

    def cancel(self) -> None:
        self._callback = None

    def fire(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class ManualClock:
    """Implements `edge.timing.Clock`."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self.now = start
        self._order = itertools.count()
        self._timers: list[tuple[float, int, ManualTimer]] = []

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> ManualTimer:
        timer = ManualTimer(callback)
        heapq.heappush(self._timers, (self.now + delay_s, next(self._order), timer))
        return timer

    def waiting(self) -> list[float]:
        """In how many seconds each timer fires."""
        return sorted(due - self.now for due, _, timer in self._timers if timer.waiting)

    def advance(self, seconds: float) -> None:
        """Move on; timers fire in their order, each at its time."""
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            due, _, timer = heapq.heappop(self._timers)
            self.now = max(self.now, due)
            timer.fire()
        self.now = end
