# SPDX-License-Identifier: Apache-2.0
"""A real edge's node in the test's own event loop, without HTTP: sandboxes on a btrfs pool, a store of one's own.

async def test_something(edge: NodeEdge) -> None:
    box = await edge.create()
    assert await edge.sh(box, "echo hi") == "hi\n"
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from opendsec.api.exec import Command, ExecResult
from opendsec.api.ids import EDGE, new_id
from opendsec.api.spec import Container, CreateRequest
from opendsec.edge import config
from opendsec.edge.actions import Actions
from opendsec.edge.assemble import Parts, assemble
from opendsec.edge.clock import SystemClock
from opendsec.edge.commands import Commands
from opendsec.edge.images import Catalog
from opendsec.edge.journal import Journal
from opendsec.edge.log import NullLog
from opendsec.edge.node import Node
from opendsec.edge.reconcile import reconcile
from opendsec.edge.uids import UidRanges
from opendsec.images.store import ImageStore
from opendsec.observe.events import EventSink
from tests.images import BASE, link_store


class NodeEdge:
    """`start`, `crash` any number of times; `close` at the end."""

    def __init__(self, folder: Path, scratch_size: str, driver: str) -> None:
        self.folder, self.driver = folder, driver
        known = folder / "edge_id"  # the same for an edge that comes after, in whatever process
        if not known.exists():
            known.write_text(new_id(EDGE))
        self.edge_id = known.read_text()
        paths = [f"--state-dir={folder / 'state'}", f"--run-dir={folder / 'run'}"]
        flags = [*paths, f"--scratch-size={scratch_size}", f"--scratch-driver={driver}"]
        self.settings = config.load(flags, {})
        self.node: Node
        self.parts: Parts

    async def start(self) -> None:
        for name in ("state/results", "run"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        log, clock = NullLog(), SystemClock()
        self.journal = Journal(self.folder / "state/journal.db")
        self.parts = await assemble(self.settings, self.edge_id, log)
        events = EventSink(clock=clock.time, store=self.journal.add_events, schedule=lambda: None, last_seq=self.journal.last_event())
        self.node = Node(
            edge_id=self.edge_id,
            journal=self.journal,
            actions=Actions(self.journal, self.folder / "state/results", clock.time, log),
            backends=self.parts.backends,
            images=Catalog(self.parts.images),
            policy=self.parts.policy(self.settings),
            uids=UidRanges(self.settings.uid_base, self.settings.uid_ranges),
            events=events,
            clock=clock,
            log=log,
            retention=self.settings.retention(),
            scratch_driver=self.parts.scratch_driver,
        )
        for backend in self.parts.backends.values():
            await backend.start()
        await reconcile(self.node, self.parts.boot_id)
        self.commands = Commands(self.node)
        self.node.ready()

    async def stop(self) -> None:
        """Sandboxes live on."""
        await self.commands.close()
        await self.node.close()
        await self.parts.close()
        self.journal.close()

    async def close(self) -> None:
        await self.node.kill_all("over")
        await self.stop()

    @property
    def snapshots(self) -> list[str]:
        """Of scratch, that are there now."""
        place = self.folder / ("state/scratch/snapshots" if self.driver == "btrfs" else "state/snapshots")
        return os.listdir(place) if place.exists() else []

    @property
    def store(self) -> ImageStore:
        return self.node.images.store

    async def create(self, image: str = BASE, **fields: Any) -> str:
        """The id of a new sandbox."""
        given = {"memory": "256MiB", "disk": "256MiB", "inodes": 50_000, **fields}
        response = await self.node.create(CreateRequest(spec=Container(image=image, **given)))
        assert response.slots[0].sandbox is not None
        return response.slots[0].sandbox.id

    async def run(self, sandbox_id: str, text: str, user: str = "") -> ExecResult:
        return await self.commands.run(sandbox_id, Command(shell=text, user=user or None))

    async def sh(self, sandbox_id: str, text: str, user: str = "") -> str:
        """Its output; it must succeed."""
        result = await self.run(sandbox_id, text, user)
        assert result.exit_code == 0, (result.exit_code, result.message, result.stderr.head, result.stdout.head)
        return (result.stdout.head + result.stdout.tail).decode()

    async def kill(self, sandbox_id: str) -> None:
        await self.node.kill(sandbox_id)


@asynccontextmanager
async def node_edge(images: Path, scratch_size: str = "3GiB", driver: str = "btrfs") -> AsyncIterator[NodeEdge]:
    """One whose store begins with all that is in `images`."""
    folder = Path(tempfile.mkdtemp(prefix="n-", dir="/var/tmp"))
    executor = ThreadPoolExecutor(8)
    asyncio.get_running_loop().set_default_executor(executor)
    (folder / "state").mkdir()
    link_store(images, folder / "state/images")
    edge = NodeEdge(folder, scratch_size, driver)
    await edge.start()
    try:
        yield edge
    finally:
        await edge.close()
        await asyncio.to_thread(shutil.rmtree, folder)
        await asyncio.get_running_loop().shutdown_default_executor()
