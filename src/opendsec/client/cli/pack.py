# SPDX-License-Identifier: Apache-2.0
"""`dsec pack`: a new environment from a sandbox."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from opendsec.client.cli import common as c


class PackKind(StrEnum):
    workspace = "workspace"
    toolkit = "toolkit"


def pack(
    sandbox: c.SandboxId,
    name: Annotated[str, typer.Argument(metavar="NAME@VERSION", help="Of the layer; the image is called NAME:VERSION.")],
    kind: Annotated[PackKind, typer.Option("--kind", "-k", help="What the layer is.")] = PackKind.workspace,
    no_scrub: Annotated[bool, typer.Option("--no-scrub", help="Keep histories, caches, credentials and /tmp too.")] = False,
    scrub: Annotated[list[str] | None, typer.Option("--scrub", help="Shell pattern of paths to leave out; repeat for more.")] = None,
    keep: Annotated[list[str] | None, typer.Option("--keep", help="Shell pattern of paths to keep in any case; repeat for more.")] = None,
    package: Annotated[list[str] | None, typer.Option("--package", "-p", help="Warn if a cache holds it; repeat for more.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings; nothing is kept then.")] = False,
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Make what was written in a sandbox a layer, and an image of it and what is below. The sandbox goes on running."""
    from opendsec.api.images import PackResult
    from opendsec.api.units import format_bytes
    from opendsec.client.cli.progress import steps

    async def work() -> PackResult:
        async with c.connect(address) as client:
            with steps(f"packing {sandbox}", quiet=json):
                return await client.sandbox(sandbox).pack(
                    name,
                    kind=kind.value,
                    scrub=not no_scrub,
                    scrub_paths=scrub or (),
                    keep_paths=keep or (),
                    packages=package or (),
                    fail_on_warnings=strict,
                )

    made = c.execute(work(), json=json)
    if json:
        c.print_json(made)
        return
    for one in made.scrubbed:
        print(f"left out  {one.rule:<20} {c.printable(one.path)} {c.printable(one.message)}")
    for one in made.warnings:
        print(f"warning   {one.rule:<20} {c.printable(one.path)} {c.printable(one.message)}")
    size = format_bytes(made.layer.meta_bytes + made.layer.data_bytes)
    print(f"image {made.image.name}: layer {', '.join(made.layer.names)}, {size}; stood still for {made.frozen_ms:.1f} ms")
