# SPDX-License-Identifier: Apache-2.0
"""Task files: what is a task, and what is said of a line that is none."""

from __future__ import annotations

import json

import pytest

from opendsec.client.rollout.tasks import BadTask, Task, read_tasks

GOOD: dict[str, object] = {"id": "t", "image": "debian", "verify": {"run": "true"}}


def one(**fields: object) -> Task | BadTask:
    return next(read_tasks([json.dumps({**GOOD, **fields}).encode()]))


def test_defaults_and_everything() -> None:
    task = one()
    assert isinstance(task, Task) and not task.has_agent_phase and task.expect == "pass"
    assert task.verify_spec({}).image == "debian"
    task = one(
        layers=["workspace:a@1"],
        files={"/a": "x"},
        actions=[{"run": ["make"], "timeout_s": 5, "cwd": "/a", "env": {"A": "1"}}],
        outputs=["/a", "/b/c"],
        limits={"cpu": 2, "memory": "1GiB", "pids": 50},
        verify={"run": "true", "layers": [], "image": "other", "timeout_s": 7},
        expect="fail",
    )
    assert isinstance(task, Task) and task.has_agent_phase
    agent, judge = task.agent_spec({"k": "v"}), task.verify_spec({})
    assert (agent.image, agent.layers, agent.memory, agent.pids, agent.labels) == ("debian", ("workspace:a@1",), "1GiB", 50, {"k": "v"})
    assert (judge.image, judge.layers, judge.cpu) == ("other", (), 2.0)
    assert agent.ttl_s is not None and agent.ttl_s > 12


def test_layers_of_the_judge_are_the_tasks_unless_given() -> None:
    task = one(layers=["workspace:a@1"])
    assert isinstance(task, Task) and task.verify_spec({}).layers == ("workspace:a@1",)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"id": 5}, "id"),
        ({"id": ""}, "id: must be 1 to 200"),
        ({"id": "a\nb"}, "id: must be"),
        ({"image": "Not A Name"}, "image: must be a name"),
        ({"verify": {}}, "verify: Object missing required field `run`"),
        ({"verify": {"run": ""}, "actions": [{"run": []}]}, "actions[0].argv"),
        ({"verify": {"run": "x", "timeout_s": 0}}, "verify.timeout_s"),
        ({"verify": {"run": "x", "image": "BAD"}}, "verify.image"),
        ({"verify": {"run": "x", "files": {"a": ""}}}, "verify.files: must be an absolute path"),
        ({"actions": [{"run": "x", "cwd": "a"}]}, "actions[0].cwd"),
        ({"actions": [{"run": "x", "shell": "y"}]}, "unknown field"),
        ({"actions": [{"run": "x"}], "agent": {"command": "y"}}, "agent: give actions or an agent"),
        ({"agent": {"command": ""}}, "agent.command: must name a program"),
        ({"agent": {"command": [""]}}, "agent.command: must name a program"),
        ({"agent": {"command": "a\0b"}}, "agent.command: must not contain a NUL"),
        ({"agent": {"command": ["a", "b\0"]}}, "agent.command: must not contain a NUL"),
        ({"agent": {"command": "a", "cwd": "b\0"}}, "agent.cwd: must not contain a NUL"),
        ({"agent": {"command": "a", "env": {"A": "b\0"}}}, "agent.env.A: must not contain a NUL"),
        ({"agent": {"command": "a", "env": {"A=B": "c"}}}, "agent.env: a name must not"),
        ({"agent": {"command": "a", "timeout_s": 0}}, "agent.timeout_s"),
        ({"outputs": ["a"]}, "outputs: must be an absolute path"),
        ({"outputs": ["/"]}, "outputs: the root"),
        ({"outputs": ["/a", "/a/b"]}, "/a/b is part of /a"),
        ({"outputs": ["/a/./b", "/a/b"]}, "is part of"),
        ({"limits": {"memory": "much"}}, "memory"),
        ({"limits": {"cores": 1}}, "unknown field"),
        ({"limits": {"pids": 1}}, "pids"),
        ({"layers": ["a b"]}, "layers[0]"),
        ({"expect": "maybe"}, "expect"),
        ({"surprise": 1}, "unknown field"),
    ],
)
def test_wrong_lines_say_what_is_wrong(fields: dict[str, object], says: str) -> None:
    bad = one(**fields)
    assert isinstance(bad, BadTask) and says in bad.message and "line 1" in bad.message, bad


def test_a_wrong_line_stops_nothing() -> None:
    lines = [b"", b"not json", json.dumps(GOOD).encode(), b"[]", json.dumps(GOOD).encode(), b'{"id": "known", "expect": "fail"}', b"  \n"]
    found = list(read_tasks(lines))
    assert [type(one).__name__ for one in found] == ["BadTask", "Task", "BadTask", "BadTask", "BadTask"]
    assert [one.id for one in found] == ["line:2", "t", "line:4", "line:5", "known"]
    assert isinstance(found[3], BadTask) and "was used before" in found[3].message
    assert found[4].expect == "fail"


def test_the_demo_writes_what_is_read_here() -> None:
    import msgspec

    from examples.demo.lines import Action, TaskLine, Verify

    line = TaskLine(id="x", actions=(Action(run="true"),), outputs=("/a",), verify=Verify(run="true"), expect="pass")
    assert isinstance(next(read_tasks([msgspec.json.encode(line)])), Task)
