# SPDX-License-Identifier: Apache-2.0
"""A task file: one JSON object a line. What is wrong with a line is found before anything runs. No I/O here.

    {"id": "fix-42", "image": "debian", "layers": ["workspace:astropy@4f2c"], "files": {"/workspace/README": "…"},
     "actions": [{"run": "sed -i s/a/b/ /workspace/x.py", "timeout_s": 60}], "outputs": ["/workspace/x.py"],
     "limits": {"memory": "1GiB"}, "verify": {"run": "pytest -q", "cwd": "/workspace", "files": {…}}, "expect": "pass"}

The agent's part is `actions`, run one after the other whatever their exit codes, or `agent`, a command on *this* machine that drives the
sandbox from outside: a task file with agents is a program, so run only those you trust. A task with neither and without `outputs` has
nothing to carry; then the judge's sandbox is the only one, and the task's `files` are written there.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Literal

import msgspec

from opendsec.api import wire
from opendsec.api.errors import InvalidRequest
from opendsec.api.exec import TIMEOUT_S, Command
from opendsec.api.spec import VM, AnySpec, Container, MicroVM, check_env, check_number, check_path, check_text

Verdict = Literal["pass", "fail"]
BackendName = Literal["container", "microvm", "vm"]

KINDS: dict[BackendName, type[Container] | type[MicroVM] | type[VM]] = {"container": Container, "microvm": MicroVM, "vm": VM}

ACTION_TIMEOUT_S = 600.0
AGENT_TIMEOUT_S = 3600.0
VERIFY_TIMEOUT_S = 600.0
MAX_LINE_BYTES = 64 << 20
SPARE_TTL_S = 3600.0  # beyond the sum of all time-outs, should this program die


class Action(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One command of the agent: shell text, or a program and its arguments."""

    run: str | tuple[str, ...]
    timeout_s: float = ACTION_TIMEOUT_S
    cwd: str | None = None
    env: dict[str, str] = {}
    user: str | None = None

    def command(self) -> Command:
        fields: dict[str, object] = {"timeout_s": self.timeout_s, "cwd": self.cwd, "env": self.env, "user": self.user}
        fields["shell" if isinstance(self.run, str) else "argv"] = self.run
        return wire.convert(fields, Command)


class Agent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command of this machine, which finds the sandbox's id in `OPENDSEC_SANDBOX` and the edge in `OPENDSEC_ADDRESS`."""

    command: str | tuple[str, ...]
    timeout_s: float = AGENT_TIMEOUT_S
    cwd: str | None = None
    env: dict[str, str] = {}

    def check(self) -> None:
        """Raises InvalidRequest for what no program of this machine could be started with."""
        words = (self.command,) if isinstance(self.command, str) else self.command
        if not words or not words[0]:
            raise InvalidRequest("must name a program", field="command")
        for word in words:
            check_text(word, "command", limit=131_071)
        if self.cwd is not None:
            check_text(self.cwd, "cwd", limit=4095)
        check_env(self.env, "env")
        check_number(self.timeout_s, "timeout_s", TIMEOUT_S)


class TaskLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits of each of the task's sandboxes; what is left out has the default of a spec."""

    cpu: float | None = None
    cpu_weight: int | None = None
    memory: int | str | None = None
    disk: int | str | None = None
    inodes: int | None = None
    pids: int | None = None
    open_files: int | None = None


class Verify(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The judge: exit code 0 is a pass. Its sandbox has the declared outputs, and over them its own `files`."""

    run: str | tuple[str, ...]
    image: str | None = None  # default: the task's
    layers: tuple[str, ...] | None = None  # default: the task's
    files: dict[str, str] = {}
    timeout_s: float = VERIFY_TIMEOUT_S
    cwd: str | None = None
    env: dict[str, str] = {}
    user: str | None = None


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line."""

    id: str
    image: str
    verify: Verify
    layers: tuple[str, ...] = ()
    files: dict[str, str] = {}
    actions: tuple[Action, ...] = ()
    agent: Agent | None = None
    outputs: tuple[str, ...] = ()
    limits: TaskLimits = TaskLimits()
    backend: BackendName = "container"  # what each of its sandboxes is
    env: dict[str, str] = {}
    user: str = ""
    expect: Verdict = "pass"

    @property
    def has_agent_phase(self) -> bool:
        return bool(self.actions or self.agent or self.outputs)

    def agent_spec(self, labels: dict[str, str]) -> AnySpec:
        return self._spec(self.image, self.layers, labels)

    def verify_spec(self, labels: dict[str, str]) -> AnySpec:
        layers = self.layers if self.verify.layers is None else self.verify.layers
        return self._spec(self.verify.image or self.image, layers, labels)

    def _spec(self, image: str, layers: tuple[str, ...], labels: dict[str, str]) -> AnySpec:
        timeouts = [action.timeout_s for action in self.actions] + [self.verify.timeout_s]
        if self.agent is not None:
            timeouts.append(self.agent.timeout_s)
        fields = {
            "backend": self.backend,
            "image": image,
            "layers": layers,
            "env": self.env,
            "user": self.user,
            "labels": labels,
            "ttl_s": sum(timeouts) + SPARE_TTL_S,
            **{name: value for name, value in msgspec.structs.asdict(self.limits).items() if value is not None},
        }
        return wire.convert(fields, KINDS[self.backend])

    def check(self) -> None:
        """Raises InvalidRequest naming the field and the rule."""
        if not self.id or len(self.id) > 200 or not self.id.isprintable():
            raise InvalidRequest("must be 1 to 200 printable characters", field="id")
        if self.agent is not None and self.actions:
            raise InvalidRequest("give actions or an agent, not both", field="agent")
        if self.agent is not None:
            with _within("agent"):
                self.agent.check()
        for index, action in enumerate(self.actions):
            with _within(f"actions[{index}]"):
                action.command().check()
        with _within("verify"):
            judge = self.verify
            Action(run=judge.run, timeout_s=judge.timeout_s, cwd=judge.cwd, env=judge.env, user=judge.user).command().check()
        for field, paths in (("files", self.files), ("verify.files", self.verify.files), ("outputs", self.outputs)):
            for path in paths:
                check_path(path, field)
                if path.rstrip("/") == "":
                    raise InvalidRequest("the root directory cannot be written or carried", field=field)
        _check_disjoint(self.outputs)
        self.agent_spec({}).check()
        with _within("verify"):
            self.verify_spec({}).check()


def _check_disjoint(paths: tuple[str, ...]) -> None:
    """An output that lies in another would be carried twice, in an order that matters."""
    normal = sorted(posixpath.normpath(path) for path in paths)
    for above, below in pairwise(normal):
        if below == above or below.startswith(above + "/"):
            raise InvalidRequest(f"{below} is part of {above} already", field="outputs")


class _within:
    """Puts the name of the part before the field of an error."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, InvalidRequest):
            raise InvalidRequest(error.message, field=f"{self._part}.{error.field}" if error.field else self._part) from None


class BadTask(msgspec.Struct, frozen=True, kw_only=True):
    """A line that is no task: its id if it has a usable one, else `line:NUMBER`."""

    id: str
    message: str
    expect: Verdict = "pass"


class _Sketch(msgspec.Struct):
    """The little that is wanted of a line that is not a task."""

    id: str
    expect: Verdict = "pass"


def read_tasks(lines: Iterable[bytes]) -> Iterator[Task | BadTask]:
    """The tasks of a file, in order. Empty lines are skipped; a wrong line is a BadTask and does not stop the others."""
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        one = _read_task(line, number)
        if one.id in seen:
            one = BadTask(id=f"line:{number}", message=f"line {number}: the id {one.id!r} was used before")
        seen.add(one.id)
        yield one


def _read_task(line: bytes, number: int) -> Task | BadTask:
    try:
        if len(line) > MAX_LINE_BYTES:
            raise InvalidRequest(f"at most {MAX_LINE_BYTES} bytes a line")
        task = wire.decode(line, Task)
        task.check()
        return task
    except InvalidRequest as error:
        sketch = _Sketch(id="")
        try:
            sketch = wire.decode(line, _Sketch)
        except InvalidRequest:
            pass
        usable = 0 < len(sketch.id) <= 200 and sketch.id.isprintable()
        return BadTask(id=sketch.id if usable else f"line:{number}", message=f"line {number}: {error}", expect=sketch.expect)
