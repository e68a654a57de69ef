# SPDX-License-Identifier: Apache-2.0
"""A fake backend: sandboxes are directories, commands are plain processes of this machine, nothing is isolated.

For tests that run their own commands only. What it promises is what the backend's contract suite checks: the whole process tree of a
command can be killed (found by a variable in the environment), several edges after one another find what the machine still holds.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pwd
import shutil
import signal as signals
import subprocess
import tempfile
import termios
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from opendsec.api.errors import Internal, OpenDSecError, SandboxLost, Unsupported
from opendsec.api.ids import SESSION
from opendsec.api.sandboxes import Capability, Usage
from opendsec.kernel import procfs
from opendsec.kernel.signals import kill_listed, signal_listed
from opendsec.runtime.backend import Counters, DiskSnapshot, ExecPlan, Exit, FileAccess, Handle, Placement, Record, Running, SnapshotRecord
from opendsec.runtime.files import SandboxFiles

MARK = "OPENDSEC_FAKE"


class FakeMachine:
    """What outlives an edge: the sandboxes. `root`: their directories are made beneath it."""

    def __init__(self, root: Path | None = None) -> None:
        self._temporary = None if root is not None else tempfile.TemporaryDirectory(prefix="fake-machine-")
        self.root = Path(self._temporary.name) if self._temporary is not None else root
        self.boot_id = "fake-boot-1"
        self.sandboxes: dict[str, FakeSandbox] = {}
        self.numbers = itertools.count(1000)

    def close(self) -> None:
        """Kill what runs and remove all."""
        for sandbox in list(self.sandboxes.values()):
            sandbox.kill_all()
        self.sandboxes.clear()
        if self._temporary is not None:
            self._temporary.cleanup()


class FakeSandbox:
    """One directory and the processes that were started there."""

    def __init__(self, machine: FakeMachine, record: Record) -> None:
        self.machine, self.record = machine, record
        self.alive = True
        self.oom_kills = 0
        self.on_death: list[Callable[[str], None]] = []
        self.running: set[FakeRunning] = set()
        self._marks: dict[tuple[int, int], bytes] = {}  # of those seen, by number and start

    async def reaped(self) -> None:
        """After `kill_all`: until no dead child is left."""
        if exits := [running.exited for running in self.running]:
            await asyncio.wait(exits)

    @property
    def root(self) -> Path:
        """Its directory, made when first needed."""
        assert self.machine.root is not None
        path = self.machine.root / self.record.sandbox_id
        if not path.exists():
            for name in ("tmp", "root", "workspace", "etc"):
                (path / name).mkdir(parents=True)
            (path / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n")
            (path / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
        return path

    def processes(self, process_id: str = "") -> tuple[int, ...]:
        """Living processes of the sandbox or of one command, wherever they went."""
        mark = f"{MARK}={self.record.sandbox_id}/".encode()
        # The kernel shows a program's environment some time after Popen has returned, so ours are known by their ids. One that is
        # executing another program has none for a moment, so whoever was seen once is known from then on.
        ours = {running.pid for running in self.running if process_id in ("", running.process_id)}
        found = []
        for pid in procfs.pids():
            try:
                facts = procfs.stat(pid)
                seen = self._marks.get((pid, facts.start_time)) or next((one for one in procfs.environ(pid) if one.startswith(mark)), b"")
                if seen:
                    self._marks[pid, facts.start_time] = seen
                if (pid in ours or (seen and seen.startswith(mark + process_id.encode()))) and facts.state not in "ZX":
                    found.append(pid)
            except (OSError, ValueError):
                continue
        return tuple(found)

    def kill_all(self, process_id: str = "") -> None:
        while pids := self.processes(process_id):
            for pid in pids:
                try:
                    os.kill(pid, signals.SIGKILL)
                except ProcessLookupError:
                    continue

    def die(self, reason: str = "its first process ended") -> None:
        """As if PID 1 had been killed."""
        self.alive = False
        self.kill_all()
        for tell in self.on_death:
            tell(reason)
        self.on_death.clear()


class FakeRunning:
    """A plain process."""

    def __init__(self, sandbox: FakeSandbox, process_id: str, child: subprocess.Popen[bytes], terminal: int | None) -> None:
        self.pid, self.terminal = child.pid, terminal
        self._sandbox, self.process_id = sandbox, process_id
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[Exit] = self._loop.create_future()
        self._pidfd = os.pidfd_open(child.pid)
        self._marked: frozenset[int] = frozenset()
        self._loop.add_reader(self._pidfd, self._reap)
        sandbox.running.add(self)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._sandbox.running.discard(self)
        _, status, used = os.wait4(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self.exited.set_result(
            Exit(
                code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                cpu_ms=(used.ru_utime + used.ru_stime) * 1000,
                max_rss_bytes=used.ru_maxrss * 1024,
            )
        )

    def signal(self, number: int, *, tree: bool = False, since_mark: bool = False) -> None:
        if tree:
            signal_listed(self._since_mark if since_mark else self.members, number)
        elif self._pidfd >= 0:
            signals.pidfd_send_signal(self._pidfd, number)

    def mark(self) -> None:
        self._marked = frozenset(self.members())

    def _since_mark(self) -> list[int]:
        return [pid for pid in self.members() if pid not in self._marked]

    def kill_since_mark(self) -> None:
        if not kill_listed(self._since_mark):
            self.kill_tree()

    def resize(self, rows: int, columns: int) -> None:
        if self.terminal is not None:
            termios.tcsetwinsize(self.terminal, (rows, columns))

    def kill_tree(self) -> None:
        self._sandbox.kill_all(self.process_id)

    def alive_children(self) -> bool:
        return bool(self.members())

    def members(self) -> tuple[int, ...]:
        return self._sandbox.processes(self.process_id)

    async def release(self) -> None:
        """Nothing was held."""


class FakeNotStarted:
    """A command that never ran."""

    pid, terminal = 0, None

    def __init__(self, message: str) -> None:
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.exited.set_result(Exit(not_started=message))

    def signal(self, number: int, *, tree: bool = False, since_mark: bool = False) -> None: ...
    def mark(self) -> None: ...
    def kill_since_mark(self) -> None: ...
    def resize(self, rows: int, columns: int) -> None: ...
    def kill_tree(self) -> None: ...
    def alive_children(self) -> bool:
        return False

    async def release(self) -> None: ...


class FakeHandle:
    """A sandbox of a FakeMachine as one edge holds it."""

    def __init__(self, sandbox: FakeSandbox) -> None:
        self.sandbox = sandbox
        self.record = sandbox.record
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._files = SandboxFiles(self._open_root, 0)
        self.fail_destroy = 0  # how many times it fails
        sandbox.on_death.append(self._on_death)

    def _on_death(self, reason: str) -> None:
        if not self.died.done() and not self.died.get_loop().is_closed():
            self.died.set_result(reason)

    @property
    def sandbox_id(self) -> str:
        return self.record.sandbox_id

    @property
    def files(self) -> FileAccess:
        return self._files

    def _open_root(self) -> int:
        self._check()
        return os.open(self.sandbox.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def alive(self) -> bool:
        return self.sandbox.alive

    def _check(self) -> None:
        if not self.sandbox.alive:
            raise SandboxLost("the sandbox has ended")

    async def exec(
        self, plan: ExecPlan, *, stdin: int | None, stdout: int | None, stderr: int | None, extra: Sequence[int] = ()
    ) -> Running:
        self._check()
        cwd = self.sandbox.root / plan.cwd.lstrip("/")
        if not cwd.is_dir():
            return FakeNotStarted(f"no such directory: {plan.cwd}")
        user, _, _ = plan.user.partition(":")
        try:
            uid = int(user) if user.isdigit() else pwd.getpwnam(user or "root").pw_uid
        except KeyError:
            return FakeNotStarted(f"no such user: {user}")
        env = {**plan.env, MARK: f"{self.sandbox_id}/{plan.process_id}"}
        if shutil.which(plan.argv[0], path=env.get("PATH", os.defpath)) is None:
            return FakeNotStarted(f"no such program: {plan.argv[0]}")
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        ours = theirs = None
        try:
            if plan.pty is not None:
                ours, theirs = os.openpty()
                os.set_inheritable(ours, False)
                termios.tcsetwinsize(ours, (plan.pty.rows, plan.pty.cols))
                stdin = stdout = stderr = theirs
            given = [null if fd is None else fd for fd in (stdin, stdout, stderr)]
            name = None if theirs is None else os.ttyname(theirs)
            argv = plan.argv
            if extra:  # Popen keeps descriptors by their own numbers; bash moves them to 3, 4, …
                moves = " ".join(f"{3 + index}<&{fd} {fd}<&-" for index, fd in enumerate(extra))
                argv = ("bash", "-c", f'exec "$@" {moves}', "bash", *plan.argv)
            child = subprocess.Popen(
                argv,
                stdin=given[0],
                stdout=given[1],
                stderr=given[2],
                env=env,
                cwd=cwd,
                user=uid or None,
                start_new_session=True,
                pass_fds=tuple(extra),
                preexec_fn=None if name is None else lambda: os.close(os.open(name, os.O_RDWR)),
            )
        except (OSError, subprocess.SubprocessError) as error:
            if ours is not None:
                os.close(ours)
            return FakeNotStarted(f"cannot run {plan.argv[0]}: {error}")
        finally:
            os.close(null)
            if theirs is not None:
                os.close(theirs)
        running = FakeRunning(self.sandbox, plan.process_id, child, ours)
        child.returncode = 0  # it is reaped by FakeRunning, not by Popen
        return running

    def counters(self) -> Counters:
        return Counters(oom_kills=self.sandbox.oom_kills)

    def usage(self) -> Usage:
        self._check()
        return Usage(memory_bytes=1 << 20, pids=self.processes())

    def processes(self) -> int:
        return len(self.sandbox.processes())

    async def freeze(self) -> None:
        """Not what is born meanwhile."""
        self._check()
        self._signal(signals.SIGSTOP)

    async def thaw(self) -> None:
        self._signal(signals.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in self.sandbox.processes():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    async def snapshot_disk(self) -> DiskSnapshot:
        """All of its directory: there are no layers below."""
        await self.freeze()
        try:
            return await asyncio.to_thread(FakeDiskSnapshot, self.sandbox.root)
        finally:
            await self.thaw()

    screen = None

    async def pause(self) -> Record:
        raise Unsupported("this fake cannot be paused")

    async def snapshot(self, snapshot_id: str, *, memory: bool, durable: bool = True) -> SnapshotRecord:
        raise Unsupported("this fake has no snapshots")

    async def destroy(self) -> None:
        if self.fail_destroy:
            self.fail_destroy -= 1
            raise Internal("destroying failed, as the test wanted")
        if self.sandbox.alive:
            self.sandbox.die("destroyed")
        await self.sandbox.reaped()
        _forget(self.sandbox.machine, self.sandbox_id)


class FakeDiskSnapshot:
    """A copy."""

    uid_base, frozen_ms = 0, 1.0

    def __init__(self, root: Path) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="fake-snapshot-"))
        self.upper, self.aside = self._place / "upper", self._place / "aside"
        shutil.copytree(root, self.upper, symlinks=True)
        self.aside.mkdir()

    async def release(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._place, ignore_errors=True)


def _forget(machine: FakeMachine, sandbox_id: str) -> None:
    machine.sandboxes.pop(sandbox_id, None)
    assert machine.root is not None
    shutil.rmtree(machine.root / sandbox_id, ignore_errors=True)


class FakeBackend:
    """Sandboxes on a FakeMachine. `before_create` may raise, or wait, for a test's purposes."""

    name = "container"

    def __init__(self, machine: FakeMachine) -> None:
        self.machine = machine
        self.handles: dict[str, FakeHandle] = {}
        self.created: list[Placement] = []
        self.before_create: Callable[[Placement], OpenDSecError | asyncio.Future[None] | None] = lambda placement: None
        self.started = self.closed = False
        self.tidied = 0  # calls of `unmount_unused`

    def capabilities(self) -> tuple[Capability, ...]:
        return (
            Capability(name="run", available=True),
            Capability(name="fork", available=False, reason="this is a fake"),
        )

    async def start(self) -> None:
        self.started = True

    async def create(self, placement: Placement) -> Handle:
        hindrance = self.before_create(placement)
        if isinstance(hindrance, OpenDSecError):
            raise hindrance
        number = next(self.machine.numbers)
        record = Record(
            sandbox_id=placement.sandbox_id,
            backend=self.name,
            pid=number,
            start_time=number,
            boot_id=self.machine.boot_id,
            uid_base=placement.uid_base,
            scratch="",
            limits=placement.limits,
            layers=tuple(layer.digest for layer in placement.layers),
        )
        sandbox = self.machine.sandboxes[placement.sandbox_id] = FakeSandbox(self.machine, record)
        try:
            if hindrance is not None:
                await hindrance
        except BaseException:
            _forget(self.machine, placement.sandbox_id)
            raise
        self.created.append(placement)
        handle = self.handles[placement.sandbox_id] = FakeHandle(sandbox)
        return handle

    async def create_many(self, placements: Sequence[Placement]) -> Sequence[Handle | BaseException]:
        return await asyncio.gather(*(self.create(placement) for placement in placements), return_exceptions=True)

    async def adopt(self, record: Record, *, cut: Collection[str] = ()) -> Handle:
        sandbox = self.machine.sandboxes.get(record.sandbox_id)
        if sandbox is None or not sandbox.alive or record.boot_id != self.machine.boot_id:
            raise SandboxLost("the sandbox has ended")
        for process_id in cut:  # commands of the edge before: nobody can hear of their end any more
            sandbox.kill_all(process_id)
        sandbox.kill_all(f"{SESSION}_")
        await sandbox.reaped()
        await FakeHandle(sandbox).thaw()
        handle = self.handles[record.sandbox_id] = FakeHandle(sandbox)
        return handle

    async def resume(self, record: Record, *, cut: Collection[str] = ()) -> Handle:
        raise Unsupported("this fake cannot be paused")

    async def remove_snapshot(self, record: SnapshotRecord) -> None:
        raise Unsupported("this fake has no snapshots")

    def snapshots(self) -> Sequence[str]:
        return ()

    async def clear(self, sandbox_id: str, record: Record | None) -> None:
        sandbox = self.machine.sandboxes.get(sandbox_id)
        if sandbox is not None and sandbox.alive:
            sandbox.die("cleared")
        if sandbox is not None:
            await sandbox.reaped()
        _forget(self.machine, sandbox_id)

    def leftovers(self) -> Sequence[str]:
        return list(self.machine.sandboxes)

    async def unmount_unused(self) -> int:
        self.tidied += 1
        return 0

    async def close(self) -> None:
        self.closed = True
