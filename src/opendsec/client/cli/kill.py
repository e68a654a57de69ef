# SPDX-License-Identifier: Apache-2.0
"""`dsec kill`: end sandboxes, or signal a process in one."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c


def kill(
    sandbox: Annotated[list[str] | None, typer.Argument(metavar="SANDBOX...", help="Ids of sandboxes.")] = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Every sandbox of the edge, or all with the labels.")] = False,
    label: c.Labels = None,
    process: Annotated[str | None, typer.Option("--process", "-p", help="Only this process of the one sandbox.")] = None,
    signal: Annotated[str, typer.Option("--signal", "-s", help="Name or number, with --process.")] = "KILL",
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """End sandboxes and everything in them."""
    import asyncio
    import signal as signals

    async def work() -> int:
        ids = list(sandbox or [])
        if not ids and not every and not label:
            c.refuse("name sandboxes, or give --all", "sandbox")
        async with c.connect(address) as client:
            if process is not None:
                if len(ids) != 1:
                    c.refuse("--process needs exactly one sandbox", "sandbox")
                name = signal.upper().removeprefix("SIG")
                number = int(name) if name.isdigit() else int(signals.Signals.__members__.get(f"SIG{name}", 0))
                if not number:
                    c.refuse(f"must be the name or number of a signal, such as TERM or 15; got {signal!r}", "signal")
                info = await client.sandbox(ids[0]).process(process).signal(number, tree=True)
                if json:
                    c.print_json(info)
                return 0
            if every or label:
                living = await client.list(labels=c.pairs(label, "label"))
                ids += [box.id for box in living if box.info is not None and box.info.state in ("running", "paused")]
            done = await asyncio.gather(*(client.sandbox(one).kill() for one in ids), return_exceptions=True)
        failed = {one: error for one, error in zip(ids, done, strict=True) if error is not None}
        if json:
            killed = [one for one in ids if one not in failed]
            c.print_json({"killed": killed, "failed": {one: str(error) for one, error in failed.items()}})
        return c.tell_failed(failed, quiet=json)

    raise typer.Exit(c.execute(work(), json=json))
