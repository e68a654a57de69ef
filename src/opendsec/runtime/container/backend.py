# SPDX-License-Identifier: Apache-2.0
"""The container backend: what the edge decided becomes a living sandbox, through the spawner.

A sandbox is its PID 1 (held by a pidfd), a cgroup in each hierarchy, a scratch, and a share in the mounts of its layers. They are
acquired in the order layers, scratch, cgroup, process, and released in the reverse one.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from opendsec.api.errors import Internal, OpenDSecError, SandboxLost, Unavailable, Unsupported
from opendsec.api.sandboxes import Capability
from opendsec.kernel import cgroups, procfs, syscalls
from opendsec.runtime.backend import Handle, LayerRef, Placement, Record, SnapshotRecord
from opendsec.runtime.container import profile
from opendsec.runtime.container.handle import ContainerHandle
from opendsec.runtime.container.plan import PROFILE_NAME, create_plan, edge_group, group_name
from opendsec.runtime.scratch import ScratchDriver
from opendsec.runtime.spawn import Answer, Message, Spawner, SpawnError, close_all

INIT = Path(__file__).resolve().parents[2] / "_native" / "dsec-init"
NAME = "container"
LOCK_TIMEOUT_S = 30.0

# Features of the kernel (`kernel.features`) without which no container can be made as this backend makes them.
NEEDED = (
    "user_namespaces",
    "sandbox_namespaces",
    "pidfd",
    "openat2",
    "seccomp_filter",
    "erofs_device",
    "detached_clone",
    "idmapped_mounts",
    "overlay_fd",
    "tmpfs",
    "cgroup_limits",
)


def capabilities(missing: Sequence[str]) -> tuple[Capability, ...]:
    """What this backend can do on a machine that lacks `missing` of `NEEDED`."""
    can = ("create", "run", "stream", "sessions", "pty", "files", "limits", "pack")
    cannot = ("pause", "fork", "snapshot", "network")
    reason = "; ".join(missing)
    return (
        *(Capability(name=name, available=not missing, reason=reason) for name in can),
        *(Capability(name=name, available=False, reason="this backend cannot do it yet") for name in cannot),
    )


class ContainerBackend:
    """All containers of one edge. `staging`: an existing directory of the host; nothing is ever mounted there outside the sandboxes.
    `lock`: a file beside the journal, see `start`. `missing`: what this machine lacks of `NEEDED`, each with the reason; with any of it
    the backend says so and makes nothing."""

    name = NAME

    def __init__(
        self, *, edge_id: str, scratch: ScratchDriver, staging: Path, lock: Path, init: Path = INIT, missing: Sequence[str] = ()
    ) -> None:
        self.edge_id = edge_id
        self.scratch = scratch
        self.hierarchies = cgroups.discover()
        self._staging = staging
        self._init = init
        self._lock_path, self._lock = lock, -1
        self._missing = tuple(missing)
        self._spawner: Spawner | None = None
        self._starting = asyncio.Lock()
        self._mounting: dict[str, asyncio.Future[None]] = {}  # digest → the mount, once asked for, of the present spawner
        self._users: Counter[str] = Counter()  # digest → living sandboxes
        self.handles: weakref.WeakSet[ContainerHandle] = weakref.WeakSet()
        self._boot_id = procfs.boot_id()
        self._program = profile.program()

    @property
    def staging(self) -> Path:
        return self._staging

    @property
    def missing(self) -> tuple[str, ...]:
        """What this machine lacks; with any of it nothing can be created."""
        return self._missing

    # --- shared parts ----------------------------------------------------------------------------------------------

    def capabilities(self) -> tuple[Capability, ...]:
        return capabilities(self._missing)

    async def start(self) -> None:
        """Wait for the spawner of an edge that crashed to be gone, then start ours.

        The lock is shared with the spawner and lasts as long as either of us. Without it an old spawner could finish a sandbox after the
        new edge has taken stock. It ends by itself when its edge does, within the one request it is at.
        """
        if self._missing:
            return  # nothing will ever be created
        self._lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            await asyncio.wait_for(asyncio.to_thread(fcntl.flock, self._lock, fcntl.LOCK_EX), LOCK_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(f"the spawner of an earlier edge still holds {self._lock_path}") from None
        await self.spawner()

    async def spawner(self) -> Spawner:
        """The running spawner; a new one if the last has died."""
        if self._spawner is not None and self._spawner.alive:
            return self._spawner
        async with self._starting:
            if self._spawner is None or not self._spawner.alive:
                if self._spawner is not None:
                    await self._spawner.close()
                self._mounting.clear()
                spawner = await Spawner.start(self._init, hold=[self._lock])
                await spawner.call("profile", {"name": PROFILE_NAME, "program": self._program})
                self._spawner = spawner
        return self._spawner

    async def close(self) -> None:
        for handle in list(self.handles):
            handle.let_go()
        if self._spawner is not None:
            await self._spawner.close()
            self._spawner = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        self.hierarchies.group(edge_group(self.edge_id)).remove_if_empty()

    # --- layers ----------------------------------------------------------------------------------------------------

    async def hold_layers(self, layers: Sequence[LayerRef]) -> Spawner:
        """For another backend of this spawner: mount what is not mounted yet, and keep it until `release_layers`, which is to be called
        whatever becomes of this."""
        self._users.update(layer.digest for layer in layers)
        spawner = await self.spawner()
        await self._use_layers(spawner, layers)
        return spawner

    def release_layers(self, digests: Sequence[str]) -> None:
        self._drop_layers(digests)

    async def _use_layers(self, spawner: Spawner, layers: Sequence[LayerRef]) -> None:
        """Mount what is not mounted yet; one mount of a layer serves all sandboxes."""
        for layer in layers:
            mounting = self._mounting.get(layer.digest)
            if mounting is None:
                mounting = self._mounting[layer.digest] = asyncio.ensure_future(self._mount(spawner, layer))
            await asyncio.shield(mounting)

    async def _mount(self, spawner: Spawner, layer: LayerRef) -> None:
        fields: Message = {"digest": layer.digest.encode(), "meta": os.fsencode(layer.meta), "data": os.fsencode(layer.data)}
        try:
            await spawner.call("layer", fields)
        except BaseException as error:
            self._mounting.pop(layer.digest, None)
            if isinstance(error, SpawnError):
                raise Internal(f"cannot mount layer {layer.digest[:19]}: {error}") from error
            raise

    def _drop_layers(self, digests: Sequence[str]) -> None:
        for digest in digests:
            self._users[digest] -= 1
            if self._users[digest] <= 0:
                del self._users[digest]

    def layers_in_use(self) -> frozenset[str]:
        """Digests that living sandboxes use."""
        return frozenset(self._users)

    async def unmount_unused(self) -> int:
        count = 0
        for digest, mounting in list(self._mounting.items()):
            # Looked at one by one: while the last was let go, somebody may have begun to use this one.
            if mounting.done() and digest not in self._users and self._mounting.pop(digest, None) is not None:
                count += 1
                if self._spawner is not None and self._spawner.alive:
                    await self._spawner.call("unlayer", {"digest": digest.encode()})
        return count

    # --- create ----------------------------------------------------------------------------------------------------

    async def create(self, placement: Placement) -> Handle:
        if self._missing:
            raise Unsupported(f"this machine cannot run containers: {'; '.join(self._missing)}", field="spec.backend")
        if placement.snapshot is not None:
            raise Unsupported("containers cannot be made of a snapshot", field="spec.snapshot")
        digests = tuple(layer.digest for layer in placement.layers)
        self._users.update(digests)
        try:
            spawner = await self.spawner()
            await self._use_layers(spawner, placement.layers)
            answer = await self._spawn(spawner, placement)
            pidfd, *upper = answer.fds
            try:
                if upper:
                    self.scratch.keep(placement.sandbox_id, upper.pop())
                record = Record(
                    sandbox_id=placement.sandbox_id,
                    backend=NAME,
                    pid=answer.pid,
                    start_time=procfs.pid_start_time(answer.pid),
                    boot_id=self._boot_id,
                    uid_base=placement.uid_base,
                    scratch=placement.sandbox_id,
                    limits=placement.limits,
                    layers=digests,
                )
                return ContainerHandle(self, record, pidfd)
            except BaseException:
                syscalls.pidfd_send_signal(pidfd, signal.SIGKILL)
                close_all(answer.fds)
                raise
        except BaseException as error:
            self._drop_layers(digests)
            await asyncio.shield(self._undo(placement.sandbox_id, cancelled=isinstance(error, asyncio.CancelledError)))
            if isinstance(error, SpawnError):
                raise Internal(f"cannot create the sandbox: {error}", data={"step": error.step, "errno": error.errno}) from error
            if isinstance(error, ProcessLookupError | FileNotFoundError):
                raise SandboxLost("the sandbox died while it was made") from error
            raise

    async def _spawn(self, spawner: Spawner, placement: Placement) -> Answer:
        """Have the sandbox made while its scratch is: the spawner needs that only late, and waits there for a word on a pipe."""
        waiting, telling = os.pipe2(os.O_CLOEXEC)
        taking = asyncio.ensure_future(self._take(placement, telling))
        try:
            scratch = self.scratch.plan(placement.sandbox_id, placement.limits)
            plan = create_plan(placement, edge_id=self.edge_id, scratch=scratch, staging=str(self._staging))
            return await spawner.call("create", plan, [waiting])
        except SpawnError:
            await taking  # if there is no scratch, that is the reason to give
            raise
        finally:
            os.close(waiting)
            await asyncio.gather(taking, return_exceptions=True)  # what is half there cannot be cleared away

    async def _take(self, placement: Placement, telling: int) -> None:
        try:
            await self.scratch.take(placement.sandbox_id, placement.uid_base, placement.limits)
            os.write(telling, b"1")
        except BrokenPipeError:
            pass  # the spawner has given up before, and says why
        finally:
            os.close(telling)

    async def _undo(self, sandbox_id: str, *, cancelled: bool) -> None:
        if cancelled and self._spawner is not None:
            await self._spawner.settle()  # else the spawner could make it after we have cleared up
        await self._clear(sandbox_id)

    async def create_many(self, placements: Sequence[Placement]) -> Sequence[Handle | BaseException]:
        return await asyncio.gather(*(self.create(placement) for placement in placements), return_exceptions=True)

    # --- after a restart -------------------------------------------------------------------------------------------

    async def adopt(self, record: Record, *, cut: Collection[str] = ()) -> Handle:
        if record.boot_id != self._boot_id:
            raise SandboxLost("the machine was restarted")
        try:
            pidfd = syscalls.pidfd_open(record.pid)
        except ProcessLookupError:
            raise SandboxLost("its first process is gone") from None
        try:
            if procfs.pid_start_time(record.pid) != record.start_time:
                raise SandboxLost("its first process is gone")
            if not self.hierarchies.group(group_name(self.edge_id, record.sandbox_id)).exists():
                raise SandboxLost("its cgroup is gone")
        except BaseException as error:
            os.close(pidfd)
            if isinstance(error, OpenDSecError):
                raise
            raise SandboxLost("its first process is gone") from error
        self._users.update(record.layers)
        handle = ContainerHandle(self, record, pidfd)
        await handle.thaw()  # an edge that died while the sandbox stood still leaves it so
        await handle.end_commands(cut)
        return handle

    async def resume(self, record: Record, *, cut: Collection[str] = ()) -> Handle:
        raise Unsupported("containers cannot be paused")

    async def remove_snapshot(self, record: SnapshotRecord) -> None:
        raise Unsupported("containers have no snapshots")

    def snapshots(self) -> Sequence[str]:
        return ()

    async def clear(self, sandbox_id: str, record: Record | None) -> None:
        await self._clear(sandbox_id)

    async def _clear(self, sandbox_id: str) -> None:
        """Everything that bears the sandbox's id, process first, scratch last."""
        group = self.hierarchies.group(group_name(self.edge_id, sandbox_id))
        try:
            await asyncio.to_thread(group.remove)
        except TimeoutError as error:
            raise Unavailable(f"processes of {sandbox_id} do not die: {error}") from error
        finally:
            await self.scratch.remove(sandbox_id)

    def leftovers(self) -> Sequence[str]:
        top = self.hierarchies.group(edge_group(self.edge_id))
        named = {group.name.rpartition("/")[2] for group in top.children()} if top.exists() else set()
        return sorted(named | set(self.scratch.list()))

    def release(self, record: Record) -> None:
        """Called by a handle when its sandbox is gone."""
        self._drop_layers(record.layers)
