# SPDX-License-Identifier: Apache-2.0
"""Rollouts over the fake edge: what is carried, who is blamed, what a crash leaves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.api.errors import Internal, OpenDSecError, QuotaExceeded, SandboxLost, Unavailable
from opendsec.client.aio import Client
from opendsec.client.rollout.results import TaskResult
from opendsec.client.rollout.runner import Runner
from opendsec.client.rollout.tasks import BadTask, Task, read_tasks
from opendsec.testing.fakes.edge import FakeEdge


def task(**fields: object) -> Task:
    made = next(read_tasks([json.dumps({"id": "t", "image": "debian", "verify": {"run": "true"}, **fields}).encode()]))
    assert isinstance(made, Task), made
    return made


def verify(run: str, **fields: object) -> dict[str, object]:
    return {"run": run, "cwd": "/w", "files": {"/w/.keep": ""}, **fields}


def acts(*commands: str) -> list[dict[str, object]]:
    return [{"run": command, "cwd": "/w"} for command in commands]


START = {"/w/a": "start\n"}


@pytest.fixture(autouse=True)
def nothing_left(edge: FakeEdge) -> Iterator[None]:
    edge.requests.clear()
    yield
    assert edge.boxes == {} and edge.failures == []


async def run(client: Client, made: Task | BadTask, **options: float) -> TaskResult:
    return await Runner(client, **options).run(made)  # type: ignore[arg-type]


async def test_without_an_agent_there_is_one_sandbox(client: Client, edge: FakeEdge) -> None:
    result = await run(client, task(files=START, verify=verify("cat a b", files={"/w/b": "judge\n"})))
    assert (result.verdict, result.matched, result.failure) == ("pass", True, None)
    assert result.verify_tail == "start\njudge\n"
    assert edge.requests.count("CREATE") == 1
    assert result.timings.create_ms > 0 and result.timings.total_ms >= result.timings.verify_ms > 0
    result = await run(client, task(verify=verify("exit 3"), expect="fail"))
    assert (result.verdict, result.matched, result.failure) == ("fail", True, None)
    assert result.verify is not None and result.verify.exit_code == 3


async def test_only_the_declared_outputs_are_carried(client: Client, edge: FakeEdge) -> None:
    made = task(
        files={**START, "/w/hidden": "x"},
        actions=acts("echo more >> a; mkdir -p d/e; printf '#!/bin/sh\\necho ran' > d/e/run; chmod 755 d/e/run", "false"),
        outputs=["/w/a", "/w/d"],
        verify=verify("cat a && d/e/run && ls"),
    )
    result = await run(client, made)
    assert result.verdict == "pass" and result.failure is None  # an action that failed is recorded, and no more
    assert [(step.outcome, step.exit_code) for step in result.actions] == [("exited", 0), ("exited", 1)]
    assert result.verify_tail == "start\nmore\nran\na\nd\n"
    assert edge.requests.count("CREATE") == edge.requests.count("KILL") == 2
    kill, create = edge.requests.index("KILL"), [index for index, name in enumerate(edge.requests) if name == "CREATE"]
    assert create[0] < kill < create[1]  # the agent is gone before the judge comes


async def test_the_judges_files_win_and_removed_outputs_stay_removed(client: Client) -> None:
    made = task(
        files=START,
        actions=acts("echo cheat > test; rm a"),
        outputs=["/w/a", "/w/test"],
        verify=verify("cat test; test ! -e a", files={"/w/test": "honest\n"}),
    )
    result = await run(client, made)
    assert result.verdict == "pass" and result.verify_tail == "honest\n" and result.missing_outputs == ("/w/a",)


async def test_links_are_opaque(client: Client, tmp_path: Path) -> None:
    """A link among the outputs arrives as a link; nothing on this machine is read through it."""
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    made = task(
        files=START,
        actions=acts(f"mkdir d; ln -s {secret} d/link; ln -s /no/such/thing dangling"),
        outputs=["/w/d", "/w/dangling"],
        verify=verify("readlink d/link"),
    )
    result = await run(client, made)
    assert result.verify_tail.strip() == str(secret) and result.missing_outputs == ("/w/dangling",)


async def test_no_link_takes_the_judges_files_elsewhere(client: Client) -> None:
    """The judge's files land where they would without the agent. Links of the image itself go on being followed."""
    for links in ("ln -s ../x t/sub", "mkdir t/y; ln -s ../../x t/y/z; ln -s y/z t/sub", "ln -s ../x/missing t/sub"):
        made = task(
            files=START,
            actions=acts(f"mkdir -p t x; {links}"),
            outputs=["/w/t"],
            verify=verify("true", files={"/w/t/sub/f": "judge", "/w/t/g": ""}),
        )
        result = await run(client, made)
        assert result.verdict == "fail" and result.failure is not None, links
        assert result.failure.kind == "agent" and "/w/t/sub/f would have become /w/x" in result.failure.message, links
    # A link that leads nowhere near the judge's files is the agent's own business.
    harmless = acts("mkdir t; ln -s /nowhere t/l")
    made = task(files=START, actions=harmless, outputs=["/w/t"], verify=verify("cat t/g", files={"/w/t/g": "judge"}))
    result = await run(client, made)
    assert result.verdict == "pass" and result.verify_tail == "judge"


async def test_what_ended_raises_ends_the_run(client: Client) -> None:
    heard = []

    def ended(result: TaskResult) -> None:
        heard.append(result.id)
        raise Unavailable("no room for results")

    with pytest.raises(Unavailable, match="no room"):
        await Runner(client).run_all([task(id="a"), task(id="b")], parallel=1, ended=ended)
    assert heard == ["a"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"actions": acts("false"), "verify": verify("false")}, "action 1 exited with 1"),
        ({"actions": [{"run": "sleep 60", "timeout_s": 0.1}], "verify": verify("false")}, "action 1 timed out"),
        ({"actions": acts("true"), "outputs": ["/w/no"], "verify": verify("false")}, "missing output: /w/no"),
        ({"actions": acts("truncate -s 10M big"), "outputs": ["/w/big"], "limits": {"disk": "1MiB"}}, "larger than 1048576"),
        # What the agent left stands in the way of the judge's own files: that masks nothing.
        ({"actions": acts("rm -r *; mkdir t; mkdir t/x"), "outputs": ["/w/t"], "verify": verify("true", files={"/w/t/x": ""})}, "irectory"),
        ({"actions": acts("mkdir -p t; echo > t/x"), "outputs": ["/w/t"], "verify": verify("true", files={"/w/t/x/y": ""})}, ""),
        ({"actions": acts("rm -rf /w/t; echo > t"), "outputs": ["/w/t"], "verify": {"run": "true", "cwd": "/w/t"}}, ""),
        ({"agent": {"command": "echo said; exit 4"}, "verify": verify("false")}, "the agent's command exited with 4"),
        ({"agent": {"command": "sleep 60", "timeout_s": 0.1}, "verify": verify("false")}, "the agent's command timed out"),
        ({"agent": {"command": ["/no/such/agent"]}, "verify": verify("false")}, "the agent's command not started"),
    ],
)
async def test_failures_of_the_agent_have_a_verdict(client: Client, fields: dict[str, object], says: str) -> None:
    result = await run(client, task(**{"files": START, "expect": "fail", **fields}))
    assert result.verdict == "fail" and result.matched, result
    if says:
        assert result.failure is not None and result.failure.kind == "agent" and says in result.failure.message, result.failure


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"image": "no-such-image"}, "no image"),
        ({"verify": {"run": "true", "image": "no-such-image"}}, "no image"),
        ({"layers": ["toolkit:none@1"]}, "no layer"),
        ({"limits": {"memory": "15TiB"}}, "memory"),
        ({"verify": {"run": ["no-such-judge"]}}, "the judge cannot start"),
        ({"files": {"/w/a": "", "/w/a/b": ""}}, ""),
        ({"files": {"/w/a": "", "/w/a/b": ""}, "actions": acts("true")}, ""),
    ],
)
async def test_failures_of_the_task_have_none(client: Client, fields: dict[str, object], says: str) -> None:
    result = await run(client, task(**fields), admission_timeout_s=0.0)
    assert result.verdict is None and not result.matched
    assert result.failure is not None and result.failure.message
    assert result.failure.kind == "task" or "no room" in result.failure.message
    assert says in result.failure.message


async def test_a_line_that_is_no_task(client: Client) -> None:
    result = await run(client, BadTask(id="line:3", message="line 3: is not valid JSON"))
    assert result.failure is not None and result.failure.kind == "task" and result.verdict is None


@pytest.mark.parametrize(
    ("route", "error"),
    [("CREATE", Internal("a bug")), ("RUN", SandboxLost("it died")), ("WRITE", Internal("a bug")), ("RUN", Unavailable("stopping"))],
)
async def test_failures_of_the_infrastructure_are_masked(client: Client, edge: FakeEdge, route: str, error: OpenDSecError) -> None:
    edge.failures.append((route, error))
    result = await run(client, task(files=START, expect="fail"))
    assert result.verdict is None and not result.matched and not result.done
    assert result.failure is not None and (result.failure.kind, result.failure.code) == ("infrastructure", error.code)


async def test_a_sandbox_that_somebody_else_ends_is_no_fault_of_the_task(client: Client, edge: FakeEdge) -> None:
    made = task(files=START, actions=[{"run": "sleep 600"}, {"run": "true"}])
    running = asyncio.ensure_future(run(client, made))
    while "RUN" not in edge.requests:
        await client.info()
    for box in await client.list():
        await box.kill()
    result = await running
    assert result.verdict is None and result.failure is not None and result.failure.kind == "infrastructure", result


async def test_a_verdict_stands_even_if_the_end_of_the_sandbox_fails(client: Client, edge: FakeEdge) -> None:
    edge.failures.append(("KILL", Internal("a bug")))
    assert (await run(client, task())).verdict == "pass"
    for box in await client.list():
        await box.kill()


async def test_waits_for_room(client: Client, edge: FakeEdge) -> None:
    edge.failures += [("CREATE", QuotaExceeded("full", data={"asked": 1, "limit": 2})), ("CREATE", Unavailable("starting"))]
    result = await run(client, task())
    assert result.verdict == "pass" and result.timings.wait_ms > 0
    edge.failures.append(("CREATE", QuotaExceeded("never", data={"asked": 3, "limit": 2})))
    result = await run(client, task())
    assert result.failure is not None and result.failure.kind == "task"


async def test_many_tasks_share_little_room() -> None:
    with FakeEdge(memory_limit_bytes=200 << 20) as edge:  # room for three
        async with Client(f"unix:{edge.socket_path}") as client:
            tasks = [task(id=f"t{n}", limits={"memory": "64MiB"}, actions=acts("true"), files=START) for n in range(12)]
            results: list[TaskResult] = []
            await Runner(client).run_all(tasks, parallel=8, ended=results.append)
            assert sorted(result.id for result in results) == sorted(one.id for one in tasks)
            assert all(result.verdict == "pass" for result in results)
            assert edge.boxes == {}


async def test_an_agent_drives_the_sandbox_from_outside(client: Client, edge: FakeEdge) -> None:
    program = (
        "import os; from opendsec.client.sync import Client\n"
        "with Client() as client:\n"
        "    client.sandbox(os.environ['OPENDSEC_SANDBOX']).files.write('/w/a', os.environ['OPENDSEC_TASK'])\n"
        "print('done')"
    )
    made = task(id="by-agent", files=START, agent={"command": [sys.executable, "-c", program]}, outputs=["/w/a"], verify=verify("cat a"))
    result = await Runner(client, address=f"unix:{edge.socket_path}").run(made)
    assert (result.verdict, result.verify_tail, result.agent_tail) == ("pass", "by-agent", "done\n"), result


async def test_cancelling_ends_the_sandboxes(client: Client, edge: FakeEdge) -> None:
    tasks = [task(id=f"t{n}", verify={"run": "sleep 600"}) for n in range(3)]
    running = asyncio.ensure_future(Runner(client).run_all(tasks, parallel=3, ended=lambda _: None))
    while edge.requests.count("RUN") < 3:
        await client.info()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await client.list() == []


# --- the command


def rollout(edge: FakeEdge, tasks: Path, out: Path, *words: str) -> subprocess.Popen[str]:
    program = "from opendsec.client.cli.main import main; main()"
    environment = {**os.environ, "OPENDSEC_ADDRESS": f"unix:{edge.socket_path}"}
    command = [sys.executable, "-c", program, "rollout", str(tasks), "--out", str(out), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def write(path: Path, *tasks: dict[str, object]) -> None:
    path.write_text("".join(json.dumps({"image": "debian", "verify": {"run": "true"}, **one}) + "\n" for one in tasks))


def test_the_command_and_its_table(edge: FakeEdge, tmp_path: Path) -> None:
    tasks, out = tmp_path / "tasks", tmp_path / "out"
    write(tasks, {"id": "a"}, {"id": "b", "verify": {"run": "false"}, "expect": "fail"})
    done = rollout(edge, tasks, out)
    text, progress = done.communicate()
    assert done.returncode == 0 and "2 of 2 as expected" in text and "expected pass  1" in text and "2/2" in progress
    write(
        tasks, {"id": "a"}, {"id": "b", "verify": {"run": "false"}, "expect": "fail"}, {"id": "c", "verify": {"run": "false"}}, {"id": ""}
    )
    done = rollout(edge, tasks, out, "--json")
    text, progress = done.communicate()
    summary = json.loads(text)
    assert done.returncode == 1 and progress == "" and summary["mistaken"] == ["c", "line:4"] and summary["failures"]["task"] == 1
    assert len(out.read_text().splitlines()) == 4  # a and b were not run again


def test_killed_and_run_again(edge: FakeEdge, tmp_path: Path) -> None:
    tasks, out = tmp_path / "tasks", tmp_path / "out"
    go = tmp_path / "go"
    write(tasks, {"id": "quick"}, {"id": "slow", "verify": {"run": f"while [ ! -e {go} ]; do sleep 0.02; done"}})
    first = rollout(edge, tasks, out, "--parallel", "1")
    assert first.stderr is not None
    for line in first.stderr:
        if line.startswith("1/2"):
            break
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["quick"]
    go.write_text("")
    second = rollout(edge, tasks, out)
    text, _ = second.communicate()
    assert second.returncode == 0 and "2 of 2 as expected" in text
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["quick", "slow"]
    assert edge.boxes == {}  # also the one that the first run left


def test_ctrl_c(edge: FakeEdge, tmp_path: Path) -> None:
    tasks, out = tmp_path / "tasks", tmp_path / "out"
    write(tasks, {"id": "quick"}, {"id": "slow", "verify": {"run": "sleep 600"}})
    process = rollout(edge, tasks, out, "--parallel", "1")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("1/2"):
            break
    process.send_signal(signal.SIGINT)
    _, progress = process.communicate()
    assert process.returncode == 130 and "Traceback" not in progress
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["quick"]
