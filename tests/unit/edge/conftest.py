# SPDX-License-Identifier: Apache-2.0
"""A node over fakes and a clock that stands still. Its edge can die and be followed by another on the same journal and machine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from opendsec.api.sandboxes import SandboxInfo
from opendsec.api.spec import Container, CreateRequest, MicroVM
from opendsec.edge.actions import Actions
from opendsec.edge.admission import Policy
from opendsec.edge.images import Catalog
from opendsec.edge.journal import Journal
from opendsec.edge.log import NullLog
from opendsec.edge.node import Node
from opendsec.edge.reconcile import reconcile
from opendsec.edge.server import Routes
from opendsec.edge.tables import Retention
from opendsec.edge.uids import UidRanges
from opendsec.observe.events import EventSink
from opendsec.testing.fakes.backend import FakeBackend, FakeMachine
from opendsec.testing.fakes.clock import FakeClock
from opendsec.testing.fakes.machines import FakeMachines
from opendsec.testing.fakes.parts import IMAGE, fake_images

MIB = 1 << 20


class World:
    """A machine, a journal, and edges one after another."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.machine = FakeMachine(directory / "machine")
        self.images = fake_images(directory / "images")
        self.clock = FakeClock()
        self.policy = Policy(memory_bytes=1000 * MIB, disk_bytes=1000 * MIB, sandboxes=50)
        self.retention = Retention()
        self.dead: list[tuple[Routes, Journal]] = []
        (directory / "results").mkdir()

    async def boot(self) -> Node:
        """Start an edge."""
        self.backend = FakeBackend(self.machine)
        self.machines = FakeMachines(self.machine)
        self.journal = Journal(self.directory / "journal.db")
        node: Node | None = None
        events = EventSink(
            clock=self.clock.time,
            store=self.journal.add_events,
            schedule=lambda: node.flush_soon() if node is not None else None,
            last_seq=self.journal.last_event(),
        )
        log = NullLog()
        node = self.node = Node(
            edge_id="edge_0000000000000000",
            journal=self.journal,
            actions=Actions(self.journal, self.directory / "results", self.clock.time, log),
            backends={"container": self.backend, "microvm": self.machines},
            images=Catalog(self.images),
            policy=self.policy,
            uids=UidRanges(65_536, 60),
            events=events,
            clock=self.clock,
            log=log,
            retention=self.retention,
            scratch_driver="fake",
        )
        await reconcile(node, self.machine.boot_id)
        self.routes = Routes(node)
        node.ready()
        return node

    def crash(self) -> None:
        """The edge is killed: nothing is flushed, no timer fires any more, the machine goes on."""
        self.node._closed = True
        for box in self.node.boxes.values():
            if box.timer is not None:
                box.timer.cancel()
            if box.commands is not None:
                box.commands.close()
        for handle in (*self.backend.handles.values(), *self.machines.handles.values()):
            handle.sandbox.on_death.clear()
        for timer in (self.node._flush_timer, self.node._prune_timer):
            if timer is not None:
                timer.cancel()
        self.node.flush_soon = lambda: None  # type: ignore[method-assign]
        self.dead.append((self.routes, self.journal))

    async def restart(self) -> Node:
        self.crash()
        return await self.boot()

    async def close(self) -> None:
        await self.node.kill_all("over")
        await self.routes.close()
        await self.node.close()
        for routes, journal in self.dead:
            await routes.close()
            journal.close()
        self.journal.close()
        self.machine.close()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncGenerator[World, None]:
    world = World(tmp_path)
    await world.boot()
    yield world
    await world.close()


@pytest.fixture
def node(world: World) -> Node:
    return world.node


def spec(**fields: object) -> Container:
    values: dict[str, object] = {"image": IMAGE, "memory": 10 * MIB, "disk": MIB, **fields}
    return Container(**values)  # type: ignore[arg-type]


def machine(**fields: object) -> MicroVM:
    values: dict[str, object] = {"image": IMAGE, "memory": 100 * MIB, "disk": 16 * MIB, **fields}
    return MicroVM(**values)  # type: ignore[arg-type]


async def create_machines(node: Node, count: int = 1, action_id: str | None = None, **fields: object) -> list[SandboxInfo]:
    """MicroVMs, all of which must come to be."""
    response = await node.create(CreateRequest(spec=machine(**fields), count=count, action_id=action_id))
    made = [slot.sandbox for slot in response.slots]
    assert None not in made, response
    return [one for one in made if one is not None]


async def create(node: Node, count: int = 1, action_id: str | None = None, **fields: object) -> list[SandboxInfo]:
    """Sandboxes, all of which must come to be."""
    response = await node.create(CreateRequest(spec=spec(**fields), count=count, action_id=action_id))
    made = [slot.sandbox for slot in response.slots]
    assert None not in made, response
    return [one for one in made if one is not None]
