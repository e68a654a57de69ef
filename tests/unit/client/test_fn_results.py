# SPDX-License-Identifier: Apache-2.0
"""What a result of a function call says, and what it raises."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from opendsec.api import fn
from opendsec.api.errors import CommandFailed, Denied, OpenDSecError, Unavailable
from opendsec.client.batch import line
from opendsec.client.results import FnResult

FAULTS: dict[fn.FnOutcome, tuple[type[OpenDSecError], int, str]] = {
    "wrong_answer": (CommandFailed, 1, "gave a wrong answer"),
    "runtime_error": (CommandFailed, 1, "failed"),
    "time_limit": (CommandFailed, 124, "ran out of time"),
    "memory_limit": (CommandFailed, 137, "ran out of memory"),
    "output_limit": (CommandFailed, 137, "wrote more than its output limit"),
    "compile_error": (CommandFailed, 126, "could not be compiled"),
    "denied": (Denied, 126, "was denied what it tried"),
    "platform_error": (Unavailable, 125, "failed by the platform's fault"),
    "cancelled": (Unavailable, 125, "was cancelled"),
}


def test_every_outcome_is_known() -> None:
    assert {"ok", *FAULTS} == set(get_args(fn.FnOutcome))


@pytest.mark.parametrize("outcome", FAULTS)
def test_faults(outcome: fn.FnOutcome) -> None:
    kind, code, words = FAULTS[outcome]
    result = FnResult(fn.FnResult(outcome=outcome, message="so it is"))
    assert not result.ok and result.shell_code() == code
    with pytest.raises(kind, match=f"the call {words}: so it is") as raised:
        result.check()
    assert raised.value.data["outcome"] == outcome


def test_the_compilers_words_are_told() -> None:
    compiled = fn.FnResult(outcome="compile_error", stderr=fn.FnOutput(data=b"line 3", total_bytes=6))
    result = FnResult(fn.FnResult(outcome="compile_error", compile=compiled))
    with pytest.raises(CommandFailed) as raised:
        result.check()
    assert raised.value.data["stderr_tail"] == "line 3" and result.compile is not None and result.compile.stderr == "line 3"


def test_signals_and_codes() -> None:
    killed = FnResult(fn.FnResult(outcome="runtime_error", signal=11))
    assert killed.shell_code() == 139 and killed.describe() == "was ended by signal 11"
    assert FnResult(fn.FnResult(outcome="runtime_error", exit_code=7)).shell_code() == 7


def test_values_and_text() -> None:
    big = FnResult(fn.FnResult(outcome="ok", value=msgspec.Raw(b'{"a":123456789012345678901234567890}')))
    assert big.value == {"a": 123456789012345678901234567890}
    assert FnResult(fn.FnResult(outcome="ok")).value is None
    text = FnResult(fn.FnResult(outcome="ok", stdout=fn.FnOutput(data=b"a\xff", total_bytes=9)))
    assert text.stdout == "a\ufffd" and text.truncated and text.stdout_bytes == b"a\xff"


@pytest.mark.parametrize(
    ("item", "function", "sent"),
    [
        ("é", False, {"stdin": "w6k="}),
        (b"", False, {"stdin": ""}),
        ([1, "x"], True, {"args": [1, "x"]}),
        ((1,), True, {"args": [1]}),
        ({"a": None}, True, {"args": [], "kwargs": {"a": None}}),
        ("x", True, {"args": ["x"]}),
        (None, True, {"args": [None]}),
        (1 << 70, True, {"args": [1 << 70]}),
        ("\ud800", True, {"args": ["\ud800"]}),
        (fn.FnInput(index=99, env={"A": "b"}), False, {"env": {"A": "b"}}),
        (fn.FnInput(args=[1]), True, {"args": [1]}),  # type: ignore[arg-type]  # as it will be written
    ],
)
def test_lines_of_a_batch(item: object, function: bool, sent: dict[str, object]) -> None:
    import json

    call = fn.FnCall(function="a:b") if function else fn.FnCall(source="")
    made = json.loads(line(5, item, call))
    assert made.pop("index") == 5
    assert {name: value for name, value in made.items() if value != {} and not (name in ("args", "kwargs") and value is None)} == sent
