# SPDX-License-Identifier: Apache-2.0
"""Variables and quotes in the arguments of instructions, by Docker's rules (those of a shell, without the shell).

    $name ${name} ${name:-word} ${name-word} ${name:+word} ${name+word} ${name:?message} ${name?message}

Nothing is substituted within single quotes or after the escape character. Unset variables are empty.
"""

from __future__ import annotations

from collections.abc import Mapping

_NAME_START = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_NAME = _NAME_START | frozenset("0123456789")
MAX_DEPTH = 20
MAX_SUBSTITUTED = 4 << 20  # characters that all substitutions of a stage put in: `ENV A=$A$A`, again and again, doubles


class BadWord(ValueError):
    """The message says what is wrong."""


class Values(dict[str, str]):
    """What variables are, with a limit on how much using them may make. All copies share the limit."""

    def __init__(self, values: Mapping[str, str] = {}, *, of: Values | None = None) -> None:
        super().__init__(values)
        self._left: list[int] = [MAX_SUBSTITUTED] if of is None else of._left

    def use(self, name: str) -> str | None:
        """Raises BadWord."""
        value = self.get(name)
        self._left[0] -= len(value or "")
        if self._left[0] < 0:
            raise BadWord(f"the values of variables come to more than {MAX_SUBSTITUTED} characters")
        return value


def one_word(text: str, values: Values, escape: str = "\\") -> str:
    """`text` with variables substituted and quotes removed; blanks stay."""
    return _Reader(text, values, escape).read()


def split(text: str, values: Values, escape: str = "\\") -> list[str]:
    """Words separated by blanks outside quotes; each substituted, and what is substituted is not split again."""
    return [one_word(word, values, escape) for word in raw_words(text, escape)]


def raw_words(text: str, escape: str = "\\") -> list[str]:
    """Words as they stand, with their quotes."""
    words: list[str] = []
    current, quote, position, depth = "", "", 0, 0
    while position < len(text):
        char = text[position]
        if char == escape and quote != "'" and position + 1 < len(text):
            current += text[position : position + 2]
            position += 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif text.startswith("${", position):
            depth += 1
        elif char == "}" and depth:
            depth -= 1
        elif char in " \t" and not depth:
            if current:
                words.append(current)
            current = ""
            position += 1
            continue
        current += char
        position += 1
    if quote:
        raise BadWord(f"a quote {quote} does not end")
    return [*words, current] if current else words


class _Reader:
    def __init__(self, text: str, values: Values, escape: str, depth: int = 0) -> None:
        self.text, self.values, self.escape, self.depth, self.at = text, values, escape, depth, 0
        if depth > MAX_DEPTH:
            raise BadWord("substitutions nested too deep")

    def read(self) -> str:
        out = ""
        quote = ""
        while self.at < len(self.text):
            char = self.text[self.at]
            if quote == "'":
                if char == "'":
                    quote = ""
                else:
                    out += char
                self.at += 1
            elif char == self.escape:
                following = self.text[self.at + 1 : self.at + 2]
                if quote and following not in ('"', "$", self.escape):
                    out += char  # within double quotes it stays before anything else
                out += following
                self.at += 2
            elif char == "$":
                out += self.variable()
            elif quote:
                if char == quote:
                    quote = ""
                else:
                    out += char
                self.at += 1
            elif char in "'\"":
                quote = char
                self.at += 1
            else:
                out += char
                self.at += 1
        if quote:
            raise BadWord(f"a quote {quote} does not end")
        return out

    def variable(self) -> str:
        self.at += 1
        if self.text[self.at : self.at + 1] == "{":
            return self.braced()
        name = self.name()
        return (self.values.use(name) or "") if name else "$"

    def name(self) -> str:
        begin = self.at
        if self.at < len(self.text) and self.text[self.at] in _NAME_START:
            while self.at < len(self.text) and self.text[self.at] in _NAME:
                self.at += 1
        return self.text[begin : self.at]

    def braced(self) -> str:
        self.at += 1
        name = self.name()
        if not name:
            raise BadWord("${ needs the name of a variable")
        rest = self.until_brace()
        value = self.values.use(name)
        if not rest:
            return value or ""
        colon = rest.startswith(":")
        operator, word = rest[int(colon) : int(colon) + 1], rest[int(colon) + 1 :]
        there = bool(value) if colon else value is not None
        if operator == "-":
            return (value or "") if there else self.nested(word)
        if operator == "+":
            return self.nested(word) if there else ""
        if operator == "?":
            if not there:
                raise BadWord(f"{name}: {self.nested(word) or 'is not set'}")
            return value or ""
        raise BadWord(f"${{{name}{rest[:20]}}} is a substitution that is not supported")

    def until_brace(self) -> str:
        begin, depth = self.at, 1
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == self.escape:
                self.at += 1
            elif self.text.startswith("${", self.at):
                depth += 1
            elif char == "}":
                depth -= 1
                if not depth:
                    self.at += 1
                    return self.text[begin : self.at - 1]
            self.at += 1
        raise BadWord("${ does not end")

    def nested(self, word: str) -> str:
        return _Reader(word, self.values, self.escape, self.depth + 1).read()
