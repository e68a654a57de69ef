# SPDX-License-Identifier: Apache-2.0
"""A `Handle` without a sandbox: real processes, pipes, terminals and cgroups of this machine, isolated in no way.

For tests of what the edge does with commands, which then run as root beside everything else: their own commands only. It needs root
and cgroups. Limits of memory and pids hold for real, disk limits do not exist.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import resource
import signal
from collections.abc import Callable, Sequence

from opendsec.api.errors import SandboxLost, Unsupported
from opendsec.api.ids import EDGE, SANDBOX, new_id
from opendsec.api.sandboxes import Usage
from opendsec.api.spec import Limits
from opendsec.kernel import cgroups, syscalls, tty
from opendsec.kernel.signals import kill_listed, signal_listed
from opendsec.runtime.backend import Counters, DiskSnapshot, ExecPlan, Exit, FileAccess, Record, Running, SnapshotRecord

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FLOOR = 1000  # child descriptors are collected from here on

LIMITS = Limits(cpu=2.0, cpu_weight=100, memory_bytes=512 << 20, disk_bytes=1 << 30, inodes=10_000, pids=512, open_files=1024)


class LocalHandle:
    """`destroy` it. Tests may set `fail_exec`, `counters_now` and `alive_now`, and end it with `die`."""

    def __init__(self, *, limits: Limits = LIMITS) -> None:
        self.record = Record(
            sandbox_id=new_id(SANDBOX),
            backend="local",
            pid=os.getpid(),
            start_time=0,
            boot_id="",
            uid_base=0,
            scratch="",
            limits=limits,
            layers=(),
        )
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.fail_exec: Exception | None = None
        self.before_exec: Callable[[], asyncio.Future[None]] | None = None  # what an exec waits for
        self.counters_now: Counters | None = None
        self.counters_read = 0
        self.alive_now = True
        self.running: list[LocalRunning] = []
        self._parent = cgroups.discover().group(f"opendsec-local-{new_id(EDGE)}")
        self.group = cgroups.discover().group(f"{self._parent.name}/{self.record.sandbox_id}")
        self.group.create({"memory_bytes": limits.memory_bytes, "pids": limits.pids})

    @property
    def sandbox_id(self) -> str:
        return self.record.sandbox_id

    @property
    def files(self) -> FileAccess:
        raise NotImplementedError

    def alive(self) -> bool:
        return self.alive_now

    async def exec(
        self, plan: ExecPlan, *, stdin: int | None, stdout: int | None, stderr: int | None, extra: Sequence[int] = ()
    ) -> Running:
        if self.before_exec is not None:
            await self.before_exec()
        if self.fail_exec is not None:
            raise self.fail_exec
        if self.died.done():
            raise SandboxLost("the sandbox has ended")
        problem = ""
        try:
            account = pwd.getpwuid(int(plan.user)) if plan.user.isdigit() else pwd.getpwnam(plan.user)
        except KeyError:
            account, problem = pwd.getpwuid(0), f"no such user: {plan.user}"
        if not os.path.isdir(plan.cwd):
            problem = f"cannot change to the working directory {plan.cwd!r}"
        env = {"PATH": DEFAULT_PATH, "HOME": account.pw_dir, "USER": account.pw_name, "LOGNAME": account.pw_name, **plan.env}
        program = _find(plan.argv[0], env["PATH"])
        if program is None:
            problem = problem or f"cannot execute {plan.argv[0]!r}: No such file or directory"
        if problem or program is None:
            failed = LocalRunning(0, -1, None, None)
            failed.exited.set_result(Exit(not_started=problem))
            return failed
        master = slave = None
        if plan.pty is not None:
            master, slave = tty.open_pair(b"/dev/ptmx", rows=plan.pty.rows, columns=plan.pty.cols)
        group = self.group.child(plan.process_id)
        os.mkdir(group.tree_path)
        join = group.join_paths()
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        directory = group.open_v2_dir()
        given = [slave, slave, slave] if slave is not None else [null if fd is None else fd for fd in (stdin, stdout, stderr)]
        given += extra
        try:
            pid, pidfd = syscalls.clone3(0, cgroup_fd=directory, want_pidfd=True)
            if pid == 0:
                limit = self.record.limits.open_files
                _become(plan, program, env, account, given, join, open_files=limit, controlling=slave is not None)
        finally:
            os.close(null)
            if slave is not None:
                os.close(slave)
            if directory is not None:
                os.close(directory)
        running = LocalRunning(pid, pidfd, group, master)
        self.running.append(running)
        return running

    def counters(self) -> Counters:
        self.counters_read += 1
        if self.counters_now is not None:
            return self.counters_now
        events = self.group.events()
        return Counters(oom_kills=events.oom_kills, pids_denied=events.pids_max_hits)

    def usage(self) -> Usage:
        return Usage()

    def processes(self) -> int:
        return len(self.group.procs())

    def begin_to_die(self) -> None:
        """As when PID 1 ends: everything is killed, and `died` is not done yet."""
        self.alive_now = False
        self.group.kill()

    def die(self, reason: str) -> None:
        self.begin_to_die()
        self.died.set_result(reason)

    async def freeze(self) -> None:
        await asyncio.to_thread(self.group.freeze)

    async def thaw(self) -> None:
        await asyncio.to_thread(self.group.thaw)

    async def snapshot_disk(self) -> DiskSnapshot:
        raise Unsupported("it has no disk of its own")

    screen = None

    async def pause(self) -> Record:
        raise Unsupported("it cannot be paused")

    async def snapshot(self, snapshot_id: str, *, memory: bool, durable: bool = True) -> SnapshotRecord:
        raise Unsupported("it has no snapshots")

    async def destroy(self) -> None:
        if self.group.exists():
            self.begin_to_die()
        for running in self.running:
            await asyncio.shield(running.exited)
        await asyncio.to_thread(self.group.remove)
        self._parent.remove_if_empty()
        if not self.died.done():
            self.died.set_result("destroyed")


def _find(program: str, path: str) -> str | None:
    candidates = [program] if "/" in program else [f"{part or '.'}/{program}" for part in path.split(":")]
    return next((name for name in candidates if os.path.isfile(name) and os.access(name, os.X_OK)), None)


def _become(
    plan: ExecPlan,
    program: str,
    env: dict[str, str],
    account: pwd.struct_passwd,
    given: Sequence[int],
    join: list[str],
    *,
    open_files: int,
    controlling: bool,
) -> None:
    """In the child: become the command."""
    try:
        cgroups.join(join)
        os.setsid()
        high = []
        for number, fd in enumerate(given):
            os.dup2(fd, FLOOR + number)
            high.append(FLOOR + number)
        for number, fd in enumerate(high):
            os.dup2(fd, number, inheritable=True)
        os.closerange(len(given), FLOOR + len(given) + 1)
        if controlling:
            tty.make_controlling(0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
        os.setgid(account.pw_gid)
        os.setuid(account.pw_uid)
        os.chdir(plan.cwd)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.execve(program, [os.fsencode(word) for word in plan.argv], {os.fsencode(k): os.fsencode(v) for k, v in env.items()})
    finally:
        os._exit(127)


class LocalRunning:
    """A child of this process in a cgroup of its own."""

    def __init__(self, pid: int, pidfd: int, group: cgroups.Group | None, terminal: int | None) -> None:
        self.pid, self.terminal = pid, terminal
        self._pidfd, self._group = pidfd, group
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[Exit] = self._loop.create_future()
        self.released = False
        self._marked: frozenset[int] = frozenset()
        if pid:
            self._loop.add_reader(pidfd, self._reap)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        _, status, usage = os.wait4(self.pid, 0)
        ended = os.waitstatus_to_exitcode(status)
        if self.exited.done():
            return  # the test has decided how it ended
        self.exited.set_result(
            Exit(
                code=ended if ended >= 0 else None,
                signal=-ended if ended < 0 else None,
                cpu_ms=(usage.ru_utime + usage.ru_stime) * 1000,
                max_rss_bytes=usage.ru_maxrss * 1024,
            )
        )

    def signal(self, number: int, *, tree: bool = False, since_mark: bool = False) -> None:
        if tree:
            signal_listed(self._since_mark if since_mark else self.members, number)
        elif self.pid and not self.exited.done():
            syscalls.pidfd_send_signal(self._pidfd, number)

    def mark(self) -> None:
        self._marked = frozenset(self.members())

    def _since_mark(self) -> list[int]:
        return [pid for pid in self.members() if pid not in self._marked]

    def kill_since_mark(self) -> None:
        if not kill_listed(self._since_mark):
            self.kill_tree()

    def resize(self, rows: int, columns: int) -> None:
        if self.terminal is not None:
            tty.set_size(self.terminal, rows, columns)

    def kill_tree(self) -> None:
        try:
            if self._group is not None:
                self._group.kill()
        except OSError:
            pass  # gone

    def alive_children(self) -> bool:
        try:
            return self._group is not None and self._group.populated()
        except OSError:
            return False

    def members(self) -> tuple[int, ...]:
        try:
            return () if self._group is None else tuple(self._group.procs())
        except OSError:
            return ()

    async def release(self) -> None:
        assert not self.released
        self.released = True
        try:
            if self._group is not None:
                os.rmdir(self._group.tree_path)
        except OSError:
            pass  # children live on; `LocalHandle.destroy` removes it
