# SPDX-License-Identifier: Apache-2.0
"""The whole posture of a sandbox's processes against literals: what is not written here must not be there.

What the kernel or the machine decides is derived from it: which masked files there are at all, limits that nobody sets, hierarchies of
control groups that are not ours.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import resource
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from opendsec.api.exec import Pty
from opendsec.kernel import abi, capabilities, cgroups, mounts, procfs, syscalls
from opendsec.runtime.backend import ExecPlan
from opendsec.runtime.container import profile
from opendsec.testing.posture import Posture, collect, differences
from tests.boxes import Box, Command, Node, until
from tests.support import ROOT

CAPABILITIES = (
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_NET_BIND_SERVICE",
    "CAP_SYS_CHROOT",
    "CAP_SETFCAP",
)
MASKED = ("acpi", "asound", "interrupts", "keys", "latency_stats", "pressure", "sched_debug", "schedstat", "scsi", "softirqs")
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEV = "rw,size=*,nr_inodes=*,mode=755"
OVERLAY = "rw,lowerdir+=/,upperdir=*,workdir=*,redirect_dir=on,fsync=volatile"
OLD_OVERLAY = OVERLAY.replace("fsync=volatile", "volatile")  # how kernels before 6.19 say it
MIB = 1 << 20
NS_GET_OWNER_UID = 0xB704


def expected_mounts() -> tuple[tuple[str, str, str, str], ...]:
    expected = (
        ("/", "overlay", "rw,nosuid,nodev,relatime", OVERLAY),
        ("/proc", "proc", "rw,nosuid,nodev,noexec,relatime", "rw"),
        ("/dev", "tmpfs", "ro,nosuid,noexec,relatime", DEV),
        *(
            (f"/proc/{name}", "tmpfs", "ro,nosuid,noexec,relatime", DEV)
            for name in MASKED
            if os.path.exists(procfs.path_of(name))  # a list of what is there, of literal names
        ),
        ("/proc/sys", "proc", "ro,nosuid,nodev,noexec,relatime", "rw"),
        ("/dev/pts", "devpts", "rw,nosuid,noexec,relatime", "rw,gid=*,mode=620,ptmxmode=666,max=64"),
        ("/dev/shm", "tmpfs", "rw,nosuid,nodev,noexec,relatime", "rw,size=*,nr_inodes=*,uid=*,gid=*"),
    )
    return tuple(sorted(expected))


def expected_limits() -> dict[str, tuple[int | None, int | None]]:
    ours = procfs.limits("self")
    unset = (
        "address space",
        "cpu time",
        "data size",
        "file locks",
        "file size",
        "processes",
        "realtime timeout",
        "resident set",
        "stack size",
    )
    return {
        **{f"Max {name}": ours[f"Max {name}"] for name in unset},
        "Max core file size": (1, 1),
        "Max locked memory": (8 * MIB, 8 * MIB),
        "Max msgqueue size": (819_200, 819_200),
        "Max nice priority": (0, 0),
        "Max open files": (256, 256),
        "Max pending signals": (64 * 16 + 1024, 64 * 16 + 1024),
        "Max realtime priority": (0, 0),
    }


def expected_cgroups(command: str = "") -> dict[str, str]:
    box = "/opendsec-EDGE/SANDBOX"
    hierarchies = cgroups.discover()
    groups = {name: path.decode() for name, path in procfs.cgroup("self").items()}
    for name in ("memory", "cpu", "pids"):
        if hierarchies.homes[name][0] == 1:
            groups[name] = box
    if hierarchies.v2 is not None:
        groups[""] = box + command
    return groups


def nothing_gained() -> dict[str, tuple[str, ...]]:
    return {"inheritable": (), "permitted": (), "effective": (), "bounding": CAPABILITIES, "ambient": ()}


def oom_score_of_init() -> int:
    effective, _, _ = syscalls.capget()
    if effective & capabilities.mask(("CAP_SYS_RESOURCE",)):
        return -1000
    return int(procfs.read(procfs.path_of("self", "oom_score_adj")))  # it could not be lowered


def posture_of_init() -> Posture:
    return Posture(
        program="/dsec-init",
        own_namespaces=("cgroup", "ipc", "mnt", "net", "pid", "user", "uts"),
        shared_namespaces=("time",),
        uid_map=((0, "base", 65_536),),
        gid_map=((0, "base", 65_536),),
        ids={"uid": ("0",) * 4, "gid": ("0",) * 4},
        groups=(),
        capabilities={**nothing_gained(), "permitted": CAPABILITIES, "effective": CAPABILITIES},
        no_new_privileges=True,
        seccomp="filter",
        seccomp_filters=1,
        mounts=expected_mounts(),
        root="/",
        directory="/",
        descriptors={},
        limits=expected_limits(),
        environment=(),
        cgroups=expected_cgroups(),
        umask="0022",
        signals_ignored="1011002",  # INT, PIPE, CHLD, XFSZ; a process 1 gets no signal from inside anyhow
        signals_blocked="",
        signals_pending="",
        oom_score_adj=oom_score_of_init(),
        scheduling=("other", os.getpriority(os.PRIO_PROCESS, 0)),
        personality="",
        session_leader=True,
        terminal=False,
        threads=1,
        tracer=0,
    )


def posture_of_root() -> Posture:
    return dataclasses.replace(
        posture_of_init(),
        program="/usr/bin/sleep",
        descriptors={0: "/dev/null", 1: "pipe", 2: "pipe"},
        environment=("HOME=/root", "LOGNAME=root", PATH, "USER=root"),
        cgroups=expected_cgroups("/COMMAND"),
        signals_ignored="",
        oom_score_adj=500,
    )


def posture_of_user() -> Posture:
    return dataclasses.replace(
        posture_of_root(),
        ids={"uid": ("5",) * 4, "gid": ("60",) * 4},
        capabilities=nothing_gained(),
        environment=("HOME=/usr/games", "LOGNAME=games", PATH, "USER=games"),
    )


def posture_with_terminal() -> Posture:
    return dataclasses.replace(
        posture_of_user(),
        terminal=True,
        descriptors={0: "/dev/pts/0", 1: "/dev/pts/0", 2: "/dev/pts/0"},
        environment=("HOME=/usr/games", "LOGNAME=games", PATH, "TERM=xterm-256color", "USER=games"),
    )


def found(node: Node, box: Box, command: Command | None = None) -> Posture:
    names = {node.edge_id: "EDGE", box.handle.sandbox_id: "SANDBOX"}
    if command is not None:
        names[f"/{box.commands[-1].process_id}"] = "/COMMAND"
    pid = box.pid if command is None else command.running.pid
    posture = collect(pid, uid_base=box.uid_base, names=names)
    return dataclasses.replace(
        posture, mounts=tuple((*mount[:3], OVERLAY if mount[3] == OLD_OVERLAY else mount[3]) for mount in posture.mounts)
    )


def sleeper(box: Box, *, user: str = "root", pty: Pty | None = None, env: Mapping[str, str] | None = None) -> Command:
    return asleep(box.start("sleep", "1000", user=user, pty=pty, env=env))


def asleep(command: Command) -> Command:
    """Until it has loaded its libraries and sleeps."""
    until(lambda: procfs.stat(command.running.pid).state == "S", "it does not sleep")
    return command


def test_process_1(node: Node, box: Box) -> None:
    assert differences(posture_of_init(), found(node, box)) == []


def test_a_command_as_root(node: Node, box: Box) -> None:
    assert differences(posture_of_root(), found(node, box, sleeper(box))) == []


def test_a_command_as_a_user(node: Node, box: Box) -> None:
    assert differences(posture_of_user(), found(node, box, sleeper(box, user="games"))) == []


def test_a_command_with_a_terminal(node: Node, box: Box) -> None:
    assert differences(posture_with_terminal(), found(node, box, sleeper(box, user="games", pty=Pty(rows=24, cols=80)))) == []


def test_a_command_with_everything_given(node: Node, box: Box) -> None:
    command = asleep(box.start("sleep", "1000", user="games:root", cwd="/tmp", env={"HOME": "/x", "A": "b"}, stdin=True))
    expected = dataclasses.replace(
        posture_of_user(),
        ids={"uid": ("5",) * 4, "gid": ("0",) * 4},
        directory="/tmp",
        descriptors={0: "pipe", 1: "pipe", 2: "pipe"},
        environment=("A=b", "HOME=/x", "LOGNAME=games", PATH, "USER=games"),
    )
    assert differences(expected, found(node, box, command)) == []


def test_further_groups_come_from_the_sandbox(node: Node, box: Box) -> None:
    assert box.sh("echo 'extra:x:4242:games,nobody' >> /etc/group").code == 0
    expected = dataclasses.replace(posture_of_user(), groups=("4242",))
    assert differences(expected, found(node, box, sleeper(box, user="games"))) == []


# --- that one thing more is seen -----------------------------------------------------------------------------------


def test_one_capability_more_is_seen(node: Node, box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "CAPABILITIES", profile.CAPABILITIES | capabilities.mask(("CAP_MKNOD",)))
    more = differences(posture_of_user(), found(node, box, sleeper(box, user="games")))
    assert more and all("CAP_MKNOD" in line for line in more if line.startswith("+"))


def test_one_mount_more_is_seen(node: Node, box: Box) -> None:
    with inside(box):
        fd = mounts.tmpfs(4096, 4)
        target = os.open("/mnt", os.O_PATH)
        mounts.attach(fd, target)
        os.close(fd)
        os.close(target)
    more = differences(posture_of_init(), found(node, box))
    assert [line.startswith("+ mounts: ('/mnt', 'tmpfs'") for line in more] == [True]


@contextmanager
def inside(box: Box) -> Iterator[None]:
    """In the sandbox's mount namespace for a while, as the host's root. (The test's threads stay outside.)"""
    ours, theirs = (os.open(procfs.path_of(pid, "ns", "mnt"), os.O_RDONLY) for pid in ("self", box.pid))
    root = os.open("/", os.O_PATH)
    syscalls.unshare(0x200)  # CLONE_FS, without which a process with threads may not move
    try:
        syscalls.setns(theirs, abi.CLONE_NEWNS)
        yield
    finally:
        syscalls.setns(ours, abi.CLONE_NEWNS)
        os.fchdir(root)
        for fd in (ours, theirs, root):
            os.close(fd)


def test_one_descriptor_more_is_seen(node: Node, box: Box) -> None:
    plan = ExecPlan(process_id="proc_more", argv=("sleep", "1000"), env={}, cwd="/", user="games")
    with open("/dev/null") as null:
        running = node.wait(box.handle.exec(plan, stdin=None, stdout=None, stderr=None, extra=[null.fileno()]))
    until(lambda: procfs.stat(running.pid).state == "S", "it does not sleep")
    posture = collect(running.pid, uid_base=box.uid_base)
    assert posture.descriptors == {0: "/dev/null", 1: "/dev/null", 2: "/dev/null", 3: "/dev/null"}
    expected = dataclasses.replace(posture, descriptors={0: "/dev/null", 1: "/dev/null", 2: "/dev/null"})
    assert differences(expected, posture) == ["+ descriptors: 3 = /dev/null"]


def test_one_variable_more_is_seen(node: Node, box: Box) -> None:
    posture = found(node, box, sleeper(box, env={"SECRET": "x"}))
    assert differences(posture_of_root(), posture) == ["+ environment: SECRET=x"]


def test_one_limit_less_is_seen(node: Node, box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendsec.runtime.container.plan.ZERO_LIMITS", (resource.RLIMIT_NICE,))
    ours = procfs.limits("self")["Max realtime priority"]
    posture = found(node, box, sleeper(box))
    more = differences(posture_of_root(), posture)
    assert more == ([] if ours == (0, 0) else ["- limits: Max realtime priority = (0, 0)", f"+ limits: Max realtime priority = {ours}"])


# --- between two sandboxes, and towards the host -------------------------------------------------------------------


def test_t08_ids_of_two_sandboxes_are_apart(node: Node, box: Box) -> None:
    with node.box() as other:
        ranges = []
        for one in (box, other):
            (row,) = procfs.read(procfs.path_of(one.pid, "uid_map")).splitlines()
            inside_first, host_first, count = map(int, row.split())
            assert (inside_first, count) == (0, 65_536)
            assert procfs.read(procfs.path_of(one.pid, "gid_map")).split() == row.split()
            ranges.append(range(host_first, host_first + count))
        first, second = ranges
        assert first.stop <= second.start or second.stop <= first.start
        assert first.start >= 65_536 and second.start >= 65_536


def test_t08_no_namespace_is_shared(node: Node, box: Box) -> None:
    with node.box() as other:
        mine, its = (
            {name: os.stat(procfs.path_of(one.pid, "ns", name)).st_ino for name in ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")}
            for one in (box, other)
        )
    assert not set(mine.values()) & set(its.values())


def test_the_owner_of_its_namespace_is_its_own_root(box: Box) -> None:
    """Not the host's: the kernel counts inotify instances, queues and signals against the owner, too (T17)."""
    with open(procfs.path_of(box.pid, "ns", "user"), "rb") as namespace:
        (owner,) = struct.unpack("=I", fcntl.ioctl(namespace, NS_GET_OWNER_UID, bytes(4)))
    assert owner == box.uid_base


def test_t10_process_1_belongs_to_the_host(box: Box) -> None:
    """The entries of a process that is not dumpable belong to the root of its memory's user namespace: here the host's. For process 1 that
    is so from exec on, because its program cannot be read from inside; a command is the sandbox's."""
    command = sleeper(box)
    assert os.stat(procfs.path_of(box.pid, "environ")).st_uid == 0
    assert os.stat(procfs.path_of(command.running.pid, "environ")).st_uid == box.uid_base


def test_what_the_edge_ignores_or_blocks_is_not_handed_on(test_images: Path) -> None:
    """An edge that was started by nohup or as a background job ignores signals, and exec keeps that."""
    program = (
        "import os, signal, sys\n"
        "for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGRTMIN + 3):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "from tests.edges import EdgeProcess\n"
        "from pathlib import Path\n"
        "import opendsec as od\n"
        "edge = EdgeProcess(Path(sys.argv[1]))\n"
        "try:\n"
        "    edge.start()\n"
        "    with od.sync.Client(run_dir=edge.run_dir, start_edge=False) as client:\n"
        "        box = client.create(od.Container(image='debian-python', memory='64MiB', disk='16MiB'))\n"
        "        print(box.run(['grep', '-E', 'Sig(Ign|Blk)', '/proc/self/status']).stdout)\n"
        "finally:\n"
        "    edge.remove()\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(test_images)], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["SigBlk:", "0000000000000000", "SigIgn:", "0000000000000000"]
