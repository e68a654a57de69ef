# SPDX-License-Identifier: Apache-2.0
"""native/init.c as process 1 of a fresh pid namespace: it reaps, ignores signals, holds nothing, costs next to nothing."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import spec
from opendsec.testing.waiting import until
from tests.support import NATIVE_INIT

pytestmark = pytest.mark.timeout(30)

# Runs as the spawner would: a process whose children are born in a new pid namespace. The first becomes init. After that
# each line on stdin orders one orphan: a child forks a grandchild and ends, so that the grandchild falls to process 1.
# The grandchild announces itself on the inherited socket (the kernel translates its pid for the reader), then waits there.
STAGE = """
import os, socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
os.set_inheritable(int(sys.argv[1]), True)
leaked = os.open("/dev/null", os.O_RDONLY)
os.set_inheritable(leaked, True)
import ctypes
if ctypes.CDLL(None, use_errno=True).unshare(0x20000000):
    raise OSError(ctypes.get_errno(), "unshare")
init = os.fork()
if init == 0:
    os.execv(sys.argv[2], ["dsec-init"])
print(init, flush=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            sock.send(b"x")
            sock.recv(1)
        os._exit(0)
    assert os.waitpid(child, 0)[0] == child
    print("middle gone", flush=True)
os.kill(init, 9)
os.waitpid(init, 0)
"""


@dataclass
class Namespace:
    """A pid namespace with init in it, and the means to make orphans there."""

    init: int
    stage: subprocess.Popen[str]
    sock: socket.socket

    def orphan(self) -> int:
        """Make an orphan that waits on our socket; return its pid as seen from here, once its parent is gone."""
        assert self.stage.stdin and self.stage.stdout
        self.stage.stdin.write("orphan\n")
        self.stage.stdin.flush()
        assert self.stage.stdout.readline() == "middle gone\n"
        _, control, _, _ = self.sock.recvmsg(1, socket.CMSG_SPACE(12))
        pid: int = struct.unpack("3i", control[0][2])[0]
        return pid

    def status(self, field: str) -> str:
        lines = Path(f"/proc/{self.init}/status").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(field + ":"))


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    here.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    command = [sys.executable, "-SI", "-c", STAGE, str(there.fileno()), str(NATIVE_INIT)]
    stage = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[there.fileno()])
    with here, stage:
        there.close()
        assert stage.stdout
        init = int(stage.stdout.readline())
        wait_until_asleep(init)
        yield Namespace(init, stage, here)
        stage.communicate()
        assert stage.returncode == 0


def wait_until_asleep(pid: int) -> None:
    """Until init is set up: nothing is mapped then but its code (and, on x86, the kernel's vsyscall page)."""

    def is_asleep() -> bool:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return 0 < len(lines) <= 2 and not any("[stack]" in line for line in lines)  # while it is executed it has little more than a stack

    until(is_asleep, "init is not set up", timeout_s=30)


def wait_until_reaped(pid: int, pidfd: int) -> None:
    """The descriptor turns readable when the process ends; being reaped then takes the kernel a moment without an event."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(10_000), "the orphan did not end"
    until(lambda: not os.path.exists(f"/proc/{pid}"), "the orphan is not reaped", timeout_s=30)


def test_reaps_orphans_that_end_later(namespace: Namespace) -> None:
    pids = [namespace.orphan() for _ in range(5)]
    for pid in pids:
        assert f"PPid:\t{namespace.init}\n" in Path(f"/proc/{pid}/status").read_text()
    pidfds = [os.pidfd_open(pid) for pid in pids]
    for _ in pids:
        namespace.sock.send(b"x")
    for pid, pidfd in zip(pids, pidfds, strict=True):
        wait_until_reaped(pid, pidfd)
        os.close(pidfd)


def test_reaps_while_stopped(namespace: Namespace) -> None:
    pid = namespace.orphan()
    pidfd = os.pidfd_open(pid)
    os.kill(namespace.init, signal.SIGSTOP)
    namespace.sock.send(b"x")
    wait_until_reaped(pid, pidfd)
    os.close(pidfd)
    os.kill(namespace.init, signal.SIGCONT)


def test_ignores_every_signal_it_may(namespace: Namespace) -> None:
    for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
        os.kill(namespace.init, number)
    assert namespace.status("ShdPnd") == namespace.status("SigPnd") == "0" * 16, "a signal is queued, not dropped"
    pid = namespace.orphan()  # still process 1, still taking orphans
    assert f"PPid:\t{namespace.init}\n" in Path(f"/proc/{pid}/status").read_text()
    namespace.sock.send(b"x")


def test_holds_nothing_and_is_called_init(namespace: Namespace) -> None:
    assert os.listdir(f"/proc/{namespace.init}/fd") == []
    assert namespace.status("Name") == "init"
    assert namespace.status("SigBlk") == "0" * 16
    assert Path(f"/proc/{namespace.init}/cmdline").read_bytes() == b""


def test_is_small(namespace: Namespace) -> None:
    promised = spec.load()
    assert promised["init.file_size"].holds(NATIVE_INIT.stat().st_size / 1024)
    assert promised["init.resident_memory"].holds(int(namespace.status("VmRSS").split()[0]))
    assert namespace.status("VmData") == namespace.status("VmStk") == "0 kB"


def test_refuses_to_run_otherwise() -> None:
    assert subprocess.run([NATIVE_INIT], check=False).returncode == 64
