# SPDX-License-Identifier: Apache-2.0
"""A real edge's node in the test's own event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.nodes import NodeEdge, node_edge


@pytest.fixture
async def edge(request: pytest.FixtureRequest, test_images: Path) -> AsyncIterator[NodeEdge]:
    """On btrfs; `ON_BOTH` is for what depends on the driver."""
    async with node_edge(test_images, driver=getattr(request, "param", "btrfs")) as edge:
        yield edge
