# SPDX-License-Identifier: Apache-2.0
"""The contract of images over the fake edge."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec.client.aio import Client
from opendsec.testing.contracts import images as contract
from opendsec.testing.fakes.edge import FakeEdge


@pytest.mark.parametrize("name", contract.CHECKS)
async def test_contract(name: str, edge: FakeEdge, tmp_path: Path) -> None:
    await contract.CHECKS[name](contract.Setup(make=lambda: Client(f"unix:{edge.socket_path}"), image="debian", folder=tmp_path))
