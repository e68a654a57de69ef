# SPDX-License-Identifier: Apache-2.0
"""`dsec fn pools`, `dsec fn pool set|resize|rm` and `dsec fn languages`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opendsec.client.cli import common as c
from opendsec.client.cli.fn_run import Reuse

if TYPE_CHECKING:
    from opendsec.api.fn import Language, PoolInfo

Name = Annotated[str, typer.Argument(metavar="POOL", help="Its name.")]


class Device(StrEnum):
    none = "none"
    shared = "shared"
    exclusive = "exclusive"
    mig = "mig"


def pools(json: c.Json = False, address: c.Address = None) -> None:
    """List the pools of members that are kept warm for calls."""

    async def work() -> Sequence[PoolInfo]:
        async with c.connect(address) as client:
            return await client.pools.list()

    _list(c.execute(work(), json=json), json)


def set_(
    name: Name,
    image: Annotated[str, typer.Option("--image", help="Name of an image.")],
    layers: c.Layers = None,
    size: Annotated[int, typer.Option("--size", "-n", help="Members kept ready.")] = 1,
    most: Annotated[int | None, typer.Option("--max", help="Members at most, idle and busy; default: 4, or --size if more.")] = None,
    preload: Annotated[list[str] | None, typer.Option("--preload", help="Module to import beforehand; repeat for more.")] = None,
    warmup: Annotated[Path | None, typer.Option("--warmup", metavar="FILE", help="Python source to run beforehand.")] = None,
    python: Annotated[str, typer.Option("--python", help="The interpreter to keep warm; empty for none.")] = "python3",
    reuse: Annotated[Reuse, typer.Option("--reuse", help="fork: a member serves many calls of one tenant. never: one call.")] = Reuse.fork,
    tenant: Annotated[str, typer.Option("--tenant", help="Whose pool it is.")] = "",
    idle: Annotated[float, typer.Option("--idle", help="Seconds after which members beyond --size go.")] = 60.0,
    memory: Annotated[str, typer.Option("--memory", "-m", help="Of a member: its interpreter and one call.")] = "512MiB",
    cpu: c.Cpu = 1.0,
    user: c.User = None,
    device: Annotated[Device, typer.Option("--device", help="A device for each member.")] = Device.none,
    labels: c.Labels = None,
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Make a pool, or change it to this."""
    from opendsec.api.fn import PoolSpec

    async def work() -> PoolInfo:
        try:
            source = warmup.read_text() if warmup is not None else ""
        except (OSError, UnicodeDecodeError) as error:
            c.refuse(f"cannot read {warmup}: {error}", "warmup")
        spec = PoolSpec(
            name=name,
            image=image,
            layers=tuple(layers or ()),
            size=size,
            max=max(4, size) if most is None else most,
            preload=tuple(preload or ()),
            warmup=source,
            python=python,
            reuse=reuse.value,
            tenant=tenant,
            idle_s=idle,
            memory=memory,
            cpu=cpu,
            user=user or "",
            device=device.value,
            labels=c.pairs(labels, "labels"),
        )
        async with c.connect(address) as client:
            return await client.pools.set(spec)

    _one(c.execute(work(), json=json), json)


def resize(
    name: Name,
    size: Annotated[int | None, typer.Option("--size", "-n", help="Members kept ready.")] = None,
    most: Annotated[int | None, typer.Option("--max", help="Members at most.")] = None,
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Change how many members a pool has. Busy ones end their call first."""

    async def work() -> PoolInfo:
        async with c.connect(address) as client:
            return await client.pools.resize(name, size=size, max=most)

    _one(c.execute(work(), json=json), json)


def rm(name: Name, json: c.Json = False, address: c.Address = None) -> None:
    """Drain a pool and forget it."""

    async def work() -> Sequence[PoolInfo]:
        async with c.connect(address) as client:
            return await client.pools.remove(name)

    left = c.execute(work(), json=json)
    if json:
        c.print_json({"pools": left})


def languages(json: c.Json = False, address: c.Address = None) -> None:
    """List the languages of programs."""

    async def work() -> Sequence[Language]:
        async with c.connect(address) as client:
            return await client.languages()

    known = c.execute(work(), json=json)
    if json:
        c.print_json({"languages": known})
        return
    rows = ((one.name, one.image, one.file, " ".join(one.compile) or ("(warm)" if one.warm else "-"), " ".join(one.run)) for one in known)
    c.table(("LANGUAGE", "IMAGE", "FILE", "COMPILE", "RUN"), rows)


def _list(found: Sequence[PoolInfo], json: bool) -> None:
    if json:
        c.print_json({"pools": found})
        return
    rows = [
        (
            pool.spec.name,
            pool.state,
            f"{pool.spec.size}/{pool.spec.max}",
            *(str(count) for count in (pool.idle, pool.busy, pool.starting, pool.waiting, pool.calls, pool.cold, pool.lost)),
            pool.spec.image,
            pool.spec.reuse,
            pool.message,
        )
        for pool in found
    ]
    headers = ("POOL", "STATE", "SIZE", "IDLE", "BUSY", "STARTING", "WAITING", "CALLS", "COLD", "LOST", "IMAGE", "REUSE", "MESSAGE")
    c.table(headers, rows)


def _one(pool: PoolInfo, json: bool) -> None:
    if json:
        c.print_json(pool)
    else:
        _list([pool], False)
