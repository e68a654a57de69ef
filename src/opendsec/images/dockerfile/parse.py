# SPDX-License-Identifier: Apache-2.0
"""Dockerfile text to instructions, as BuildKit's parser does it: directives, comments, continued lines, flags, here-documents.

What is not understood is refused with its line number, never skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from opendsec.api.errors import InvalidRequest
from opendsec.images.dockerfile.words import BadWord

MAX_BYTES = 1 << 20
MAX_INSTRUCTIONS, MAX_STAGES = 2000, 64  # planning takes the square of the one; each stage may need all before it
KNOWN = frozenset(("FROM", "RUN", "COPY", "ADD", "ENV", "ARG", "WORKDIR", "USER", "ENTRYPOINT", "CMD", "LABEL", "SHELL"))
UNSUPPORTED = {
    "EXPOSE": "a sandbox has no ports to publish: remove the line",
    "VOLUME": "a sandbox's files are its own: remove the line",
    "HEALTHCHECK": "nothing would check it: remove the line",
    "STOPSIGNAL": "sandboxes are ended by SIGKILL: remove the line",
    "ONBUILD": "triggers are not kept in images",
    "MAINTAINER": "use LABEL",
}
_FLAGS: Mapping[str, frozenset[str]] = {
    "COPY": frozenset(("from", "chown", "chmod")),
    "ADD": frozenset(("chown", "chmod")),
}

_DIRECTIVE = re.compile(r"#\s*([a-zA-Z][a-zA-Z0-9]*)\s*=\s*(.+?)\s*")
_FLAG = re.compile(r"--([a-z][a-z0-9-]*)(?:=(\S*))?(?:\s+|$)")
_HEREDOC = re.compile(r"<<(-?)(['\"]?)([A-Za-z_][A-Za-z0-9_]*)\2")


class Heredoc(NamedTuple):
    name: str
    text: str  # without the closing line; leading tabs stripped if asked for
    raw: str  # as it stood, with the closing line
    quoted: bool


class Instruction(NamedTuple):
    """`text`: what follows the name and the flags, continued lines joined, nothing substituted."""

    line: int
    name: str
    text: str
    flags: Mapping[str, str] = {}
    heredocs: tuple[Heredoc, ...] = ()
    escape: str = "\\"

    def __str__(self) -> str:
        flags = "".join(f" --{name}={value}" for name, value in self.flags.items())
        return f"{self.name}{flags} {' '.join(self.text.split())}"

    def refuse(self, why: str) -> NoReturn:
        refuse(self.line, why)


def refuse(line: int, why: str) -> NoReturn:
    raise InvalidRequest(f"line {line}: {why}", field="source.dockerfile", data={"line": line})


def parse(text: str) -> list[Instruction]:
    """Raises InvalidRequest with the line number."""
    if len(text) > MAX_BYTES:
        raise InvalidRequest(f"must be at most {MAX_BYTES} characters", field="source.dockerfile")
    if "\0" in text:
        raise InvalidRequest("must not contain NUL", field="source.dockerfile")
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    escape = _escape(lines)
    continued = re.compile(re.escape(escape) + r"[ \t]*$")
    found: list[Instruction] = []
    position = 0
    while position < len(lines):
        first, joined = position, ""
        if not (line := lines[position].lstrip()) or line.startswith("#"):
            position += 1
            continue
        more = True
        while more and position < len(lines):
            line = lines[position]
            position += 1
            if line.lstrip().startswith("#") or (joined and not line.strip()):
                continue  # comments, and empty lines, between the parts of a continued line
            more = continued.search(line) is not None
            joined += continued.sub("", line) if more else line
        instruction, position = _instruction(first + 1, joined.strip(), lines, position, escape)
        found.append(instruction)
        if len(found) > MAX_INSTRUCTIONS:
            refuse(first + 1, f"more than {MAX_INSTRUCTIONS} instructions")
    if sum(instruction.name == "FROM" for instruction in found) > MAX_STAGES:
        raise InvalidRequest(f"has more than {MAX_STAGES} stages", field="source.dockerfile")
    if not found:
        raise InvalidRequest("has no instructions", field="source.dockerfile")
    return found


def _escape(lines: list[str]) -> str:
    """Directives are the comments at the very beginning, up to the first line that is none."""
    seen = set()
    for number, line in enumerate(lines, 1):
        match = _DIRECTIVE.fullmatch(line.strip())
        if match is None:
            break
        name = match[1].lower()
        if name in seen:
            refuse(number, f"only one {name!r} directive")
        seen.add(name)
        if name == "escape":
            if match[2] not in ("\\", "`"):
                refuse(number, "escape must be \\ or `")
            return match[2]
        if name not in ("syntax", "check"):
            break
    return "\\"


def _instruction(number: int, line: str, lines: list[str], position: int, escape: str) -> tuple[Instruction, int]:
    name, _, text = line.partition(" ") if "\t" not in line.split(" ")[0] else line.partition("\t")
    name, text = name.upper(), text.strip()
    if name in UNSUPPORTED:
        refuse(number, f"{name} is not supported: {UNSUPPORTED[name]}")
    if name not in KNOWN:
        refuse(number, f"unknown instruction {name[:40]!r}")
    if not text:
        refuse(number, f"{name} needs an argument")
    flags, text = _flags(number, name, text)
    heredocs: list[Heredoc] = []
    if name == "RUN" and not text.startswith("["):
        for match in _HEREDOC.finditer(text):
            heredoc, position = _heredoc(number, match, lines, position)
            heredocs.append(heredoc)
    elif name in ("COPY", "ADD") and _HEREDOC.search(text):
        refuse(number, f"{name} of a here-document is not supported")
    return Instruction(number, name, text, flags, tuple(heredocs), escape), position


def _flags(number: int, name: str, text: str) -> tuple[dict[str, str], str]:
    flags: dict[str, str] = {}
    while text.startswith("--") and (match := _FLAG.match(text)):
        flag, value = match[1], match[2] or ""
        if name == "RUN" and (flag, value) == ("network", "none"):
            pass  # that is how they run
        elif flag not in _FLAGS.get(name, ()):
            refuse(number, f"{name} --{flag} is not supported")
        elif not value:
            refuse(number, f"{name} --{flag} needs a value")
        elif flag in flags:
            refuse(number, f"{name} has --{flag} twice")
        else:
            flags[flag] = value
        text = text[match.end() :]
    if not text:
        refuse(number, f"{name} needs an argument")
    return flags, text


def _heredoc(number: int, match: re.Match[str], lines: list[str], position: int) -> tuple[Heredoc, int]:
    strip, quote, name = match.groups()
    body: list[str] = []
    raw: list[str] = []
    while position < len(lines):
        line = lines[position]
        position += 1
        raw.append(line)
        plain = line.lstrip("\t") if strip else line
        if plain == name:
            return Heredoc(name, "".join(f"{one}\n" for one in body), "\n".join(raw), bool(quote)), position
        body.append(plain)
    refuse(number, f"the here-document {name!r} does not end")


def json_words(text: str) -> tuple[str, ...] | None:
    """The words of an exec form; None if it is no JSON array of strings (then it is a shell form, as Docker has it)."""
    if not text.startswith("["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        return None
    if any("\0" in word or not _encodable(word) for word in value):
        raise BadWord("a word holds a NUL character, or is not valid Unicode text")
    return tuple(value)


def _encodable(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True
