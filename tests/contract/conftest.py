# SPDX-License-Identifier: Apache-2.0
"""Edges under test: the real server over the fake backend, and over containers."""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from opendsec.edge.assemble import assemble
from opendsec.testing.contracts.edge_api import Edge
from opendsec.testing.fakes.parts import IMAGE
from opendsec.testing.local_edge import TOKEN, LocalEdge
from tests.images import BASE, base_store, link_store

KINDS = ("fake", "container")
SETTINGS = {"scratch_driver": "tmpfs", "memory_limit": "16GiB"}


@pytest.fixture(params=KINDS)
async def edge(request: pytest.FixtureRequest) -> AsyncGenerator[Edge, None]:
    async with running_edge(request.param) as edge:
        yield edge


@contextlib.asynccontextmanager
async def running_edge(kind: str) -> AsyncGenerator[Edge, None]:
    """An edge of one kind, and nothing of it afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        if kind == "fake":
            local = LocalEdge(directory, settings=SETTINGS)
        else:
            for folder_on_the_way in (directory, directory.parent):
                folder_on_the_way.chmod(0o755)  # a sandbox is put together below the run directory, as its own root
            (directory / "state").mkdir()
            link_store(base_store(), directory / "state" / "images")
            local = LocalEdge(directory, settings=SETTINGS, assembling=assemble)
        await local.start()
        try:
            async with local.http() as client:
                yield Edge(
                    client=client,
                    image=IMAGE if kind == "fake" else BASE,
                    occupied=_occupied(local, fake=kind == "fake"),
                    records=lambda: _records(local.settings.journal),
                    restart=local.restart,
                    tcp=local.tcp,
                    token=TOKEN,
                    socket=str(local.settings.socket),
                )
        finally:
            await local.close()


def _records(journal: Path) -> dict[str, int]:
    with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as db:
        return {table: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("sandboxes", "actions", "commands")}


def _occupied(local: LocalEdge, *, fake: bool) -> Callable[[], set[str]]:
    def containers() -> set[str]:
        assert local.node is not None
        return {sandbox_id for backend in local.node.backends.values() for sandbox_id in backend.leftovers()}

    return (lambda: set(local.machine.sandboxes)) if fake else containers
