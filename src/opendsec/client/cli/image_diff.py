# SPDX-License-Identifier: Apache-2.0
"""`dsec image diff`: how two trees differ."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c

_MARKS = {"added": "A", "removed": "D", "changed": "C"}


def diff(
    a: Annotated[str, typer.Argument(help="An image, a layer (kind:name@version) or a digest.")],
    b: Annotated[str, typer.Argument(help="The other one.")],
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """List paths that were added (A), removed (D) or changed (C) from one image or layer to another."""
    from opendsec.api.images import DiffReport
    from opendsec.api.units import format_bytes

    async def work() -> DiffReport:
        async with c.connect(address) as client:
            return await client.images.diff(a, b)

    found = c.execute(work(), json=json)
    if json:
        c.print_json(found)
        return
    for one in found.entries:
        detail = ", ".join(word for word in (format_bytes(one.size_bytes) if one.kind == "file" else one.kind, one.what) if word)
        print(f"{_MARKS[one.change]} {c.printable(one.path)} ({detail})")
    if found.truncated:
        print("… and more: the list was cut", flush=True)
