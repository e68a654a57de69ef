# SPDX-License-Identifier: Apache-2.0
"""T09, T10: a command on its way in, and process 1, looked at from inside.

The newcomer is caught where it stands: frozen at its first instruction, before it has joined anything, or stopped by a signal after that.
The attacker comes by nsenter, with every capability that the sandbox's root could ever have had.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import Iterator

import pytest

from opendsec.kernel import procfs
from tests.boxes import Box, Node

# Prints as JSON what can be read of each process named in argv[1] ("*": all but its own): {pid: {entry: text or error}}.
LOOK = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.restype = ctypes.c_long
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]

def look(pid):
    found = {}
    failed = lambda e: found.update({e.filename.split("/", 3)[3] + "/": f"! {e.errno}"})
    for folder, folders, files in os.walk(f"/proc/{pid}", onerror=failed):
        if folder.count("/") > 3: folders[:] = []
        for name in files + folders:
            path = f"{folder}/{name}"
            short = path.split("/", 3)[3]
            if os.path.islink(path):
                try: found[short] = "-> " + os.readlink(path)
                except OSError as e: found[short] = f"! {e.errno}"
            elif name in files and name not in ("mem", "clear_refs", "pagemap"):
                try: found[short] = open(path, "rb").read().decode("latin-1")
                except OSError as e: found[short] = f"! {e.errno}"
    try: found["mem"] = str(len(os.pread(os.open(f"/proc/{pid}/mem", os.O_RDONLY), 1, 1 << 22)))
    except OSError as e: found["mem"] = f"! {e.errno}"
    found["ptrace"] = "attached" if libc.ptrace(0x4206, pid, None, None) == 0 else f"! {ctypes.get_errno()}"  # PTRACE_SEIZE
    for name in ("root", "cwd", "exe", "ns/mnt", "ns/net", "ns/pid", "ns/user"):
        try: found[name] = "-> " + os.readlink(f"/proc/{pid}/{name}")
        except OSError as e: found[name] = f"! {e.errno}"
    for name in ("root", "cwd"):
        try: found[f"{name}/"] = repr(os.listdir(f"/proc/{pid}/{name}"))
        except OSError as e: found[f"{name}/"] = f"! {e.errno}"
    try: found["pidfd_getfd"] = str(libc.syscall(438, os.pidfd_open(pid), 0, 0)) + f" {ctypes.get_errno()}"
    except OSError as e: found["pidfd_getfd"] = f"! {e.errno}"
    return found

me = os.getpid()
pids = [int(p) for p in os.listdir("/proc") if p.isdigit() and int(p) != me] if sys.argv[1] == "*" else [int(sys.argv[1])]
print(json.dumps({pid: look(pid) for pid in pids}))
"""

EACCES, EPERM = "! 13", "! 1"
GUARDED = ("environ", "maps", "smaps", "auxv", "syscall", "personality", "io", "stack", "numa_maps")  # readable by who may trace
LINKS = ("root", "cwd", "exe", "ns/mnt", "ns/net", "ns/pid", "ns/user")


def look_from_inside(box: Box, which: str = "*") -> dict[int, dict[str, str]]:
    """What root inside sees of other processes, given back every capability, and not frozen when the sandbox is."""
    command = ["nsenter", "--target", str(box.pid), "--all", "python3", "-c", LOOK, which]
    done = subprocess.run(command, capture_output=True, check=False, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    assert done.returncode == 0, done.stderr.decode()
    return {int(pid): entries for pid, entries in json.loads(done.stdout).items()}


@pytest.fixture
def sentinels() -> Iterator[list[str]]:
    """Words that are to be found on the host, in places that a process's entries in /proc could show."""
    listener = socket.create_server(("127.0.0.1", 0))
    abstract = socket.socket(socket.AF_UNIX)
    name = f"opendsec-sentinel-{os.getpid()}"
    abstract.bind("\0" + name)
    with listener, abstract:
        port = f"{listener.getsockname()[1]:04X}"
        assert name.encode() in procfs.read(procfs.path_of("self", "net", "unix"))
        assert f"0100007F:{port}".encode() in procfs.read(procfs.path_of("self", "net", "tcp"))
        yield [name, f"0100007F:{port}", "/sys/fs/cgroup", "/sysroot", "python", str(os.getcwd()), "opendsec.kernel", "import sys"]


def test_t09_a_newborn_command_shows_nothing_of_the_host(node: Node, box: Box, sentinels: list[str]) -> None:
    """Frozen at birth: it is in the pid namespace already and in no other."""
    group = node.container(box).group
    group.freeze()
    pending = node.loop.create_task(box.start_async("true"))
    node.wait(settled(node))
    try:
        seen = look_from_inside(box)
    finally:
        group.thaw()
        node.wait(pending)
    (newborn,) = (entries for entries in seen.values() if entries["comm"] == "dsec-spawner\n")
    assert newborn["cmdline"].rstrip("\0") == "dsec-spawner"
    assert newborn["mountinfo"] == newborn["mounts"] == ""
    assert newborn["net/route"].count("\n") <= 1  # the heading
    assert [line.split()[0] for line in newborn["net/dev"].splitlines()[2:]] == ["lo:"]
    for entry, text in newborn.items():
        assert not [word for word in sentinels if word in text], entry
    assert_guarded(newborn)


async def settled(node: Node) -> None:
    await asyncio.sleep(0)
    await (await node.backend.spawner()).settle()


def assert_guarded(entries: dict[str, str]) -> None:
    """Nothing that takes the right to trace can be had."""
    assert {name: entries[name] for name in GUARDED if name in entries and entries[name] not in (EACCES, EPERM)} == {}
    assert {name: entries[name] for name in LINKS if entries[name] not in (EACCES, EPERM)} == {}
    assert [name for name in entries if name.startswith(("fd/", "map_files/")) and entries[name] not in (EACCES, EPERM)] == []
    assert entries["mem"] in (EACCES, EPERM)
    assert entries["root/"] == entries["cwd/"] == EACCES
    assert entries["ptrace"] == EPERM
    assert entries["pidfd_getfd"] == "-1 1"


STOPPER = """
import json, os, signal, sys
exec(sys.argv[2])  # defines look()
print("ready", flush=True)
caught = 0
known = {int(p) for p in os.listdir("/proc") if p.isdigit()}
while not caught:
    for pid in {int(p) for p in os.listdir("/proc") if p.isdigit()} - known:
        known.add(pid)
        try:
            while True:
                os.kill(pid, signal.SIGSTOP)
                state, comm = open(f"/proc/{pid}/stat").read().split(") ")[1][0], open(f"/proc/{pid}/comm").read()
                if comm != "dsec-spawner\\n": break
                if state == "T":
                    print(json.dumps(look(pid)), flush=True); caught += 1; break
        except PermissionError: known.discard(pid)  # it has not joined yet
        except OSError: pass
        finally:
            try: os.kill(pid, signal.SIGCONT)
            except OSError: pass
"""


@pytest.mark.slow
def test_t09_a_command_stopped_while_it_joins(node: Node, box: Box) -> None:
    """Root inside may signal it as soon as it has joined. A long /etc/passwd makes that a while."""
    lines = "".join(f"user{n}:x:{n % 60000}:5:5:/home:/bin/sh\n" for n in range(1000, 24_000) if n != 5)
    assert box.run("sh", "-c", "cat > /etc/passwd", input=lines.encode()).code == 0
    definitions = LOOK[: LOOK.index("me = os.getpid()")]
    attacker = box.start_python(STOPPER, "", definitions)
    attacker.expect("ready")
    for _ in range(200):
        assert box.run("true", user="5").code == 0
        if attacker.running.exited.done():
            break
    result = attacker.wait()
    stopped = json.loads(result.out.decode().split("\n")[1])
    assert stopped["status"].startswith("Name:\tdsec-spawner")
    assert stopped["mountinfo"] == box.run("cat", "/proc/self/mountinfo").text  # it is inside by now, so these are its own
    assert_guarded(stopped)


def test_t10_process_1_cannot_be_looked_into(box: Box) -> None:
    """Not even with the capabilities that the sandbox's root never had: the kernel takes it for the host's."""
    entries = look_from_inside(box, "1")[1]
    assert entries["comm"] == "init\n"
    assert entries["cmdline"] == ""  # it has given its memory back
    assert_guarded(entries)


def test_t10_the_end_of_process_1_is_the_end_of_all(node: Node) -> None:
    """From outside, as the host's own killer would do it."""
    with node.box() as box:
        running = box.start("sleep", "1000")
        os.kill(box.pid, 9)
        result = running.wait()
        assert result.exit.signal == 9
        assert node.wait(reason_of(box)) == "its first process ended"


async def reason_of(box: Box) -> str:
    return await box.handle.died


@pytest.mark.slow
def test_t09_a_flood_of_signals_forges_no_output(node: Node, box: Box) -> None:
    """The spawner's own handlers must not run, nor write, in a command."""
    source = """
import os, signal
print("ready", flush=True)
while True:
    for pid in os.listdir("/proc"):
        if pid.isdigit() and int(pid) not in (1, os.getpid()):
            try:
                for number in (signal.SIGCHLD, signal.SIGWINCH, signal.SIGURG, signal.SIGCONT): os.kill(int(pid), number)
            except OSError: pass
"""
    attacker = box.start_python(source)
    attacker.expect("ready")
    for _ in range(100):
        result = box.run("echo", "x")
        assert (result.out, result.err, result.code) == (b"x\n", b"", 0)
    attacker.kill()
