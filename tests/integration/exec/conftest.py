# SPDX-License-Identifier: Apache-2.0
"""Commands of one handle, with a clock that the test moves, under both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from opendsec.edge.processes import Defaults, Execution, ProcessTable
from opendsec.testing.fakes.local_handle import LocalHandle
from opendsec.testing.fakes.timing import ManualClock
from tests.integration.exec.bench import Bench, Events


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The edge runs on uvloop, which treats descriptors in its own way; nothing here may depend on which loop it is."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="module", autouse=True)
def libuv() -> None:
    """libuv opens a pipe for signals with its first loop and keeps it for the life of the process: that is no leak of a test."""
    uvloop.new_event_loop().close()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    clock, events = ManualClock(), Events()
    execution = Execution(emit=events, clock=clock)
    handle = LocalHandle()
    table = ProcessTable(execution, handle, Defaults(env={"FROM": "sandbox", "BOTH": "sandbox"}))
    bench = Bench(execution, handle, table, clock, events)
    yield bench
    await bench.close()
