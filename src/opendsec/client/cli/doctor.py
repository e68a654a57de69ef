# SPDX-License-Identifier: Apache-2.0
"""`dsec doctor`: what this machine can do."""

from __future__ import annotations

import typer

from opendsec.client.cli import common as c


def doctor(json: c.Json = False, address: c.Address = None) -> None:
    """Show each kernel feature: whether it is there, what needs it, and what happens without it.

    Asks the edge if one runs (or `--address`); otherwise probes this machine without starting one. Exit code 1 if no backend can run.
    """
    import subprocess
    import sys

    from opendsec.api import wire
    from opendsec.api.errors import Unavailable
    from opendsec.api.sandboxes import Capabilities
    from opendsec.client import launch

    async def work() -> Capabilities:
        if address is not None or launch.listening(launch.default_run_dir()):
            async with c.connect(address) as client:
                return await client.capabilities()
        probe = subprocess.run([sys.executable, "-m", "opendsec.edge", "--doctor"], stdout=subprocess.PIPE, check=False)
        if probe.returncode != 0:
            raise Unavailable(f"probing this machine failed with exit code {probe.returncode}")
        return wire.decode(probe.stdout, Capabilities)

    found = c.execute(work(), json=json)
    if json:
        c.print_json(found)
    else:
        _show(found)
    works = any(one.available for backend in found.backends.values() for one in backend if one.name == "create")
    raise typer.Exit(0 if works else 1)


def _show(found: object) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from opendsec.api.sandboxes import Capabilities

    assert isinstance(found, Capabilities)
    console = Console()
    if found.features:
        features = Table(title="Features of this machine", box=box.SIMPLE_HEAD, title_justify="left")
        for heading in ("", "feature", "needed for", "without it", "why not"):
            features.add_column(heading, overflow="fold")
        for one in found.features:
            mark = "[green]yes[/]" if one.present else "[red]no[/]"
            features.add_row(
                mark,
                escape(one.name),
                escape(one.needed_for),
                "" if one.present else escape(one.without_it),
                "" if one.present else escape(one.reason),
            )
        console.print(features)
    for name, capabilities in found.backends.items():
        backend = Table(title=f"Backend {name}", box=box.SIMPLE_HEAD, title_justify="left")
        for heading in ("", "capability", "why not"):
            backend.add_column(heading, overflow="fold")
        for can in capabilities:
            backend.add_row("[green]yes[/]" if can.available else "[red]no[/]", escape(can.name), escape(can.reason))
        console.print(backend)
