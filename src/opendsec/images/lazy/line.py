# SPDX-License-Identifier: Apache-2.0
"""How much may be under way to the stores at once for those who do not wait. Pure.

All that is under way shares one line. With everything asked for at once the first bytes come when nearly all have come, and a reader that
waits for something else gets its share of the line only. With too little, the line idles for a round trip each time. What is enough is
not known beforehand; it shows in how long answers take: a line that has a queue takes a multiple of its least time.
"""

from __future__ import annotations

from collections import deque

FIRST = 64  # chunks, which are 4 MiB: what a line of 1 Gbit/s carries in 34 ms
REMEMBER = 128  # answers
SHORT_S = 0.01  # differences between times below this are noise


class Line:
    """The window: chunks that prefetch may have under way."""

    def __init__(self, first: int = FIRST) -> None:
        self.window = self._first = first
        self._times: deque[float] = deque(maxlen=REMEMBER)

    def note(self, seconds: float, chunks: int) -> None:
        """A fetch of so many chunks took so long."""
        self._times.append(max(seconds, SHORT_S))
        least = min(self._times)
        if seconds <= 2 * least:
            self.window += chunks  # twice as much each round
        elif seconds > 4 * least:
            self.window = max(self._first, self.window - chunks)
