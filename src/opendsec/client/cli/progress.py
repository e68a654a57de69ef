# SPDX-License-Identifier: Apache-2.0
"""Progress on standard error: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opendsec.api.images import BuildEvent


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


@contextmanager
def work(title: str, *, quiet: bool = False) -> Iterator[Callable[[BuildEvent], None]]:
    """A function to call with the events of long work on images: on a terminal one bar for each thing under way, with bytes and rate;
    elsewhere one line for each step."""
    if quiet:
        yield lambda event: None
        return
    if not sys.stderr.isatty():
        last = ""

        def line(event: BuildEvent) -> None:
            nonlocal last
            text = event.what or event.message if event.kind == "progress" else event.message
            if event.kind in ("step", "progress", "log") and text and text != last:
                last = text
                print(text, file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TransferSpeedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        whole = progress.add_task(escape(title), total=None)
        bars: dict[str, TaskID] = {}

        def show(event: BuildEvent) -> None:
            if event.kind in ("step", "log") and event.message:
                progress.update(whole, description=escape(f"{title}: {event.message}"[:90]))
            if event.kind != "progress":
                return
            if not event.total_bytes and not event.done_bytes:  # counts of things, not of bytes
                progress.update(whole, description=escape(f"{title}: {event.message}"[:90]) if event.message else None)
                progress.update(whole, completed=event.done, total=event.total or None)
                return
            name = event.what or title
            if name not in bars:
                bars[name] = progress.add_task(escape(name[:60]), total=event.total_bytes or None)
            progress.update(bars[name], completed=event.done_bytes, total=event.total_bytes or None)
            if event.total_bytes and event.done_bytes >= event.total_bytes:
                progress.remove_task(bars.pop(name))  # dozens of layers would fill the screen

        yield show
