# SPDX-License-Identifier: Apache-2.0
"""Rules on the sources that no linter knows: the floor, third-party packages, sizes, licence, the public names."""

from __future__ import annotations

import ast
import os
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support import ROOT, SRC

MAX_LINES = 800
LONG_LINES = 400  # above this a module is listed as one to watch

# Third-party packages by the package that may import them. The node's floor and its policy depend on nothing.
THIRD_PARTY = {
    "": set(),
    "kernel": set(),
    "policy": set(),
    "api": {"msgspec"},
    "images": {"msgspec", "obstore", "zstandard"},
    "runtime": {"msgspec", "pycdlib", "qemu", "zstandard"},
    "observe": {"msgspec", "structlog"},
    "edge": {"msgspec", "uvicorn", "uvloop", "httptools", "structlog"},
    "client": {"msgspec", "httpx", "typer", "click", "rich"},
    "testing": {"msgspec", "httpx", "starlette", "uvicorn", "pytest", "hypothesis"},
}

KERNEL_LITERALS = ("/proc/", "/sys/fs/cgroup")
IN_SANDBOXES = (SRC / "testing" / "redteam.py", SRC / "runtime" / "fncall" / "zygote.py")  # what they say is run there, not here
KERNEL_MODULES = ("ctypes", "fcntl")  # fcntl: flock and the like are fine, ioctl is not


NOT_OURS = {".git", ".venv", ".hypothesis", ".cache", "__pycache__", "_native", "artifacts", "build", "dist"}


@cache
def tracked_files() -> list[Path]:
    """Every file of the project: no build products, no virtual environment. Without git, which a source archive has not."""
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = sorted(name for name in folders if name not in NOT_OURS and not name.endswith(("_cache", ".egg-info")))
        found += [Path(folder, name) for name in sorted(files)]
    return found


def modules() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def package_of(path: Path) -> str:
    parts = path.relative_to(SRC).parts
    return parts[0] if len(parts) > 1 else ""


def identify(path: Path) -> str:
    return str(path.relative_to(ROOT))


every_module = pytest.mark.parametrize("path", modules(), ids=identify)


def docstrings(tree: ast.AST) -> set[int]:
    """The ids of all string expressions that stand alone: docstrings and comments in string form."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@every_module
def test_only_the_floor_touches_the_kernel(path: Path) -> None:
    if package_of(path) == "kernel" or path in IN_SANDBOXES:
        return
    tree = ast.parse(path.read_text())
    prose = docstrings(tree)
    found = [f"{line}: imports {name}" for line, name in imports(tree) if name.split(".")[0] == "ctypes" or name == "fcntl.ioctl"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in prose:
            text = node.value if isinstance(node.value, str) else node.value.decode(errors="replace")
            found += [f"{node.lineno}: the literal {literal}" for literal in KERNEL_LITERALS if literal in text]
        if isinstance(node, ast.Attribute) and node.attr == "ioctl":
            found.append(f"{node.lineno}: ioctl")
    assert not found, f"{identify(path)}: this belongs in kernel/: {found}"


@every_module
def test_third_party_packages_are_allowed_by_name(path: Path) -> None:
    package = package_of(path)
    assert package in THIRD_PARTY, f"a new package: say in {Path(__file__).name} what it may import"
    allowed = THIRD_PARTY[package] | sys.stdlib_module_names | {"opendsec"}
    found = [f"{line}: {name}" for line, name in imports(ast.parse(path.read_text())) if name.split(".")[0] not in allowed]
    assert not found, f"{identify(path)}: {package or 'opendsec'} may not import {found}"


@every_module
def test_no_explicit_any(path: Path) -> None:
    """mypy says it of annotations; this says it of the import, also where mypy does not look."""
    if package_of(path) != "kernel":
        names = {name for _, name in imports(ast.parse(path.read_text()))}
        assert "typing.Any" not in names, f"{identify(path)} imports Any"


@every_module
def test_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{identify(path)} has no docstring"


def test_module_size() -> None:
    suffixes = (".py", ".c", ".h", ".sh")
    sizes = {identify(p): len(p.read_text().splitlines()) for p in tracked_files() if p.suffix in suffixes}
    if to_watch := {name: lines for name, lines in sizes.items() if LONG_LINES < lines <= MAX_LINES}:
        warnings.warn(LongModules(f"long modules: {to_watch}"), stacklevel=1)
    assert {name: lines for name, lines in sizes.items() if lines > MAX_LINES} == {}


class LongModules(UserWarning):
    """Printed in the summary, never an error (pyproject.toml, filterwarnings)."""


def test_licence_header() -> None:
    sources = [p for p in tracked_files() if p.suffix in {".py", ".c", ".h", ".sh", ".toml"} or p.name in {"Makefile", "run"}]
    without = [identify(p) for p in sources if "SPDX-License-Identifier: Apache-2.0" not in "".join(p.read_text().splitlines(True)[:3])]
    assert without == []


def test_packages_are_typed() -> None:
    assert (SRC / "py.typed").is_file()
