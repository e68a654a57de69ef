# SPDX-License-Identifier: Apache-2.0
"""An edge with the toolchain image for each module, and a client for each test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

import opendsec as od
from tests.edges import EdgeProcess
from tests.leaks import LeakDetector
from tests.toolchain import toolchain_store


@pytest.fixture(scope="module")
def edge(leak_detector: LeakDetector) -> Iterator[EdgeProcess]:
    edge = EdgeProcess(toolchain_store(), ["--scratch-driver", "tmpfs", "--memory-limit", "6GiB"])
    try:
        edge.start()
        edge.edge_id = asyncio.run(_edge_id(edge))
        leak_detector.allow("cgroups", f"opendsec-{edge.edge_id}")  # members of pools live on between tests,
        leak_detector.allow("processes", "^calld ")  # and come and go with the pool
        yield edge
    finally:
        edge.remove()


async def _edge_id(edge: EdgeProcess) -> str:
    async with edge.client() as client:
        return (await client.info()).edge_id


@pytest.fixture
async def client(edge: EdgeProcess) -> AsyncIterator[od.Client]:
    async with edge.client() as client:
        yield client
