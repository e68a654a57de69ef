# SPDX-License-Identifier: Apache-2.0
"""Commands of one handle, with a clock that the test moves, under both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from tests.integration.exec.bench import Bench, small_bench


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The edge runs on uvloop, which treats descriptors in its own way; nothing here may depend on which loop it is."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="module", autouse=True)
def libuv() -> None:
    """libuv opens a pipe for signals with its first loop and keeps it for the life of the process: that is no leak of a test."""
    uvloop.new_event_loop().close()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with small_bench() as bench:
        yield bench
