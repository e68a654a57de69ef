# SPDX-License-Identifier: Apache-2.0
"""How a command ended: from what was observed to what its result says. Pure.

`outcome` is the first of these that holds:

1. `unknown`: the edge or its spawner went away before it ended.
2. `not_started`: it never ran.
3. `output_limit`: it wrote more than it might, whether or not it ended by itself in the same moment.
4. `timed_out`, `killed`: the edge killed its tree for that reason, and it was that which ended it: a command that beat the signal and
   ended with an exit code is `exited`. In a session, where the shell lives on and answers, the reason alone decides.
5. `killed`: a signal ended it that a caller had sent.
6. `memory_limit`: while it ran the kernel's OOM killer killed something in the sandbox, and SIGKILL ended it, or it exited with 137,
   which is how a shell says that SIGKILL ended its child.
7. `signalled`, `exited`.

`limits_hit` says more: every limit that refused something in the sandbox while the command ran, also if the command coped. The counters
are the sandbox's, so of two commands that run at the same time both may be told. A full disk that was full before counts only if the
command failed.
"""

from __future__ import annotations

import signal
from typing import Literal

import msgspec

from opendsec.api.exec import Outcome
from opendsec.api.spec import Limits
from opendsec.api.units import format_bytes
from opendsec.runtime.backend import Counters, Exit

Cause = Literal["timed_out", "output_limit", "killed"]
EXIT_OF_SIGKILL = 128 + signal.SIGKILL


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides."""

    exit: Exit
    cause: Cause | None  # why the edge killed its tree, if it did
    cause_message: str = ""
    sent: frozenset[int] = frozenset()  # signals that callers sent to it
    before: Counters
    after: Counters
    truncated: bool  # something of its output was not kept
    in_session: bool = False


class Verdict(msgspec.Struct, frozen=True):
    outcome: Outcome
    limits_hit: tuple[str, ...]
    message: str


def judge(seen: Observed, limits: Limits) -> Verdict:
    outcome = _outcome(seen)
    hit = tuple(_limits_hit(seen, outcome))
    return Verdict(outcome, hit, _message(seen, outcome, hit, limits))


def _outcome(seen: Observed) -> Outcome:
    ended = seen.exit
    if ended.lost:
        return "unknown"
    if ended.not_started:
        return "not_started"
    if seen.cause == "output_limit":
        return "output_limit"
    if seen.cause is not None and (ended.code is None or seen.in_session):
        return seen.cause
    deadly = ended.code - 128 if seen.in_session and ended.code is not None else ended.signal
    if deadly in seen.sent:
        return "killed"
    if seen.after.oom_kills > seen.before.oom_kills and (ended.signal == signal.SIGKILL or ended.code == EXIT_OF_SIGKILL):
        return "memory_limit"
    return "exited" if ended.code is not None else "signalled"


def _limits_hit(seen: Observed, outcome: Outcome) -> list[str]:
    before, after = seen.before, seen.after
    failed = outcome != "exited" or seen.exit.code != 0
    return [
        name
        for name, hit in (
            ("time", outcome == "timed_out"),
            ("memory", after.oom_kills > before.oom_kills),
            ("pids", after.pids_denied > before.pids_denied),
            ("disk", after.disk_full and (failed or not before.disk_full)),
            ("inodes", after.inodes_full and (failed or not before.inodes_full)),
            ("output", seen.truncated or outcome == "output_limit"),
        )
        if hit
    ]


def _message(seen: Observed, outcome: Outcome, hit: tuple[str, ...], limits: Limits) -> str:
    if outcome == "not_started":
        return seen.exit.not_started
    if outcome == "unknown":
        return "the edge or its spawner went away while it ran: nobody saw its end"
    parts = [seen.cause_message] if outcome == seen.cause and seen.cause_message else []
    if not hit:
        return "; ".join(parts)
    sizes = {
        "memory": f"memory limit of {format_bytes(limits.memory_bytes)}",
        "pids": f"limit of {limits.pids} processes",
        "disk": f"limit of {format_bytes(limits.disk_bytes)} of writable files",
        "inodes": f"limit of {limits.inodes} files",
    }
    if outcome == "memory_limit":
        parts.append(f"the kernel killed it at the sandbox's {sizes['memory']}")
    reached = [sizes[name] for name in hit if name in sizes and (name, outcome) != ("memory", "memory_limit")]
    if reached:
        parts.append(f"the sandbox reached its {' and its '.join(reached)}")
    return "; ".join(parts)
