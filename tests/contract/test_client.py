# SPDX-License-Identifier: Apache-2.0
"""The client's contract, with a real edge behind it."""

from __future__ import annotations

import pytest

from opendsec.client.aio import Client
from opendsec.testing.contracts import client as contract
from opendsec.testing.contracts import client_bad_input
from opendsec.testing.contracts.edge_api import Edge


@pytest.mark.parametrize("name", contract.CHECKS)
async def test_contract(name: str, edge: Edge) -> None:
    await contract.CHECKS[name](contract.Setup(make=lambda: Client(f"unix:{edge.socket}"), image=edge.image))


async def test_bad_input(edge: Edge) -> None:
    await client_bad_input.check_every_case(contract.Setup(make=lambda: Client(f"unix:{edge.socket}"), image=edge.image))
