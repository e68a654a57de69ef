# SPDX-License-Identifier: Apache-2.0
"""Whether an output is right: the checkers that are no program. Pure.

`exact` is strict within and lenient at the end: white space at the end of the whole, and the final newline, do not count. `tokens` are
words between white space (ASCII's, as bytes: an output need not be text). `float` compares words that are finite numbers on both
sides by value, all others as they are; `inf` and `nan` are words.
"""

from __future__ import annotations

import math

from opendsec.api.fn import Checker

LARGE_BYTES = 256 << 10  # of both: more is to be compared in a worker thread
SHOWN = 60


def check(checker: Checker, expected: bytes, output: bytes) -> str:
    """ "" if `output` is right, else what is wrong about it in a few words, without a word of what was expected: whoever reads it may
    hand it on to whoever wrote the program."""
    if checker.kind == "exact":
        return "" if expected.rstrip() == output.rstrip() else _exact(expected.rstrip(), output.rstrip())
    wanted, got = expected.split(), output.split()
    if wanted == got:
        return ""
    if checker.kind == "float":
        wrong = next((i for i, pair in enumerate(zip(wanted, got, strict=False)) if not _close(*pair, checker)), None)
    else:
        wrong = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), None)
    if wrong is not None:
        return f"word {wrong + 1} is wrong: {_shown(got[wrong])}"
    if len(wanted) != len(got):
        return f"it has {len(got)} words, {'fewer' if len(got) < len(wanted) else 'more'} than it should"
    return ""


def _exact(expected: bytes, output: bytes) -> str:
    same = next((i for i, (a, b) in enumerate(zip(expected, output, strict=False)) if a != b), min(len(expected), len(output)))
    line = output.count(b"\n", 0, same) + 1
    if same == len(output):
        return f"it ends too early, in line {line}"
    wrong = output[output.rfind(b"\n", 0, same) + 1 :].split(b"\n", 1)[0]
    return f"line {line} is wrong: {_shown(wrong)}"


def _shown(data: bytes) -> str:
    return repr(data[:SHOWN].decode("utf-8", "replace")) + ("…" if len(data) > SHOWN else "")


def _close(wanted: bytes, got: bytes, checker: Checker) -> bool:
    if wanted == got:
        return True
    first, second = _number(wanted), _number(got)
    if first is None or second is None:
        return False
    return math.isclose(first, second, rel_tol=checker.rel_tol, abs_tol=checker.abs_tol)


def _number(word: bytes) -> float | None:
    if len(word) > 400 or b"_" in word:  # int("1_000") is Python's, not anybody else's
        return None
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
