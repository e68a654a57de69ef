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
from opendsec.runtime.vmm.store import VmStore
from opendsec.testing.contracts.edge_api import Edge
from opendsec.testing.fakes.parts import IMAGE
from opendsec.testing.local_edge import TOKEN, LocalEdge
from tests.images import BASE, base_store, link_store
from tests.vms import borrow, give_back, kept

KINDS = ("fake", "fake-microvm", "container")
SLOW = pytest.param("microvm", marks=pytest.mark.slow)
MACHINES = ("fake-microvm", SLOW)
MACHINE = {"backend": "microvm", "memory": "128MiB"}
SETTINGS = {"scratch_driver": "tmpfs", "memory_limit": "16GiB"}


@pytest.fixture(params=(*KINDS, SLOW))
async def edge(request: pytest.FixtureRequest) -> AsyncGenerator[Edge, None]:
    async with running_edge(request.param) as edge:
        yield edge


@pytest.fixture(params=MACHINES)
async def machine_edge(request: pytest.FixtureRequest) -> AsyncGenerator[Edge, None]:
    async with running_edge(request.param) as edge:
        yield edge


def image_of(kind: str) -> str:
    return IMAGE if kind.startswith("fake") else BASE


@contextlib.asynccontextmanager
async def local_edge(kind: str, directory: Path, **settings: str) -> AsyncGenerator[LocalEdge, None]:
    """An edge of one kind, and nothing of it afterwards."""
    if not kind.startswith("fake"):
        for folder_on_the_way in (directory, directory.parent):
            folder_on_the_way.chmod(0o755)  # a sandbox is put together below the run directory, as its own root
        (directory / "state").mkdir()
        link_store(base_store(), directory / "state" / "images")
    machines = VmStore(directory / "state" / "vm")
    if kind == "microvm":
        settings["vm_parts"] = str(kept())
        borrow(machines)
    local = LocalEdge(directory, settings={**SETTINGS, **settings}, assembling=None if kind.startswith("fake") else assemble)
    await local.start()
    try:
        yield local
    finally:
        await local.close()
        if kind == "microvm":
            give_back(machines)


@contextlib.asynccontextmanager
async def running_edge(kind: str) -> AsyncGenerator[Edge, None]:
    with tempfile.TemporaryDirectory() as folder:
        async with local_edge(kind, Path(folder)) as local, local.http() as client:
            yield Edge(
                client=client,
                image=image_of(kind),
                occupied=_occupied(local, fake=kind.startswith("fake")),
                records=lambda: _records(local.settings.journal),
                restart=local.restart,
                tcp=local.tcp,
                token=TOKEN,
                socket=str(local.settings.socket),
                **(MACHINE if "microvm" in kind else {}),
                **({"ttl_s": 4.0} if kind == "microvm" else {}),
            )


def _records(journal: Path) -> dict[str, int]:
    with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as db:
        return {table: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("sandboxes", "actions", "commands")}


def _occupied(local: LocalEdge, *, fake: bool) -> Callable[[], set[str]]:
    def containers() -> set[str]:
        assert local.node is not None
        return {sandbox_id for backend in local.node.backends.values() for sandbox_id in backend.leftovers()}

    return (lambda: set(local.machine.sandboxes)) if fake else containers
