# SPDX-License-Identifier: Apache-2.0
"""What a result says, for each way to end."""

from __future__ import annotations

import msgspec
import pytest

from opendsec.api.exec import Outcome
from opendsec.api.spec import Limits
from opendsec.edge.outcome import Cause, Observed, judge
from opendsec.runtime.backend import Counters, Exit

LIMITS = Limits(cpu=1.0, cpu_weight=100, memory_bytes=64 << 20, disk_bytes=1 << 30, inodes=1000, pids=64, open_files=1024)
QUIET = Counters()
OOM = Counters(oom_kills=1)
SEEN = Observed(exit=Exit(code=0), cause=None, before=QUIET, after=QUIET, truncated=False)


@pytest.mark.parametrize(
    ("exit", "cause", "sent", "after", "outcome"),
    [
        (Exit(code=0), None, (), QUIET, "exited"),
        (Exit(code=137), None, (), QUIET, "exited"),
        (Exit(signal=9), None, (), QUIET, "signalled"),
        (Exit(signal=11), None, (), OOM, "signalled"),
        (Exit(signal=9), None, (), OOM, "memory_limit"),
        (Exit(code=137), None, (), OOM, "memory_limit"),
        (Exit(code=1), None, (), OOM, "exited"),
        (Exit(signal=9), None, (9,), OOM, "killed"),
        (Exit(signal=15), None, (15,), QUIET, "killed"),
        (Exit(signal=9), None, (15,), QUIET, "signalled"),
        (Exit(code=0), None, (15,), QUIET, "exited"),
        (Exit(signal=9), "timed_out", (), OOM, "timed_out"),
        (Exit(), "timed_out", (), QUIET, "timed_out"),
        (Exit(code=0), "timed_out", (), QUIET, "exited"),
        (Exit(signal=9), "killed", (), QUIET, "killed"),
        (Exit(code=0), "output_limit", (), QUIET, "output_limit"),
        (Exit(lost=True), "timed_out", (), OOM, "unknown"),
        (Exit(not_started="no such program"), None, (), QUIET, "not_started"),
    ],
)
def test_outcome(exit: Exit, cause: Cause | None, sent: tuple[int, ...], after: Counters, outcome: Outcome) -> None:
    seen = msgspec.structs.replace(SEEN, exit=exit, cause=cause, sent=frozenset(sent), after=after)
    assert judge(seen, LIMITS).outcome == outcome


def test_in_a_session_the_shell_answers_for_the_killed() -> None:
    seen = msgspec.structs.replace(SEEN, exit=Exit(code=137), cause="timed_out", cause_message="killed after 3 s", in_session=True)
    verdict = judge(seen, LIMITS)
    assert (verdict.outcome, verdict.limits_hit, verdict.message) == ("timed_out", ("time",), "killed after 3 s")


def test_the_message_of_what_did_not_start() -> None:
    assert judge(msgspec.structs.replace(SEEN, exit=Exit(not_started="no such user")), LIMITS).message == "no such user"


@pytest.mark.parametrize(
    ("code", "before", "after", "hit"),
    [
        (0, QUIET, QUIET, ()),
        (0, OOM, OOM, ()),
        (0, QUIET, OOM, ("memory",)),
        (0, Counters(pids_denied=3), Counters(pids_denied=4), ("pids",)),
        (0, QUIET, Counters(disk_full=True), ("disk",)),
        (0, Counters(disk_full=True), Counters(disk_full=True), ()),
        (1, Counters(disk_full=True), Counters(disk_full=True), ("disk",)),
        (1, Counters(disk_full=True), QUIET, ()),
        (0, QUIET, Counters(inodes_full=True), ("inodes",)),
        (1, Counters(inodes_full=True), Counters(inodes_full=True), ("inodes",)),
    ],
)
def test_limits_hit(code: int, before: Counters, after: Counters, hit: tuple[str, ...]) -> None:
    seen = msgspec.structs.replace(SEEN, exit=Exit(code=code), before=before, after=after)
    assert judge(seen, LIMITS).limits_hit == hit


def test_messages_name_the_limit() -> None:
    seen = msgspec.structs.replace(SEEN, exit=Exit(signal=9), after=Counters(oom_kills=1, pids_denied=1), truncated=True)
    verdict = judge(seen, LIMITS)
    assert verdict.limits_hit == ("memory", "pids", "output")
    assert verdict.message == "the kernel killed it at the sandbox's memory limit of 64MiB; the sandbox reached its limit of 64 processes"
    seen = msgspec.structs.replace(SEEN, after=Counters(disk_full=True, inodes_full=True))
    assert judge(seen, LIMITS).message == "the sandbox reached its limit of 1GiB of writable files and its limit of 1000 files"
