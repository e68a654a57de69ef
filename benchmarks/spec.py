# SPDX-License-Identifier: Apache-2.0
"""The promised numbers, read from SPECIFICATION.md.

Each bound lives in that file and nowhere else: a benchmark or a test asks here for it by name. The file is Markdown for people; what this
module reads of it are the tables whose header row names at least the columns in `COLUMNS`, in any order.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

COLUMNS = ("name", "what", "relation", "bound", "unit", "test")
PENDING = "no test yet"
SPECIFICATION = Path(__file__).resolve().parent.parent / "SPECIFICATION.md"

Relation = Literal["<=", ">="]
_HOLDS = {"<=": operator.le, ">=": operator.ge}
_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>[^)]+)\)")


class SpecificationError(ValueError):
    """A line of the file that cannot be read; the message begins with its number."""


@dataclass(frozen=True)
class Bound:
    """One promise: the value measured for `name` stands in `relation` to `bound`, in `unit`."""

    name: str
    what: str
    relation: Relation
    bound: float
    unit: str
    test: str  # "path" or "path::function" as the link's text gives it; "" where there is no test yet
    line: int

    def holds(self, value: float) -> bool:
        return bool(_HOLDS[self.relation](value, self.bound))


def parse(text: str) -> dict[str, Bound]:
    """All bounds of the text by name, in its order. Raises SpecificationError for a malformed or repeated line."""
    bounds: dict[str, Bound] = {}
    header: list[str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("|"):
            header = None
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if header is None:
            header = cells
        elif set(COLUMNS) <= set(header) and not set(line) <= set("|-: "):
            bound = _bound(number, header, cells)
            if bound.name in bounds:
                raise SpecificationError(f"{number}: {bound.name} is promised twice")
            bounds[bound.name] = bound
    return bounds


def _bound(number: int, header: list[str], cells: list[str]) -> Bound:
    if len(cells) != len(header):
        raise SpecificationError(f"{number}: {len(cells)} cells under {len(header)} headings")
    row = dict(zip(header, cells, strict=True))
    name = row["name"].strip("`")
    if not _NAME.fullmatch(name):
        raise SpecificationError(f"{number}: {name!r} is not a dotted lower-case name")
    relation: Relation = ">=" if row["relation"].strip("`") == ">=" else "<="
    if relation != row["relation"].strip("`"):
        raise SpecificationError(f"{number}: the relation is {row['relation']!r}, not <= or >=")
    try:
        bound = float(row["bound"].replace(",", ""))
    except ValueError:
        raise SpecificationError(f"{number}: {row['bound']!r} is not a number") from None
    link = _LINK.fullmatch(row["test"])
    if link is None and row["test"] != PENDING:
        raise SpecificationError(f"{number}: the test is neither one link nor {PENDING!r}")
    test = link["text"].strip("`") if link else ""
    return Bound(name, row["what"], relation, bound, row["unit"], test, number)


def load(path: Path = SPECIFICATION) -> dict[str, Bound]:
    """Every bound this project promises. Raises OSError where the file is missing (an installation without a checkout)."""
    return parse(path.read_text(encoding="utf-8"))
