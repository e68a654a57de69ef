# SPDX-License-Identifier: Apache-2.0
"""`dsec rollout`: tasks run and judged in bulk."""

from __future__ import annotations

import typer

from opendsec.client.cli import common as c


def rollout(json: c.Json = False, address: c.Address = None) -> None:
    """Run tasks."""
    raise typer.Exit(1)
