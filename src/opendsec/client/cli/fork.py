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
    import sys

    from opendsec.api.errors import OpenDSecError

    async def work() -> int:
        async with c.connect(address) as client:
            slots = await client.sandbox(sandbox).fork(count)
        failed = [slot for slot in slots if isinstance(slot, OpenDSecError)]
        if json:
            c.print_json([{"error": slot.body()} if isinstance(slot, OpenDSecError) else {"sandbox": slot.info} for slot in slots])
            return c.FAILED if failed else 0
        for slot in slots:
            if not isinstance(slot, OpenDSecError):
                print(slot.id)
        for text in sorted({str(error) for error in failed}):
            print(f"dsec: {sum(str(error) == text for error in failed)} of {count} failed: {text}", file=sys.stderr)
        return c.FAILED if failed else 0

    raise typer.Exit(c.execute(work(), json=json))
