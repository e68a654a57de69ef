# SPDX-License-Identifier: Apache-2.0
"""Work that holds the event loop for long (a result of 20 MiB is some 70 ms of encoding) takes turns.

Forty commands that end at once, each with as much output as is kept, would otherwise keep every other sandbox waiting for seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from opendsec.api.exec import ExecResult
from opendsec.api.fn import FnResult

LARGE_BYTES = 256 << 10  # less than this is not worth a turn
T = TypeVar("T")


class Turns:
    """One such piece of work at a time, and after each the loop is for others for as long as it took."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def do(self, work: Callable[[], T], size: int) -> T:
        """The result of `work`, which is about `size` bytes."""
        if size < LARGE_BYTES:
            return work()
        await self._turn.acquire()
        began = time.perf_counter()
        try:
            return work()
        finally:
            # Whoever has had a turn goes on at once: only the next one waits.
            asyncio.get_running_loop().call_later(time.perf_counter() - began, self._turn.release)


def size_of(result: object) -> int:
    """How much of it is output; 0 for anything but the result of a command or a call."""
    if isinstance(result, FnResult):
        return len(result.stdout.data) + len(result.stderr.data) + sum(map(len, result.files.values()))
    if not isinstance(result, ExecResult):
        return 0
    return sum(len(kept.head) + len(kept.tail) for kept in (result.stdout, result.stderr))
