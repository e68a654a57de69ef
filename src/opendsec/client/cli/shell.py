# SPDX-License-Identifier: Apache-2.0
"""`dsec shell`: a terminal in a sandbox."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c


def shell(
    target: Annotated[str, typer.Argument(metavar="SANDBOX|IMAGE", help="A sandbox; or an image: then a new sandbox, ended at the end.")],
    command: Annotated[list[str] | None, typer.Argument(help="Instead of the user's shell.")] = None,
    cpu: c.Cpu = 1.0,
    memory: c.Memory = "512MiB",
    disk: c.Disk = "1GiB",
    layer: c.Layers = None,
    backend: c.Backend = c.BackendName.container,
    env: c.Env = None,
    user: c.User = None,
    workdir: c.Cwd = None,
    address: c.Address = None,
) -> None:
    """Open a terminal in a sandbox. The exit code is the shell's. If input is no terminal, the shell reads it as a script."""
    import os

    from opendsec.api.ids import SANDBOX
    from opendsec.client._core import CommandOptions
    from opendsec.client.aio import Sandbox

    async def work() -> int:
        given = {"TERM": os.environ.get("TERM", "xterm"), **c.environment(env)}
        options: CommandOptions = {"env": given, "user": user, "cwd": workdir}
        # The end of a file or pipe has no place in a terminal: it is a key there, which a shell that is just starting throws away.
        tty = os.isatty(0)
        flag = " -i" if tty else ""
        words = command or ["/bin/sh", "-c", f"if command -v bash >/dev/null; then exec bash{flag}; else exec sh{flag}; fi"]

        async def inside(box: Sandbox) -> int:
            return await c.run_in(box, words, options, interactive=True, tty=tty, json=False)

        async with c.connect(address) as client:
            if target.startswith(f"{SANDBOX}_"):
                return await inside(client.sandbox(target))
            spec = c.spec(
                target,
                cpu=cpu,
                memory=memory,
                disk=disk,
                pids=512,
                layers=layer,
                labels=None,
                policy="default",
                hostname="",
                ttl=None,
                ttl_idle=c.ABANDONED_S,
                backend=backend,
            )
            async with await client.create(spec) as box:
                return await inside(box)

    raise typer.Exit(c.execute(work()))
