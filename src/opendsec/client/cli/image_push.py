# SPDX-License-Identifier: Apache-2.0
"""`dsec image push`: an image to a registry, a file or a store."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c


def push(
    name: c.Image,
    reference: Annotated[
        str,
        typer.Argument(metavar="REF", help="docker://HOST/NAME:TAG, oci:/PATH:TAG, docker-archive:/PATH[:NAME:TAG] or store:STORE/NAME."),
    ],
    insecure: Annotated[bool, typer.Option("--insecure", help="A registry without TLS, or with a certificate nobody signed.")] = False,
    token: c.Token = "",
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Send an image elsewhere: as OCI layers that Docker runs too, or to a store as layers that load on demand."""
    from opendsec.api.images import ImageInfo
    from opendsec.client.cli.progress import work

    async def pushing() -> ImageInfo:
        async with c.connect(address) as client:
            with work(f"pushing {name}", quiet=json) as tell:
                return await client.images.push(name, c.local_reference(reference), tls_verify=not insecure, token=token, progress=tell)

    sent = c.execute(pushing(), json=json)
    if json:
        c.print_json(sent)
    else:
        print(f"image {sent.name}: {c.layers_of(len(sent.layers))} pushed to {reference}")
