# SPDX-License-Identifier: Apache-2.0
"""Starting an edge: once, by whoever comes first, with a reason if it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from opendsec.api.errors import Unavailable
from opendsec.client import launch
from opendsec.client._core import RetryPolicy
from opendsec.client.aio import Client

# Listens where an edge would, tells that it is ready, notes that it was started, and ends when asked on its socket.
STAND_IN = """
import argparse, os, socket, sys
parser = argparse.ArgumentParser()
for name in ("state-dir", "run-dir", "ready-fd", "mode"):
    parser.add_argument("--" + name)
given = parser.parse_args()
with open(os.path.join(given.state_dir, "starts"), "a") as starts:
    starts.write(f"{os.getpid()}\\n")
if given.mode == "fails":
    print("no memory left on the moon", file=sys.stderr)
    sys.exit(1)
listening = socket.socket(socket.AF_UNIX)
if given.mode != "silent":
    path = os.path.join(given.run_dir, "edge.sock")
    if os.path.exists(path):
        os.unlink(path)
    listening.bind(path)
    listening.listen(64)
    os.write(int(given.ready_fd), b"ready\\n")
    os.close(int(given.ready_fd))
while True:
    sys.stdin.read() if given.mode == "silent" else listening.accept()
    if given.mode == "silent":
        import signal
        signal.pause()
"""


class Place:
    def __init__(self, folder: Path) -> None:
        self.run_dir, self.state_dir = folder / "run", folder / "state"
        self._program = folder / "stand_in.py"
        self._program.write_text(STAND_IN)

    def start(self, *, mode: str = "works", timeout_s: float = 20.0) -> bool:
        return launch.start_edge(
            self.run_dir,
            self.state_dir,
            arguments=("--mode", mode),
            timeout_s=timeout_s,
            program=(sys.executable, "-S", str(self._program)),
        )

    def starts(self) -> list[int]:
        try:
            return [int(line) for line in (self.state_dir / "starts").read_text().split()]
        except FileNotFoundError:
            return []

    def stop(self, pid: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            launch._wait_readable(pidfd, 10)
        finally:
            os.close(pidfd)


@pytest.fixture
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        yield place
        for pid in place.starts():
            place.stop(pid)


def test_starts_what_does_not_run(place: Place) -> None:
    assert not launch.listening(place.run_dir)
    assert place.start()
    assert launch.listening(place.run_dir)
    assert not place.start()  # one is enough
    assert len(place.starts()) == 1


def test_many_starters_make_one(place: Place) -> None:
    with ThreadPoolExecutor(8) as pool:
        started = list(pool.map(lambda _: place.start(), range(8)))
    assert started.count(True) == 1 and len(place.starts()) == 1


def test_a_dead_one_is_replaced(place: Place) -> None:
    place.start()
    place.stop(place.starts()[0])
    assert not launch.listening(place.run_dir)
    assert place.start()
    assert len(place.starts()) == 2


def test_a_failure_comes_with_the_log(place: Place) -> None:
    with pytest.raises(Unavailable, match="no memory left on the moon"):
        place.start(mode="fails")
    with pytest.raises(Unavailable) as error:
        place.start(mode="fails")
    assert error.value.message.count("no memory left on the moon") == 1  # of this start only


def test_one_that_never_gets_ready(place: Place) -> None:
    with pytest.raises(Unavailable, match=r"not ready within 0\.5 s.*is empty"):
        place.start(mode="silent", timeout_s=0.5)


def test_no_such_program(place: Place) -> None:
    with pytest.raises(Unavailable):
        launch.start_edge(place.run_dir, place.state_dir, program=("/no/such/program",), timeout_s=20)


def test_a_place_that_cannot_be_used(place: Place) -> None:
    place.run_dir.write_text("a file")
    with pytest.raises(Unavailable, match="cannot start one"):
        place.start()


def test_waiting_for_the_end_has_an_end() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        pidfd = os.pidfd_open(process.pid)
        with pytest.raises(Unavailable, match="has not ended"):
            launch.wait_ended(pidfd, 0)
        process.kill()
        launch.wait_ended(pidfd)
        os.close(pidfd)


async def test_a_named_socket_is_never_an_edge_started_over_the_default_state(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(launch, "start_edge", lambda *args, **kwargs: started.append(args))
    async with Client(f"unix:{place.run_dir / launch.SOCKET_NAME}", retry=RetryPolicy(attempts=1)) as client:
        with pytest.raises(Unavailable):
            await client.info()
    assert started == []
