# SPDX-License-Identifier: Apache-2.0
"""Signals to processes that are known by their numbers alone, such as the members of a cgroup."""

from __future__ import annotations

import os
import signal

from opendsec.kernel import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable


ROUNDS = 20  # of killing what may fork meanwhile


def kill_listed(listing: Callable[[], Collection[int]]) -> bool:
    """SIGKILL to every process that `listing` gives, again until it gives none; whether that was reached. Each round stops them first: or a
    parent sees its child die, and goes on until it dies itself."""
    for _ in range(ROUNDS):
        if not listing():
            return True
        signal_listed(listing, signal.SIGSTOP)
        signal_listed(listing, signal.SIGKILL)
    return not listing()


def signal_listed(listing: Callable[[], Iterable[int]], number: int) -> None:
    """Send a signal to every process that `listing` gives.

    A process may end, and its number pass to one of the host, between the listing and the signal: so each is held by a pidfd
    first, and is signalled if it is still listed then. What has ended, or appeared since, is passed over.
    """
    held: dict[int, int] = {}
    try:
        for pid in listing():
            try:
                held[pid] = syscalls.pidfd_open(pid)
            except OSError:
                continue  # ended
        for pid in held.keys() & set(listing()):
            try:
                syscalls.pidfd_send_signal(held[pid], number)
            except ProcessLookupError:
                continue
    finally:
        for pidfd in held.values():
            os.close(pidfd)
