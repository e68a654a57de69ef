# SPDX-License-Identifier: Apache-2.0
"""`dsec fork`: live copies of a machine."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c


def fork(
    sandbox: c.SandboxId,
    count: Annotated[int, typer.Option("--count", "-n", help="How many copies.")] = 1,
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Copy a running machine with all that runs in it, and print the ids of the copies, one a line."""

    async def work() -> int:
        async with c.connect(address) as client:
            slots = await client.sandbox(sandbox).fork(count)
        return c.show_slots(slots, json)

    raise typer.Exit(c.execute(work(), json=json))
