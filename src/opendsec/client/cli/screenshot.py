# SPDX-License-Identifier: Apache-2.0
"""`dsec screenshot`: what a machine shows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opendsec.client.cli import common as c


def screenshot(
    sandbox: c.SandboxId,
    file: Annotated[Path, typer.Argument(help="Where to put the PNG; `-` is standard output.")] = Path("screenshot.png"),
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Save a picture of a machine's screen."""
    import sys

    async def work() -> bytes:
        async with c.connect(address) as client:
            return await client.sandbox(sandbox).screen.png()

    image = c.execute(work(), json=json)
    if str(file) == "-":
        sys.stdout.buffer.write(image)
        return
    file.write_bytes(image)
    if json:
        c.print_json({"file": str(file), "bytes": len(image)})
    else:
        print(file)
