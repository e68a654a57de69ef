# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from benchmarks.spec import Bound, SpecificationError, load, parse

HEAD = "| name | what | relation | bound | unit | test |\n|---|---|---|---|---|---|\n"


def test_reads_a_line() -> None:
    text = "Words.\n\n" + HEAD + "| `a.rate` | how many | >= | 1,000 | per s | [`tests/x.py::test_y`](tests/x.py) |\n"
    assert parse(text) == {"a.rate": Bound("a.rate", "how many", ">=", 1000.0, "per s", "tests/x.py::test_y", 5)}


def test_columns_are_found_by_name() -> None:
    text = "| unit | test | name | bound | what | relation |\n|-|-|-|-|-|-|\n| ms | no test yet | a.b | 2.5 | w | <= |\n"
    assert parse(text)["a.b"] == Bound("a.b", "w", "<=", 2.5, "ms", "", 3)


def test_other_tables_are_left_alone() -> None:
    assert parse("| word | meaning |\n|---|---|\n| a | b |\n") == {}


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("| a.b | w | <= | 1 | s |", "3: 5 cells"),
        ("| Name | w | <= | 1 | s | no test yet |", "not a dotted"),
        ("| a.b | w | = | 1 | s | no test yet |", "the relation"),
        ("| a.b | w | <= | many | s | no test yet |", "not a number"),
        ("| a.b | w | <= | 1 | s | soon |", "neither one link"),
        ("| a.b | w | <= | 1 | s | no test yet |\n| a.b | w | <= | 1 | s | no test yet |", "4: a.b is promised twice"),
    ],
)
def test_refuses(row: str, complaint: str) -> None:
    with pytest.raises(SpecificationError, match=complaint):
        parse(HEAD + row)


def test_holds() -> None:
    at_most, at_least = Bound("a.b", "", "<=", 1.5, "x", "", 1), Bound("a.b", "", ">=", 200, "per s", "", 1)
    assert at_most.holds(1.5) and not at_most.holds(1.51)
    assert at_least.holds(200) and not at_least.holds(199.9)


def test_the_projects_own_file_is_readable() -> None:
    assert "container.create.ratio" in load()
