# SPDX-License-Identifier: Apache-2.0
"""`dsec rollout`: tasks run and judged in bulk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opendsec.client.cli import common as c

if TYPE_CHECKING:
    from opendsec.client.rollout.results import Summary, TaskResult

SHOWN_MISTAKES = 20


def rollout(
    tasks: Annotated[
        Path, typer.Argument(metavar="TASKS.jsonl", help="One task a line. A task's `agent` is a command run on this machine.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Results, one a line as tasks end. If it exists, what it has is not run again.")],
    parallel: Annotated[int, typer.Option("--parallel", "-n", min=1, help="Tasks at a time.")] = 4,
    backend: Annotated[c.BackendName | None, typer.Option("--backend", "-b", help="What sandboxes are, whatever the tasks say.")] = None,
    only: Annotated[str | None, typer.Option("--only", help="Only ids that match this shell pattern.")] = None,
    admission_timeout: Annotated[float, typer.Option("--admission-timeout", help="Seconds a task waits for room on the edge.")] = 1800.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Run tasks in sandboxes and judge each in a second, fresh one.

    Exit code 0 if every verdict was the expected one, 1 if not. A failure of the infrastructure or a mistake in a task's line gives no
    verdict; such a task is run again next time.
    """
    import fnmatch
    import hashlib
    import os

    import msgspec

    from opendsec.api.errors import InvalidRequest
    from opendsec.client import launch
    from opendsec.client.cli.rollout_progress import watching
    from opendsec.client.rollout.results import ResultFile, summarize
    from opendsec.client.rollout.runner import Runner, end_leftovers
    from opendsec.client.rollout.tasks import Task, read_tasks

    async def work() -> list[TaskResult]:
        try:
            with tasks.open("rb") as file:
                wanted = [one for one in read_tasks(file) if only is None or fnmatch.fnmatchcase(one.id, only)]
        except OSError as error:
            raise InvalidRequest(f"cannot read {tasks}: {error.strerror}", field="tasks") from None
        if backend is not None:
            wanted = [msgspec.structs.replace(one, backend=backend.value) if isinstance(one, Task) else one for one in wanted]
        if not wanted:
            raise InvalidRequest(f"there is no task in {tasks}" + (f" that matches {only}" if only else ""), field="tasks")
        where = address or os.environ.get("OPENDSEC_ADDRESS") or f"unix:{launch.default_run_dir() / launch.SOCKET_NAME}"
        # Sandboxes bear the name of the results file, so that the next run finds those of one that was killed.
        labels = {"rollout": hashlib.sha256(os.fsencode(out.resolve())).hexdigest()[:16]}
        async with c.connect(address) as client:
            with ResultFile(out) as results:
                ids = {one.id for one in wanted}
                before = [result for id, result in results.done.items() if id in ids and result.done]
                skipped = {result.id for result in before}
                left = [one for one in wanted if one.id not in skipped]
                if left:
                    await end_leftovers(client, labels)
                runner = Runner(
                    client,
                    labels=labels,
                    address=where,
                    token=os.environ.get("OPENDSEC_TOKEN", ""),
                    admission_timeout_s=admission_timeout,
                )
                with watching(len(wanted), before, quiet=quiet or json) as view:

                    def ended(result: TaskResult) -> None:
                        results.append(result)
                        view.ended(result)

                    await runner.run_all(left, parallel=parallel, ended=ended, began=view.began)
                return [results.done[one.id] for one in wanted]

    c.raise_descriptor_limit()
    ended_tasks = c.execute(work(), json=json)
    summary = summarize(ended_tasks)
    if json:
        c.print_json(summary)
    else:
        _show(summary, {one.id: one.describe() for one in ended_tasks if not one.matched}, str(out))
    raise typer.Exit(0 if summary.ok else 1)


def _show(summary: Summary, reasons: dict[str, str], out: str) -> None:
    rows = [
        (f"expected {expected}", *(str(counts[verdict]) for verdict in ("pass", "fail", "none")))
        for expected, counts in summary.matrix.items()
        if sum(counts.values())
    ]
    c.rich_table(f"{summary.tasks} tasks", ("", "judged pass", "judged fail", "no verdict"), rows, numbers=True)
    failures = [(kind, str(count)) for kind, count in summary.failures.items() if count]
    if failures:
        c.rich_table("Failures", ("at fault", "tasks"), failures, numbers=True)
    spans = (("create", summary.create_ms), ("verify", summary.verify_ms), ("whole task", summary.total_ms))
    timings = [(name, f"{span[0]:.1f}", f"{span[1]:.1f}") for name, span in spans if span is not None]
    if timings:
        c.rich_table("Milliseconds", ("", "median", "90 %"), timings, numbers=True)
    for mistaken in summary.mistaken[:SHOWN_MISTAKES]:
        print(f"not as expected: {mistaken}: {reasons[mistaken][:200]}")
    if len(summary.mistaken) > SHOWN_MISTAKES:
        print(f"and {len(summary.mistaken) - SHOWN_MISTAKES} more")
    print(f"{summary.matched} of {summary.tasks} as expected; results in {out}")
