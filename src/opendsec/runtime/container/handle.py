# SPDX-License-Identifier: Apache-2.0
"""A living container, and a command running in it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from opendsec.api.errors import SandboxLost, Unavailable, Unsupported
from opendsec.api.ids import SESSION
from opendsec.api.sandboxes import Usage
from opendsec.images.waiting import in_thread, to_the_end
from opendsec.kernel import cgroups, procfs, syscalls, tty
from opendsec.kernel.signals import kill_listed, signal_listed
from opendsec.runtime.backend import Counters, DiskSnapshot, ExecPlan, Exit, FileAccess, Record, Running, SnapshotRecord
from opendsec.runtime.container import still
from opendsec.runtime.container.plan import exec_plan, group_name
from opendsec.runtime.files import SandboxFiles
from opendsec.runtime.spawn import Spawner, SpawnError

if TYPE_CHECKING:
    from opendsec.runtime.container.backend import ContainerBackend

# A failure in one of these steps is the command's or the image's doing; in any other it is ours.
CALLERS_STEPS = frozenset(("find the user", "change to the working directory", "exec", "descriptors", "start"))


class ContainerHandle:
    """Holds a pidfd of PID 1; everything else is found by the sandbox's id."""

    def __init__(self, backend: ContainerBackend, record: Record, pidfd: int) -> None:
        self.record = record
        self._backend = backend
        self._pidfd = pidfd
        self._loop = asyncio.get_running_loop()
        self._destroying: asyncio.Future[None] | None = None
        self.died: asyncio.Future[str] = self._loop.create_future()
        self.group = backend.hierarchies.group(group_name(backend.edge_id, record.sandbox_id))
        self._files = SandboxFiles(self.open_root, record.uid_base)
        self._still = asyncio.Lock()  # one at a time freezes, copies and thaws
        self._abandoned: set[asyncio.Task[None]] = set()
        self._emptying: dict[str, cgroups.Group] = {}  # of ended commands whose children live on
        self._loop.add_reader(pidfd, self._on_death)
        backend.handles.add(self)
        backend.scratch.follow(record.sandbox_id, record.limits, self.open_root)

    def let_go(self) -> None:
        """Give back the descriptor that holds it; the sandbox stays. For an edge that ends before its process does."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    @property
    def sandbox_id(self) -> str:
        return self.record.sandbox_id

    @property
    def files(self) -> FileAccess:
        return self._files

    def _on_death(self) -> None:
        self._loop.remove_reader(self._pidfd)
        if not self.died.done():
            self.died.set_result("its first process ended")

    def _check_alive(self) -> None:
        if self.died.done() or self._destroying is not None:
            raise SandboxLost("the sandbox has ended")

    def alive(self) -> bool:
        return not self.died.done() and not procfs.is_exiting(self.record.pid, self.record.start_time)

    def open_root(self) -> int:
        """An O_PATH descriptor of the root directory; the caller closes it. Raises SandboxLost, Unavailable."""
        self._check_alive()
        try:
            root = os.open(procfs.path_of(self.record.pid, "root"), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise SandboxLost("the sandbox has ended") from error
        except OSError as error:  # no descriptor or no memory left here, which says nothing of the sandbox
            raise Unavailable(f"cannot reach the sandbox's files: {error.strerror}") from error
        try:
            # Still alive after the path was opened: so the number was its own all the while, not another process's.
            syscalls.pidfd_send_signal(self._pidfd, 0)
        except OSError as error:
            os.close(root)
            raise SandboxLost("the sandbox has ended") from error
        return root

    # --- commands --------------------------------------------------------------------------------------------------

    async def exec(
        self, plan: ExecPlan, *, stdin: int | None, stdout: int | None, stderr: int | None, extra: Sequence[int] = ()
    ) -> Running:
        self._check_alive()
        wanted: list[int | None] = [stdin, stdout, stderr, *extra]
        given = [fd for fd in wanted if fd is not None]
        marks = [fd is not None for fd in wanted]
        wire = exec_plan(plan, edge_id=self._backend.edge_id, sandbox_id=self.sandbox_id, limits=self.record.limits, given=marks)
        group = self.group.child(plan.process_id)
        spawner = await self._backend.spawner()
        try:
            answer = await spawner.call("exec", wire, [self._pidfd, *given])
        except SpawnError as error:
            self.forget_group(group)  # the spawner made it perhaps, and the child that failed may not have left it yet
            if self.died.done() or self._destroying is not None or not self._lives():
                # Asked first: "killed before it could start" is then no fault of the command.
                raise SandboxLost("the sandbox has ended") from error
            if error.step in CALLERS_STEPS:
                return NotStarted(error.text)
            if error.step == "plan" and error.errno:
                return NotStarted(f"the kernel refused a new process: {error.text}")
            raise Unavailable(f"cannot start the command: {error}") from error
        except asyncio.CancelledError:
            # It may start all the same, or hang in its start (root inside can stop it there): nobody would ever control it.
            self._abandoned.add(task := asyncio.ensure_future(self._abandon(spawner, group)))
            task.add_done_callback(self._abandoned.discard)
            raise
        assert answer.exited is not None
        pidfd, *terminal = answer.fds
        return ContainerRunning(self, group, answer.pid, pidfd, terminal[0] if terminal else None, answer.exited)

    async def _abandon(self, spawner: Spawner, group: cgroups.Group) -> None:
        await spawner.settle()
        try:
            group.kill()
        except OSError:
            pass  # it never came to be, or went with the sandbox
        self.forget_group(group)

    def _lives(self) -> bool:
        try:
            syscalls.pidfd_send_signal(self._pidfd, 0)
        except OSError:
            return False
        return True

    def forget_group(self, group: cgroups.Group) -> None:
        """Remove the group of an ended command, now or, if there is something in it still, when another one ends."""
        self._emptying[group.name] = group
        self._emptying = {name: one for name, one in self._emptying.items() if not one.remove_if_empty()}

    async def end_commands(self, cut: Collection[str]) -> None:
        """End the commands in `cut` and all sessions of an earlier edge process; groups that others left are removed once empty."""
        for group in self.group.children():
            name = group.name.rpartition("/")[2]
            if name in cut or name.startswith(f"{SESSION}_"):
                await asyncio.to_thread(group.remove)
            else:
                self.forget_group(group)

    # --- accounting ------------------------------------------------------------------------------------------------

    def counters(self) -> Counters:
        try:
            events = self.group.events()
        except OSError:
            return Counters()
        disk_full, inodes_full = self._backend.scratch.full(self.sandbox_id)
        return Counters(oom_kills=events.oom_kills, pids_denied=events.pids_max_hits, disk_full=disk_full, inodes_full=inodes_full)

    def usage(self) -> Usage:
        self._check_alive()
        try:
            used, events = self.group.usage(), self.group.events()
        except OSError as error:
            raise SandboxLost("the sandbox has ended") from error
        disk_bytes, inodes = self._backend.scratch.usage(self.sandbox_id)
        return Usage(
            memory_bytes=used.memory_bytes or 0,
            memory_peak_bytes=used.memory_peak_bytes or 0,
            cpu_ms=(used.cpu_us or 0) / 1000,
            pids=max((used.pids or 1) - 1, 0),
            disk_bytes=disk_bytes,
            inodes=inodes,
            oom_kills=events.oom_kills,
            pids_denied=events.pids_max_hits,
        )

    def processes(self) -> int:
        try:
            return max(len(self.group.procs()) - 1, 0)
        except OSError:
            return 0

    # --- standing still -----------------------------------------------------------------------------------------------

    async def freeze(self) -> None:
        self._check_alive()
        async with self._still:
            await in_thread(still.freeze, self.group, self.record.limits)

    async def thaw(self) -> None:
        async with self._still:
            await in_thread(still.thaw, self.group, self.record.limits)

    async def snapshot_disk(self) -> DiskSnapshot:
        self._check_alive()
        async with self._still:
            taking = asyncio.ensure_future(asyncio.to_thread(still.snapshot_disk, self.group, self._backend.scratch, self.record))
            try:
                return await to_the_end(taking)
            except asyncio.CancelledError:
                if taking.exception() is None:
                    await taking.result().release()
                raise

    screen = None

    async def pause(self) -> Record:
        raise Unsupported("containers cannot be paused")

    async def snapshot(self, snapshot_id: str, *, memory: bool, durable: bool = True) -> SnapshotRecord:
        raise Unsupported("containers have no snapshots")

    # --- end -------------------------------------------------------------------------------------------------------

    async def destroy(self) -> None:
        if self._destroying is None:
            self._destroying = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._destroying)

    async def _destroy(self) -> None:
        try:
            try:
                self.group.kill()
            except OSError:
                pass  # the group is gone, or going
            try:
                syscalls.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except OSError:
                pass  # already dead
            await self.died
        finally:
            try:
                await self._backend.clear(self.sandbox_id, self.record)
            finally:
                self.let_go()
                self._backend.release(self.record)


class NotStarted:
    """A command that never ran."""

    pid = 0
    terminal = None

    def __init__(self, message: str) -> None:
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.exited.set_result(Exit(not_started=message))

    def signal(self, number: int, *, tree: bool = False, since_mark: bool = False) -> None:
        """There is nothing to signal."""

    def mark(self) -> None:
        """There is nothing to remember."""

    def kill_since_mark(self) -> None:
        """There is nothing to kill."""

    def resize(self, rows: int, columns: int) -> None:
        """There is no terminal."""

    def kill_tree(self) -> None:
        """There is nothing to kill."""

    def alive_children(self) -> bool:
        return False

    async def release(self) -> None:
        """There is nothing to release."""


class ContainerRunning:
    """A started command: its own cgroup holds its whole tree, however its processes detach themselves."""

    def __init__(
        self,
        handle: ContainerHandle,
        group: cgroups.Group,
        pid: int,
        pidfd: int,
        terminal: int | None,
        exited: asyncio.Future[Exit],
    ) -> None:
        self.pid = pid
        self.terminal = terminal
        self.exited = exited
        self._handle = handle
        self._group = group
        self._pidfd: int | None = pidfd
        self._marked: frozenset[int] = frozenset()  # pids
        exited.add_done_callback(lambda _: self._close())

    def _close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def signal(self, number: int, *, tree: bool = False, since_mark: bool = False) -> None:
        if tree:
            signal_listed(self._since_mark if since_mark else self.members, number)
        elif self._pidfd is not None:
            try:
                syscalls.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                pass  # it has ended, its exit is on the way

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
            self._group.kill()
        except OSError:
            pass  # the group is gone, and with it all its processes

    def alive_children(self) -> bool:
        try:
            return self._group.populated()
        except OSError:
            return False

    def members(self) -> tuple[int, ...]:
        """Host pids of all living processes of the tree."""
        try:
            return tuple(self._group.procs())
        except OSError:
            return ()

    async def release(self) -> None:
        self._handle.forget_group(self._group)
