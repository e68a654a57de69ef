# SPDX-License-Identifier: Apache-2.0
"""Live counts of a rollout, on standard error: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opendsec.client.rollout.results import TaskResult

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINES = 10  # printed over a whole rollout where there is no terminal


class View:
    """Counts what ends, and shows nothing."""

    def __init__(self, total: int, before: Sequence[TaskResult]) -> None:
        self.total = total
        self.running = 0
        self.counts = {"pass": 0, "fail": 0, "no verdict": 0, "mistaken": 0}
        for result in before:
            self._count(result)
        self.done = len(before)

    def began(self, task_id: str) -> None:
        self.running += 1
        self.show()

    def ended(self, result: TaskResult) -> None:
        self.running -= 1
        self.done += 1
        self._count(result)
        self.show()

    def _count(self, result: TaskResult) -> None:
        self.counts[result.verdict or "no verdict"] += 1
        self.counts["mistaken"] += not result.matched

    def text(self) -> str:
        return "  ".join(f"{name} {count}" for name, count in self.counts.items() if count or name in ("pass", "fail"))

    def show(self) -> None: ...


class _Lines(View):
    _shown = -1

    def show(self) -> None:
        step = self.done * LINES // max(1, self.total)
        if step != self._shown:
            self._shown = step
            print(f"{self.done}/{self.total}  {self.text()}", file=sys.stderr, flush=True)


class _Bar(View):
    def __init__(self, total: int, before: Sequence[TaskResult], progress: Progress, task: TaskID) -> None:
        super().__init__(total, before)
        self._progress, self._task = progress, task
        self.show()

    def show(self) -> None:
        self._progress.update(self._task, completed=self.done, description=f"{self.running} running  {self.text()}")


@contextmanager
def watching(total: int, before: Sequence[TaskResult], *, quiet: bool) -> Iterator[View]:
    """A view to tell what begins and ends. `before`: results that are there already."""
    if quiet:
        yield View(total, before)
    elif not sys.stderr.isatty():
        yield _Lines(total, before)
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            yield _Bar(total, before, progress, progress.add_task("", total=total))
