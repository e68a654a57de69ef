# SPDX-License-Identifier: Apache-2.0
"""Progress on standard error: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bytes_bar(title: str, total: int | None, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A function to call with the bytes done so far."""
    if quiet or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def steps(title: str, *, quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A function to call with a message, and how much is done of how much (0 of 0 if nobody knows)."""
    if quiet:
        yield lambda message, done, total: None
        return
    if not sys.stderr.isatty():
        last = ""

        def line(message: str, done: int, total: int) -> None:
            nonlocal last
            if message and message != last:
                last = message
                print(message, file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(escape(title), total=None)

        def update(message: str, done: int, total: int) -> None:
            text = escape(message[:70]) if message else None
            progress.update(task, description=text, completed=done, total=total or None)

        yield update
