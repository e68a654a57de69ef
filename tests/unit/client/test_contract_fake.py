# SPDX-License-Identifier: Apache-2.0
"""The client's contract suite over the fake edge, by both transports."""

from __future__ import annotations

import httpx
import pytest

from opendsec.client.aio import Client
from opendsec.client.transport import HttpxTransport
from opendsec.testing.contracts import client as contract
from opendsec.testing.contracts import client_bad_input
from opendsec.testing.fakes.edge import FakeEdge


@pytest.mark.parametrize("transport", ["unix", "httpx"])
@pytest.mark.parametrize("name", contract.CHECKS)
async def test_contract(name: str, transport: str, edge: FakeEdge) -> None:
    def make() -> Client:
        if transport == "unix":
            return Client(f"unix:{edge.socket_path}")
        return Client(transport=HttpxTransport("http://edge", transport=httpx.AsyncHTTPTransport(uds=str(edge.socket_path))))

    await contract.CHECKS[name](contract.Setup(make=make, image="debian"))


@pytest.mark.parametrize("name", client_bad_input.CASES)
async def test_bad_input(name: str, edge: FakeEdge) -> None:
    setup = contract.Setup(make=lambda: Client(f"unix:{edge.socket_path}"), image="debian")
    await client_bad_input.check_case(name, setup)
