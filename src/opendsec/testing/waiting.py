# SPDX-License-Identifier: Apache-2.0
"""Waiting in tests for what nobody tells of, such as a process that has to be seen in a control group.

Where something can be awaited, await that. A loop that only looks again takes the processor from what it waits for, which on a machine
with few of them is the difference between soon and never; so these look often at first, and then now and again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator

AT_ONCE = 20
MAX_PAUSE_S = 0.01


def pauses() -> Iterator[float]:
    """How long to wait before each further look, in seconds."""
    for _ in range(AT_ONCE):
        yield 0.0
    pause_s = 0.0005
    while True:
        yield pause_s
        pause_s = min(pause_s * 1.5, MAX_PAUSE_S)


async def eventually(condition: Callable[[], object]) -> None:
    """Until the condition holds. The event loop turns in between, and the test's own time-out is the limit."""
    for pause_s in pauses():
        if condition():
            return
        await asyncio.sleep(pause_s)


def until(condition: Callable[[], object], what: str, *, timeout_s: float) -> None:
    """The same where no event loop turns. Raises AssertionError, with `what` as the complaint, if it does not come in time."""
    deadline = time.monotonic() + timeout_s
    for pause_s in pauses():
        if condition():
            return
        assert time.monotonic() < deadline, what
        if pause_s:
            time.sleep(pause_s)
        else:
            os.sched_yield()
