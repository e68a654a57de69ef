# SPDX-License-Identifier: Apache-2.0
"""`dsec pause`, `dsec resume`: let go of a machine's memory, and have it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from opendsec.client.cli import common as c

if TYPE_CHECKING:
    from opendsec.api.sandboxes import SandboxInfo

Sandboxes = Annotated[list[str], typer.Argument(metavar="SANDBOX...", help="Ids of sandboxes.")]


def pause(sandbox: Sandboxes, json: c.Json = False, address: c.Address = None) -> None:
    """Save the state of machines, memory and all, and end their processes. Whatever needs one resumes it."""
    _each(sandbox, "pause", json=json, address=address)


def resume(sandbox: Sandboxes, json: c.Json = False, address: c.Address = None) -> None:
    """Let paused machines run again."""
    _each(sandbox, "resume", json=json, address=address)


def _each(ids: list[str], what: str, *, json: bool, address: str | None) -> None:
    import asyncio

    async def work() -> int:
        async with c.connect(address) as client:
            boxes = [client.sandbox(one) for one in ids]
            turning = [box.pause() if what == "pause" else box.resume() for box in boxes]
            done: list[SandboxInfo | BaseException] = await asyncio.gather(*turning, return_exceptions=True)
        failed = {one: result for one, result in zip(ids, done, strict=True) if isinstance(result, BaseException)}
        if json:
            sandboxes = [result for result in done if not isinstance(result, BaseException)]
            c.print_json({"sandboxes": sandboxes, "failed": {one: str(error) for one, error in failed.items()}})
        return c.tell_failed(failed, quiet=json)

    raise typer.Exit(c.execute(work(), json=json))
