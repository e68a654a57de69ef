# SPDX-License-Identifier: Apache-2.0
"""Time as the node sees it: a wall clock, and timers at wall-clock times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

LONGEST_S = 600.0  # a timer set for later fires in between, so that a clock that was set is noticed


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    def time(self) -> float:
        """Unix seconds."""

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call back once, at unix time `when` or somewhat earlier: the callback looks at the time and sets another timer if need be."""


class SystemClock:
    """The machine's clock and the running event loop."""

    def time(self) -> float:
        return time.time()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        # One millisecond on top: the loop's clock and the wall clock round differently, and too early costs another round.
        delay_s = min(max(0.0, when - time.time()) + 0.001, LONGEST_S)
        return asyncio.get_running_loop().call_later(delay_s, callback)
