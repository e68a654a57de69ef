# SPDX-License-Identifier: Apache-2.0
"""`dsec create`: sandboxes that stay."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c


def create(
    image: c.Image,
    count: Annotated[int, typer.Option("--count", "-n", help="How many, by one request.")] = 1,
    cpu: c.Cpu = 1.0,
    memory: c.Memory = "512MiB",
    disk: c.Disk = "1GiB",
    pids: c.Pids = 512,
    layer: c.Layers = None,
    label: c.Labels = None,
    policy: c.Policy = "default",
    backend: c.Backend = c.BackendName.container,
    snapshot: c.Snapshot = "",
    hardware: c.Hardware = False,
    hostname: c.Hostname = "",
    ttl: c.Ttl = None,
    ttl_idle: c.TtlIdle = None,
    env: c.Env = None,
    user: c.User = None,
    action_id: Annotated[str | None, typer.Option("--action-id", help="The same id never creates twice.")] = None,
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Create sandboxes and print their ids, one a line; a slot that failed says why on standard error."""

    async def work() -> int:
        spec = c.spec(
            image,
            cpu=cpu,
            memory=memory,
            disk=disk,
            pids=pids,
            layers=layer,
            labels=label,
            policy=policy,
            hostname=hostname,
            ttl=ttl,
            ttl_idle=ttl_idle,
            env=env,
            user=user,
            backend=backend,
            snapshot=snapshot,
            hardware=hardware,
        )
        async with c.connect(address) as client:
            slots = await client.create_many(spec, count, action_id=action_id)
        return c.show_slots(slots, json)

    raise typer.Exit(c.execute(work(), json=json))
