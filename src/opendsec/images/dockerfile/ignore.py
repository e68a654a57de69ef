# SPDX-License-Identifier: Apache-2.0
""".dockerignore: patterns by Go's filepath.Match with `**`, the last one that matches decides, `!` takes back."""

from __future__ import annotations

import posixpath
import re
from typing import NamedTuple

from opendsec.api.errors import InvalidRequest

MAX_BYTES = 1 << 20
MAX_PATTERNS = 10_000


class Ignore:
    def __init__(self, text: str = "") -> None:
        """Raises InvalidRequest for a pattern that means nothing."""
        self._rules: list[_Rule] = []
        for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
            pattern = line.strip()
            if not pattern or line.startswith("#"):
                continue
            keeps = pattern.startswith("!")
            pattern = posixpath.normpath(pattern.removeprefix("!").strip()).lstrip("/")
            if pattern in ("", "."):
                continue
            try:
                self._rules.append(_Rule(re.compile(translate(pattern)), keeps))
            except (re.error, ValueError) as error:
                raise InvalidRequest(f".dockerignore, line {number}: {error}", field="source.context") from None
            if len(self._rules) > MAX_PATTERNS:
                raise InvalidRequest(f".dockerignore: more than {MAX_PATTERNS} patterns", field="source.context")
        self.takes_back = any(rule.keeps for rule in self._rules)

    def excludes(self, path: str) -> bool:
        """`path` is relative to the context. A pattern that matches a directory covers what is in it."""
        excluded = False
        for rule in self._rules:
            if rule.keeps == excluded and any(rule.pattern.fullmatch(prefix) for prefix in _prefixes(path)):
                excluded = not rule.keeps
        return excluded


class _Rule(NamedTuple):
    pattern: re.Pattern[str]
    keeps: bool


def _prefixes(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]


def translate(pattern: str) -> str:
    """A regular expression for whole paths. Raises ValueError."""
    out, at = "", 0
    while at < len(pattern):
        char = pattern[at]
        if pattern.startswith("**", at):
            at += 2
            if pattern.startswith("/", at):
                at += 1
                out += "(?:.*/)?"
            else:
                out += ".*"
            continue
        if char == "*":
            out += "[^/]*"
        elif char == "?":
            out += "[^/]"
        elif char == "[":
            end = pattern.find("]", at + 2)
            if end < 0:
                raise ValueError(f"a [ does not end in {pattern!r}")
            inner = pattern[at + 1 : end]
            negated = inner.startswith("^")
            inner = inner.removeprefix("^").replace("\\", "\\\\").replace("[", "\\[").replace("^", "\\^")
            out += f"[{'^/' if negated else ''}{inner}]"
            at = end
        elif char == "\\":
            at += 1
            if at == len(pattern):
                raise ValueError(f"ends in a backslash: {pattern!r}")
            out += re.escape(pattern[at])
        else:
            out += re.escape(char)
        at += 1
    return out
