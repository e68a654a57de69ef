# SPDX-License-Identifier: Apache-2.0
"""The edge as a process of its own: how it starts, that it is the only one, how it stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

MODULE = "opendsec.testing.fakes.parts"


class EdgeProcess:
    """An edge over fakes; `arguments` besides the directories."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.directory = directory
        ready, tell = os.pipe()
        command = [sys.executable, "-m", MODULE, "--state-dir", str(directory / "s"), "--run-dir", str(directory / "r")]
        self.process = subprocess.Popen(
            [*command, "--ready-fd", str(tell), *arguments], pass_fds=(tell,), stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        os.close(tell)
        self.ready = os.read(ready, 100)  # empty: it ended before it was ready
        os.close(ready)

    def client(self) -> httpx.Client:
        return httpx.Client(base_url="http://edge", transport=httpx.HTTPTransport(uds=str(self.directory / "r/edge.sock")), timeout=30)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """The exit status and the log."""
        self.process.send_signal(number)
        _, log = self.process.communicate(timeout=30)
        return self.process.returncode, log.decode()


@pytest.fixture
def edge(tmp_path: Path) -> Iterator[EdgeProcess]:
    edge = EdgeProcess(tmp_path)
    assert edge.ready == b"ready\n"
    yield edge
    if edge.process.poll() is None:
        edge.end(signal.SIGKILL)


def test_it_answers_when_it_says_so_and_ends_when_told(edge: EdgeProcess) -> None:
    with edge.client() as client:
        info = client.get("/v1/info").json()
    assert info["pid"] == edge.process.pid and info["state"] == "ready"
    limits = Path(f"/proc/{edge.process.pid}/limits").read_text()
    soft, hard = next(line.split()[3:5] for line in limits.splitlines() if line.startswith("Max open files"))
    assert soft == hard
    status, log = edge.end()
    assert status == 0 and '"event": "edge.ready"' in log
    assert not (edge.directory / "r/edge.sock").exists()


def test_there_is_one_edge_for_a_state_or_a_socket(edge: EdgeProcess) -> None:
    second = EdgeProcess(edge.directory)
    status, log = second.end() if second.ready else (second.process.wait(), second.process.communicate()[1].decode())
    assert (second.ready, status) == (b"", 1)
    assert f"an edge (process {edge.process.pid}) already uses" in log
    with edge.client() as client:
        assert client.get("/v1/info").status_code == 200


def test_a_killed_one_is_followed_by_another(edge: EdgeProcess) -> None:
    with edge.client() as client:
        before = client.get("/v1/info").json()["edge_id"]
    edge.end(signal.SIGKILL)
    assert (edge.directory / "r/edge.sock").exists()
    again = EdgeProcess(edge.directory)
    assert again.ready
    with again.client() as client:
        assert client.get("/v1/info").json()["edge_id"] == before
        assert client.post("/v1/shutdown?kill=1").json()["state"] == "draining"
    assert again.process.wait(30) == 0
    again.process.communicate()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--max-cpu", "x"), "--max-cpu"),
        (("--tcp", "127.0.0.1:0"), "needs --token-file"),
        (("--tcp", "127.0.0.1:0", "--token-file", "/no"), "--token-file"),
    ],
)
def test_wrong_settings_end_it_with_a_sentence(tmp_path: Path, arguments: tuple[str, ...], what: str) -> None:
    edge = EdgeProcess(tmp_path, *arguments)
    _, log = edge.process.communicate(timeout=30)
    assert (edge.ready, edge.process.returncode in (1, 2)) == (b"", True)
    assert what in log.decode() and "Traceback" not in log.decode()


def test_another_file_in_the_journals_place_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s/journal.db").write_bytes(b"something else " * 1000)
    edge = EdgeProcess(tmp_path)
    _, log = edge.process.communicate(timeout=30)
    assert edge.ready == b"" and "is not a journal of an edge" in log.decode()
    assert (tmp_path / "s/journal.db").read_bytes() == b"something else " * 1000


@pytest.mark.parametrize("lost", ("removed", "emptied"))
def test_a_lost_journal_is_no_first_start(tmp_path: Path, lost: str) -> None:
    """Its sandboxes may still run, under uids that a first start would give out again."""
    assert EdgeProcess(tmp_path).end(signal.SIGKILL)
    for path in (tmp_path / "s").glob("journal.db*"):
        path.unlink()
    if lost == "emptied":
        (tmp_path / "s/journal.db").touch()
    for _ in range(2):
        edge = EdgeProcess(tmp_path)
        _, log = edge.process.communicate(timeout=30)
        assert (edge.ready, edge.process.returncode) == (b"", 1)
        assert "journal.db is gone or empty" in log.decode() and "Traceback" not in log.decode()


def test_a_journal_that_cannot_be_opened_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "s/journal.db").mkdir(parents=True)
    edge = EdgeProcess(tmp_path)
    _, log = edge.process.communicate(timeout=30)
    assert (edge.ready, edge.process.returncode) == (b"", 1)
    assert "journal.db" in log.decode() and "Traceback" not in log.decode()
