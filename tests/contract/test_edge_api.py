# SPDX-License-Identifier: Apache-2.0
"""The edge's contract on the wire, over each kind of edge."""

from __future__ import annotations

import pytest

from opendsec.testing.contracts import edge_api, edge_once
from opendsec.testing.contracts.edge_api import Edge


@pytest.mark.parametrize("name", edge_api.CHECKS)
async def test_contract(name: str, edge: Edge) -> None:
    await edge_api.CHECKS[name](edge)


@pytest.mark.parametrize("name", edge_once.CHECKS)
async def test_changes_happen_once(name: str, edge: Edge) -> None:
    await edge_once.CHECKS[name](edge)
