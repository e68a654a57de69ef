# SPDX-License-Identifier: Apache-2.0
"""What a command costs the edge besides the backend's own work: pipes, bookkeeping, result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from opendsec.api.exec import Command
from opendsec.api.sandboxes import Usage
from opendsec.edge.processes import Defaults, Execution, ProcessTable
from opendsec.runtime.backend import Counters, ExecPlan, Exit, FileAccess, Record, Running
from opendsec.testing.fakes.local_handle import LIMITS

BOUND_S = 0.0003  # of CPU time a command; some 0.08 ms here
SANDBOX = "sb_0000000000000000"


class Ended:
    """A command that ends at once."""

    pid, terminal = 1, None

    def __init__(self) -> None:
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.exited.set_result(Exit(code=0))

    def signal(self, number: int, *, tree: bool = False, since_mark: bool = False) -> None: ...
    def mark(self) -> None: ...
    def kill_since_mark(self) -> None: ...
    def resize(self, rows: int, columns: int) -> None: ...
    def kill_tree(self) -> None: ...
    def alive_children(self) -> bool:
        return False

    async def release(self) -> None: ...


class Nothing:
    """A sandbox that does nothing."""

    sandbox_id = SANDBOX

    def __init__(self) -> None:
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.record = Record(
            sandbox_id=SANDBOX, backend="", pid=1, start_time=0, boot_id="", uid_base=0, scratch="", limits=LIMITS, layers=()
        )

    @property
    def files(self) -> FileAccess:
        raise NotImplementedError

    def alive(self) -> bool:
        return True

    async def exec(
        self, plan: ExecPlan, *, stdin: int | None, stdout: int | None, stderr: int | None, extra: Sequence[int] = ()
    ) -> Running:
        return Ended()

    def counters(self) -> Counters:
        return Counters()

    def usage(self) -> Usage:
        return Usage()

    def processes(self) -> int:
        return 0

    async def destroy(self) -> None: ...


async def test_overhead_of_a_command() -> None:
    execution = Execution()
    table = ProcessTable(execution, Nothing(), Defaults())
    best = 1.0
    for _ in range(8):  # the first fills the shelf: the others pay for what is forgotten, too
        began = time.process_time()
        for _ in range(300):
            await table.run(Command(shell="true"))
        best = min(best, (time.process_time() - began) / 300)
    table.close()
    await execution.close()
    assert best < BOUND_S, f"{best * 1e6:.0f} µs a command"
