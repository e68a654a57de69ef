# SPDX-License-Identifier: Apache-2.0
"""`dsec judge`: programs and their tests, from a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opendsec.client.cli import common as c

if TYPE_CHECKING:
    from opendsec.api.fn import JudgeResult
    from opendsec.client.judge_tasks import Expected

Ended = tuple["Expected", "JudgeResult"]


def judge(
    tasks: Annotated[Path, typer.Argument(metavar="TASKS.jsonl", help="One task a line: a program and its tests; - for standard input.")],
    parallel: Annotated[int, typer.Option("--parallel", "-n", min=1, help="Tasks at a time.")] = 8,
    only: Annotated[str | None, typer.Option("--only", help="Only ids that match this shell pattern.")] = None,
    pool: Annotated[str, typer.Option("--pool", help="For tasks that name neither a pool nor an image.")] = "",
    image: Annotated[str, typer.Option("--image", help="Likewise.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, and only what is not as expected.")] = False,
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Judge programs by their tests; results are printed as they come.

    Exit code 0 if every verdict was the expected one (`pass` unless the task's line says otherwise), 1 if not.
    """
    import asyncio
    import fnmatch

    import msgspec

    from opendsec.client.judge_tasks import read_tasks, verdict

    async def work() -> tuple[int, dict[str, int]]:
        try:
            with tasks.open("rb") if str(tasks) != "-" else sys.stdin.buffer as file:
                wanted = [one for one in read_tasks(file) if only is None or fnmatch.fnmatchcase(one.task.id, only)]
        except OSError as error:
            c.refuse(f"cannot read {tasks}: {error.strerror}", "tasks")
        if not wanted:
            c.refuse(f"there is no task in {tasks}" + (f" that matches {only}" if only else ""), "tasks")
        counts = {"pass": 0, "fail": 0, "no verdict": 0, "mistaken": 0}
        left = iter(wanted)
        async with c.connect(address) as client:
            with _bar(len(wanted), quiet=quiet or json) as advance:

                async def worker() -> None:
                    for one in left:
                        task = one.task
                        if not task.pool and not task.image:
                            task = msgspec.structs.replace(task, pool=pool, image=image)
                        result = await client.judge(task)
                        said = verdict(result.outcome)
                        counts["no verdict" if said == "none" else said] += 1
                        counts["mistaken"] += said != one.expect
                        advance()
                        if json:
                            c.print_json(_fields(one, result))
                        elif not quiet or said != one.expect:
                            print(_line(one, result), flush=True)

                workers = [asyncio.ensure_future(worker()) for _ in range(min(parallel, len(wanted)))]
                try:
                    await asyncio.gather(*workers)
                finally:
                    for one in workers:
                        one.cancel()
                    await asyncio.gather(*workers, return_exceptions=True)
        return len(wanted), counts

    total, counts = c.execute(work(), json=json)
    if not json:
        shown = ", ".join(f"{count} {name}" for name, count in counts.items() if count or name in ("pass", "fail"))
        print(f"{total} tasks: {shown}")
    raise typer.Exit(1 if counts["mistaken"] else 0)


@contextmanager
def _bar(total: int, *, quiet: bool) -> Iterator[Callable[[], None]]:
    if quiet or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


def _line(one: Expected, result: JudgeResult) -> str:
    failed = next((test for test in result.tests if test.outcome not in ("ok", "cancelled")), None)
    why = result.message or (failed.message or (failed.result.message if failed.result else "") if failed else "")
    at = f"  at {failed.name}" if failed is not None and failed.name else ""
    mistaken = "" if (result.outcome == "ok") == (one.expect == "pass") else f"  (expected: {one.expect})"
    return f"{result.outcome:<14} {one.task.id}  {result.passed}/{result.total}{at}{f': {why}' if why else ''}{mistaken}"


def _fields(one: Expected, result: JudgeResult) -> dict[str, object]:
    from opendsec.client.cli.fn_run import fn_fields
    from opendsec.client.judge_tasks import verdict
    from opendsec.client.results import FnResult

    return {
        "id": one.task.id,
        "outcome": result.outcome,
        "expect": one.expect,
        "matched": verdict(result.outcome) == one.expect,
        "passed": result.passed,
        "total": result.total,
        "message": result.message,
        "tests": [
            {
                "name": test.name,
                "outcome": test.outcome,
                "message": test.message,
                "result": fn_fields(FnResult(test.result)) if test.result is not None else None,
            }
            for test in result.tests
        ],
        "compile": fn_fields(FnResult(result.compile)) if result.compile is not None else None,
    }
