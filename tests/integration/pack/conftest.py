# SPDX-License-Identifier: Apache-2.0
"""A real edge's node in the test's own event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.nodes import NodeEdge, node_edge


@pytest.fixture(params=["btrfs", "tmpfs"])
async def edge(request: pytest.FixtureRequest, test_images: Path) -> AsyncIterator[NodeEdge]:
    async with node_edge(test_images, driver=request.param) as edge:
        yield edge
