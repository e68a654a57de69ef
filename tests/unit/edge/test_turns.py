# SPDX-License-Identifier: Apache-2.0
"""Large work takes turns, and others run in between."""

from __future__ import annotations

import asyncio
import time

import pytest

from opendsec.edge.turns import LARGE_BYTES, Turns


async def test_others_run_between_large_pieces() -> None:
    turns, order = Turns(), list[str]()

    def work(name: str) -> str:
        order.append(name)
        began = time.perf_counter()
        while time.perf_counter() - began < 0.01:
            pass  # it holds the loop
        return name

    async def other() -> None:
        while len([name for name in order if name != "other"]) < 4:
            order.append("other")
            await asyncio.sleep(0)

    large = [turns.do(lambda name=name: work(name), LARGE_BYTES) for name in "abcd"]  # type: ignore[misc]
    results = await asyncio.gather(*large, other())
    assert results[:4] == ["a", "b", "c", "d"] and [name for name in order if name != "other"] == ["a", "b", "c", "d"]
    for first, second in ("ab", "bc", "cd"):
        assert "other" in order[order.index(first) : order.index(second)], order


async def test_small_work_waits_for_nobody_and_an_error_gives_the_turn_back() -> None:
    turns = Turns()

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await turns.do(fail, LARGE_BYTES)
    waiting = asyncio.ensure_future(turns.do(lambda: "large", LARGE_BYTES))
    assert await turns.do(lambda: "small", LARGE_BYTES - 1) == "small" and not waiting.done()
    assert await waiting == "large"
