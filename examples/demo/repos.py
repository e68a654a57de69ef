# SPDX-License-Identifier: Apache-2.0
"""Repository tasks: released bugs, the recorded actions that fix them, and the upstream tests of the fixed release as judge.

    python -m examples.demo.repos tasks OUT.jsonl [--cache DIR]
    python -m examples.demo.repos layers OUT_DIR [--cache DIR]

`repos.toml` names the releases; this module turns them into layer directories and task lines. A task's workspace is the source
distribution of the release that has the bug. The judge gets the same workspace afresh, the agent's declared outputs, and test
files from the distribution of the release that fixed it. It runs first the neighbours, which pass in both releases, then the
regression tests, which fail in the one and pass in the other, and the exit codes keep the two apart: see `JUDGE_BROKEN`.
"""

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path

import msgspec

from examples.demo.fetch import Release, WheelPart, fetch, fetch_all, read_sdist, unpack_sdist, unpack_wheels
from examples.demo.lines import Action, TaskLine, Verdict, Verify, write_lines

DATA_FILE = Path(__file__).with_name("repos.toml")

# The exit code of a judge whose neighbour tests did not pass. pytest itself ends with 1 when tests failed and with 2 to 5 when
# it could not run them, so a no-op agent has been judged rightly only when the code is exactly 1.
JUDGE_BROKEN = 70
JUDGE_TESTS_FAILED = 1

_VERIFY_DIR = "/verify"


class Toolkit(msgspec.Struct, frozen=True, kw_only=True):
    """Pure wheels laid into one directory, which is also what goes into PYTHONPATH. `parts` is by a wheel's project."""

    ref: str
    path: str
    wheels: tuple[Release, ...]
    parts: dict[str, WheelPart] = {}


class Project(msgspec.Struct, frozen=True, kw_only=True):
    """A package in two releases; `source` is where its modules lie, from the top of the distribution."""

    name: str
    buggy: Release
    fixed: Release
    source: str = "."
    toolkits: tuple[str, ...]

    @property
    def workspace_ref(self) -> str:
        return f"workspace:{self.name}@{self.buggy.version}"

    @property
    def workspace_path(self) -> str:
        return f"/workspace/{self.name}"


class RepoTask(msgspec.Struct, frozen=True, kw_only=True):
    """One bug. Paths in `outputs` and `tests_dir` are from the top of the distribution, test ids from beside `tests_dir`'s copy."""

    id: str
    project: str
    bug: str
    outputs: tuple[str, ...]
    tests_dir: str = "tests"
    test_files: tuple[str, ...]
    regression: tuple[str, ...]
    neighbours: tuple[str, ...]
    actions: tuple[str, ...]


class Data(msgspec.Struct, frozen=True, kw_only=True):
    """All of `repos.toml`."""

    toolkit: tuple[Toolkit, ...]
    project: tuple[Project, ...]
    task: tuple[RepoTask, ...]

    def find_project(self, name: str) -> Project:
        return next(project for project in self.project if project.name == name)

    def find_toolkit(self, ref: str) -> Toolkit:
        return next(toolkit for toolkit in self.toolkit if toolkit.ref == ref)


def load(path: Path = DATA_FILE) -> Data:
    """The demo's own tasks. Raises `msgspec.ValidationError` for a file of another shape."""
    return msgspec.toml.decode(path.read_bytes(), type=Data)


def layer_dir(root: Path, ref: str) -> Path:
    """Where `build_layers` puts the tree of a layer: `KIND:NAME@VERSION` at `root/KIND/NAME@VERSION`."""
    kind, _, name = ref.partition(":")
    return root / kind / name


def build_layers(data: Data, root: Path, cache: Path) -> dict[str, Path]:
    """A directory tree for each layer that the tasks name, by its reference; those already there are kept.

    Each tree is laid out from the sandbox's root: a workspace holds `workspace/NAME/...`, a toolkit `opt/NAME/...`.
    """
    layers: dict[str, Path] = {}
    for toolkit in data.toolkit:
        layers[toolkit.ref] = layer_dir(root, toolkit.ref)
        target = layers[toolkit.ref] / toolkit.path.lstrip("/")
        if not target.exists():
            wheels = fetch_all(toolkit.wheels, cache)
            parts = [toolkit.parts.get(wheel.project, WheelPart()) for wheel in toolkit.wheels]
            unpack_wheels(zip(wheels, parts, strict=True), target)
    archives = fetch_all((project.buggy for project in data.project), cache)
    for project, archive in zip(data.project, archives, strict=True):
        layers[project.workspace_ref] = layer_dir(root, project.workspace_ref)
        target = layers[project.workspace_ref] / project.workspace_path.lstrip("/")
        if not target.exists():
            unpack_sdist(archive, target)
    return layers


def tasks(data: Data, cache: Path) -> Iterator[TaskLine]:
    """Two tasks a bug, in the file's order: `repo/ID/noop`, which must fail, and `repo/ID/recorded`, which must pass."""
    fetch_all((project.fixed for project in data.project), cache)
    for task in data.task:
        project = data.find_project(task.project)
        files = read_sdist(fetch(project.fixed, cache), [f"{task.tests_dir}/{name}" for name in task.test_files])
        yield _line(data, project, task, files, (), "noop", "fail")
        yield _line(data, project, task, files, task.actions, "recorded", "pass")


def _line(
    data: Data, project: Project, task: RepoTask, files: dict[str, str], actions: tuple[str, ...], agent: str, expect: Verdict
) -> TaskLine:
    layers = (project.workspace_ref, *project.toolkits)
    environment = _environment(data, project)
    return TaskLine(
        id=f"repo/{task.id}/{agent}",
        layers=layers,
        actions=tuple(Action(run=f"{environment}\n{text.strip()}\n", cwd=project.workspace_path) for text in actions),
        outputs=tuple(f"{project.workspace_path}/{path}" for path in task.outputs),
        verify=Verify(
            layers=layers,
            files={f"{_VERIFY_DIR}/tests/{name.removeprefix(task.tests_dir).lstrip('/')}": text for name, text in files.items()},
            run=f"{environment}\n{_judge(task)}",
            cwd=_VERIFY_DIR,
        ),
        expect=expect,
    )


def _environment(data: Data, project: Project) -> str:
    # The workspace comes first: what is under test must be the agent's code, also where a toolkit brings the same package.
    # The tests' directory is no part of the path, so nothing there can stand in for the package either.
    source = project.workspace_path if project.source == "." else f"{project.workspace_path}/{project.source}"
    path = ":".join([source, *(data.find_toolkit(ref).path for ref in project.toolkits)])
    return f"export PYTHONPATH={path}"


def _judge(task: RepoTask) -> str:
    pytest = "python3 -m pytest -q -p no:cacheprovider"
    return f"{pytest} {shlex.join(task.neighbours)} || exit {JUDGE_BROKEN}\n{pytest} {shlex.join(task.regression)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.demo.repos", description="Write the repository tasks or their layers.")
    parser.add_argument("what", choices=["tasks", "layers"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--cache", type=Path, default=Path(".cache/demo"))
    arguments = parser.parse_args()
    data = load()
    if arguments.what == "tasks":
        print(f"{write_lines(tasks(data, arguments.cache), arguments.out)} tasks in {arguments.out}")
    else:
        for ref, path in build_layers(data, arguments.out, arguments.cache).items():
            print(f"{ref}\t{path}")


if __name__ == "__main__":
    main()
