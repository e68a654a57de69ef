# SPDX-License-Identifier: Apache-2.0
"""Checkers: what counts and what does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.api.fn import Checker
from opendsec.edge.fn.checkers import check

EXACT, TOKENS = Checker(), Checker(kind="tokens")
FLOAT = Checker(kind="float", abs_tol=1e-3, rel_tol=0.0)
RELATIVE = Checker(kind="float", abs_tol=0.0, rel_tol=1e-3)

RIGHT = [
    (EXACT, b"a\nb\n", b"a\nb"),
    (EXACT, b"a\n", b"a  \n\n"),
    (EXACT, b"", b"\n"),
    (EXACT, b"\xff\0", b"\xff\0\n"),
    (TOKENS, b"1 2\n3", b"1  2 3\n"),
    (TOKENS, b"", b" \n"),
    (FLOAT, b"1.0", b"1.0005"),
    (FLOAT, b"x 1", b"x 1.000"),
    (FLOAT, b"nan", b"nan"),
    (FLOAT, b"-0.0", b"0"),
    (FLOAT, b"1e3", b"1000.0"),
    (RELATIVE, b"1000000", b"1000500"),
]
WRONG = [
    (EXACT, b"a\nb\n", b"a\nc"),
    (EXACT, b"a b", b"a  b"),
    (EXACT, b" a", b"a"),
    (EXACT, b"a", b""),
    (TOKENS, b"1 2", b"1"),
    (TOKENS, b"1", b"1 2"),
    (TOKENS, b"1", b"1.0"),
    (FLOAT, b"1.0", b"1.01"),
    (FLOAT, b"1.0", b"one"),
    (FLOAT, b"1", b"nan"),
    (FLOAT, b"1", b"inf"),
    (FLOAT, b"inf", b"1e999"),
    (FLOAT, b"1000", b"1_000"),
    (RELATIVE, b"1000000", b"1002000"),
    (RELATIVE, b"0", b"1e-9"),
]


@pytest.mark.parametrize("checker, expected, output", RIGHT)
def test_right(checker: Checker, expected: bytes, output: bytes) -> None:
    assert check(checker, expected, output) == ""


@pytest.mark.parametrize("checker, expected, output", WRONG)
def test_wrong(checker: Checker, expected: bytes, output: bytes) -> None:
    assert check(checker, expected, output) != ""


def test_the_message_shows_the_output_and_never_what_was_expected() -> None:
    for checker in (EXACT, TOKENS, FLOAT):
        message = check(checker, b"first SECRET", b"first guess")
        assert "guess" in message and "SECRET" not in message
    assert "line 2" in check(EXACT, b"a\nb", b"a\nc")
    assert "word 2" in check(TOKENS, b"a b", b"a c")
    assert "fewer" in check(TOKENS, b"a b", b"a")


@given(st.binary(max_size=60), st.binary(max_size=60), st.sampled_from(["exact", "tokens", "float"]))
def test_any_bytes_are_compared(expected: bytes, output: bytes, kind: str) -> None:
    checker = {"exact": EXACT, "tokens": TOKENS, "float": FLOAT}[kind]
    assert check(checker, expected, expected) == ""
    verdict = check(checker, expected, output)
    if expected.rstrip() == output.rstrip():
        assert verdict == ""
