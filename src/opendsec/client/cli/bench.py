# SPDX-License-Identifier: Apache-2.0
"""`dsec bench`: the project's benchmarks, which live beside the sources."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c


def bench(
    name: Annotated[str, typer.Argument(help="Which one, or `all`.")],
    options: Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS]", help="--json, --quick, --plot FILE.png, and its own.")] = None,
) -> None:
    """Run a benchmark of the project."""
    import os
    import sys
    from pathlib import Path

    from opendsec.api.errors import NotFound

    checkout = Path(__file__).resolve().parents[4]
    folder = next((one / "benchmarks" for one in (checkout, Path.cwd()) if (one / "benchmarks").is_dir()), None)
    if folder is None:
        c.fail(NotFound("benchmarks are part of the project's checkout, and this is an installed package; run it from a checkout"))
    names = sorted(one.stem for one in folder.glob("*.py") if not one.stem.startswith("_"))
    if name not in names and not (name == "all" and names):
        c.fail(NotFound(f"no benchmark is called {name!r}; there are {', '.join(names)}"))
    os.chdir(folder.parent)
    if name != "all":
        os.execv(sys.executable, [sys.executable, "-m", f"benchmarks.{name}", *(options or [])])
    failed = 0
    for one in names:
        failed |= os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-m", f"benchmarks.{one}", *(options or [])])
    raise typer.Exit(1 if failed else 0)
