# SPDX-License-Identifier: Apache-2.0
"""The repository tasks' data and the lines made of it. Nothing is fetched: the cache is filled with made-up distributions."""

import hashlib
import io
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import msgspec
import pytest

from examples.demo import repos
from examples.demo.fetch import Release, WheelPart
from examples.demo.lines import read_lines, write_lines
from examples.demo.repos import Data, Project, RepoTask, Toolkit


@pytest.fixture(scope="module")
def data() -> Data:
    return repos.load()


def test_there_are_enough_and_marshmallow_is_among_them(data: Data) -> None:
    assert len({task.project for task in data.task}) >= 6
    marshmallow = data.find_project("marshmallow")
    assert marshmallow.buggy.version == "3.13.0"
    assert any(task.project == "marshmallow" and "TimeDelta" in task.bug for task in data.task)


def test_names_are_unique_and_references_lead_somewhere(data: Data) -> None:
    for names in ([t.id for t in data.task], [p.name for p in data.project], [t.ref for t in data.toolkit]):
        assert len(set(names)) == len(names)
    for task in data.task:
        for ref in data.find_project(task.project).toolkits:
            data.find_toolkit(ref)


def test_every_download_is_pinned(data: Data) -> None:
    releases = [project.buggy for project in data.project] + [project.fixed for project in data.project]
    releases += [wheel for toolkit in data.toolkit for wheel in toolkit.wheels]
    for release in releases:
        assert re.fullmatch(r"[0-9a-f]{64}", release.sha256), release
        assert release.version in release.filename
    for project in data.project:
        assert project.buggy.filename != project.fixed.filename
        assert not project.buggy.is_wheel and not project.fixed.is_wheel
    for toolkit in data.toolkit:
        # Anything but "any" would tie the layer to one interpreter.
        assert all(wheel.filename.endswith("-none-any.whl") for wheel in toolkit.wheels)


def test_paths_stay_inside(data: Data) -> None:
    for task in data.task:
        for path in (*task.outputs, *task.test_files, task.tests_dir):
            assert not path.startswith("/") and ".." not in path.split("/")
        for test in (*task.regression, *task.neighbours):
            name = test.partition("::")[0]
            assert name.removeprefix("tests/") in task.test_files, test
        assert not set(task.regression) & set(task.neighbours)
        assert task.regression and task.neighbours and task.actions


def test_actions_are_shell(data: Data) -> None:
    for task in data.task:
        for action in task.actions:
            subprocess.run(["sh", "-n", "-c", action], check=True)


def _sdist(path: Path, top: str, files: dict[str, str]) -> Release:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return Release(project="toy", version=top.rpartition("-")[2], filename=path.name, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture
def toy(tmp_path: Path) -> tuple[Data, Path]:
    """One made-up task, and a cache that holds all it needs."""
    cache = tmp_path / "cache"
    cache.mkdir()
    buggy = _sdist(cache / "toy-1.0.tar.gz", "toy-1.0", {"src/toy.py": "x = 1\n"})
    fixed = _sdist(cache / "toy-1.1.tar.gz", "toy-1.1", {"src/toy.py": "x = 2\n", "deep/tests/test_toy.py": "def test_x(): ...\n"})
    with zipfile.ZipFile(cache / "kit-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("inside/kit.py", "")
    kit = Release(
        project="kit",
        version="1",
        filename="kit-1-py3-none-any.whl",
        sha256=hashlib.sha256((cache / "kit-1-py3-none-any.whl").read_bytes()).hexdigest(),
    )
    parts = {"kit": WheelPart(take="inside", into="moved")}
    return Data(
        toolkit=(Toolkit(ref="toolkit:kit@1", path="/opt/kit", wheels=(kit,), parts=parts),),
        project=(Project(name="toy", buggy=buggy, fixed=fixed, source="src", toolkits=("toolkit:kit@1",)),),
        task=(
            RepoTask(
                id="toy-x",
                project="toy",
                bug="x is 1",
                outputs=("src/toy.py",),
                tests_dir="deep/tests",
                test_files=("test_toy.py",),
                regression=("tests/test_toy.py::test_x[a b]",),
                neighbours=("tests/test_toy.py::test_y",),
                actions=("\nls\n", "echo 'x = 2' > src/toy.py"),
            ),
        ),
    ), cache


def test_a_bug_becomes_a_noop_and_a_recorded_agent(toy: tuple[Data, Path]) -> None:
    noop, recorded = repos.tasks(*toy)
    assert (noop.id, noop.expect, noop.actions) == ("repo/toy-x/noop", "fail", ())
    assert (recorded.id, recorded.expect) == ("repo/toy-x/recorded", "pass")
    path = "export PYTHONPATH=/workspace/toy/src:/opt/kit\n"
    assert [action.run for action in recorded.actions] == [f"{path}ls\n", f"{path}echo 'x = 2' > src/toy.py\n"]
    assert {action.cwd for action in recorded.actions} == {"/workspace/toy"}
    for line in (noop, recorded):
        assert line.layers == line.verify.layers == ("workspace:toy@1.0", "toolkit:kit@1")
        assert line.outputs == ("/workspace/toy/src/toy.py",)
        assert line.verify == recorded.verify, "both are judged alike"
    assert recorded.verify.files == {"/verify/tests/test_toy.py": "def test_x(): ...\n"}
    assert recorded.verify.cwd == "/verify"
    assert recorded.verify.run == (
        f"{path}python3 -m pytest -q -p no:cacheprovider tests/test_toy.py::test_y || exit 70\n"
        "python3 -m pytest -q -p no:cacheprovider 'tests/test_toy.py::test_x[a b]'\n"
    )


def test_layers_are_laid_out_from_the_root_and_kept(toy: tuple[Data, Path], tmp_path: Path) -> None:
    data, cache = toy
    root = tmp_path / "layers"
    layers = repos.build_layers(data, root, cache)
    assert layers == {"toolkit:kit@1": root / "toolkit/kit@1", "workspace:toy@1.0": root / "workspace/toy@1.0"}
    files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    assert files == ["toolkit/kit@1/opt/kit/moved/kit.py", "workspace/toy@1.0/workspace/toy/src/toy.py"]
    marker = root / "workspace/toy@1.0/workspace/toy/src/toy.py"
    before = marker.stat().st_ino
    assert repos.build_layers(data, root, cache) == layers
    assert marker.stat().st_ino == before


def test_lines_survive_a_file_and_are_the_same_bytes_each_time(toy: tuple[Data, Path], tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        assert write_lines(repos.tasks(*toy), path) == 2
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert read_lines(paths[0]) == list(repos.tasks(*toy))
    first = msgspec.json.decode(paths[0].read_bytes().splitlines()[0], type=dict[str, object])
    assert list(first) == ["id", "image", "layers", "files", "actions", "outputs", "limits", "verify", "expect"]
    assert first["limits"] == {"cpu": 1, "memory": "512MiB", "disk": "256MiB", "pids": 128}
