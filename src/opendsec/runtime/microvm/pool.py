# SPDX-License-Identifier: Apache-2.0
"""Machines that wait to become sandboxes: clones of a template that have been loaded, have run their first commands, and stand still.

Under emulation a clone's first command takes ten times as long as its second, because nothing of the guest's code is translated yet, and
no two processes can share translations. This is what waiting machines save; with hardware virtualisation they save the start of
QEMU. They are nobody yet: each gets its identity when it is handed out.

A template that was used lately has `size` of them. They are made one after another, when nothing else is being created, and end when
their template has not been used for a while, or when they are asked to (`shed`): they are memory that others may need.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from opendsec.runtime.guest.channel import Channel
from opendsec.runtime.vmm.process import Vmm
from opendsec.runtime.vmm.store import Template
from opendsec.runtime.vmm.templates import Wanted

IDLE_S = 300.0
SETTLE_S = 0.25  # after one was handed out: its first commands come first
RETRY_S = 30.0  # after one that could not be made
MAX_MACHINES = 32  # of all templates


@dataclass(eq=False)
class Waiting:
    """A machine that stands still. `folder` holds its disk, disk-0.qcow2."""

    name: str
    uid: int
    template: str  # key
    folder: Path
    vmm: Vmm
    channel: Channel


@dataclass(eq=False)
class _Shelf:
    """What waits of one template."""

    template: Template
    wanted: Wanted
    machines: deque[Waiting] = field(default_factory=deque)
    used_at: float = 0.0
    failed_at: float = 0.0

    def wants_more(self, now: float) -> bool:
        return now - self.used_at < IDLE_S and not (self.failed_at and now - self.failed_at < RETRY_S)


class Pool:
    """`make` makes one, `discard` ends one for good; `room` says whether there is memory for one."""

    def __init__(
        self,
        size: int,
        *,
        make: Callable[[Template, Wanted], Awaitable[Waiting]],
        discard: Callable[[Waiting], Awaitable[None]],
        room: Callable[[Wanted], bool] = lambda wanted: True,
    ) -> None:
        self.size, self._room = size, room
        self._make, self._discard = make, discard
        self._shelves: dict[str, _Shelf] = {}
        self._loop = asyncio.get_running_loop
        self._dropping: set[asyncio.Task[None]] = set()
        self._filling: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._creating = 0
        self._used_at = 0.0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.changed = asyncio.Event()
        """Set whenever a machine has come to wait; whoever waits clears it."""

    def waiting(self, key: str = "") -> int:
        return sum(len(shelf.machines) for name, shelf in self._shelves.items() if key in ("", name))

    @contextlib.contextmanager
    def creating(self) -> Iterator[None]:
        """Nothing is made for the pool meanwhile, if it has not begun."""
        self._creating += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._creating -= 1
            if not self._creating:
                self._quiet.set()

    def take(self, template: Template, wanted: Wanted) -> Waiting | None:
        """One of this template, from now on the caller's; and let there be more."""
        if not self.size or self._closed:
            return None
        shelf = self._shelves.setdefault(template.key, _Shelf(template, wanted))
        shelf.used_at = self._used_at = self._loop().time()
        found = None
        while shelf.machines and found is None:
            found = shelf.machines.popleft()
            if found.vmm.died.done() or found.channel.lost:
                self._drop(found)
                found = None
        self._fill()
        return found

    def _fill(self) -> None:
        if self._filling is None and not self._closed and self._next() is not None:
            self._filling = asyncio.ensure_future(self._run())
            self._filling.add_done_callback(self._filled)

    def _next(self) -> _Shelf | None:
        """The shelf that lacks most."""
        now = self._loop().time()
        if self.waiting() >= MAX_MACHINES:
            return None
        lacking = [
            shelf
            for shelf in self._shelves.values()
            if len(shelf.machines) < self.size and shelf.wants_more(now) and self._room(shelf.wanted)
        ]
        return min(lacking, key=lambda shelf: len(shelf.machines), default=None)

    async def _run(self) -> None:
        while not self._closed:
            await self._quiet.wait()
            if (rest := self._used_at + SETTLE_S - self._loop().time()) > 0:
                await asyncio.sleep(rest)
                continue
            if (shelf := self._next()) is None:
                break
            try:
                made = await self._make(shelf.template, shelf.wanted)
            except Exception:
                shelf.failed_at = self._loop().time()  # whoever is created meanwhile will be told why it does not work
                continue
            shelf.failed_at = 0.0
            if self._closed or self._shelves.get(shelf.template.key) is not shelf:
                await self._discard(made)
            else:
                shelf.machines.append(made)
                self.changed.set()
        if self._timer is None and not self._closed and self._shelves:
            self._timer = self._loop().call_later(IDLE_S, self._expire)

    def _filled(self, task: asyncio.Task[None]) -> None:
        self._filling = None
        if not task.cancelled() and task.exception() is None:
            self._fill()  # one may have been taken since it looked for the last time
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error  # a bug: the loop's handler is told

    def _expire(self) -> None:
        self._timer = None
        now = self._loop().time()
        for key, shelf in list(self._shelves.items()):
            if now - shelf.used_at >= IDLE_S:
                del self._shelves[key]
                for machine in shelf.machines:
                    self._drop(machine)
        if self._shelves:
            self._timer = self._loop().call_later(IDLE_S / 2, self._expire)

    def _drop(self, machine: Waiting) -> None:
        task = asyncio.get_running_loop().create_task(self._gone(machine))
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    async def _gone(self, machine: Waiting) -> None:
        await self._discard(machine)

    async def shed(self) -> int:
        """End all that wait now; how many."""
        machines = [machine for shelf in self._shelves.values() for machine in shelf.machines]
        self._shelves.clear()
        await asyncio.gather(*(self._discard(machine) for machine in machines), return_exceptions=True)
        return len(machines)

    async def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
        await self.shed()
        await asyncio.gather(*self._dropping, return_exceptions=True)
