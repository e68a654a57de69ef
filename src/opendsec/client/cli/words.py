# SPDX-License-Identifier: Apache-2.0
"""Command lines that hold another command line: which words are ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typer import Context
from typer.core import TyperCommand


def options_length(words: Sequence[str], takes_value: Mapping[str, bool]) -> int:
    """How many words at the beginning are options and their values, with a `--` that ends them. `takes_value`: by spelling, such as
    `-e` or `--env`; what is not in it takes none."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        word = words[at]
        at += 1
        if word == "--":
            break
        if word.startswith("--"):
            at += "=" not in word and takes_value.get(word, False)
            continue
        for index, letter in enumerate(word[1:], start=2):
            if takes_value.get(f"-{letter}", False):
                at += index == len(word)  # else the rest of the word is the value
                break
    return min(at, len(words))


def options_first(words: Sequence[str], takes_value: Mapping[str, bool]) -> list[str]:
    """The words with the options that stand behind the first argument, or only a `--`, moved before it."""
    first = options_length(words, takes_value)
    more = options_length(words[first + 1 :], takes_value)
    if not more:
        return list(words)
    moved = [*words[:first], *words[first + 1 : first + 1 + more]]
    return [*(word for word in moved if word != "--"), words[first], *words[first + 1 + more :]]


class RunsACommand(TyperCommand):
    """A command of ours whose first argument is followed by a program and its arguments, which are not to be touched.

    Our options may stand before the first argument and behind it, since no program's name begins with a dash:
    `dsec exec --timeout 5 BOX ls -l`, `dsec exec BOX --timeout 5 ls -l`, `dsec exec BOX -- ls -l`.
    """

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:  # type: ignore[override]  # the base class is private
        takes_value = {
            spelling: not getattr(param, "is_flag", False)
            for param in self.get_params(ctx)
            if param.param_type_name == "option"
            for spelling in (*param.opts, *param.secondary_opts)
        }
        return super().parse_args(ctx, options_first(args, takes_value))
