# SPDX-License-Identifier: Apache-2.0
"""`dsec image compose`: a name for an image with layers on top."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c


def compose(
    name: Annotated[str, typer.Argument(help="Name of the new image.")],
    base: Annotated[str, typer.Argument(help="The image below.")],
    layers: Annotated[list[str], typer.Argument(metavar="LAYER...", help="kind:name@version, lowest first.")],
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Name an ordered list of layers as an image."""
    from opendsec.api.images import ImageInfo

    async def work() -> ImageInfo:
        async with c.connect(address) as client:
            return await client.images.compose(name, base, layers)

    made = c.execute(work(), json=json)
    if json:
        c.print_json(made)
    else:
        print(f"image {made.name}: {c.layers_of(len(made.layers))}")
