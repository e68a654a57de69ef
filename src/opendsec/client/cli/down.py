# SPDX-License-Identifier: Apache-2.0
"""`dsec down`: stop the edge of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c


def down(
    kill: Annotated[bool, typer.Option("--kill", "-k", help="End all sandboxes first. Without it they live on for the next edge.")] = False,
    json: c.Json = False,
) -> None:
    """Stop the edge, and wait until it has stopped.

    Sandboxes live on with their files and with what ended commands left running, and `dsec up` finds them again; it then ends the commands
    and sessions that were under way, since nobody has their output.
    """
    import asyncio
    import os

    from opendsec.api.sandboxes import EdgeInfo
    from opendsec.client import launch
    from opendsec.client.aio import Client

    async def work() -> EdgeInfo | None:
        run_dir = launch.default_run_dir()
        if not launch.listening(run_dir):
            return None
        async with Client(run_dir=run_dir, start_edge=False) as client:
            before = await client.info()
            pidfd = os.pidfd_open(before.pid)
            try:
                info = await client.shutdown(kill=kill)
                await client.aclose()
                await asyncio.to_thread(launch.wait_ended, pidfd)
            finally:
                os.close(pidfd)
            return info

    info = c.execute(work(), json=json)
    if json:
        c.print_json(info)
    elif info is None:
        print("no edge runs")
    else:
        print(f"edge {info.edge_id} has stopped" + ("" if kill or not info.sandboxes else f"; {info.sandboxes} sandboxes live on"))
