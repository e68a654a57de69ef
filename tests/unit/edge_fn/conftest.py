# SPDX-License-Identifier: Apache-2.0
"""An edge of fakes whose members a test can hold up, kill and count."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import msgspec
import pytest

from opendsec.api.errors import SandboxLost
from opendsec.edge.assemble import Parts
from opendsec.edge.config import Settings
from opendsec.edge.fn.devices import Accelerator
from opendsec.edge.fn.parts import FnParts
from opendsec.edge.fn.pools import Pools
from opendsec.edge.fn.routes import Functions
from opendsec.edge.log import Log
from opendsec.runtime.fncall.interface import Ended, Job, Member, MemberPlan
from opendsec.testing.fakes.backend import FakeMachine
from opendsec.testing.fakes.members import FakeMember, FakeMembers
from opendsec.testing.fakes.parts import fake_images, fake_parts
from opendsec.testing.local_edge import LocalEdge


class HeldMember(FakeMember):
    """A member whose calls end when the test says so."""

    async def call(self, job: Job) -> Ended:
        members = self._backend
        assert isinstance(members, HeldMembers)
        if self.died.done():
            raise SandboxLost("it is dead")
        members.jobs.append((self, job))
        ending: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        members.open[self.member_id] = ending
        members.changed()
        stubborn = members.stubborn
        waiting = asyncio.ensure_future(asyncio.wait((ending, self.died), return_when=asyncio.FIRST_COMPLETED))
        try:
            while not waiting.done():
                try:
                    await asyncio.shield(waiting)
                except asyncio.CancelledError:
                    if not stubborn:
                        waiting.cancel()
                        raise
        finally:
            members.open.pop(self.member_id, None)
            members.changed()
        if not ending.done():
            raise SandboxLost("it died")
        return ending.result()


class HeldMembers(FakeMembers):
    """`jobs`: what was given to members, in order. `open`: calls under way by member."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.jobs: list[tuple[FakeMember, Job]] = []
        self.open: dict[str, asyncio.Future[Ended]] = {}
        self.stubborn = False  # calls take no cancellation
        self.plans: list[MemberPlan] = []
        self._changed = asyncio.Event()

    async def create(self, plan: MemberPlan) -> Member:
        self.plans.append(plan)
        if self.before_create is not None:
            await self.before_create(plan)
        member = HeldMember(self, plan)
        member.directory.mkdir()
        self.members[plan.member_id] = member
        self.created += 1
        self.changed()
        return member

    @property
    def running(self) -> list[asyncio.Future[Ended]]:
        """Calls that were not told to end."""
        return [ending for ending in self.open.values() if not ending.done()]

    def changed(self) -> None:
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():
                self._changed.clear()
                try:
                    async with asyncio.timeout(0.05):  # what the edge does with it is announced by nobody
                        await self._changed.wait()
                except TimeoutError:
                    continue

    def end(self, ended: Ended | None = None) -> None:
        """End the oldest call under way."""
        self.running[0].set_result(ended or Ended(code=0, stdout=b"done", stdout_total=4))


class World:
    """The edge and its parts."""

    def __init__(self, folder: Path) -> None:
        self.machine = FakeMachine(folder / "machine")
        self.members = HeldMembers(folder / "members")
        self.devices: tuple[Accelerator, ...] = ()
        self.edge = LocalEdge(folder, machine=self.machine, assembling=self._assemble, settings={"memory_limit": "4GiB"})

    async def _assemble(self, settings: Settings, edge_id: str, log: Log) -> Parts:
        parts = fake_parts(self.machine, fake_images(settings.state_dir / "images"))
        assert parts.fn is not None
        functions = FnParts(backend=self.members, languages=parts.fn.languages, devices=self.devices)
        return msgspec.structs.replace(parts, fn=functions)

    @property
    def functions(self) -> Functions:
        assert self.edge.functions is not None
        return self.edge.functions

    @property
    def pools(self) -> Pools:
        return self.functions.needed()


@pytest.fixture
async def world() -> AsyncGenerator[World, None]:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        await world.edge.start()
        try:
            yield world
        finally:
            await world.edge.close()
