# SPDX-License-Identifier: Apache-2.0
"""Dockerfile text to instructions to steps, without running anything."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.api.errors import InvalidRequest
from opendsec.api.images import ImageConfig
from opendsec.images.dockerfile import plan as plans
from opendsec.images.dockerfile.context import Reader
from opendsec.images.dockerfile.ignore import Ignore
from opendsec.images.dockerfile.parse import parse
from opendsec.images.dockerfile.plan import Copy, MakeDir, Planned, Run
from opendsec.images.dockerfile.words import BadWord, Values, one_word, split


def planned(text: str, args: dict[str, str] | None = None, base: ImageConfig | None = None, target: str = "") -> Planned:
    dockerfile = plans.stages(parse(text), args or {})
    return plans.plan(plans.target(dockerfile, target), dockerfile, base or ImageConfig(), args or {})


def runs(text: str, args: dict[str, str] | None = None) -> list[Run]:
    return [step.action for step in planned(text, args).steps if isinstance(step.action, Run)]


# --- parsing ---------------------------------------------------------------------------------------------------------


def test_continued_lines_comments_and_case() -> None:
    text = "# syntax=docker/dockerfile:1\n\n  from  a\r\nrun one \\\n# between\n\n  two \\  \n three\n#end\nCmd x"
    found = parse(text)
    assert [(one.line, one.name, one.text) for one in found] == [(3, "FROM", "a"), (4, "RUN", "one   two  three"), (10, "CMD", "x")]


def test_the_escape_directive() -> None:
    found = parse("# escape=`\nFROM a\nRUN dir C:\\ `\n x\n")
    assert found[1].text == "dir C:\\  x"
    assert parse("# a comment\n# escape=`\nFROM a\nRUN a \\\n b\n")[1].text == "a  b"  # no longer at the beginning


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<<EOF\necho 1\n\techo 2\nEOF", "echo 1\n\techo 2\n"),
        ("<<-EOF\n\techo 1\n\tEOF", "echo 1\n"),
        ("<<'E'\necho $x\nE", "echo $x\n"),
        ("cat <<A <<B\n1\nA\n2\nB", "cat <<A <<B\n1\nA\n2\nB"),
        ("python3 - <<EOF\nprint(1)\nEOF", "python3 - <<EOF\nprint(1)\nEOF"),
    ],
)
def test_here_documents(text: str, expected: str) -> None:
    first, *rest = runs(f"FROM a\nRUN {text}\nRUN after\n")
    assert first.argv == ("/bin/sh", "-c", expected) and rest[0].argv[2] == "after"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("FROM a\nEXPOSE 80", 2, "EXPOSE is not supported"),
        ("FROM a\n\nVOLUME /x", 3, "VOLUME is not supported"),
        ("FROM a\nHEALTHCHECK NONE", 2, "not supported"),
        ("FROM a\nONBUILD RUN x", 2, "not supported"),
        ("FROM a\nSTOPSIGNAL 9", 2, "not supported"),
        ("FROM a\nWHATEVER x", 2, "unknown instruction"),
        ("FROM a\nRUN", 2, "needs an argument"),
        ("FROM --platform=linux/arm64 a", 1, "FROM --platform is not supported"),
        ("FROM a\nRUN --mount=type=cache,target=/c x", 2, "RUN --mount is not supported"),
        ("FROM a\nRUN --security=insecure x", 2, "not supported"),
        ("FROM a\nCOPY --link a b", 2, "COPY --link is not supported"),
        ("FROM a\nCOPY --chown=1 --chown=2 a b", 2, "twice"),
        ("FROM a\nCOPY --from a b", 2, "needs a value"),
        ("FROM a\nADD --checksum=x a b", 2, "not supported"),
        ("FROM a\nADD https://x/y /z", 2, "not in the context"),
        ("FROM a\nADD git@x:y /z", 2, "not in the context"),
        ("FROM a\nCOPY <<EOF /x\n1\nEOF", 2, "here-document is not supported"),
        ("FROM a\nRUN <<EOF\nnever ends", 2, "does not end"),
        ("FROM a\nRUN <<EOF\n#!/usr/bin/python3\nEOF", 2, "program of its own"),
        ("RUN x\nFROM a", 1, "before the first FROM"),
        ("FROM a AS", 1, "must be FROM"),
        ("FROM a AS 1x", 1, "cannot be the name"),
        ("FROM a AS x\nFROM b AS X", 2, "already"),
        ("FROM $NONE", 1, "empty"),
        ("FROM a\nCOPY one", 2, "at least one source"),
        ("FROM a\nCOPY one two /dir", 2, "must be a directory"),
        ("FROM a\nCOPY --chmod=u+x a b", 2, "octal"),
        ("FROM a\nENV X", 2, "must be ENV"),
        ("FROM a\nENV X=1 Y", 2, "must be ENV"),
        ("FROM a\nARG 1X", 2, "cannot be the name"),
        ("FROM a\nSHELL sh -c", 2, "must be SHELL"),
        ("FROM a\nRUN []", 2, "empty"),
        ("FROM a\nWORKDIR $NONE", 2, "empty"),
        ("FROM a\nENV X=${Y", 2, "does not end"),
        ("FROM a\nENV X=${Y#z}", 2, "not supported"),
        ("FROM a\nENV X=${Y:?must be given}", 2, "must be given"),
    ],
)
def test_what_is_refused(text: str, line: int, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as error:
        planned(text)
    assert error.value.data["line"] == line and str(error.value).startswith(f"source.dockerfile: line {line}: ")


@pytest.mark.slow
@given(st.text(alphabet="FROMRUNCPYENVARG abc$\\{}'\"<->=[]#\n/.:", max_size=200))
def test_any_text_is_planned_or_refused(text: str) -> None:
    try:
        planned("FROM a\n" + text)
    except InvalidRequest:
        pass


# --- words -----------------------------------------------------------------------------------------------------------

VALUES = Values({"a": "A", "empty": "", "two": "x y"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$a", "A"),
        ("${a}b", "Ab"),
        ("$ab", ""),
        ("'$a'", "$a"),
        ('"$a $two"', "A x y"),
        ("\\$a", "$a"),
        ('"\\$a \\n"', "$a \\n"),
        ("${none:-d}", "d"),
        ("${empty:-d}", "d"),
        ("${empty-d}", ""),
        ("${none-d}", "d"),
        ("${a:+s}", "s"),
        ("${empty:+s}", ""),
        ("${empty+s}", "s"),
        ("${none:-${a}}", "A"),
        ("${none:-'q'}", "q"),
        ("$", "$"),
        ("$1", "$1"),
        ("a\\ b", "a b"),
    ],
)
def test_substitution(text: str, expected: str) -> None:
    assert one_word(text, VALUES) == expected


def test_splitting() -> None:
    assert split("one 'two three' fo\"ur fi\"ve six\\ seven $two", VALUES) == ["one", "two three", "four five", "six seven", "x y"]
    with pytest.raises(BadWord):
        split("'open", VALUES)


# --- what would take all memory, or for ever -------------------------------------------------------------------------


def refused(text: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        dockerfile = plans.stages(parse(text), {})
        for stage in dockerfile.stages:
            plans.plan(stage, dockerfile, ImageConfig(), {})
    assert caught.value.field == "source.dockerfile"
    return caught.value.message


@pytest.mark.parametrize("instruction", ["ENV", "ARG"])
@pytest.mark.parametrize("first", ["FROM a\n", ""])
def test_values_that_double(instruction: str, first: str) -> None:
    if first or instruction == "ARG":
        assert "more than 4194304 characters" in refused(f"{first}{instruction} A=x\n" + f"{instruction} A=$A$A${{A:-}}${{A:+$A}}\n" * 60)


def test_words_of_one_instruction() -> None:
    assert "more than 4194304 characters" in refused(f"FROM a\nENV A={'x' * 50_000}\nCOPY " + "$A " * 100 + "/to/\n")


def test_instructions_and_stages_are_counted() -> None:
    assert refused("FROM a\n" + "ENV A=x\n" * 2000) == "line 2001: more than 2000 instructions"
    assert refused("FROM a AS s\n" * 65) == "has more than 64 stages"


def test_json_that_is_no_command() -> None:
    assert runs("FROM a\nRUN [" + "[" * 100_000)[0].argv[:2] == ("/bin/sh", "-c")
    assert "not valid Unicode" in refused('FROM a\nRUN ["\\ud800"]')
    assert "NUL" in refused('FROM a\nCMD ["a\\u0000b"]')


# --- planning --------------------------------------------------------------------------------------------------------


def test_arguments_and_environment() -> None:
    text = """
ARG TAG=1
ARG OUTER=outer
FROM base:$TAG
ARG TAG
ARG INNER=inner-$TAG
ARG NOTHING
ENV A=$INNER B="x y" C=$A
ENV D one two
ENV INNER=from-env
RUN echo $INNER
ARG LATE=late
RUN x
"""
    dockerfile = plans.stages(parse(text), {"TAG": "2", "UNKNOWN": "x"})
    assert dockerfile.stages[0].base == "base:2" and dockerfile.notes == ("the argument 'UNKNOWN' is declared nowhere",)
    first, second = runs(text, {"TAG": "2"})
    assert first.argv[2] == "echo $INNER"
    assert {key: value for key, value in first.env.items() if key != "PATH"} == {
        "TAG": "2",
        "INNER": "from-env",
        "A": "inner-2",
        "B": "x y",
        "C": "",
        "D": "one two",
    }
    assert "OUTER" not in first.env and "LATE" not in first.env and second.env["LATE"] == "late"
    config = planned(text).config
    assert "TAG" not in config.env and config.env["A"] == "inner-1"


def test_commands_users_and_directories() -> None:
    base = ImageConfig(env={"PATH": "/x"}, user="me", workdir="/base", entrypoint=("/e",), cmd=("c",))
    result = planned(
        'FROM b\nWORKDIR sub\nWORKDIR ../other/\nUSER you:us\nRUN ["a", "b"]\nSHELL ["bash", "-ec"]\nRUN c\nENTRYPOINT d', base=base
    )
    assert [step.action for step in result.steps] == [
        MakeDir(path="/base/sub"),
        MakeDir(path="/base/other"),
        Run(argv=("a", "b"), env={"PATH": "/x"}, user="you:us", cwd="/base/other"),
        Run(argv=("bash", "-ec", "c"), env={"PATH": "/x"}, user="you:us", cwd="/base/other"),
    ]
    assert result.config == ImageConfig(env={"PATH": "/x"}, user="you:us", workdir="/base/other", entrypoint=("bash", "-ec", "d"))
    assert planned("FROM b\nRUN x", base=base).config.cmd == ("c",)
    assert planned('FROM b\nCMD ["n"]\nENTRYPOINT ["e"]', base=base).config.cmd == ("n",)
    assert planned("FROM b").config.env == {"PATH": plans.PATH}


def test_copies() -> None:
    text = 'FROM a\nWORKDIR /w\nENV V=v\nCOPY a $V\nCOPY a b dir/\nCOPY ["with blank", "/x/"]\n'
    text += "COPY --from=0 --chown=$V:g --chmod=0755 a .\nADD x.tar /y"
    copies = [step.action for step in planned(text).steps if isinstance(step.action, Copy)]
    assert copies == [
        Copy(origin="", sources=("a",), to="/w/v"),
        Copy(origin="", sources=("a", "b"), to="/w/dir/"),
        Copy(origin="", sources=("with blank",), to="/x/"),
        Copy(origin="0", sources=("a",), to="/w/", chown="v:g", chmod=0o755),
        Copy(origin="", sources=("x.tar",), to="/y", unpack=True),
    ]


def test_stages() -> None:
    dockerfile = plans.stages(parse("FROM a AS one\nRUN x\nFROM One AS two\nFROM scratch\nRUN y"), {})
    assert [(stage.name, stage.base, stage.from_stage) for stage in dockerfile.stages] == [
        ("one", "a", None),
        ("two", "One", 0),
        ("", "scratch", None),
    ]
    assert plans.target(dockerfile, "TWO").number == 1 and plans.target(dockerfile, "0").name == "one"
    assert plans.target(dockerfile, "").number == 2
    with pytest.raises(InvalidRequest, match="no stage 'x'"):
        plans.target(dockerfile, "x")


# --- .dockerignore ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "path", "excluded"),
    [
        ("*.o", "a.o", True),
        ("*.o", "d/a.o", False),
        ("**/*.o", "d/e/a.o", True),
        ("**/*.o", "a.o", True),
        ("dir", "dir/x/y", True),
        ("/dir/", "dir/x", True),
        ("dir/*", "dir", False),
        ("dir/**", "dir/x/y", True),
        ("*\n!keep", "keep/x", False),
        ("!keep\n*", "keep", True),
        ("a?c", "abc", True),
        ("a[!b]c", "a!c", True),
        ("a[^b]c", "abc", False),
        ("\\*", "x", False),
        ("# x\n\n", "x", False),
        ("*", "deep/x", True),
        (".*\n!.env", ".env", False),
    ],
)
def test_ignoring(patterns: str, path: str, excluded: bool) -> None:
    assert Ignore(patterns).excludes(path) is excluded


def test_patterns_that_mean_nothing() -> None:
    with pytest.raises(InvalidRequest, match="line 2"):
        Ignore("ok\n[open")


def test_what_will_not_fit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    with open(tmp_path / "b", "wb") as file:
        file.truncate(1 << 40)
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        reader = Reader(fd)
        for paths in ([b"b"], [b""]):
            with pytest.raises(InvalidRequest, match="more than the 1000 bytes"):
                reader.entries(paths, "/x/", limit_bytes=1000)
        assert reader.entries([b"a"], "/x", limit_bytes=100)[0].size == 100
        with pytest.raises(InvalidRequest):
            reader.entries([b"a", b"a"], "/x/", limit_bytes=199)
    finally:
        os.close(fd)


def test_reading_a_context_can_be_cancelled(tmp_path: Path) -> None:
    """A build that was given up, or an edge that stops, would wait for a thread that reads a hole of a tebibyte."""
    with open(tmp_path / "endless", "wb") as file:
        file.truncate(1 << 40)
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        reader = Reader(fd)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(reader.entries, [b"endless"], "/x")
            reader.cancel()
            with pytest.raises(InvalidRequest, match="cancelled"):
                reading.result(30)
    finally:
        os.close(fd)
