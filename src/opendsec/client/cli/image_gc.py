# SPDX-License-Identifier: Apache-2.0
"""`dsec image gc`: remove what nothing uses."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would go.")] = False,
    grace: Annotated[
        float | None, typer.Option("--grace", help="Seconds since the layer came that it is kept in any case; an hour.")
    ] = None,
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Remove layers that no name and no sandbox uses, and whose grace period is over."""
    from opendsec.api.images import Collected
    from opendsec.api.units import format_bytes

    async def work() -> Collected:
        async with c.connect(address) as client:
            return await client.images.gc(dry_run=dry_run, grace_s=grace)

    done = c.execute(work(), json=json)
    if json:
        c.print_json(done)
    else:
        print(f"{c.layers_of(len(done.digests))}, {format_bytes(done.freed_bytes)} {'would be' if done.dry_run else 'were'} freed")
