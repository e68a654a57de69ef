# SPDX-License-Identifier: Apache-2.0
"""`dsec up`: the edge of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c


def up(
    options: Annotated[list[str] | None, typer.Argument(metavar="[EDGE OPTIONS]", help="Passed on; `dsec-edge --help` lists them.")] = None,
    json: c.Json = False,
) -> None:
    """Start the edge of this machine, unless one runs; returns once it accepts requests."""
    from opendsec.api.sandboxes import EdgeInfo
    from opendsec.client import launch
    from opendsec.client.aio import Client

    run_dir, state_dir = launch.default_run_dir(), launch.default_state_dir()

    async def work() -> tuple[bool, EdgeInfo]:
        # `--run-dir` and `--state-dir` of the edge are ours as well: without them we would look for it in the wrong place.
        runs, state, rest = run_dir, state_dir, []
        words = iter(options or [])
        for word in words:
            name, equals, value = word.partition("=")
            if name in ("--run-dir", "--state-dir"):
                path = type(run_dir)(value if equals else next(words, ""))
                runs, state = (path, state) if name == "--run-dir" else (runs, path)
            else:
                rest.append(word)
        started = launch.start_edge(runs, state, arguments=tuple(rest))
        async with Client(run_dir=runs, state_dir=state, start_edge=False) as client:
            return started, await client.info()

    started, info = c.execute(work(), json=json)
    if json:
        c.print_json(info)
    else:
        print(f"edge {info.edge_id} (process {info.pid}) {'is ready' if started else 'was running already'}, {info.sandboxes} sandboxes")
        if not started and options:
            print("the options were not used: it keeps those it was started with")
