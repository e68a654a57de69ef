# SPDX-License-Identifier: Apache-2.0
"""`dsec image pull`: an image from a registry, a file or a store."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c


def pull(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="REF",
            help="docker://HOST/NAME:TAG, oci:/PATH:TAG, docker-archive:/PATH[:NAME:TAG] or store:STORE/NAME.",
        ),
    ],
    name: Annotated[str, typer.Option("--name", "-n", help="What to call it here; default: its name there, without the host.")] = "",
    platform: Annotated[str, typer.Option("--platform", help="Such as linux/amd64; default: this machine's.")] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="A registry without TLS, or with a certificate nobody signed.")] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Of a store: load all content now, not when it is first read.")] = False,
    token: c.Token = "",
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Bring an image here. From a store only the metadata comes; content follows when it is first read."""
    from opendsec.api.images import ImageInfo
    from opendsec.api.units import format_bytes
    from opendsec.client.cli.progress import work

    async def pulling() -> ImageInfo:
        async with c.connect(address) as client:
            with work(f"pulling {reference}", quiet=json) as tell:
                return await client.images.pull(
                    c.local_reference(reference),
                    name=name,
                    platform=platform,
                    tls_verify=not insecure,
                    lazy=not whole,
                    token=token,
                    progress=tell,
                )

    made = c.execute(pulling(), json=json)
    if json:
        c.print_json(made)
    else:
        print(f"image {made.name}: {c.layers_of(len(made.layers))}, {format_bytes(made.size_bytes)}")
