# SPDX-License-Identifier: Apache-2.0
"""Whether anybody is there. Whoever is root in the guest can stop guestd as well as replace it. So while anything is expected of it, a
guest that says nothing is asked for a sign of life, and given up if none comes in SILENT_S seconds. Those count while it can run
(`served`): a guest that is slow since its machine gets no CPU, or stands still, is not a silent one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

QUIET_S, REST_S = 10.0, 30.0  # without a word, before it is asked for one: while answers are due; while only commands run
STEP_S = 2.0
SILENT_S = 60.0

Expected = int
NOTHING, NO_WORD, ENDS, ANSWERS = range(4)
"""Nothing at all; nothing now, for it stands still or is just greeted; that something ends; answers."""

WHY = "somebody inside has stopped its guestd, or its kernel hangs"


class Silence:
    """Of one channel. `expects`: what it expects of the guest now; `ask`: for a sign of life; `give_up`: with the reason."""

    def __init__(self, expects: Callable[[], Expected], ask: Callable[[], None], give_up: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._expects, self._ask, self._give_up = expects, ask, give_up
        self.served: Callable[[float], float] = lambda seconds: seconds
        """Of so many seconds since it was called last, how many the guest could run."""
        self.heard = False  # since the last look: set by the channel
        self.timer: asyncio.TimerHandle | None = None
        self._heard_at = self._looked_at = 0.0
        self._silent_s: float | None = None  # since it was asked

    def begin(self) -> None:
        """Something is expected, and `timer` is None."""
        self._heard_at = self._loop.time()
        self.timer = self._loop.call_later(QUIET_S, self._look)

    def close(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def _look(self) -> None:
        """Again and again, while anything is expected of the guest."""
        self.timer = None
        now, expected = self._loop.time(), self._expects()
        if expected == NOTHING:
            self.heard, self._silent_s = False, None
            return
        if self.heard or expected == NO_WORD:
            self.heard, self._heard_at, self._silent_s = False, now, None
        elif self._silent_s is not None:
            self._silent_s += self.served(min(now - self._looked_at, 2 * STEP_S))  # this loop may not have turned
            if self._silent_s >= SILENT_S:
                self._give_up(f"the guest has said nothing for {SILENT_S:g} s: {WHY}")
                return
        self.timer = self._loop.call_later(QUIET_S if self._silent_s is None else STEP_S, self._look)
        self._looked_at = now
        if self._silent_s is None and now - self._heard_at >= (QUIET_S if expected == ANSWERS else REST_S):
            self._silent_s = 0.0
            self.served(0.0)
            self._ask()
