# SPDX-License-Identifier: Apache-2.0
"""Wrong requests over HTTP, to one edge of each kind."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from benchmarks import spec
from opendsec.testing.contracts import edge_bad_input
from opendsec.testing.contracts.edge_api import Edge
from opendsec.testing.contracts.edge_bad_input import World
from tests.contract.conftest import KINDS, running_edge
from tests.leaks import LeakDetector


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=KINDS)
async def target(request: pytest.FixtureRequest, leak_detector: LeakDetector) -> AsyncGenerator[tuple[Edge, World], None]:
    # The edge of a module makes these when first needed and ends them with itself; `check_case` looks for what matters.
    leak_detector.allow("descriptors", r"journal\.db|socket:|pipe:")
    leak_detector.allow("threads", r"asyncio_|files")
    async with running_edge(request.param) as edge:
        yield edge, await World.make(edge)


def test_there_are_enough_cases() -> None:
    assert spec.load()["input.cases"].holds(len(edge_bad_input.CASES))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", edge_bad_input.CASES)
async def test_bad_input(name: str, target: tuple[Edge, World]) -> None:
    """`input.unclear` of the specification: a failure here is one."""
    await edge_bad_input.check_case(name, *target)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.slow
async def test_oversize(target: tuple[Edge, World]) -> None:
    edge, world = target
    await edge_bad_input.check_oversize(edge)
    response = await edge.client.post(f"{world.names['box']}/run", content=edge_bad_input.stdin_too_long())
    assert (response.status_code, response.json()["error"]["field"]) == (400, "stdin")
