# SPDX-License-Identifier: Apache-2.0
"""The whole posture of a call's process, and of what serves it, against literals: what is not written here must not be there."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import os
import signal
import struct
from collections.abc import Callable

import pytest

from opendsec.kernel import namespaces, procfs
from opendsec.testing.posture import Posture, collect, differences
from tests.fnmembers import Calls, pythons
from tests.security.test_posture import DEV, MASKED, NS_GET_OWNER_UID, PATH, expected_limits, oom_score_of_init

OVERLAY = "rw,lowerdir=/l0,upperdir=*,workdir=*,redirect_dir=nofollow,userxattr"
NOTHING = {"inheritable": (), "permitted": (), "effective": (), "bounding": (), "ambient": ()}
OWN = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


def expected_mounts() -> tuple[tuple[str, str, str, str], ...]:
    return tuple(
        sorted(
            (
                ("/", "overlay", "rw,nosuid,nodev,relatime", OVERLAY),
                ("/proc", "proc", "ro,nosuid,nodev,noexec,relatime", "ro"),
                ("/dev", "tmpfs", "ro,nosuid,noexec,relatime", DEV),
                *((f"/proc/{name}", "tmpfs", "ro,nosuid,noexec,relatime", DEV) for name in MASKED if os.path.exists(procfs.path_of(name))),
                ("/dev/pts", "devpts", "ro,nosuid,noexec,relatime", "rw,gid=*,mode=620,ptmxmode=666,max=64"),
                ("/dev/shm", "tmpfs", "rw,nosuid,nodev,relatime", "rw,size=*,nr_inodes=*,mode=700,uid=*,gid=*"),
            )
        )
    )


def expected(*, program: str, filters: int) -> Posture:
    groups = {name: path.decode() for name, path in procfs.cgroup("self").items()}
    return Posture(
        program=program,
        own_namespaces=OWN,
        shared_namespaces=("time",),
        uid_map=((0, "base", 65_536),),
        gid_map=((0, "base", 65_536),),
        ids={"uid": ("65534",) * 4, "gid": ("65534",) * 4},
        groups=(),
        capabilities=NOTHING,
        no_new_privileges=True,
        seccomp="filter",
        seccomp_filters=filters,
        mounts=expected_mounts(),
        root="/",
        directory="/tmp",
        descriptors={0: "/dev/null", 1: "pipe", 2: "pipe"},
        limits={
            **expected_limits(),
            "Max cpu time": (12, 12),
            "Max pending signals": (256 * 16 + 1024, 256 * 16 + 1024),
        },
        environment=("HOME=/nonexistent", "LOGNAME=nobody", PATH, "USER=nobody"),
        cgroups={name: "/opendsec-EDGE-fn/MEMBER" if name in ("", "memory", "cpu", "pids") else path for name, path in groups.items()},
        umask="0022",
        signals_ignored="",
        signals_blocked="",
        signals_pending="",
        oom_score_adj=1000,
        scheduling=("other", os.getpriority(os.PRIO_PROCESS, 0)),
        personality="",
        session_leader=True,
        terminal=False,
        threads=1,
        tracer=0,
    )


def during(calls: Calls, kind: str, look: Callable[[int], None]) -> None:
    """Call `look` with the host's number of a call's first process while it sleeps."""

    async def run() -> None:
        before = set(calls.member.group.procs())
        source = "import time\nopen('/dev/shm/on', 'w')\ntime.sleep(1000)"
        task = asyncio.ensure_future(calls.member.call(calls.job(kind, source=source, argv=["sleep", "1000"])))  # type: ignore[arg-type]
        wanted = b"python3" if kind == "source" else b"sleep"

        def asleep(pid: int) -> bool:
            try:
                stat = procfs.stat(pid)
                return stat.comm == wanted and stat.state == "S" and procfs.fds(pid).keys() == {0, 1, 2}
            except (FileNotFoundError, ProcessLookupError):
                return False  # one that only joins the namespaces, and is gone

        try:
            while not (fresh := [pid for pid in set(calls.member.group.procs()) - before if asleep(pid)]):
                assert not task.done(), task.result()
                await asyncio.sleep(0.001)
            look(fresh[0])
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    calls.node.wait(run())


def found(calls: Calls, pid: int) -> Posture:
    return collect(pid, uid_base=calls.plan.uid_base, names={calls.node.edge_id: "EDGE", calls.plan.member_id: "MEMBER"})


def test_a_program(member: Calls) -> None:
    during(member, "exec", lambda pid: check(expected(program="/usr/bin/sleep", filters=1), found(member, pid)))


def test_a_fork_of_the_interpreter(member: Calls) -> None:
    wanted = dataclasses.replace(expected(program="/usr/bin/python3.11", filters=2), signals_ignored="1001000")  # as Python has it
    wanted = dataclasses.replace(
        wanted, environment=tuple(sorted((*wanted.environment, "LD_BIND_NOW=1")))
    )  # at its start; taken away since
    during(member, "source", lambda pid: check(wanted, found(member, pid)))


def check(wanted: Posture, got: Posture) -> None:
    assert (
        differences(dataclasses.replace(wanted, program=got.program) if got.program.startswith(wanted.program[:14]) else wanted, got) == []
    )


def test_the_interpreter(member: Calls) -> None:
    """Under the same filter but for setns, without capabilities; not dumpable; outside the calls' user, pid and mount namespaces."""
    pid = pythons(member)[0]
    got = found(member, pid)
    assert got.capabilities == NOTHING and got.no_new_privileges and got.seccomp_filters == 2
    assert got.descriptors == {0: "pipe", 1: "pipe", 2: "pipe", 3: "socket"}
    assert os.stat(procfs.path_of(pid, "environ")).st_uid == member.plan.uid_base  # not the user's own: it cannot be dumped
    assert got.oom_score_adj == 0
    assert procfs.status(pid)["NSpid"].split()[1:] == ["32000"]
    inside: list[dict[str, int]] = []
    during(member, "source", lambda call: inside.append(namespaces.namespace_ids(call)))
    its = namespaces.namespace_ids(pid)
    assert {name for name in its if its[name] != inside[0][name]} == {"ipc", "mnt", "pid", "user", "uts"}


def test_the_supervisor(member: Calls) -> None:
    got = found(member, member.member.pid)
    assert (got.program, got.no_new_privileges, got.root, got.directory) == ("/dsec-init", True, "/", "/")
    assert os.stat(procfs.path_of(member.member.pid, "environ")).st_uid == 0
    assert got.oom_score_adj == oom_score_of_init()
    assert got.ids["uid"] == ("0",) * 4 and got.uid_map == ((0, "base", 65_536),)


def test_the_calls_user_owns_their_user_namespace(member: Calls) -> None:
    """And so the interpreter, of that user, may enter it. The user namespace is below the member's, whose owner is the member's root."""
    owners: list[int] = []

    def look(pid: int) -> None:
        with open(procfs.path_of(pid, "ns", "user"), "rb") as namespace:
            owners.extend(struct.unpack("=I", fcntl.ioctl(namespace, NS_GET_OWNER_UID, bytes(4))))

    during(member, "exec", look)
    assert owners == [member.plan.uid_base + 65_534]


UNTIL_TOLD = """
from signal import SIG_BLOCK, SIGUSR1, pthread_sigmask, sigwait
pthread_sigmask(SIG_BLOCK, {SIGUSR1})
open('/dev/shm/on', 'w')
sigwait({SIGUSR1})
print('end')
"""


def until_told(calls: Calls, look: Callable[[int], None]) -> None:
    """As `during`, for a plain call that then ends by itself."""

    async def run() -> None:
        task = asyncio.ensure_future(calls.member.call(calls.job("source", source=UNTIL_TOLD)))
        while not (inside := [pid for pid in calls.member.group.procs() if ready(pid)]):
            assert not task.done(), task.result()
            await asyncio.sleep(0.001)
        look(inside[0])
        os.kill(inside[0], signal.SIGUSR1)
        assert (await task).stdout == b"end\n"

    def ready(pid: int) -> bool:
        try:
            return os.path.exists(procfs.path_of(pid, "root", "dev", "shm", "on")) and procfs.status(pid)["NSpid"].split()[-1] == "2"
        except (FileNotFoundError, ProcessLookupError):
            return False  # one that only joins the namespaces, and is gone

    calls.node.wait(run())


@pytest.mark.slow
def test_a_kept_envelope_has_new_files_and_ipc(member: Calls) -> None:
    """After a plain call its pid namespace stays, which is empty."""
    seen: list[dict[str, int]] = []
    held: list[int] = []  # so that no number is given out again

    def look(pid: int) -> None:
        seen.append(namespaces.namespace_ids(pid))
        held.extend(namespaces.open_namespace(pid, name) for name in ("ipc", "mnt"))

    try:
        for _ in range(2):
            until_told(member, look)
    finally:
        for fd in held:
            os.close(fd)
    assert {name for name in seen[0] if seen[0][name] != seen[1][name]} == {"ipc", "mnt"}


def private_memory(pid: int) -> bytes:
    found = []
    with open(procfs.path_of(pid, "maps"), "rb") as maps, open(procfs.path_of(pid, "mem"), "rb", buffering=0) as memory:
        for line in maps:
            where, access = line.split()[:2]
            start, end = (int(part, 16) for part in where.split(b"-"))
            if access == b"rw-p" and end - start < 64 << 20:
                memory.seek(start)
                found.append(memory.read(end - start))
    return b"".join(found)


def test_the_key_to_setns_is_in_no_memory_but_the_supervisors(member: Calls) -> None:
    """Nobody outside knows it, but it is among the few words of the supervisor's that are neither text nor small."""
    member.check()
    supervisor = private_memory(member.member.pid)
    words = {supervisor[at : at + 8] for at in range(0, len(supervisor) - 7, 8)}
    secrets = [
        word for word in words if len(set(word)) > 5 and 0 not in word and not all(0x20 <= byte < 0x7F or byte == 10 for byte in word)
    ]
    assert len(secrets) >= 2
    interpreter = pythons(member)[0]
    copies: list[bytes] = []
    until_told(member, lambda pid: copies.append(private_memory(pid)))
    copies.append(private_memory(interpreter))
    for memory in copies:
        assert len(memory) > 1 << 20 and not [word.hex() for word in secrets if word in memory]


@pytest.mark.slow
def test_each_call_has_namespaces_of_its_own(member: Calls) -> None:
    seen: list[dict[str, int]] = []
    held: list[int] = []  # so that no number is given out again

    def look(pid: int) -> None:
        seen.append(namespaces.namespace_ids(pid))
        held.extend(namespaces.open_namespace(pid, name) for name in ("ipc", "mnt", "pid", "uts"))

    try:
        for kind in ("exec", "source"):
            during(member, kind, look)
    finally:
        for fd in held:
            os.close(fd)
    assert {name for name in seen[0] if seen[0][name] == seen[1][name]} == {"cgroup", "net", "time", "user"}
