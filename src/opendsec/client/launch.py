# SPDX-License-Identifier: Apache-2.0
"""Starting the edge of this machine. Blocking; many callers may do it at once and one edge comes of it."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from opendsec.api.errors import Unavailable

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
SOCKET_NAME = "edge.sock"


def default_run_dir() -> Path:
    return Path(os.environ.get("OPENDSEC_RUN_DIR") or "/run/opendsec")


def default_state_dir() -> Path:
    return Path(os.environ.get("OPENDSEC_STATE_DIR") or "/var/lib/opendsec")


def listening(run_dir: Path) -> bool:
    """Whether an edge accepts connections there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(run_dir / SOCKET_NAME))
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
            return False
        except OSError as error:  # not allowed; longer than the 107 bytes that the path of a socket may have
            raise Unavailable(f"cannot reach an edge at {run_dir / SOCKET_NAME}: {error.strerror or error}") from None
    return True


def start_edge(
    run_dir: Path,
    state_dir: Path,
    *,
    arguments: Sequence[str] = (),
    timeout_s: float = START_TIMEOUT_S,
    program: Sequence[str] = (sys.executable, "-m", "opendsec.edge"),
) -> bool:
    """Start an edge unless one listens; True if this call started it. Returns once it accepts connections.

    Raises Unavailable with the end of its log if it does not come up.
    """
    log_path = state_dir / "edge.log"
    try:
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o755)
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(run_dir / "start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Unavailable(f"no edge runs, and this user cannot start one: {error}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # others wait here for the one that is starting it
        if listening(run_dir):
            return False
        edge = [*program, "--state-dir", str(state_dir), "--run-dir", str(run_dir), *arguments]
        _start(edge, run_dir, log_path, timeout_s)
        return True
    finally:
        os.close(lock)


def _start(edge: list[str], run_dir: Path, log_path: Path, timeout_s: float) -> None:
    ready, tell = os.pipe2(os.O_CLOEXEC)
    try:
        with log_path.open("ab") as log:
            log_start = log.tell()
            try:
                # By way of setsid(1), which forks: the edge is then no child of ours and leaves no zombie to us when it ends.
                subprocess.run(
                    ["setsid", "--fork", *edge, "--ready-fd", str(tell)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(tell,),
                    cwd="/",
                    check=True,
                )
            except (OSError, subprocess.CalledProcessError) as error:
                raise Unavailable(f"cannot start an edge: {error}") from None
        os.close(tell)
        tell = -1
        if not _wait_readable(ready, timeout_s):
            raise Unavailable(f"the edge was not ready within {timeout_s:g} s; its log is {log_path}{_tail(log_path, log_start)}")
        if not os.read(ready, 64) and not listening(run_dir):  # end of file: it ended, unless because another one was there
            raise Unavailable(f"the edge did not start; its log is {log_path}{_tail(log_path, log_start)}")
    finally:
        os.close(ready)
        if tell >= 0:
            os.close(tell)


def wait_ended(pidfd: int, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Wait until an edge that was told to stop has ended: only then is its state directory free. Raises Unavailable."""
    if not _wait_readable(pidfd, timeout_s):
        raise Unavailable(f"the edge was told to stop and has not ended within {timeout_s:g} s")


def _wait_readable(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _tail(log_path: Path, start: int, limit: int = 4000) -> str:
    """What the log says since `start`, its last part."""
    with log_path.open("rb") as log:
        end = log.seek(0, os.SEEK_END)
        log.seek(max(start, end - limit))
        text = log.read().decode("utf-8", "replace").strip()
    return f":\n{text}" if text else ", which is empty"
