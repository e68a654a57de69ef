# SPDX-License-Identifier: Apache-2.0
"""`dsec image ls`: images and layers."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c


def ls(
    layers: Annotated[bool, typer.Option("--layers", help="The layers instead.")] = False,
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """List images, or layers."""
    from opendsec.api.images import ImageList
    from opendsec.api.units import format_bytes

    async def work() -> ImageList:
        async with c.connect(address) as client:
            return await client.images.list()

    listed = c.execute(work(), json=json)
    if json:
        c.print_json(listed)
    elif layers:
        c.table(
            ("DIGEST", "KIND", "SIZE", "AGE", "NAMES"),
            (
                (one.digest[:19], one.kind, format_bytes(one.meta_bytes + one.data_bytes), c.ago(one.created_at), " ".join(one.names))
                for one in listed.layers
            ),
        )
    else:
        c.table(
            ("IMAGE", "LAYERS", "SIZE", "AGE", "USER", "WORKDIR"),
            (
                (one.name, str(len(one.layers)), format_bytes(one.size_bytes), c.ago(one.created_at), one.config.user, one.config.workdir)
                for one in listed.images
            ),
        )
