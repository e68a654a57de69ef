# SPDX-License-Identifier: Apache-2.0
"""`dsec bench`: the project's benchmarks, which live beside the sources."""

from __future__ import annotations

from pathlib import Path
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

    from opendsec.api.errors import NotFound

    checkout = Path(__file__).resolve().parents[4]
    folder = next((one / "benchmarks" for one in (checkout, Path.cwd()) if (one / "benchmarks").is_dir()), None)
    if folder is None:
        c.fail(NotFound("benchmarks are part of the project's checkout, and this is an installed package; run it from a checkout"))
    names = [one.stem for one in sorted(folder.glob("*.py")) if _is_benchmark(one)]
    if name not in names and not (name == "all" and names):
        c.fail(NotFound(f"no benchmark is called {name!r}; there are {', '.join(names)}"))
    here, given = Path.cwd(), list(options or [])
    os.chdir(folder.parent)
    if name != "all":
        command = [sys.executable, "-m", f"benchmarks.{name}", *_with_plot(name, given, here)]
        os.execv(sys.executable, command)
    failed = 0
    for one in names:
        failed |= os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-m", f"benchmarks.{one}", *_with_plot(one, given, here)])
    raise typer.Exit(1 if failed else 0)


def _is_benchmark(path: Path) -> bool:
    """Whether it is a program that speaks the format of benchmarks; the others in the folder serve them."""
    text = path.read_text(encoding="utf-8")
    return "__main__" in text and "--json" in text


def _with_plot(name: str, options: list[str], here: Path) -> list[str]:
    """The options with the file of `--plot` made absolute; in a directory each benchmark has a file of its name."""
    if "--plot" not in options[:-1]:
        return options
    at = options.index("--plot") + 1
    plot = here / options[at]
    if options[at].endswith("/") or plot.is_dir():
        plot.mkdir(parents=True, exist_ok=True)
        plot = plot / f"{name}.png"
    return [*options[:at], str(plot), *options[at + 1 :]]
