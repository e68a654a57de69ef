# SPDX-License-Identifier: Apache-2.0
"""The SDK and the command line with the edge that they start themselves, in a process of its own, over containers."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.api.errors import Unavailable
from opendsec.api.spec import Container
from opendsec.client import launch, sync
from opendsec.client.aio import Client
from opendsec.client.rollout.results import TaskResult
from opendsec.client.rollout.runner import Runner
from opendsec.client.rollout.tasks import Task, read_tasks
from tests.images import BASE, base_store, link_store

pytestmark = pytest.mark.slow


class Place:
    """Where an edge of our own lives, or none does."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.state_dir = folder / "run", folder / "state"
        self.state_dir.mkdir()
        link_store(base_store(), self.state_dir / "images")
        self.environment = {
            **os.environ,
            "OPENDSEC_RUN_DIR": str(self.run_dir),
            "OPENDSEC_STATE_DIR": str(self.state_dir),
            "OPENDSEC_SCRATCH_DRIVER": "tmpfs",
        }

    def client(self) -> Client:
        return Client(run_dir=self.run_dir, state_dir=self.state_dir)

    def dsec(self, *words: str) -> subprocess.CompletedProcess[str]:
        program = "from opendsec.client.cli.main import main; main()"
        return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, env=self.environment, check=False)

    def edges(self) -> list[int]:
        """Process ids of the edges that ever got ready here."""
        lines = (self.state_dir / "edge.log").read_text().splitlines() if (self.state_dir / "edge.log").exists() else []
        events = [json.loads(line) for line in lines if line.startswith("{")]
        return [event["pid"] for event in events if event.get("event") == "edge.ready"]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with tempfile.TemporaryDirectory() as folder:
        for below in (Path(folder), Path(folder).parent):
            below.chmod(0o755)  # a sandbox is put together below the run directory, as its own root
        place = Place(Path(folder))
        monkeypatch.setenv("OPENDSEC_SCRATCH_DRIVER", "tmpfs")
        yield place
        stopped = place.dsec("down", "--kill")
        assert stopped.returncode == 0, stopped


def end(pid: int) -> None:
    """Kill an edge and wait until it has gone."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [], 30)
    finally:
        os.close(pidfd)


async def test_clients_start_one_edge_and_share_it(place: Place) -> None:
    clients = [place.client() for _ in range(5)]
    infos = await asyncio.gather(*(client.info() for client in clients))
    assert len({info.pid for info in infos}) == 1 and len(place.edges()) == 1
    box = await clients[0].create(Container(image=BASE))
    assert (await clients[1].sandbox(box.id).run("echo hi")).stdout == "hi\n"
    for client in clients:
        await client.aclose()


async def test_sandboxes_outlive_the_edge_and_the_client_finds_the_next(place: Place) -> None:
    async with place.client() as client:
        box = await client.create(Container(image=BASE))
        await box.files.write("/tmp/kept", "kept")
        process = await box.start("sleep 600")
        first = await client.info()
        end(first.pid)
        assert await box.files.read("/tmp/kept") == "kept"  # by an edge that this very call has started
        second = await client.info()
        assert second.pid != first.pid and second.edge_id == first.edge_id and second.sandboxes == 1
        again = await box.run("echo once", action_id="the/one")
        repeated = await box.run("echo once", action_id="the/one")
        assert again.process_id == repeated.process_id
        assert (await process.info()).state in ("running", "ended")


async def test_a_client_that_may_not_start_one_says_so(place: Place) -> None:
    async with Client(run_dir=place.run_dir, state_dir=place.state_dir, start_edge=False) as client:
        with pytest.raises(Unavailable, match="no edge listens"):
            await client.info()
    assert place.edges() == []


async def test_an_edge_that_cannot_start_gives_the_reason(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENDSEC_MEMORY_FRACTION", "seven")
    async with place.client() as client:
        with pytest.raises(Unavailable, match=r"OPENDSEC_MEMORY_FRACTION"):
            await client.info()


def test_up_and_down(place: Place) -> None:
    assert place.dsec("down").stdout == "no edge runs\n"
    assert "is ready" in place.dsec("up", "--memory-limit", "4GiB").stdout
    assert "was running already" in place.dsec("up").stdout
    box = place.dsec("create", BASE).stdout.strip()
    assert "1 sandboxes live on" in place.dsec("down").stdout
    assert not launch.listening(place.run_dir)
    assert json.loads(place.dsec("doctor", "--json").stdout)["features"]  # starts none
    assert not launch.listening(place.run_dir)
    ran = place.dsec("exec", box, "cat /proc/1/comm; exit 4")  # starts one
    assert ran.returncode == 4 and ran.stdout, ran
    assert place.dsec("run", BASE, "id -u").stdout == "0\n"
    assert "has stopped" in place.dsec("down", "--kill").stdout
    assert len(place.edges()) == 2


def test_without_an_event_loop(place: Place) -> None:
    with sync.Client(run_dir=place.run_dir, state_dir=place.state_dir) as client, client.create(Container(image=BASE)) as box:
        assert box.run("echo $0").check().stdout
        assert [event.kind for event in box.stream("true")] == ["started", "exit"]


async def test_tasks_are_judged_in_a_second_sandbox(place: Place) -> None:
    def task(name: str, **fields: object) -> Task:
        made = next(read_tasks([json.dumps({"id": name, "image": BASE, "limits": {"memory": "64MiB"}, **fields}).encode()]))
        assert isinstance(made, Task), made
        return made

    secret = {"/work/secret": "the agent's own\n", "/work/src/a.sh": "exit 1\n"}
    fix = "rm src/a.sh; mkdir src/deep; printf 'exit 0\\n' >src/deep/b.sh; ln -s deep/b.sh src/a.sh; mkfifo src/fifo"
    fix += "; chmod 4755 src/deep/b.sh"
    run = "sh src/a.sh && test ! -e secret && stat -c %a src/deep/b.sh"
    judge = {"run": run, "cwd": "/work", "files": {"/work/judge": ""}}
    agent = (
        "from opendsec.client.sync import Client; import os\n"
        "with Client() as client:\n"
        "    client.sandbox(os.environ['OPENDSEC_SANDBOX']).run('echo by agent > /work/src/a.sh').check()\n"
    )
    tasks = [
        task("fixed", files=secret, actions=[{"run": fix, "cwd": "/work"}], outputs=["/work/src"], verify=judge),
        task("idle", files=secret, outputs=["/work/src"], verify=judge, expect="fail"),
        task("flood", actions=[{"run": "yes", "timeout_s": 1}], outputs=["/work/src"], verify=judge, expect="fail"),
        task("sparse", actions=[{"run": "truncate -s 100G /big"}], outputs=["/big"], verify={"run": "true"}, expect="fail"),
        task("no image", verify={"run": "true", "image": "no-such-image"}),
        task(
            "agent",
            files=secret,
            agent={"command": [sys.executable, "-c", agent]},
            outputs=["/work/src"],
            verify={"run": ["grep", "by agent", "/work/src/a.sh"]},
        ),
    ]
    results: dict[str, TaskResult] = {}
    async with place.client() as client:
        runner = Runner(client, address=f"unix:{place.run_dir / launch.SOCKET_NAME}")
        await runner.run_all(tasks, parallel=3, ended=lambda result: results.update({result.id: result}))
        assert await client.list(state="running") == []
    verdicts = {name: (result.verdict, result.matched) for name, result in results.items()}
    assert verdicts == {
        "fixed": ("pass", True),
        "idle": ("fail", True),
        "flood": ("fail", True),
        "sparse": ("fail", True),
        "no image": (None, False),
        "agent": ("pass", True),
    }, results
    assert results["fixed"].failure is None and results["idle"].failure is None
    assert {name: result.failure.kind for name, result in results.items() if result.failure} == {
        "flood": "agent",
        "sparse": "agent",
        "no image": "task",
    }
