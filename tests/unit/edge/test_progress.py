# SPDX-License-Identifier: Apache-2.0
"""Long work as a stream: what is told, how it ends, and that leaving cancels it."""

from __future__ import annotations

import asyncio

import pytest

from opendsec.api.errors import Conflict
from opendsec.api.images import BuildEvent, ImageConfig, ImageInfo
from opendsec.edge.progress import WAITING, Progress, streamed

IMAGE = ImageInfo(name="made", layers=(), config=ImageConfig(), size_bytes=0, created_at=0.0)


async def told(work: object) -> list[BuildEvent]:
    return [event async for event in streamed(work)]  # type: ignore[arg-type]


async def test_what_was_made_is_told_once() -> None:
    async def silent(progress: Progress) -> ImageInfo:
        return IMAGE

    async def talkative(progress: Progress) -> ImageInfo:
        progress(BuildEvent(kind="step", message="one"))
        progress(BuildEvent(kind="done", message="made", image=IMAGE))
        return IMAGE

    assert await told(silent) == [BuildEvent(kind="done", message="made", image=IMAGE)]
    assert [event.kind for event in await told(talkative)] == ["step", "done"]


async def test_threads_may_tell() -> None:
    async def work(progress: Progress) -> None:
        def in_thread() -> None:
            for number in range(10):
                progress(BuildEvent(kind="progress", done=number))

        await asyncio.to_thread(in_thread)

    assert [event.done for event in await told(work) if event.kind == "progress"] == list(range(10))


async def test_a_slow_reader_loses_progress_and_never_the_end() -> None:
    async def work(progress: Progress) -> ImageInfo:
        for number in range(3 * WAITING):
            progress(BuildEvent(kind="progress", done=number))
        return IMAGE

    events = await told(work)
    assert len(events) <= WAITING + 2 and events[-1].kind == "done"


async def test_failure_before_a_word_is_an_error_and_later_an_event_too() -> None:
    async def at_once(progress: Progress) -> None:
        raise Conflict("no")

    async def later(progress: Progress) -> None:
        progress(BuildEvent(kind="step"))
        raise Conflict("no")

    for work, kinds in ((at_once, []), (later, ["step", "failed"])):
        found = []
        with pytest.raises(Conflict):
            async for event in streamed(work):
                found.append(event.kind)
        assert found == kinds


async def test_leaving_cancels_the_work_and_waits_for_its_end() -> None:
    cleared = []

    async def work(progress: Progress) -> None:
        progress(BuildEvent(kind="step"))
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleared.append(True)

    events = streamed(work)
    assert (await anext(events)).kind == "step"
    await events.aclose()
    assert cleared == [True]
