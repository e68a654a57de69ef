# SPDX-License-Identifier: Apache-2.0
"""What the process that reads a stranger's archive can do: read and write what it was given."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# In a process of its own, since the caller of `confine.start` must be single-threaded and a test session is not.
PROGRAM = """
import os, sys
sys.path[:0] = {path!r}
from opendsec.images.oci import confine
from tests.integration.oci import test_confine
reading, writing = os.pipe()
go, ready = os.pipe()
function = getattr(test_confine, {function!r})
pid = confine.start(lambda: function(go, writing), (go, writing), memory_bytes=1 << 30, file_bytes=1 << 20)
os.close(writing)
if {look!r}:
    assert os.read(reading, 1) == b"r"
    print(test_confine.seen(pid))
    os.write(ready, b"x")
print(os.read(reading, 1 << 16).decode())
print(confine.end(pid))
"""


def run(function: Callable[[int, int], None], *, look: bool = False) -> list[str]:
    program = PROGRAM.format(path=sys.path, function=function.__name__, look=look)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def seen(pid: int) -> str:
    place = Path(f"/proc/{pid}")
    status = dict(line.split(":\t", 1) for line in (place / "status").read_text().splitlines() if ":\t" in line)
    return json.dumps(
        {
            "uid": status["Uid"].split(),
            "gid": status["Gid"].split(),
            "groups": status["Groups"].split(),
            "capabilities": {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16},
            "no new privileges": status["NoNewPrivs"],
            "seccomp": status["Seccomp"],
            "shared namespaces": [
                name
                for name in os.listdir("/proc/self/ns")
                if os.stat(f"/proc/self/ns/{name}").st_ino == os.stat(place / "ns" / name).st_ino
            ],
            "root": os.listdir(place / "root"),
            "mounts": [line.split()[4:6] for line in (place / "mountinfo").read_text().splitlines()],
            "descriptors": len(os.listdir(place / "fd")),
        }
    )


def wait(go: int, out: int) -> None:
    os.write(out, b"r")
    os.read(go, 1)


def test_posture() -> None:
    look, *_, status = run(wait, look=True)
    assert status == "0"
    found = json.loads(look)
    unknown = str(0x7FFF_FFF0)
    assert found["uid"] == [unknown] * 4 and found["gid"] == [unknown] * 4 and found["groups"] == []
    assert found["capabilities"] and found["no new privileges"] == "1" and found["seccomp"] == "2"
    # The pid namespace for children is its own as well; the time namespace says nothing about anybody.
    assert set(found["shared namespaces"]) <= {"time", "time_for_children"}
    assert found["root"] == []
    assert len(found["mounts"]) == 1 and "ro" in found["mounts"][0][1].split(",")
    assert found["descriptors"] == 3  # the two that it was given, and standard error


def opens(go: int, out: int) -> None:
    os.open("/", os.O_RDONLY)


def forks(go: int, out: int) -> None:
    os.fork()


def connects(go: int, out: int) -> None:
    socket.socket(socket.AF_INET, socket.SOCK_STREAM)


def executes(go: int, out: int) -> None:
    os.execv("/bin/true", ["true"])


def traces(go: int, out: int) -> None:
    ctypes.CDLL(None).ptrace(0, 0, 0, 0)


def kills(go: int, out: int) -> None:
    os.kill(1, signal.SIGKILL)


def unshares(go: int, out: int) -> None:
    ctypes.CDLL(None).unshare(0x10000000)


def maps_code(go: int, out: int) -> None:
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)


def raises_limits(go: int, out: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (10, 10))


@pytest.mark.slow
@pytest.mark.parametrize("function", [opens, forks, connects, executes, traces, kills, unshares, maps_code, raises_limits])
def test_anything_else_kills(function: Callable[[int, int], None]) -> None:
    assert run(function)[-1] == str(-signal.SIGSYS)


def fills(go: int, out: int) -> None:
    try:
        bytearray(2 << 30)
    except MemoryError:
        os.write(out, b"too much")


def test_memory_is_bounded() -> None:
    assert run(fills) == ["too much", "0"]


def fails(go: int, out: int) -> None:
    raise OSError(errno.EIO, "x")


def test_what_raises_ends_with_1() -> None:
    assert run(fails)[-1] == "1"
