# SPDX-License-Identifier: Apache-2.0
"""MicroVMs driven from uvloop, as the edge drives them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path

import pytest
import uvloop

from opendsec.images.store import ImageStore
from opendsec.testing.contracts.backend import Setup
from tests.images import BASE, base_store
from tests.vms import LIMITS, VmNode


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


uvloop.new_event_loop().close()  # the first one makes a pipe that the process keeps


@pytest.fixture
async def vms() -> AsyncGenerator[Setup, None]:
    """A started backend of microVMs, and what makes sandboxes on it. None may be left at the end."""
    with tempfile.TemporaryDirectory() as folder:
        async with VmNode(Path(folder)) as node:
            setup = Setup(make=node.make, layers=ImageStore(base_store()).resolve(BASE).layers, murder=lambda _: None, limits=LIMITS)
            await setup.start()
            try:
                yield setup
                left = list(setup.backend.leftovers())
            finally:
                for sandbox_id in setup.backend.leftovers():
                    await setup.backend.clear(sandbox_id, None)
                await setup.backend.close()
            assert left == []
