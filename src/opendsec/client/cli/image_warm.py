# SPDX-License-Identifier: Apache-2.0
"""`dsec image warm`: load content before it is needed."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c


def warm(
    name: c.Image,
    trace: Annotated[bool, typer.Option("--trace", help="Only what the recorded traces say, not all.")] = False,
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Load an image's content now."""
    from opendsec.api.images import ImageInfo
    from opendsec.client.cli.progress import work

    async def warming() -> ImageInfo:
        async with c.connect(address) as client:
            with work(f"warming {name}", quiet=json) as tell:
                return await client.images.warm(name, trace=trace, progress=tell)

    done = c.execute(warming(), json=json)
    if json:
        c.print_json(done)
    else:
        print(f"image {done.name} is warm")
