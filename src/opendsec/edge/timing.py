# SPDX-License-Identifier: Apache-2.0
"""Time as the execution of commands sees it, passed in so that tests can hold it still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> None:
        """It will not fire any more; may be repeated, also after it fired."""


class Clock(Protocol):
    def wall(self) -> float:
        """Unix seconds."""

    def monotonic(self) -> float:
        """Seconds since some moment."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer: ...


class LoopClock:
    """The machine's clocks, and timers of the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        return self._loop.call_later(delay_s, callback)
