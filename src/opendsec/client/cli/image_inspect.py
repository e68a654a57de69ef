# SPDX-License-Identifier: Apache-2.0
"""`dsec image inspect`: what an image is made of, and how much of it is here."""

from __future__ import annotations

import typer

from opendsec.client.cli import common as c


def inspect(
    name: c.Image,
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Show an image's config and layers, and how much of each is on this machine."""
    from opendsec.api.images import ImageDetail
    from opendsec.api.units import format_bytes

    async def work() -> ImageDetail:
        async with c.connect(address) as client:
            return await client.images.inspect(name)

    found = c.execute(work(), json=json)
    if json:
        c.print_json(found)
        raise typer.Exit(0)
    image, config = found.image, found.image.config
    facts = (
        ("image", image.name),
        ("source", found.source),
        ("size", format_bytes(image.size_bytes)),
        ("user", config.user),
        ("workdir", config.workdir),
        ("entrypoint", " ".join(config.entrypoint)),
        ("command", " ".join(config.cmd)),
        ("environment", " ".join(f"{key}={value}" for key, value in config.env.items())),
    )
    for label, value in facts:
        if value:
            print(f"{label:<12} {c.printable(value)}")
    for note in found.notes:
        print(f"{'note':<12} {c.printable(note)}")
    print()
    c.table(
        ("LAYER", "KIND", "SIZE", "HERE", "FROM", "CHUNKS", "TRACES", "NAMES"),
        (
            (
                one.layer.digest[:19],
                one.layer.kind,
                format_bytes(one.layer.meta_bytes + one.layer.data_bytes),
                "all" if one.complete else f"{100 * one.local_bytes // max(1, one.layer.data_bytes)} %",
                one.origin or "-",
                str(one.chunks),
                str(one.traces),
                " ".join(one.layer.names),
            )
            for one in found.layers
        ),
    )
