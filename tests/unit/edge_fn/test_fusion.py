# SPDX-License-Identifier: Apache-2.0
"""SandboxFusion's request and answer."""

from __future__ import annotations

import base64
import json

import msgspec
import pytest

from opendsec.api import wire
from opendsec.api.errors import InvalidRequest, NotFound, QuotaExceeded, Unavailable
from opendsec.api.fn import FnOutput, FnResult
from opendsec.edge.fn.fusion import RunCodeRequest, answer, parse, refusal


def request(**fields: object) -> bytes:
    return json.dumps({"code": "print(1)", "language": "python", **fields}).encode()


def test_a_request_becomes_a_call() -> None:
    body = request(
        language="nodejs",
        stdin="in",
        run_timeout=3,
        compile_timeout=4,
        memory_limit_MB=100,
        files={"a": base64.b64encode(b"x").decode(), "b": None},
        fetch_files=["out"],
        anything_else=1,
    )
    call, compile_limits = parse(wire.decode(body, RunCodeRequest))
    assert (call.source, call.language, call.stdin, call.files, call.outputs) == ("print(1)", "javascript", b"in", {"a": b"x"}, ("out",))
    assert (call.limits.wall_time_s, call.limits.memory) == (3, 100 << 20)
    assert compile_limits.wall_time_s == 4


def test_defaults_are_theirs() -> None:
    call, compile_limits = parse(wire.decode(request(stdin=None, memory_limit_MB=-1), RunCodeRequest))
    assert (call.limits.wall_time_s, compile_limits.wall_time_s, call.stdin) == (10.0, 10.0, b"")


@pytest.mark.parametrize(
    "body, field",
    [
        (b"x", "body"),
        (b"{}", "body"),
        (request(code=1), "code"),
        (request(run_timeout=0), "run_timeout"),
        (request(run_timeout="x"), "run_timeout"),
        (request(compile_timeout=-1), "compile_timeout"),
        (request(memory_limit_MB=-2), "memory_limit_MB"),
        (request(files={"a": "***"}), "files.a"),
        (request(files=[]), "files"),
        (request(fetch_files="x"), "fetch_files"),
    ],
)
def test_a_request_that_does_not_fit(body: bytes, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(wire.decode(body, RunCodeRequest))
    assert caught.value.field == field


def result(outcome: str, **fields: object) -> FnResult:
    return msgspec.structs.replace(FnResult(outcome="ok"), outcome=outcome, **fields)


CASES = [
    (result("ok", exit_code=0), "Success", "Finished", 0),
    (result("runtime_error", exit_code=3), "Failed", "Finished", 3),
    (result("runtime_error", signal=11), "Failed", "Finished", -11),
    (result("time_limit", signal=9, limits_hit=("wall_time",)), "Failed", "TimeLimitExceeded", None),
    (result("memory_limit", signal=9), "Failed", "Finished", -9),
    (result("output_limit", signal=9), "Failed", "Finished", -9),
    (result("denied", signal=31), "Failed", "Finished", -31),
    (result("platform_error", message="no luck"), "SandboxError", "Error", None),
]


@pytest.mark.parametrize("given, status, run_status, code", CASES)
def test_answers(given: FnResult, status: str, run_status: str, code: int | None) -> None:
    told = answer(given, "pod")
    assert told.status == status and told.executor_pod_name == "pod" and told.compile_result is None
    assert told.run_result is not None
    assert (told.run_result.status, told.run_result.return_code) == (run_status, code)
    assert told.message == ("no luck" if status == "SandboxError" else "")


def test_compilation_has_a_part_of_its_own() -> None:
    compiled = result("ok", exit_code=0, stdout=FnOutput(data=b"warning", total_bytes=7), wall_ms=1500.0)
    told = answer(result("ok", exit_code=0, compile=compiled, files={"a": b"\xff"}), "pod")
    assert told.status == "Success" and told.compile_result is not None
    assert (told.compile_result.stdout, told.compile_result.execution_time) == ("warning", 1.5)
    assert told.files == {"a": "/w=="}
    refused = result("compile_error", exit_code=1, stderr=FnOutput(data=b"no", total_bytes=2))
    told = answer(result("compile_error", compile=refused), "pod")
    assert told.status == "Failed" and told.run_result is None
    assert told.compile_result is not None and told.compile_result.return_code == 1
    slow = result("compile_error", signal=9, limits_hit=("wall_time",))
    told = answer(result("compile_error", compile=slow), "pod")
    assert told.compile_result is not None and told.compile_result.status == "TimeLimitExceeded" and told.status == "Failed"


def test_refusals_that_are_nobodys_fault_are_answers() -> None:
    assert refusal(QuotaExceeded("full"), "pod").status == "SandboxError"
    assert refusal(Unavailable("later"), "pod").message == "later"
    with pytest.raises(NotFound):
        refusal(NotFound("no image"), "pod")
