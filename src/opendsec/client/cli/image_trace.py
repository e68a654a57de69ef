# SPDX-License-Identifier: Apache-2.0
"""`dsec image trace`: record what a program reads."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c


def trace(
    name: c.Image,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="A program and its arguments; one word is shell text.")],
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds.")] = 600.0,
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Record which content a command reads in a fresh sandbox of an image, in order. The next cold start loads it in that order."""
    from opendsec.api.images import TraceInfo
    from opendsec.api.units import format_bytes

    async def tracing() -> TraceInfo:
        argv = command if len(command) > 1 else ["/bin/sh", "-c", command[0]]
        async with c.connect(address) as client:
            return await client.images.trace(name, argv, timeout_s=timeout)

    made = c.execute(tracing(), json=json)
    if json:
        c.print_json(made)
    else:
        print(f"image {made.name}: {made.chunks} chunks, {format_bytes(made.bytes)} in the trace; exit code {made.exit_code}")
