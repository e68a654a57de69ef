# SPDX-License-Identifier: Apache-2.0
"""`dsec image verify`: is what is here what it should be."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c


def verify(
    name: Annotated[str, typer.Argument(help="An image, a layer (kind:name@version) or a digest.")],
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Read all content that is here and compare it with its checksums. Exit code 1 if something does not match."""
    from opendsec.api.images import LintReport

    async def work() -> LintReport:
        async with c.connect(address) as client:
            return await client.images.verify(name)

    found = c.execute(work(), json=json)
    c.findings(found.findings, found, json=json)
    if not json and not found.findings:
        print(f"{name}: all that is here is as it should be")
    raise typer.Exit(1 if found.findings else 0)
