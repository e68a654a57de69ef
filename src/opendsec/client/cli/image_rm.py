# SPDX-License-Identifier: Apache-2.0
"""`dsec image rm`: forget names."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c


def rm(
    name: Annotated[list[str], typer.Argument(metavar="NAME...", help="Images, or layers as kind:name@version.")],
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Forget images. Their content goes with `dsec image gc` once nothing uses it."""

    async def work() -> None:
        async with c.connect(address) as client:
            for one in name:
                await client.images.remove(one)

    c.execute(work(), json=json)
    if json:
        c.print_json({"removed": name})
