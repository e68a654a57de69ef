# SPDX-License-Identifier: Apache-2.0
"""`dsec run`: a sandbox for one command."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c


def run(
    image: c.Image,
    command: Annotated[list[str], typer.Argument(help="Program and arguments, or one word of shell text.")],
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
    env: c.Env = None,
    user: c.User = None,
    workdir: c.Cwd = None,
    timeout: c.Timeout = None,
    interactive: c.Interactive = False,
    tty: c.Tty = False,
    keep: Annotated[bool, typer.Option("--keep", help="Do not end the sandbox; its id goes to standard error.")] = False,
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Create a sandbox, run one command in it, end it. The exit code is the command's."""
    import sys

    from opendsec.client._core import CommandOptions

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
            ttl=None,
            ttl_idle=None if keep else c.ABANDONED_S,
            env=env,
            user=user,
            backend=backend,
            snapshot=snapshot,
            hardware=hardware,
        )
        options: CommandOptions = {"cwd": workdir, "timeout_s": timeout}
        async with c.connect(address) as client:
            box = await client.create(spec)
            if keep:
                print(box.id, file=sys.stderr)
                return await c.run_in(box, command, options, interactive=interactive, tty=tty, json=json)
            async with box:
                return await c.run_in(box, command, options, interactive=interactive, tty=tty, json=json)

    raise typer.Exit(c.execute(work(), json=json))
