# SPDX-License-Identifier: Apache-2.0
"""Documents keep their word: links lead somewhere, each promise names its test, each threat has a number."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks import spec
from tests.style.test_sources import identify, tracked_files
from tests.support import ROOT, SRC

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def documents() -> list[Path]:
    return [path for path in tracked_files() if path.suffix == ".md"]


@cache
def anchors(path: Path) -> set[str]:
    """The anchors that a Markdown file's headings get."""
    headings = re.findall(r"^#+\s+(.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "")).strip().lower().replace(" ", "-") for heading in headings}


def outside_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", documents(), ids=identify)
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for target in LINK.findall(outside_code(path.read_text())):
        if re.match(r"https?://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("bound", spec.load().values(), ids=lambda bound: bound.name)
def test_each_promise_names_its_test(bound: spec.Bound) -> None:
    if not bound.test:
        return  # the line says "no test yet"
    file, _, function = bound.test.partition("::")
    path = ROOT / file
    assert path.is_file(), f"line {bound.line}: no file {file}"
    if function:
        assert re.search(rf"^\s*(async )?def {function}\b", path.read_text(), re.MULTILINE), f"line {bound.line}: no {function}"
    assert bound.name in path.read_text() or not file.startswith("tests/"), f"{file} does not read {bound.name}"


def test_links_of_promises_point_where_their_text_says() -> None:
    for text, target in re.findall(r"\[`([^`\]]+)`\]\(([^)]+)\)", spec.SPECIFICATION.read_text()):
        assert text.partition("::")[0] == target


def test_decisions_are_numbered_and_listed() -> None:
    names = sorted(path.name for path in (ROOT / "docs" / "adr").glob("[0-9]*.md"))
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
    listed = (ROOT / "docs" / "adr" / "README.md").read_text()
    assert [name for name in names if f"({name})" not in listed] == []


def test_the_architecture_names_what_exists() -> None:
    """Each "`file.py` `name`, `name`" is a module and functions, methods or classes in it."""
    wrong = []
    for file, names in re.findall(r"`([\w/]+\.py)`((?:,? `[\w.]+`(?!\.py))*)", (ROOT / "docs" / "architecture.md").read_text()):
        path = SRC / file
        tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
        known = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
        wrong += [f"{file} {name}" for name in re.findall(r"`([\w.]+)`", names) if not set(name.split(".")) <= known]
        wrong += [] if path.is_file() else [file]
    assert wrong == []


def test_threats_are_numbered_without_a_gap() -> None:
    text = (ROOT / "docs" / "threat-model.md").read_text()
    numbers = [int(number) for number in re.findall(r"^\| T(\d\d) \|", text, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 20
