# SPDX-License-Identifier: Apache-2.0
"""What a guest is asked of itself as a machine: who it is, its clock, network, disks and end. See docs/guest-protocol.md."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence

from opendsec.api.errors import SandboxLost, Unavailable
from opendsec.runtime.backend import Counters
from opendsec.runtime.guest import wire
from opendsec.runtime.guest.wire import Fields, WireError

ANSWER_S = 30.0


class Refused(OSError):
    """The guest answered by an error: its errno, and its text for people as `strerror`."""


class Requests:
    """Of a channel, which asks and gives up."""

    counters: Counters  # as the guest told last
    usage_now: wire.GuestUsage | None

    async def ask(self, kind: int, payload: bytes, *, timeout_s: float | None = ANSWER_S) -> bytes:
        """The answer. Raises Refused, SandboxLost, Unavailable."""
        raise NotImplementedError

    def give_up(self, reason: str) -> None:
        """The guest is not to be trusted any more."""
        raise NotImplementedError

    def read(self, answer: bytes, read: Callable[[Fields], wire.T]) -> wire.T:
        """Raises SandboxLost, and breaks the channel, if the answer is no such thing."""
        try:
            return wire.only(answer, read)
        except WireError as error:
            self.give_up(f"the guest broke the protocol: {error}")
            raise SandboxLost(f"the sandbox has ended: the guest broke the protocol: {error}") from error

    async def _machine(self, kind: int, payload: bytes, timeout_s: float = ANSWER_S) -> bytes:
        """Raises Unavailable also when the guest refuses."""
        try:
            return await self.ask(kind, payload, timeout_s=timeout_s)
        except Refused as error:
            raise Unavailable(f"the guest could not do it: {error.strerror}", data={"errno": error.errno or 0}) from error

    async def ping(self, timeout_s: float = ANSWER_S) -> None:
        said = secrets.token_bytes(wire.NONCE_BYTES)
        if await self._machine(wire.PING, said, timeout_s) != said:
            self.give_up("the guest answered what it was not asked")

    async def identity(
        self, *, seed: bytes | None = None, hostname: str = "", machine_id: str = "", boot_id: str = "", wall_clock_ns: int | None = None
    ) -> wire.Renewed:
        """Make the guest somebody else: random numbers (always), names, clock (None: the host's time by now; 0: left alone). Raises
        Unavailable unless the guest confirms each of them: then the clone must not be used."""
        seed = os.urandom(wire.SEED_BYTES) if seed is None else seed
        now = time.time_ns() if wall_clock_ns is None else wall_clock_ns
        names = wire.string(hostname) + wire.string(machine_id) + wire.string(boot_id)
        renewed = self.read(await self._machine(wire.IDENTITY, seed + wire.u64(now) + names), wire.renewed)
        wanted = wire.DONE_SEED | (wire.DONE_HOSTNAME if hostname else 0) | (wire.DONE_MACHINE_ID if machine_id else 0)
        wanted |= (wire.DONE_BOOT_ID if boot_id else 0) | (wire.DONE_CLOCK if now else 0)
        if wanted & ~renewed.done:
            raise Unavailable(f"the guest did not confirm its new identity (asked for {wanted:#x}, done {renewed.done:#x})")
        return renewed

    async def clock(self, wall_clock_ns: int | None = None, seed: bytes | None = None) -> None:
        """Set the clock, to the host's unless given, and mix in a seed. Raises Unavailable unless both are confirmed."""
        now = time.time_ns() if wall_clock_ns is None else wall_clock_ns
        done = self.read(await self._machine(wire.CLOCK, wire.u64(now) + (seed or os.urandom(wire.SEED_BYTES))), Fields.u32)
        if (wire.DONE_CLOCK | wire.DONE_SEED) & ~done:
            raise Unavailable(f"the guest did not set its clock (done {done:#x})")

    async def network(
        self,
        *,
        device: str = "",
        mac: bytes = bytes(6),
        mtu: int = 0,
        addresses: Sequence[str] = (),
        gateways: Sequence[str] = (),
        name_servers: Sequence[str] = (),
    ) -> None:
        """`addresses` with their prefix lengths."""
        parts = (wire.string(device), mac, wire.u32(mtu), wire.strings(addresses), wire.strings(gateways), wire.strings(name_servers))
        self.read(await self._machine(wire.NETWORK, b"".join(parts)), wire.nothing)

    async def usage(self) -> wire.GuestUsage:
        used = self.read(await self._machine(wire.USAGE, b""), wire.usage)
        self.counters, self.usage_now = used.counters, used
        return used

    async def sync(self) -> None:
        self.read(await self._machine(wire.SYNC, b""), wire.nothing)

    async def freeze_disk(self) -> None:
        """The root's disk stands still, with all that was written before on it."""
        self.read(await self._machine(wire.FREEZE, b""), wire.nothing)

    async def thaw_disk(self) -> None:
        """May be repeated."""
        self.read(await self._machine(wire.THAW, b""), wire.nothing)

    async def mount(self, source: str, target: str, kind: str, options: str = "", *, read_only: bool = False) -> None:
        payload = b"".join(map(wire.string, (source, target, kind, options))) + wire.u32(wire.MOUNT_READ_ONLY if read_only else 0)
        self.read(await self._machine(wire.MOUNT, payload), wire.nothing)

    async def limits(self, *, processes: int) -> None:
        self.read(await self._machine(wire.LIMITS, wire.u64(processes)), wire.nothing)

    async def shutdown(self, *, reboot: bool = False) -> None:
        """Returns when the guest has heard; `broken` is done when it is over, by the end of its machine."""
        self.read(await self._machine(wire.SHUTDOWN, wire.u32(wire.SHUTDOWN_REBOOT if reboot else wire.SHUTDOWN_OFF)), wire.nothing)
