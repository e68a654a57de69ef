# SPDX-License-Identifier: Apache-2.0
"""Peers run in a small process of their own: `python -m benchmarks.peers` reads one JSON list of words a line, runs it, and answers with
its milliseconds, or `null` if it failed.

It lives in a mount namespace without the cgroup2 mount, because crun refuses machines that have both kinds of cgroups.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from opendsec.kernel import abi, cgroups, syscalls


class Peers:
    """The other side of that process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def time_ms(self, command: list[str]) -> float | None:
        """Milliseconds from the start of a command to its end; None if it failed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        took: float | None = json.loads(self._process.stdout.readline())
        return took


@contextlib.contextmanager
def peers() -> Iterator[Peers]:
    with subprocess.Popen([sys.executable, "-m", "benchmarks.peers"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield Peers(process)


def serve() -> None:
    unified = cgroups.discover().v2
    syscalls.unshare(abi.CLONE_NEWNS)
    syscalls.mount(None, "/", None, abi.MS_REC | abi.MS_PRIVATE)
    if unified is not None and cgroups.discover().mode == "hybrid":
        syscalls.umount2(unified, abi.MNT_DETACH)
    quiet = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
    for line in sys.stdin:
        command = json.loads(line)
        began = time.perf_counter()
        pid = os.posix_spawn(command[0], command, {"PATH": "/usr/bin:/bin"}, file_actions=quiet)
        _, status = os.waitpid(pid, 0)
        print(json.dumps(None if status else (time.perf_counter() - began) * 1000), flush=True)


if __name__ == "__main__":
    serve()
