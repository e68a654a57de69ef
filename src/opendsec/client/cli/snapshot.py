# SPDX-License-Identifier: Apache-2.0
"""`dsec snapshot create|ls|rm`: what machines were at one moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from opendsec.client.cli import common as c


def create(
    sandbox: c.SandboxId,
    name: Annotated[str, typer.Argument(help="A new name; the snapshot's id if not given.")] = "",
    disk_only: Annotated[bool, typer.Option("--disk-only", help="Without memory: what is made of it boots.")] = False,
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Keep what a machine is now. It goes on running. `dsec create --snapshot NAME` makes another of it."""
    from opendsec.api.snapshots import SnapshotInfo

    async def work() -> SnapshotInfo:
        async with c.connect(address) as client:
            return await client.sandbox(sandbox).snapshot(name, memory=not disk_only)

    made = c.execute(work(), json=json)
    c.show(made, json, lambda: print(made.name))


def ls(json: c.Json = False, address: c.Address = None) -> None:
    """List snapshots."""
    from opendsec.api.snapshots import SnapshotInfo, SnapshotList
    from opendsec.api.units import format_bytes

    async def work() -> Sequence[SnapshotInfo]:
        async with c.connect(address) as client:
            return await client.snapshots.list()

    found = SnapshotList(tuple(c.execute(work(), json=json)))
    rows = [
        (
            one.name,
            one.backend,
            "disk and memory" if one.memory else "disk",
            one.image,
            f"{one.limits.cpu:g}",
            format_bytes(one.limits.memory_bytes),
            format_bytes(one.limits.disk_bytes),
            format_bytes(one.stored_bytes),
            c.ago(one.created_at),
        )
        for one in found.snapshots
    ]
    headers = ("SNAPSHOT", "BACKEND", "KEEPS", "IMAGE", "CPU", "MEMORY", "DISK", "STORED", "AGE")
    c.show(found, json, lambda: c.table(headers, rows))


def rm(
    name: Annotated[list[str], typer.Argument(metavar="SNAPSHOT...", help="Names or ids.")],
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Forget snapshots. Sandboxes that were made of them stay."""

    async def work() -> None:
        async with c.connect(address) as client:
            for one in name:
                await client.snapshots.remove(one)

    c.execute(work(), json=json)
    if json:
        c.print_json({"removed": name})
