# SPDX-License-Identifier: Apache-2.0
"""A living member: its supervisor's channel, its control group, one call at a time."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import TYPE_CHECKING

from opendsec.api.errors import Internal, SandboxLost
from opendsec.kernel import syscalls
from opendsec.kernel.fds import sealed_memfd
from opendsec.runtime.fncall import wire
from opendsec.runtime.fncall.interface import Ended, Job, MemberPlan
from opendsec.runtime.spawn import close_all

if TYPE_CHECKING:
    from opendsec.runtime.fncall.backend import FnMembers

OVERHEAD_BYTES = 4 << 20  # of a call for the kernel's own: namespaces, mounts, page tables
LINGERING_BYTES = 16 << 20  # a call that used more is waited for, until the kernel has taken it back
LINGER_S, LINGER_STEP_S = 0.5, 0.002
CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)


class FnMember:
    """See interface.Member."""

    def __init__(self, backend: FnMembers, plan: MemberPlan, channel: socket.socket, pidfd: int, pid: int) -> None:
        self._backend, self.plan, self._channel, self._pidfd, self.pid = backend, plan, channel, pidfd, pid
        self._loop = asyncio.get_running_loop()
        self._number = channel.fileno()
        self.died: asyncio.Future[str] = self._loop.create_future()
        self.group = backend.group_of(plan.member_id)
        self._answer: asyncio.Future[tuple[bytes, list[int]]] | None = None
        self._destroying: asyncio.Future[None] | None = None
        self._limits: tuple[int, int] = (0, 0)  # bytes, processes: as last set
        self.base_bytes = self.base_pids = 0  # of a member at rest
        self._loop.add_reader(pidfd, self._on_death)
        self._loop.add_reader(self._number, self._receive)

    @property
    def member_id(self) -> str:
        return self.plan.member_id

    # --- the channel -----------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            data, ancillary, flags, _ = self._channel.recvmsg(wire.DATAGRAM_BYTES, 32)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary, flags = b"", [], 0
        fds: list[int] = []
        if ancillary:
            for _, _, numbers in ancillary:
                fds += [int.from_bytes(numbers[at : at + 4], "little") for at in range(0, len(numbers) // 4 * 4, 4)]
        if not data:
            close_all(fds)
            self._loop.remove_reader(self._number)  # `died` tells the rest
            return
        answer = self._answer
        if answer is None or answer.done() or flags & CUT:
            close_all(fds)
            if answer is not None and not answer.done():
                answer.set_exception(Internal("a member broke its protocol"))
            return
        answer.set_result((data, fds))

    def _on_death(self) -> None:
        self._loop.remove_reader(self._pidfd)
        if not self.died.done():
            self.died.set_result("its first process ended")
        if self._answer is not None and not self._answer.done():
            self._receive()  # what it said before
            if not self._answer.done():
                self._answer.set_exception(SandboxLost("the member ended during the call"))

    def _send(self, kind: int, body: bytes, fds: tuple[int, ...] = ()) -> None:
        memfd = -1
        try:
            if len(body) > wire.INLINE_BYTES or kind == wire.SETUP:
                memfd = sealed_memfd("job", body)
                socket.send_fds(self._channel, [wire.HEAD.pack(wire.MAGIC, kind, wire.IN_MEMFD, len(body))], [memfd, *fds])
            else:
                self._channel.send(wire.HEAD.pack(wire.MAGIC, kind, 0, len(body)) + body)
        except BlockingIOError:
            raise Internal("a member does not take its messages") from None
        except OSError as error:
            raise SandboxLost("the member has ended") from error
        finally:
            if memfd >= 0:
                os.close(memfd)

    async def setup(self, body: bytes, fds: tuple[int, ...]) -> str:
        """Tell a new member what to be. "" once it is ready, else why it cannot."""
        self._answer = self._loop.create_future()
        try:
            self._send(wire.SETUP, body, fds)
            data, passed = await self._answer
        finally:
            self._answer = None
        close_all(passed)
        kind, flags, _ = wire.read_head(data)
        if kind == wire.FAILED and not flags:
            return data[wire.HEAD.size :].decode("utf-8", "replace").strip() or "it was killed"
        if kind != wire.READY:
            raise Internal("a member broke its protocol")
        # Not what is at hand of files: of that a call takes what it needs, and could else have so much more than its limit.
        self.base_bytes, self.base_pids = self.group.held_bytes(), self.group.usage().pids or 0
        return ""

    # --- calls -----------------------------------------------------------------------------------------------------

    async def call(self, job: Job) -> Ended:
        if self.died.done() or self._destroying is not None:
            raise SandboxLost("the member has ended")
        if self._answer is not None:
            raise Internal("a member serves one call at a time")
        if job.kind != "exec" and not self.plan.python:
            return Ended(not_started="this pool keeps no interpreter warm", caller_fault=True)
        body = wire.job_body(job)
        answer = self._answer = self._loop.create_future()
        try:
            limits = (job.limits.memory_bytes + 2 * job.limits.output_bytes, job.limits.pids)
            if limits != self._limits:
                await self._limit(*limits)
            self._send(wire.JOB, body)
            try:
                data, fds = await asyncio.shield(answer)
            except asyncio.CancelledError:
                await self._cancel(answer)
                raise
        finally:
            self._answer = None
        try:
            if wire.read_head(data)[0] != wire.ENDED:
                raise wire.Broken("another message than an end")
            ended = wire.read_ended(wire.read_body(data, fds))
        except wire.Broken as error:
            raise Internal(f"a member broke its protocol: {error}") from error
        finally:
            close_all(fds)
        if ended.peak_memory_bytes > LINGERING_BYTES:
            await self._until_returned()
        return ended

    async def _cancel(self, answer: asyncio.Future[tuple[bytes, list[int]]]) -> None:
        """Have the call killed, and wait until it is gone, however often we are told to stop waiting."""
        try:
            self._send(wire.CANCEL, b"")
        except (Internal, SandboxLost):
            return  # it is to be destroyed
        while not answer.done():
            try:
                await asyncio.wait([answer])
            except asyncio.CancelledError:
                continue
        if answer.exception() is None:
            close_all(answer.result()[1])

    async def _limit(self, memory_bytes: int, pids: int) -> None:
        """Let the group have what a member at rest uses and this on top."""
        memory = min(self.base_bytes + memory_bytes + OVERHEAD_BYTES, self.plan.limits.memory_bytes)
        # While the interpreter forks there are two more than before.
        wanted = {"memory_bytes": memory, "pids": self.base_pids + max(pids, 2)}
        for attempt in range(100):
            try:
                self.group.update(wanted)
                break
            except OSError as error:  # what the last call used is on its way back, and there is more of it than this allows
                if attempt == 99:
                    raise Internal(f"cannot limit the member's memory: {error.strerror}") from error
                await asyncio.sleep(LINGER_STEP_S)
        self._limits = (memory_bytes, pids)

    async def _until_returned(self) -> None:
        """The kernel unmounts a dead namespace a moment after its last process. What was written there counts as memory until then."""
        deadline = self._loop.time() + LINGER_S
        while self.held_bytes() > self.base_bytes + LINGERING_BYTES and self._loop.time() < deadline:
            await asyncio.sleep(LINGER_STEP_S)

    # --- accounting ------------------------------------------------------------------------------------------------

    def memory_bytes(self) -> int:
        try:
            return self.group.usage().memory_bytes or 0
        except OSError:
            return 0

    def held_bytes(self) -> int:
        """Without files of the image that were read and can be read again: these may stay for as long as there is room."""
        try:
            return self.group.held_bytes()
        except OSError:
            return 0

    def processes(self) -> int:
        """Beside process 1, the interpreter with its threads, and the envelope that waits for the next call."""
        try:
            return max((self.group.usage().pids or 0) - self.base_pids, 0)
        except OSError:
            return 0

    # --- end -------------------------------------------------------------------------------------------------------

    async def destroy(self) -> None:
        if self._destroying is None:
            self._destroying = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._destroying)

    async def _destroy(self) -> None:
        try:
            self.kill()
            await self.died
        finally:
            try:
                await self._backend.clear(self.member_id)
            finally:
                self.let_go()
                self._backend.release(self)

    def kill(self) -> None:
        try:
            self.group.kill()
        except OSError:
            pass  # the group is gone, or going
        try:
            syscalls.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except OSError:
            pass  # already dead

    def let_go(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            self._loop.remove_reader(self._number)
            os.close(self._pidfd)
            self._channel.close()
            self._pidfd = -1
