# SPDX-License-Identifier: Apache-2.0
"""Run task lines without OpenDSec, each step in bubblewrap on the /usr of this machine or of another root directory.

    python -m examples.demo.prove TASKS.jsonl [--layers DIR] [--only GLOB] [--root DIR] [--jobs N]

When `dsec rollout` judges a task differently, one of the two is wrong, and this tells which. It holds a no-op agent to more than
a rollout does: its judge must have run, and must have failed for the regression tests alone. With `--root` the tasks are proven
on the Python of another Debian release, such as mmdebstrap makes.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from examples.demo.lines import TaskLine, read_lines
from examples.demo.repos import JUDGE_TESTS_FAILED, layer_dir

_TAIL_LINES = 12


class Ran(msgspec.Struct, frozen=True):
    """What one command did; a time-out counts as 124, as timeout(1) has it. `output` is both streams."""

    exit_code: int
    output: str


class Proof(msgspec.Struct, frozen=True):
    """The verdict of one task, and what its judge said."""

    task: TaskLine
    judge: Ran
    actions: tuple[Ran, ...]
    duration_s: float

    @property
    def holds(self) -> bool:
        if self.task.expect == "pass":
            return self.judge.exit_code == 0
        return self.judge.exit_code == JUDGE_TESTS_FAILED


class _Box:
    """A root directory with the layers copied in, in which commands run one after the other."""

    def __init__(self, root: Path, layers: tuple[str, ...], layers_dir: Path, system: Path) -> None:
        self._root = root
        self._system = system
        for ref in layers:
            shutil.copytree(layer_dir(layers_dir, ref), root, dirs_exist_ok=True)

    def path(self, inside: str) -> Path:
        return self._root / inside.lstrip("/")

    def write(self, files: dict[str, str]) -> None:
        for inside, text in files.items():
            self.path(inside).parent.mkdir(parents=True, exist_ok=True)
            self.path(inside).write_text(text, encoding="utf-8")

    def run(self, text: str, cwd: str, timeout_s: int) -> Ran:
        (self._root / "tmp").mkdir(exist_ok=True)
        command = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--setenv", "HOME", "/tmp"]
        command += ["--ro-bind", str(self._system / "usr"), "/usr", "--proc", "/proc", "--dev", "/dev"]
        for name in ("bin", "lib", "lib64"):
            command += ["--symlink", f"usr/{name}", f"/{name}"]
        for top in sorted(self._root.iterdir()):
            command += ["--bind", str(top), f"/{top.name}"]
        command += ["--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin", "--chdir", cwd, "/bin/sh", "-c", text]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            return Ran(124, f"longer than {timeout_s} s")
        return Ran(done.returncode, done.stdout.decode("utf-8", "replace"))


def prove(task: TaskLine, layers_dir: Path, system: Path = Path("/")) -> Proof:
    """Run the task's agent and then its judge, each in a box of its own, with only the declared outputs carried over."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="prove-") as scratch:
        agent = Path(scratch, "agent")
        judge = Path(scratch, "judge")
        agent.mkdir()
        judge.mkdir()
        actions: list[Ran] = []
        judge_box = _Box(judge, task.verify.layers, layers_dir, system)
        if task.actions or task.outputs:
            box = _Box(agent, task.layers, layers_dir, system)
            box.write(task.files)
            actions = [box.run(action.run, action.cwd, action.timeout_s) for action in task.actions]
            for output in task.outputs:
                shutil.copy(box.path(output), judge_box.path(output))
        judge_box.write(task.verify.files)
        verdict = judge_box.run(task.verify.run, task.verify.cwd, task.verify.timeout_s)
    return Proof(task, verdict, tuple(actions), time.monotonic() - start)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.demo.prove", description="Run task lines in bubblewrap.")
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--layers", type=Path, default=Path(".cache/demo/layers"), help="what `repos layers` wrote")
    parser.add_argument("--only", default="*", help="task ids to run, as a shell pattern")
    parser.add_argument("--root", type=Path, default=Path("/"), help="the root directory whose /usr the boxes get")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="print what each command said")
    arguments = parser.parse_args()
    chosen = [task for task in read_lines(arguments.tasks) if fnmatchcase(task.id, arguments.only)]
    wrong = 0
    with ThreadPoolExecutor(max_workers=arguments.jobs) as pool:
        for proof in pool.map(lambda task: prove(task, arguments.layers, arguments.root), chosen):
            wrong += not proof.holds
            steps = " ".join(str(ran.exit_code) for ran in proof.actions)
            print(f"{'ok   ' if proof.holds else 'WRONG'} {proof.task.id:48} {proof.judge.exit_code:4} {proof.duration_s:6.2f} s  {steps}")
            if arguments.verbose or not proof.holds:
                for ran in (*proof.actions, proof.judge):
                    print("      | " + "\n      | ".join(ran.output.splitlines()[-_TAIL_LINES:]))
    print(f"{len(chosen)} tasks, {wrong} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
