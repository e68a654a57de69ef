# SPDX-License-Identifier: Apache-2.0
"""Language definitions: one TOML file each, those that come with the package and the operator's.

A file's name is the language's. `{file}` in a command is what the source is called, `{memory_mb}` the call's memory. An operator's file
of the same name replaces ours whole; `images` (`python=debian-python,*=toolchain`) replaces images alone.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from opendsec.api.errors import InvalidRequest
from opendsec.api.fn import Language
from opendsec.api.fn_check import LANGUAGE, check_argv, check_files, check_outputs
from opendsec.api.spec import MIB, Container, check_env
from opendsec.api.units import parse_bytes

BUILTIN = Path(__file__).parent / "languages"


class Languages:
    """All languages of one edge, by name."""

    def __init__(self, languages: Mapping[str, Language]) -> None:
        self.all = dict(languages)

    def get(self, name: str) -> Language:
        """Raises InvalidRequest."""
        found = self.all.get(name)
        if found is None:
            raise InvalidRequest(f"must be one of {', '.join(sorted(self.all))}; got {name[:40]!r}", field="language")
        return found


def load(operators: Path | None = None, images: str = "") -> Languages:
    """Read all definitions. Raises ValueError naming the file and the rule."""
    folders = (BUILTIN,) if operators is None else (BUILTIN, operators)
    found = {path.stem: _read(path) for folder in folders for path in sorted(folder.glob("*.toml"))}
    instead = parse_images(images)
    if unknown := sorted(set(instead) - set(found) - {"*"}):
        raise ValueError(f"no language is called {unknown[0]!r}")
    for name, language in found.items():
        image = instead.get(name, instead.get("*"))
        if image is not None:
            found[name] = msgspec.structs.replace(language, image=image)
    return Languages(found)


def parse_images(text: str) -> dict[str, str]:
    """`python=debian-python,*=toolchain` as a mapping. Raises ValueError."""
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, image = part.partition("=")
        try:
            Container(image=image).check()
        except InvalidRequest:
            equals = ""
        if not equals or not name:
            raise ValueError(f"must be LANGUAGE=IMAGE,…; got {part[:80]!r}")
        found[name] = image
    return found


def _read(path: Path) -> Language:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        if "name" in content:
            raise ValueError("a language is called as its file: leave out 'name'")
        if not LANGUAGE.fullmatch(path.stem):
            raise ValueError("its name must be lower case letters, digits or any of + # . _ -")
        known = {field.name for field in msgspec.structs.fields(Language)}
        if unknown := sorted(set(content) - known):
            raise ValueError(f"no key is called {unknown[0]!r}")
        language = msgspec.convert({**content, "name": path.stem}, Language)
        _check(language)
    except (OSError, ValueError, InvalidRequest) as error:  # of TOML, of its types, of its rules
        raise ValueError(f"{path}: {error}") from None
    return language


def _check(language: Language) -> None:
    Container(image=language.image).check()
    check_files({language.file: b""}, "file")
    check_argv(language.run, "run")
    if language.compile:
        check_argv(language.compile, "compile")
        if not language.artifacts:
            raise ValueError("a compiled language needs 'artifacts'")
    check_outputs(language.artifacts)
    check_env(language.env, "env")
    parse_bytes(language.memory_overhead, field="memory_overhead")


def command(template: tuple[str, ...], language: Language, memory_bytes: int) -> tuple[str, ...]:
    """A command of a language with its places filled in."""
    memory_mb = str(max(1, memory_bytes // MIB))
    return tuple(part.replace("{file}", language.file).replace("{memory_mb}", memory_mb) for part in template)
