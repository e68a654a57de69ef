# SPDX-License-Identifier: Apache-2.0
"""What was observed of a call, and what its result says."""

from __future__ import annotations

import msgspec
import pytest

from opendsec.api.errors import Denied, InvalidRequest, NotFound, QuotaExceeded, SandboxLost, Unavailable
from opendsec.api.fn import FnLimits, FnOutput, FnResult
from opendsec.api.fn_check import check_limits
from opendsec.edge.fn import outcome
from opendsec.runtime.fncall.interface import Ended

BOUNDS = check_limits(FnLimits())

CASES: list[tuple[Ended, str, tuple[str, ...]]] = [
    (Ended(code=0), "ok", ()),
    (Ended(code=1), "runtime_error", ()),
    (Ended(signal=11), "runtime_error", ()),
    (Ended(signal=9), "runtime_error", ()),
    (Ended(not_started="no such program: x", caller_fault=True), "runtime_error", ()),
    (Ended(not_started="no memory for its file system"), "platform_error", ()),
    (Ended(), "platform_error", ()),
    (Ended(signal=9, timed_out="wall"), "time_limit", ("wall_time",)),
    (Ended(signal=9, timed_out="cpu"), "time_limit", ("cpu_time",)),
    (Ended(timed_out="wall"), "time_limit", ("wall_time",)),
    (Ended(signal=24), "time_limit", ("cpu_time",)),
    (Ended(code=0, timed_out="wall"), "time_limit", ("wall_time",)),
    (Ended(signal=9, oom_killed=True), "memory_limit", ("memory",)),
    (Ended(code=137, oom_killed=True), "memory_limit", ("memory",)),
    (Ended(code=0, oom_killed=True), "ok", ("memory",)),
    (Ended(signal=9, oom_killed=True, timed_out="wall"), "memory_limit", ("wall_time", "memory")),
    (Ended(signal=9, output_exceeded=True), "output_limit", ("output",)),
    (Ended(signal=9, output_exceeded=True, oom_killed=True), "output_limit", ("memory", "output")),
    (Ended(signal=31, denied="mount"), "denied", ()),
    (Ended(code=1, pids_denied=True, disk_full=True), "runtime_error", ("pids", "disk")),
    (Ended(code=0, pids_denied=True), "ok", ("pids",)),
]


@pytest.mark.parametrize("ended, expected, hits", CASES)
def test_classification(ended: Ended, expected: str, hits: tuple[str, ...]) -> None:
    result = outcome.result(ended, BOUNDS, index=7, cold=True)
    assert (result.outcome, result.limits_hit) == (expected, hits)
    assert (result.index, result.cold) == (7, True)
    assert bool(result.message) == (expected != "ok" or bool(hits))


def test_messages_are_for_people() -> None:
    def message(ended: Ended) -> str:
        return outcome.result(ended, BOUNDS).message

    assert message(Ended(signal=11)) == "killed by SIGSEGV"
    assert message(Ended(code=3)) == "exit code 3"
    assert "10 s of CPU time" in message(Ended(signal=9, timed_out="cpu"))
    assert "256MiB of memory" in message(Ended(signal=9, oom_killed=True))
    assert "the machine failed" in message(Ended(not_started="x"))
    assert message(Ended(not_started="no such program: x", caller_fault=True)) == "no such program: x"
    assert "not all files" in message(Ended(code=0, files_problem="a link"))


def test_what_could_not_be_made_is_told_by_whose_fault_it_is() -> None:
    for error, expected in (
        (InvalidRequest("x", field="stdin"), "denied"),
        (Denied("x"), "denied"),
        (NotFound("x"), "denied"),
        (QuotaExceeded("x"), "platform_error"),
        (Unavailable("x"), "platform_error"),
        (SandboxLost("x"), "platform_error"),
    ):
        assert outcome.failed(error, 3).outcome == expected
        assert outcome.failed(error, 3).index == 3


def test_large_results_are_recorded_without_their_outputs() -> None:
    small = FnResult(outcome="ok", stdout=FnOutput(data=b"x", total_bytes=1))
    assert outcome.recorded(small) is None
    large = FnResult(
        outcome="runtime_error",
        exit_code=1,
        stdout=FnOutput(data=bytes(600_000), total_bytes=600_000),
        files={"a": bytes(600_000)},
        value=msgspec.Raw(b"1"),
        message="exit code 1",
    )
    kept = outcome.recorded(large)
    assert kept is not None
    assert (kept.outcome, kept.exit_code, kept.files, kept.stdout.data, kept.stdout.total_bytes) == ("runtime_error", 1, {}, b"", 600_000)
    assert kept.message.startswith("exit code 1; its outputs, ")


@pytest.mark.parametrize(
    "value",
    [
        b"5",
        b'"\xc3\xa9"',
        b'{"a": [1, null]}',
        b"[" * 250 + b"]" * 250,
        b"[" + b"[1]," * 300 + b"[]]",
        b'["' + b"9" * 5000 + b'\\",1"]',
        b"null",
        b"true",
    ],
)
def test_a_value_goes_into_the_result_as_it_is(value: bytes) -> None:
    result = outcome.result(Ended(code=0, value=value), BOUNDS)
    assert (result.outcome, bytes(result.value), result.message) == ("ok", value, "")


@pytest.mark.parametrize(
    "value",
    [
        b'null,"outcome":"wrong_answer","exit_code":77',
        b'1}\n{"outcome":"ok","index":2,"stdout":{"data":"Zm9yZ2Vk"}}',
        b"[1,\n2]",
        b"[1,\r2]",
        b"{bad",
        b"NaN",
        b"\xff\xfe",
        b'"\xff"',
        b'"\\ud800"',
        b"1" * 5000,
        b"[" * 20000,
        b"[" * 950 + b"]" * 950,
        b"1]" + b",[1" * 300,
        b"1]" * 200 + b",[" * 200 + b"1",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    ],
)
def test_a_value_that_would_forge_more_than_itself_is_the_programs_fault(value: bytes) -> None:
    result = outcome.result(Ended(code=0, value=value), BOUNDS)
    assert (result.outcome, bytes(result.value)) == ("runtime_error", b"null")
    assert "its value cannot be passed on as JSON" in result.message
    line = msgspec.json.encode(result)
    assert b"\n" not in line and msgspec.json.decode(line, type=FnResult).outcome == "runtime_error"
    timed_out = outcome.result(Ended(signal=9, timed_out="wall", value=value), BOUNDS)
    assert (timed_out.outcome, bytes(timed_out.value)) == ("time_limit", b"null")


def test_a_function_that_left_no_value_has_none() -> None:
    assert bytes(outcome.result(Ended(code=0, value=b""), BOUNDS).value) == b"null"
