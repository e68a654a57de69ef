# SPDX-License-Identifier: Apache-2.0
"""The commands about function calls over the fake edge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opendsec.api.errors import InvalidRequest
from opendsec.client.judge_tasks import read_tasks
from tests.unit.client.conftest import Dsec


def test_run_a_file(dsec: Dsec, tmp_path: Path) -> None:
    Path("a.py").write_text("import sys; print(sys.stdin.read()); print('no', file=sys.stderr); sys.exit(3)")
    assert dsec("fn", "run", "a.py", "--stdin", "-", stdin="é".encode()) == (3, "é\n", "no\n")
    Path("b.sh").write_text("cat given/x; echo made > out.txt; mkdir d; echo 2 > d/y")
    ran = dsec("fn", "run", "b.sh", "-f", "given/x=a.py", "-o", "*.txt", "-o", "d/y", "--to", "back", "--json")
    shown = json.loads(ran.out)
    assert ran.code == 0 and shown["outcome"] == "ok" and shown["stdout"] == Path("a.py").read_text()
    assert shown["files"] == {"out.txt": "back/out.txt", "d/y": "back/d/y"} and Path("back/d/y").read_text() == "2\n"


def test_run_a_function(dsec: Dsec) -> None:
    assert dsec("fn", "run", "statistics:mean", "[1, 2, 6]") == (0, "3\n", "")
    ran = dsec("fn", "run", "builtins:int", '"x"')
    assert ran.code == 1 and "ValueError" in ran.err and ran.out == ""


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("a.py", "1"), 125, "only a function takes arguments"),
        (("a.xyz",), 125, "language: cannot be told from the name 'a.xyz'; give one of bash, python"),
        (("a.py", "--language", "klingon"), 125, "language: no language 'klingon'"),
        (("none.py",), 125, "program: cannot read none.py: No such file"),
        (("bad.py",), 125, "program: is not text"),
        (("math:sqrt", "x"), 125, "arguments: must be JSON"),
        (("a.py", "--memory", "lots"), 125, "limits.memory: 'lots' is not a size"),
        (("a.py", "--pool", "none"), 125, "pool: no pool none"),
        (("a.py", "--stdin", "none"), 125, "stdin: cannot read none"),
        (("a.py", "--file", "x"), 125, "file: must look like KEY=VALUE"),
        (("a.py", "--output", "../x"), 125, "outputs[0]"),
        (("forever.py", "--timeout", "0.2"), 124, "the call ran out of time (limits hit: wall_time)"),
    ],
)
def test_run_fails(dsec: Dsec, words: tuple[str, ...], code: int, says: str) -> None:
    for name, text in {"a.py": b"", "a.xyz": b"", "bad.py": b"\xff", "forever.py": b"import time; time.sleep(600)"}.items():
        Path(name).write_bytes(text)
    ran = dsec("fn", "run", *words)
    assert ran.code == code and says in ran.err, ran


def test_pools_and_languages(dsec: Dsec) -> None:
    made = json.loads(dsec("fn", "pool", "set", "p.1", "--image", "debian", "-n", "2", "--preload", "json", "--json").out)
    assert made["spec"]["size"] == 2 and made["spec"]["max"] == 4 and made["spec"]["preload"] == ["json"]
    assert "p.1" in dsec("fn", "pools").out
    assert json.loads(dsec("fn", "pools", "--json").out)["pools"][0]["spec"]["name"] == "p.1"
    assert "1/4" in dsec("fn", "pool", "resize", "p.1", "--size", "1").out
    assert "size: must be at most max" in dsec("fn", "pool", "resize", "p.1", "--size", "9").err
    assert dsec("fn", "pool", "set", "q", "--image", "debian", "--device", "mig").code == 125
    assert dsec("fn", "pool", "rm", "p.1") == (0, "", "")
    assert dsec("fn", "pool", "rm", "p.1").code == 125
    assert "python" in dsec("fn", "languages").out
    assert json.loads(dsec("fn", "languages", "--json").out)["languages"]


TASK = {"source": "print(int(input()) * 2)", "tests": [{"name": "two", "stdin": "2\n", "expected": "4\n"}]}


def test_judge(dsec: Dsec) -> None:
    wrong = {**TASK, "id": "wrong", "source": "print(5)"}
    Path("tasks.jsonl").write_text(
        "\n".join(json.dumps(one) for one in [{**TASK, "id": "right"}, {**wrong, "expect": "fail"}, TASK]) + "\n\n"
    )
    ran = dsec("judge", "tasks.jsonl")
    assert ran.code == 0 and ran.err == ""
    *lines, last = ran.out.splitlines()
    assert sorted(lines)[:2] == ["ok             line-3  1/1", "ok             right  1/1"]
    assert sorted(lines)[2].startswith("wrong_answer   wrong  0/1  at two")
    assert last == "3 tasks: 2 pass, 1 fail"
    shown = [json.loads(line) for line in dsec("judge", "tasks.jsonl", "--json").out.splitlines()]
    assert {one["id"]: one["matched"] for one in shown} == {"right": True, "wrong": True, "line-3": True}
    assert shown[0]["tests"][0]["result"]["exit_code"] == 0
    Path("more.jsonl").write_text(json.dumps(wrong))
    ran = dsec("judge", "more.jsonl", "--quiet")
    assert ran.code == 1 and "(expected: pass)" in ran.out and "1 tasks: 0 pass, 1 fail, 1 mistaken" in ran.out
    assert dsec("judge", "-", "--only", "w*", stdin=json.dumps(wrong).encode()).code == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 1: is not valid JSON"),
        ("\n{}", "line 2: Object missing required field `source`"),
        ('{"source": "", "colour": 1}', "line 1: Object contains unknown field `colour`"),
        ('{"source": ""}', "tests: line 1"),
        ('{"source": "", "tests": [{"stdin": 5}]}', "tests[0].stdin: line 1"),
        ('{"source": "", "tests": [{"stdin": {"base64": "*"}}]}', "tests[0].stdin.base64: line 1"),
        ('{"source": "", "tests": [{}], "checker": {"kind": "program"}}', "checker.source: line 1"),
        ('{"source": "", "tests": [{}], "expect": "win"}', "expect: line 1"),
        ("", "there is no task"),
    ],
)
def test_bad_tasks(dsec: Dsec, text: str, says: str) -> None:
    Path("tasks.jsonl").write_text(text)
    ran = dsec("judge", "tasks.jsonl")
    assert ran.code == 125 and says in ran.err, ran.err


def test_content_that_is_no_text() -> None:
    line = json.dumps({"source": "1", "files": {"a": "é"}, "tests": [{"stdin": {"base64": "/w=="}, "files": {"b": {"base64": "AA=="}}}]})
    (one,) = read_tasks([line.encode()])
    assert one.task.files == {"a": "é".encode()} and one.task.tests[0].stdin == b"\xff" and one.task.tests[0].files == {"b": b"\0"}
    with pytest.raises(InvalidRequest, match="line 1"):
        list(read_tasks([b'{"source": 5}']))
