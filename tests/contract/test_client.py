# SPDX-License-Identifier: Apache-2.0
"""The client's contract, with a real edge behind it."""

from __future__ import annotations

import pytest

from opendsec.api.spec import Container, MicroVM
from opendsec.client.aio import Client
from opendsec.testing.contracts import client as contract
from opendsec.testing.contracts import client_bad_input
from opendsec.testing.contracts import client_machines as machines
from opendsec.testing.contracts.edge_api import Edge


@pytest.mark.parametrize("name", contract.CHECKS)
async def test_contract(name: str, edge: Edge) -> None:
    await contract.CHECKS[name](setup_for(edge))


def setup_for(edge: Edge) -> contract.Setup:
    kind = MicroVM if edge.backend == "microvm" else Container
    return contract.Setup(make=lambda: Client(f"unix:{edge.socket}"), image=edge.image, kind=kind, memory=edge.memory, disk=edge.disk)


@pytest.mark.parametrize("name", machines.CHECKS)
async def test_machines(name: str, machine_edge: Edge) -> None:
    await machines.CHECKS[name](setup_for(machine_edge))


async def test_bad_input(edge: Edge) -> None:
    await client_bad_input.check_every_case(setup_for(edge))
