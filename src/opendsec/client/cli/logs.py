# SPDX-License-Identifier: Apache-2.0
"""`dsec logs`: what an edge, a sandbox or a command said."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c


def logs(
    sandbox: Annotated[str | None, typer.Argument(metavar="[SANDBOX]", help="Only this sandbox.")] = None,
    process: Annotated[str | None, typer.Argument(metavar="[PROCESS]", help="The output of this command of it.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as things happen.")] = False,
    processes: Annotated[bool, typer.Option("--processes", "-p", help="The sandbox's commands instead of its events.")] = False,
    after: Annotated[int, typer.Option("--after", help="Events after this number.")] = 0,
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Show events of the edge or of one sandbox, its commands, or the output of one command."""
    import sys
    import time

    async def events() -> None:
        async with c.connect(address) as client:
            if sandbox is not None:
                await client.get(sandbox)  # it is known, be it ended: else silence would look like nothing having happened
            async for event in client.events(sandbox_id=sandbox, after=after, follow=follow):
                if json:
                    c.print_json(event)
                    continue
                at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at))
                facts = " ".join(f"{key}={value}" for key, value in event.data.items())
                print(f"{event.seq:>6}  {at}  {event.sandbox_id or '-':<19}  {event.kind:<20}  {facts}".rstrip(), flush=True)

    async def commands(box_id: str) -> None:
        async with c.connect(address) as client:
            infos = await client.sandbox(box_id).processes()
        if json:
            c.print_json(infos)
            return
        rows = []
        for info in infos:
            end = info.result
            rows.append(
                (
                    info.id,
                    info.state if end is None else f"{end.outcome}" + (f" {end.exit_code}" if end.exit_code is not None else ""),
                    c.ago(info.started_at),
                    str(info.stdout_bytes),
                    str(info.stderr_bytes),
                    info.command.replace("\n", "⏎"),
                )
            )
        c.table(("PROCESS", "STATE", "STARTED", "STDOUT", "STDERR", "COMMAND"), rows)

    async def output(box_id: str, process_id: str) -> None:
        async with c.connect(address) as client:
            handle = client.sandbox(box_id).process(process_id)
            info = await handle.info()
            wanted = {"stdout": info.stdout_bytes, "stderr": info.stderr_bytes}
            async for event in handle.attach():
                if json and event.kind in ("output", "gap"):
                    c.print_json({"stream": event.stream, "offset": event.offset, "text": event.text, "missing_bytes": event.missing_bytes})
                elif event.data:
                    target = sys.stderr if event.stream == "stderr" else sys.stdout
                    target.buffer.write(event.data)
                    target.buffer.flush()
                if event.stream is not None:
                    wanted[event.stream] -= len(event.data) + event.missing_bytes
                if not follow and max(wanted.values()) <= 0:
                    return

    if sandbox is None or (process is None and not processes):
        c.execute(events(), json=json)
    elif process is None:
        c.execute(commands(sandbox), json=json)
    else:
        c.execute(output(sandbox, process), json=json)
