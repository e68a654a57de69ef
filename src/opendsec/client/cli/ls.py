# SPDX-License-Identifier: Apache-2.0
"""`dsec ls`: the sandboxes of an edge."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c


def ls(
    label: c.Labels = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Ended ones too.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Ids only.")] = False,
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """List sandboxes."""
    from opendsec.api.sandboxes import SandboxList
    from opendsec.api.units import format_bytes

    async def work() -> SandboxList:
        async with c.connect(address) as client:
            boxes = await client.list(labels=c.pairs(label, "label"), state="all" if every else None)
        return SandboxList(sandboxes=tuple(box.info for box in boxes if box.info is not None))

    listed = c.execute(work(), json=json)
    if json:
        c.print_json(listed)
    elif quiet:
        for info in listed.sandboxes:
            print(info.id)
    else:
        c.table(
            ("SANDBOX", "STATE", "BACKEND", "IMAGE", "CPU", "MEMORY", "AGE", "LABELS"),
            (
                (
                    info.id,
                    info.state,
                    info.backend,
                    info.image,
                    f"{info.limits.cpu:g}",
                    format_bytes(info.limits.memory_bytes),
                    c.ago(info.created_at),
                    " ".join(f"{key}={value}" for key, value in info.labels.items()),
                )
                for info in listed.sandboxes
            ),
        )
