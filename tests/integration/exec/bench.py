# SPDX-License-Identifier: Apache-2.0
"""What the tests of commands share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from msgspec.structs import replace

from opendsec.api.exec import Command, ExecEvent, ExecResult
from opendsec.edge.process import Process
from opendsec.edge.processes import Defaults, Execution, ProcessTable
from opendsec.edge.retention import Retention
from opendsec.edge.sessions import SessionTable
from opendsec.testing.fakes.local_handle import LIMITS, LocalHandle
from opendsec.testing.fakes.timing import ManualClock
from opendsec.testing.waiting import eventually as eventually


class Events:
    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, str | int | float | bool | None]]] = []

    def __call__(self, kind: str, sandbox_id: str | None = None, **data: str | int | float | bool | None) -> None:
        assert sandbox_id is not None
        self.seen.append((kind, data))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.seen]


class Bench:
    def __init__(self, execution: Execution, handle: LocalHandle, table: ProcessTable, clock: ManualClock, events: Events) -> None:
        self.execution, self.handle, self.table, self.clock, self.events = execution, handle, table, clock, events
        self.sessions = SessionTable(table)

    async def sh(self, text: str, **fields: object) -> ExecResult:
        return await self.table.run(self.command(text, **fields))

    async def start(self, text: str, **fields: object) -> Process:
        return await self.table.start(self.command(text, **fields))

    def command(self, text: str, **fields: object) -> Command:
        command = Command(shell=text, **fields)  # type: ignore[arg-type]
        command.check()
        return command

    async def output(self, process: Process, text: bytes) -> None:
        """Until it has written `text` to stdout."""
        await eventually(lambda: text in process.stdout.read_from(0, 1 << 20)[0])

    async def close(self, *, shared: bool = False) -> None:
        self.table.begin_kill("the test is over")
        await self.handle.destroy()
        self.sessions.close()
        self.table.close()
        self.table.forget_all()
        if not shared:
            await self.execution.close()


@asynccontextmanager
async def small_bench(
    *,
    retention: Retention | None = None,
    on_active: Callable[[int], None] = lambda count: None,
    memory_bytes: int = LIMITS.memory_bytes,
    pids: int = LIMITS.pids,
    open_files: int = LIMITS.open_files,
    share: Bench | None = None,
) -> AsyncIterator[Bench]:
    """A bench with other bounds. `share`: on the same edge as that one."""
    clock, events = ManualClock(), Events()
    execution = share.execution if share else Execution(emit=events, clock=clock, retention=retention)
    handle = LocalHandle(limits=replace(LIMITS, memory_bytes=memory_bytes, pids=pids, open_files=open_files))
    table = ProcessTable(execution, handle, Defaults(env={"FROM": "sandbox", "BOTH": "sandbox"}), on_active=on_active)
    bench = Bench(execution, handle, table, clock, events)
    try:
        yield bench
    finally:
        await bench.close(shared=share is not None)


async def collect(events: AsyncIterator[ExecEvent]) -> list[ExecEvent]:
    return [event async for event in events]


def data_of(events: list[ExecEvent], stream: str = "stdout") -> bytes:
    return b"".join(event.data for event in events if event.kind == "output" and event.stream == stream)
