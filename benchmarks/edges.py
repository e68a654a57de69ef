# SPDX-License-Identifier: Apache-2.0
"""Edges for benchmarks of images: cold ones, with a remote store, and publishers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import opendsec as od
from tests.edges import EdgeProcess

STORE = "depot"


def stores(url: str | Path, *, writable: bool = False) -> str:
    """The text of a stores.toml with one store."""
    return f'[[store]]\nname = "{STORE}"\nurl = "{url}"\nwritable = {"true" if writable else "false"}\n'


@asynccontextmanager
async def edge(
    images: Path | None = None, arguments: Sequence[str] = (), *, store: str = ""
) -> AsyncIterator[tuple[od.Client, EdgeProcess]]:
    """A fresh edge as a process of its own, and a client of it. Nothing of either is left."""
    process = EdgeProcess(images, arguments, stores=store)
    try:
        await asyncio.to_thread(process.start)
        async with process.client() as client:
            yield client, process
    except BaseException:
        await asyncio.to_thread(_remove_quietly, process)
        raise
    await asyncio.to_thread(process.remove)


def _remove_quietly(process: EdgeProcess) -> None:
    try:
        process.remove()
    except Exception:
        shutil.rmtree(process.folder, ignore_errors=True)
