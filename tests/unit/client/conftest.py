# SPDX-License-Identifier: Apache-2.0
"""A fake edge for each module, a client for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from opendsec.client.aio import Client
from opendsec.testing.fakes.edge import FakeEdge


@pytest.fixture(scope="module")
def edge() -> Iterator[FakeEdge]:
    with FakeEdge() as edge:
        yield edge


@pytest.fixture
async def client(edge: FakeEdge) -> AsyncIterator[Client]:
    async with Client(f"unix:{edge.socket_path}") as client:
        yield client
