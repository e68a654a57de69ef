# SPDX-License-Identifier: Apache-2.0
"""The edge's commands and sessions over a channel to a guestd on this machine, with a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest
import uvloop

from opendsec.api.exec import Command, ExecResult, SessionRequest, SessionRun
from opendsec.edge.process import Process
from opendsec.edge.processes import Defaults, Execution, ProcessTable
from opendsec.edge.sessions import SessionTable
from opendsec.runtime.backend import Handle
from opendsec.testing.contracts.backend import Setup
from opendsec.testing.fakes.timing import ManualClock
from tests.hostguest import HostGuestBackend, HostGuestHandle


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="module", autouse=True)
def libuv() -> None:
    """libuv opens a pipe for signals with its first loop and keeps it for the life of the process: that is no leak of a test."""
    uvloop.new_event_loop().close()


class GuestBench:
    """`handle`: the guest. `table`, `sessions`: the edge's."""

    def __init__(self, handle: HostGuestHandle) -> None:
        self.handle, self.clock = handle, ManualClock()
        self.execution = Execution(clock=self.clock)
        self.table = ProcessTable(self.execution, cast(Handle, handle), Defaults(cwd="/tmp"))
        self.sessions = SessionTable(self.table)

    def command(self, text: str, **fields: object) -> Command:
        return Command(shell=text, **fields)  # type: ignore[arg-type]

    async def sh(self, text: str, **fields: object) -> ExecResult:
        return await self.table.run(self.command(text, **fields))

    async def start(self, text: str, **fields: object) -> Process:
        return await self.table.start(self.command(text, **fields))

    async def shell(self) -> Callable[..., asyncio.Future[ExecResult]]:
        info = await self.sessions.open(SessionRequest())

        def run(text: str, **fields: object) -> asyncio.Future[ExecResult]:
            return asyncio.ensure_future(self.sessions.run(info.id, SessionRun(shell=text, **fields)))  # type: ignore[arg-type]

        return run

    async def close(self) -> None:
        self.table.begin_kill("the test is over")
        await self.handle.destroy()
        self.sessions.close()
        self.table.close()
        self.table.forget_all()
        await self.execution.close()


@pytest.fixture
async def bench() -> AsyncIterator[GuestBench]:
    async def make() -> HostGuestBackend:
        return HostGuestBackend()

    setup = Setup(make=make, layers=(), murder=lambda handle: None)  # type: ignore[arg-type]
    made = GuestBench(await HostGuestBackend().create(setup.placement()))
    yield made
    await made.close()
