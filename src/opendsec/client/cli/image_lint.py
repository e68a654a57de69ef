# SPDX-License-Identifier: Apache-2.0
"""`dsec image lint`: leaked answers."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c


def lint(
    name: Annotated[str, typer.Argument(help="An image, a layer (kind:name@version) or a digest.")],
    package: Annotated[list[str] | None, typer.Option("--package", "-p", help="Look for it in caches; repeat for more.")] = None,
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Warn of what would give an answer away: git objects newer than HEAD, reflogs, caches of packages, core dumps. Exit code 1 if so."""
    from opendsec.api.images import LintReport

    async def work() -> LintReport:
        async with c.connect(address) as client:
            return await client.images.lint(name, packages=package or ())

    found = c.execute(work(), json=json)
    c.findings(found.findings, found, json=json)
    raise typer.Exit(1 if found.findings else 0)
