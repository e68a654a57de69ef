# SPDX-License-Identifier: Apache-2.0
"""`dsec exec`: a command in a living sandbox."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c


def exec_(
    sandbox: c.SandboxId,
    command: Annotated[list[str], typer.Argument(help="Program and arguments, or one word of shell text.")],
    env: c.Env = None,
    user: c.User = None,
    workdir: c.Cwd = None,
    timeout: c.Timeout = None,
    interactive: c.Interactive = False,
    tty: c.Tty = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Print the process id and let it run.")] = False,
    action_id: Annotated[str | None, typer.Option("--action-id", help="The same id never runs twice.")] = None,
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Run a command in a sandbox. The exit code is the command's."""
    from opendsec.client._core import CommandOptions

    async def work() -> int:
        options: CommandOptions = {
            "env": c.environment(env),
            "user": user,
            "cwd": workdir,
            "timeout_s": timeout,
            "action_id": action_id,
            "pty": tty,
        }
        async with c.connect(address) as client:
            box = client.sandbox(sandbox)
            if not detach:
                return await c.run_in(box, command, options, interactive=interactive, tty=tty, json=json)
            process = await box.start(command[0] if len(command) == 1 else command, **options)
            if json:
                c.print_json(await process.info())
            else:
                print(process.id)
            return 0

    raise typer.Exit(c.execute(work(), json=json))
