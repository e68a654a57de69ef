# SPDX-License-Identifier: Apache-2.0
"""The time-out of a test gets through, and says what was waited for.

pytest-timeout raises in whatever runs when the alarm comes. Both event loops log what a callback raises and go on, and uvloop takes signals
in a callback of its own: a test that waited there for something that never came waited on until its commands had ended by themselves.
What both let through, and asyncio's tasks too, is SystemExit. Raised between two callbacks of asyncio it would lose the one that was next,
and the task of that one could never be ended; so it is raised in a callback, unless the loop does not come to that.
"""

from __future__ import annotations

import asyncio
import signal
import traceback
from types import FrameType

import pytest
import pytest_timeout

GRACE_S = 2.0  # for a loop to come to its callbacks
AGAIN_S = 60.0  # from one failure to the next, should somebody catch it; pytest tells of it meanwhile


class TimedOut(pytest.fail.Exception, SystemExit):
    """A failure like any other, for pytest."""


def waiting() -> str:
    """Where each task of the running event loop stands."""
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        return ""
    lines = []
    for task in tasks:
        lines.append(f"task {task.get_name()}:\n")
        at: object = task.get_coro()
        while isinstance(frame := getattr(at, "cr_frame", None) or getattr(at, "gi_frame", None), FrameType):
            lines += traceback.format_list(traceback.extract_stack(frame, 1))
            at = getattr(at, "cr_await", None) or getattr(at, "gi_yieldfrom", None)
    return "\n" + "".join(lines)


@pytest.hookimpl
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool | None:
    if settings.method != "signal":
        return None
    asked = False

    def expire(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        __tracebackhide__ = True
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            asked = True
        if asked:
            fail()
        else:
            asked = True
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)
            loop.call_soon_threadsafe(fail)

    def fail() -> None:
        nonlocal asked
        __tracebackhide__ = True
        asked = False
        signal.setitimer(signal.ITIMER_REAL, max(settings.timeout, AGAIN_S))
        try:
            pytest_timeout.timeout_sigalrm(item, settings)
        except pytest.fail.Exception as failure:
            raise TimedOut(f"{failure.msg}{waiting()}") from None

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel  # type: ignore[attr-defined]
    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    return True
