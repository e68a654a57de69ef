# SPDX-License-Identifier: Apache-2.0
"""The shape of a task line, as `dsec rollout TASKS.jsonl` reads it: one JSON object a line.

Field order is the order of the attributes, so that the same input gives the same bytes.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

# The name under which the demo registers its base image.
BASE_IMAGE = "debian-python"

Verdict = Literal["pass", "fail"]


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the agent: shell text, and whatever its exit code is, the next step follows."""

    run: str
    timeout_s: int = 60
    cwd: str = "/"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What both sandboxes of a task may use."""

    cpu: float = 1
    memory: str = "512MiB"
    disk: str = "256MiB"
    pids: int = 128


class Verify(msgspec.Struct, frozen=True, kw_only=True):
    """The judge's sandbox: fresh, with the declared outputs and `files` written into it. Exit code 0 of `run` is a pass."""

    layers: tuple[str, ...] = ()
    files: dict[str, str] = {}
    run: str
    timeout_s: int = 120
    cwd: str = "/"


class TaskLine(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout. With no actions and no outputs there is nothing to carry, and the judge's sandbox is the only one."""

    id: str
    image: str = BASE_IMAGE
    layers: tuple[str, ...] = ()
    files: dict[str, str] = {}
    actions: tuple[Action, ...] = ()
    outputs: tuple[str, ...] = ()
    limits: Limits = Limits()
    verify: Verify
    expect: Verdict


def write_lines(tasks: Iterable[msgspec.Struct], path: Path) -> int:
    """Write the tasks to `path` in the order given; returns how many."""
    encoder = msgspec.json.Encoder()
    count = 0
    with path.open("wb") as out:
        for task in tasks:
            out.write(encoder.encode(task) + b"\n")
            count += 1
    return count


def read_lines(path: Path) -> list[TaskLine]:
    """Read what `write_lines` wrote. Raises `msgspec.ValidationError` on a line of another shape."""
    decoder = msgspec.json.Decoder(TaskLine)
    return [decoder.decode(line) for line in path.read_bytes().splitlines() if line.strip()]
