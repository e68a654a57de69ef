# SPDX-License-Identifier: Apache-2.0
"""A living VM as the edge holds it: a QEMU and the channel to its guest.

A VM is lost when either is: a guest whose root killed or replaced guestd breaks its channel, and then its machine is ended. What is
saved of it (`pause`, `snapshot`) is in `saving`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from opendsec.api.errors import OpenDSecError, SandboxLost, Unavailable, Unsupported
from opendsec.api.ids import SESSION
from opendsec.api.sandboxes import Usage
from opendsec.kernel import procfs
from opendsec.runtime.backend import (
    Counters,
    DiskSnapshot,
    ExecPlan,
    FileAccess,
    Record,
    Running,
    Screen,
    SnapshotRecord,
)
from opendsec.runtime.guest.channel import Channel
from opendsec.runtime.vmm import process, saving
from opendsec.runtime.vmm.process import Vmm
from opendsec.runtime.vmm.records import record_of
from opendsec.runtime.vmm.screen import VmScreen
from opendsec.runtime.vmm.store import BoxState

if TYPE_CHECKING:
    from opendsec.runtime.vmm.backend import VmBackend

REBOOT_S = 300.0  # ten times what an emulated boot of a whole system takes


class VmHandle:
    """See `runtime.backend.Handle`. `box` is what its `box.json` says."""

    def __init__(self, backend: VmBackend, box: BoxState, vmm: Vmm, channel: Channel) -> None:
        self.backend, self.box = backend, box
        self.record = record_of(box, backend.name)
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.turn = asyncio.Lock()  # one at a time saves, freezes and thaws
        self.channel = channel
        self._vmm: Vmm | None = None
        self._destroying: asyncio.Future[None] | None = None
        self._losing: asyncio.Future[None] | None = None
        self._rebooting: asyncio.Task[None] | None = None
        size = (box.options.width, box.options.height)
        self._screen = VmScreen(lambda: self.vmm, size) if all(size) else None
        self.hold(vmm)
        channel.broken.add_done_callback(self._on_broken)
        backend.handles[box.sandbox_id] = self

    # --- what it holds -------------------------------------------------------------------------------------------------

    def hold(self, vmm: Vmm) -> None:
        """This is its QEMU from now on."""
        self._vmm = vmm
        self.channel.silence.served = vmm.served
        if self.backend.reboots(self.box):
            vmm.listeners.append(lambda name, data: self._on_event(vmm, name, data))
        vmm.died.add_done_callback(lambda told: self._on_death(vmm, told.result()))

    def lose(self, vmm: Vmm, reason: str) -> None:
        """This was its QEMU, and is to be no more: it is lost."""
        if vmm is self._vmm:
            self._vmm = None
            self.channel.close()
            self._lost(reason)

    def let_go_of_vmm(self) -> None:
        """It has none any more: it is paused."""
        self._vmm = None

    def update(self, box: BoxState) -> None:
        self.box = box
        self.record = record_of(box, self.backend.name)

    async def let_go(self) -> None:
        """For an edge that ends before its VMs do."""
        vmm, self._vmm = self._vmm, None
        await self._end_reboot()
        self.channel.close()
        if vmm is not None:
            await vmm.let_go()

    async def _end_reboot(self) -> None:
        if self._rebooting is not None:
            self._rebooting.cancel()
            await asyncio.gather(self._rebooting, return_exceptions=True)

    @property
    def sandbox_id(self) -> str:
        return self.box.sandbox_id

    @property
    def vmm(self) -> Vmm:
        """Raises SandboxLost; Unavailable if it is paused."""
        if self.died.done() or self._destroying is not None:
            raise SandboxLost("the sandbox has ended")
        if self._vmm is None:
            raise Unavailable("the sandbox is paused")
        return self._vmm

    def _on_death(self, vmm: Vmm, reason: str) -> None:
        if vmm is self._vmm:
            self.channel.close()
            self._lost(reason)

    def _on_broken(self, told: asyncio.Future[str]) -> None:
        """The guest is not one of ours any more. If its machine is dying, that has a better reason to give."""
        if told.cancelled() or not told.result() or self._vmm is None or self._destroying is not None:
            return
        self._losing = asyncio.ensure_future(self._give_up(self._vmm, told.result()))

    async def _give_up(self, vmm: Vmm, reason: str) -> None:
        await asyncio.wait([vmm.died], timeout=process.DIE_TIMEOUT_S if not vmm.alive() else 0.05)
        if not vmm.died.done():
            self._lost(reason)
            await vmm.kill()

    def _on_event(self, vmm: Vmm, name: str, data: Mapping[str, object]) -> None:
        """A guest that resets its machine takes with it what ran there; the sandbox goes on with the next boot, as who it was."""
        if name != "RESET" or not data.get("guest") or vmm is not self._vmm or self.channel.lost:
            return
        if self._rebooting is not None and not self._rebooting.done():
            if self.channel.greeting:
                return  # firmware resets the machine as well; what is said to the guest waits for it
            self._rebooting.cancel()
        self.channel.restart("the machine was rebooted inside")
        self._rebooting = asyncio.create_task(self._come_back(vmm))

    async def _come_back(self, vmm: Vmm) -> None:
        async def renew() -> None:
            await self.channel.identity(hostname=self.box.hostname)
            await self.channel.limits(processes=self.box.limits.pids)

        try:
            await self.channel.reopen(await vmm.channel(), renew, timeout_s=REBOOT_S)
        except (OpenDSecError, OSError) as error:
            if vmm is self._vmm and not vmm.died.done():
                self._lost(f"it was rebooted inside, and did not come back: {error}")
                await vmm.kill()

    def _lost(self, reason: str) -> None:
        if not self.died.done():
            self.died.set_result(reason)

    def alive(self) -> bool:
        if self.died.done() or self._destroying is not None:
            return False
        return self._vmm is None or (self._vmm.alive() and not self.channel.lost)

    # --- commands and files ----------------------------------------------------------------------------------------------

    @property
    def files(self) -> FileAccess:
        return self.channel.files

    async def exec(
        self, plan: ExecPlan, *, stdin: int | None, stdout: int | None, stderr: int | None, extra: Sequence[int] = ()
    ) -> Running:
        self.vmm  # noqa: B018 - raises if there is none
        return await self.channel.exec(plan, (stdin, stdout, stderr, *extra), self.box.limits)

    async def end_commands(self, cut: Collection[str]) -> None:
        """End the commands in `cut` and all sessions of an earlier edge."""
        found = await self.channel.commands()
        names = [row.name for row in found if row.name in cut or row.name.startswith(f"{SESSION}_")]
        if names:
            await self.channel.cut(names)

    # --- accounting ----------------------------------------------------------------------------------------------------

    def counters(self) -> Counters:
        return self.channel.counters

    def usage(self) -> Usage:
        """Memory is what QEMU and its guest take of the host; the guest's own words are as old as the last time it was asked."""
        told = self.channel.usage_nowait()
        try:
            memory_bytes = procfs.pss_bytes(self.vmm.pid) if self._vmm is not None else 0
        except OSError:
            raise SandboxLost("the sandbox has ended") from None
        if told is None:
            return Usage(memory_bytes=memory_bytes)
        return Usage(
            memory_bytes=memory_bytes,
            memory_peak_bytes=max(told.memory_peak_bytes, memory_bytes),
            cpu_ms=told.cpu_us / 1000,
            pids=told.processes,
            disk_bytes=told.disk_bytes,
            inodes=told.inodes,
            oom_kills=told.counters.oom_kills,
            pids_denied=told.counters.pids_denied,
        )

    def processes(self) -> int:
        told = self.channel.usage_nowait()
        return told.processes if told is not None and not self.died.done() else 0

    # --- standing still ------------------------------------------------------------------------------------------------

    async def freeze(self) -> None:
        async with self.turn:
            await self.vmm.stop()

    async def thaw(self) -> None:
        async with self.turn:
            if self._vmm is not None and not self.died.done():
                with contextlib.suppress(SandboxLost):
                    await self._vmm.cont()

    async def snapshot_disk(self) -> DiskSnapshot:
        self.vmm  # noqa: B018
        raise Unsupported("what a VM has written cannot be packed yet; a snapshot keeps it")

    async def pause(self) -> Record:
        async with self.turn:
            await saving.pause(self)
        return self.record

    async def snapshot(self, snapshot_id: str, *, memory: bool, durable: bool = True) -> SnapshotRecord:
        async with self.turn:
            return await saving.snapshot(self, snapshot_id, memory=memory, durable=durable)

    @property
    def screen(self) -> Screen | None:
        return self._screen

    # --- end -----------------------------------------------------------------------------------------------------------

    async def destroy(self) -> None:
        if self._destroying is not None and self._destroying.done() and self._destroying.exception() is not None:
            self._destroying = None  # what was left over then may go now
        if self._destroying is None:
            self._destroying = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._destroying)

    async def _destroy(self) -> None:
        vmm, self._vmm = self._vmm, None
        await self._end_reboot()
        self.channel.close()
        try:
            if vmm is not None:
                await vmm.kill()
            if self._losing is not None:
                await asyncio.gather(self._losing, return_exceptions=True)
        finally:
            self._lost("the sandbox was destroyed")
            await self.backend.forget(self)
