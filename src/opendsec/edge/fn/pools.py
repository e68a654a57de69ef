# SPDX-License-Identifier: Apache-2.0
"""All pools of one edge: declared ones, which outlive it in the journal, and those made for calls that name none.

Members are promised memory as sandboxes are. When there is no room for one, members that other pools hold beyond their size make way,
the idle ones first; as long as any may, calls wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import msgspec

from opendsec.api.errors import Conflict, NotFound, Unavailable, Unsupported
from opendsec.api.fn import PoolInfo, PoolList, PoolResize, PoolSpec
from opendsec.api.fn_check import check_pool, check_resize
from opendsec.api.spec import MIB
from opendsec.edge import admission
from opendsec.edge.fn import events
from opendsec.edge.fn.devices import Accelerator, Lease, supported
from opendsec.edge.fn.serving import LivePool
from opendsec.edge.node import Node
from opendsec.runtime.fncall.interface import FnBackend

WATCH_S = 5.0
STEP_BYTES = 256 * MIB  # sizes of members that were made for calls without a pool
BASE_BYTES = 128 * MIB  # of a member itself: a warm interpreter
CLEAR_AT_ONCE = 16


class Pools:
    """Use: `start` once what the journal says of sandboxes is known, `close` before the node."""

    def __init__(self, node: Node, backend: FnBackend, *, devices: Sequence[Accelerator], members: int) -> None:
        self.node, self.backend, self.devices = node, backend, tuple(devices)
        self._members = members  # of implicit pools
        self.declared: dict[str, LivePool] = {}
        self.implicit: dict[tuple[str, str, int], LivePool] = {}
        self.leases: dict[str, Lease] = {}
        self.promises: dict[str, admission.Promise] = {}  # of living members
        self.starts: set[asyncio.Task[None]] = set()
        self.hungry: set[LivePool] = set()  # they found no room
        self._evicting = False
        self.closed = False
        self._closing = asyncio.Event()
        self._watch: asyncio.TimerHandle | None = None
        node.layer_users += [self.layers, backend.layers_in_use]
        node.members = lambda: len(self.promises)
        node.on_destroyed.append(lambda box: self.room_made())

    # --- life ------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Clear what a dead edge left, then fill the declared pools."""
        node = self.node
        rows = {row.member_id: row for row in node.journal.members()}
        for row in rows.values():
            node.uids.reserve(row.uid_base)
        slots = asyncio.Semaphore(CLEAR_AT_ONCE)

        async def clear(member_id: str) -> None:
            async with slots:
                try:
                    await self.backend.clear(member_id)
                except Exception as error:
                    # Its uids stay reserved, and the next edge tries again.
                    node.log.error("pool.member_not_cleared", member_id=member_id, reason=f"{type(error).__name__}: {error}")
                    return
                if (row := rows.get(member_id)) is not None:
                    node.uids.give_back(row.uid_base)
                    node.journal.drop_member(member_id)

        await asyncio.gather(*(clear(member_id) for member_id in {*rows, *self.backend.leftovers()}))
        for name, body in node.journal.pools().items():
            try:
                spec = msgspec.json.decode(body, type=PoolSpec)
                self.declared[name] = LivePool(self, spec, check_pool(spec), implicit=False)
            except Exception as error:
                node.log.error("pool.not_restored", pool=name, reason=str(error))
        for pool in self.declared.values():
            pool.begin()
        self._watch_again()

    async def close(self) -> None:
        """End all calls and members; declared pools stay in the journal."""
        if self.closed:
            return
        self.closed = True
        self._closing.set()
        if self._watch is not None:
            self._watch.cancel()
        tasks = {holder.task for pool in self._all() for holder in pool.holders.values() if holder.task is not None} | self.starts
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for pool in self._all():
            pool.abandon(Unavailable("the edge is stopping"))
        await self.backend.close()
        for pool in self._all():
            for holder in pool.holders.values():
                with contextlib.suppress(Unavailable):
                    self.node.journal.drop_member(holder.member_id)

    def _watch_again(self) -> None:
        now = asyncio.get_running_loop().time()
        for pool in self._all():
            pool.watch(now)
        self._watch = asyncio.get_running_loop().call_later(WATCH_S, self._watch_again)

    async def pause(self, seconds: float) -> None:
        """Wait, but not for longer than the edge lives."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    def _all(self) -> list[LivePool]:
        return [*self.declared.values(), *self.implicit.values()]

    def layers(self) -> frozenset[str]:
        """Digests that pools need for their next members."""
        return frozenset[str]().union(*(pool.layers for pool in self._all()))

    def emit(self, kind: str, **data: str | int | float | bool | None) -> None:
        self.node.events.emit(kind, None, **data)

    # --- what callers do -------------------------------------------------------------------------------------------------

    def list(self) -> PoolList:
        return PoolList(tuple(pool.info() for pool in self._all()))

    def get(self, name: str) -> LivePool:
        """A declared pool that takes calls. Raises NotFound, Conflict."""
        pool = self.declared.get(name)
        if pool is None:
            raise NotFound(f"no pool {name!r}", field="pool")
        if pool.machine.draining:
            raise Conflict(f"pool {name!r} is being removed", field="pool")
        return pool

    async def set(self, spec: PoolSpec, begin: Callable[[], None] = lambda: None) -> PoolInfo:
        """Declare a pool, or change one to what `spec` says. `begin` is called before anything is done."""
        size = check_pool(spec)
        if why := supported(self.devices, spec.device):
            raise Unsupported(f"a pool with device {spec.device!r} cannot be had: {why}", field="device", data={"device": spec.device})
        resolved = await self.node.images.resolve(spec.image, spec.layers)
        pool = self.declared.get(spec.name)
        if pool is not None and pool.machine.draining:
            raise Conflict(f"pool {spec.name!r} is being removed", field="name")
        self._check_ready()
        new = LivePool(self, spec, size, implicit=False) if pool is None else pool
        if pool is None:
            admission.check_one(new.limits, self.node.policy)
        begin()
        self.node.journal.put_pool(spec.name, msgspec.json.encode(spec), self.node.clock.time())
        before, new.layers = new.layers, frozenset(layer.digest for layer in resolved.layers)
        self.emit("pool.declared", pool=spec.name, image=spec.image, size=spec.size, max=spec.max)
        if pool is None:
            self.declared[spec.name] = new
            new.begin()
        else:
            new.reshape(spec, size, renewed=before != new.layers)
        return new.info()

    async def resize(self, name: str, change: PoolResize, begin: Callable[[], None] = lambda: None) -> PoolInfo:
        return await self.set(check_resize(change, self._named(name).spec), begin)

    async def remove(self, name: str, begin: Callable[[], None] = lambda: None) -> PoolList:
        """Serve what waits, then end all members; returns when nothing is left of it."""
        pool = self._named(name)
        begin()
        self.node.journal.drop_pool(name)
        pool.drain()
        await asyncio.wait((pool.emptied,))
        if self.declared.get(name) is pool:
            del self.declared[name]
            self.emit("pool.removed", pool=name)
        return self.list()

    def _named(self, name: str) -> LivePool:
        if name not in self.declared:
            raise NotFound(f"no pool {name!r}", field="name")
        return self.declared[name]

    def _check_ready(self) -> None:
        if self.node.phase != "ready":
            raise Unavailable(f"this edge is {self.node.phase} and takes no new calls")

    def for_call(self, image: str, python: str, needed_bytes: int) -> LivePool:
        """A pool for calls that name none, with members that have `needed_bytes` for a call."""
        size = -(-(needed_bytes + BASE_BYTES) // STEP_BYTES) * STEP_BYTES
        key = (image, python, size)
        pool = self.implicit.get(key)
        if pool is not None and pool.hopeless:
            pool.renew()
        if pool is None:
            for old, other in list(self.implicit.items()):
                if not other.machine.slots and not other.machine.waiting and not other.users:
                    other.abandon(Unavailable("its pool is gone"))
                    del self.implicit[old]
            name = f"~{image}{'+python' if python else ''}-{size // MIB}"
            spec = PoolSpec(name=name, image=image, size=0, max=self._members, python=python, memory=size)
            pool = LivePool(self, spec, size, implicit=True)
            admission.check_one(pool.limits, self.node.policy)
            self.implicit[key] = pool
        return pool

    # --- room ------------------------------------------------------------------------------------------------------------

    def make_room(self, asking: LivePool) -> bool:
        """Have another pool give up a member; whether there is hope for room."""
        self.hungry.add(asking)
        hope = self._evicting
        for pool in sorted(self._all(), key=lambda pool: (not pool.implicit, not pool.machine.idle)):
            if pool is asking:
                continue
            if any(slot.phase == "ending" for slot in pool.machine.slots.values()):
                hope = True
            elif _surplus(pool) > 0:
                hope = True
                if not self._evicting:
                    self._evict(pool)
        return hope

    def share(self, pool: LivePool) -> None:
        """A pool has an idle member while others found no room."""
        if not self._evicting and pool not in self.hungry and _surplus(pool) > 0:
            self._evict(pool)

    def _evict(self, pool: LivePool) -> None:
        before = pool.machine.idle
        self._evicting = True
        pool.feed(events.Evicted(0 if pool.implicit else pool.spec.size, asyncio.get_running_loop().time()))
        if pool.machine.idle == before:
            self._evicting = False  # a busy one will go later, or none: ask again

    def room_made(self) -> None:
        """Something was given back."""
        self._evicting = False
        hungry, self.hungry = self.hungry, set()
        for pool in hungry:
            if not self.closed:
                pool.feed(events.RoomMade(asyncio.get_running_loop().time()))


def _surplus(pool: LivePool) -> int:
    """Members that it may give up, those that are still starting once they have."""
    return pool.machine.living - (0 if pool.implicit else pool.spec.size)
