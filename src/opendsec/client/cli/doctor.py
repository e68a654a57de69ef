# SPDX-License-Identifier: Apache-2.0
"""`dsec doctor`: what this machine can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from opendsec.client.cli import common as c

if TYPE_CHECKING:
    from opendsec.api.sandboxes import Capabilities


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


def _show(found: Capabilities) -> None:
    def mark(there: bool) -> str:
        return "yes" if there else "NO"

    features = [
        (mark(one.present), one.name, one.needed_for, "" if one.present else one.without_it, "" if one.present else one.reason)
        for one in found.features
    ]
    if features:
        c.rich_table("Features of this machine", ("", "feature", "needed for", "without it", "why not"), features)
    for name, capabilities in found.backends.items():
        c.rich_table(
            f"Backend {name}", ("", "capability", "why not"), [(mark(can.available), can.name, can.reason) for can in capabilities]
        )
