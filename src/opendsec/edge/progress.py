# SPDX-License-Identifier: Apache-2.0
"""Long work as a stream of its progress: one helper for builds, pulls, pushes and warming."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeAlias

from opendsec.api.errors import OpenDSecError
from opendsec.api.images import BuildEvent, ImageInfo, LayerInfo
from opendsec.images.process import Progress

Work: TypeAlias = Callable[[Progress], Awaitable[ImageInfo | LayerInfo | None]]

WAITING = 256  # events that may wait for a slow reader; beyond that progress is dropped, the end never


async def streamed(work: Work) -> AsyncGenerator[BuildEvent, None]:
    """What `work` tells, then one `done` with what it made; or `failed`, followed by the error. Work that fails before it told anything
    just raises, so that the error can still become a status.

    `work` may call its `progress` from any thread. Closing the generator cancels the work, and waits until it has cleared up.
    """
    loop = asyncio.get_running_loop()
    waiting: asyncio.Queue[BuildEvent] = asyncio.Queue()
    ended = told = False  # `done` was told by the work itself; something was yielded

    def queue(event: BuildEvent) -> None:
        nonlocal ended
        if event.kind == "done":
            ended = True
        if waiting.qsize() < WAITING or event.kind == "done":
            waiting.put_nowait(event)

    def progress(event: BuildEvent) -> None:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is loop:
            queue(event)
        else:
            loop.call_soon_threadsafe(queue, event)

    task = asyncio.ensure_future(work(progress))
    following: asyncio.Future[BuildEvent] | None = None
    try:
        while True:
            following = asyncio.ensure_future(waiting.get())
            await asyncio.wait((following, task), return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                told = True
                yield following.result()
                continue
            following.cancel()
            break
        await asyncio.sleep(0)  # what threads of the work told last has been handed to the loop: let it arrive
        while not waiting.empty():
            told = True
            yield waiting.get_nowait()
        try:
            made = task.result()
        except OpenDSecError as error:
            if told:
                yield BuildEvent(kind="failed", message=str(error))
            raise
        if not ended:
            yield BuildEvent(
                kind="done",
                message=made.name if isinstance(made, ImageInfo) else ", ".join(made.names) if made is not None else "",
                image=made if isinstance(made, ImageInfo) else None,
                layer=made if isinstance(made, LayerInfo) else None,
            )
    finally:
        if following is not None:
            following.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
