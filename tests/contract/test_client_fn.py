# SPDX-License-Identifier: Apache-2.0
"""The contract of function calls through the SDK: the real edge over a fake of its members."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from opendsec.client.aio import Client
from opendsec.testing.contracts import client_fn as contract
from opendsec.testing.contracts.edge_api import Edge
from tests.contract.conftest import running_edge


@pytest.fixture
async def fake_edge() -> AsyncGenerator[Edge, None]:
    async with running_edge("fake") as edge:
        yield edge


@pytest.mark.slow
@pytest.mark.parametrize("name", contract.CHECKS)
async def test_contract(name: str, fake_edge: Edge) -> None:
    await contract.CHECKS[name](contract.Setup(make=lambda: Client(f"unix:{fake_edge.socket}"), image=fake_edge.image))
