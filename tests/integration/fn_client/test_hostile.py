# SPDX-License-Identifier: Apache-2.0
"""Honest calls among hostile ones in one pool: all right, all told apart, and the pool as it was. The benchmark does it 10,000 times."""

from __future__ import annotations

import pytest

import opendsec as od
from benchmarks.fncall import MIB, held, pool, ready
from tests.hostile import HOSTILE, LIMITS, mix

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the image is built first, if it is not kept
GROWTH_BYTES = 64 * MIB


async def test_the_mix(client: od.Client) -> None:
    edge = await client.info()
    items = list(mix(400))
    assert {item.hostile.name for item in items if item.hostile} == {one.name for one in HOSTILE}
    call = od.FnCall(pool="hostile", limits=LIMITS)
    async with pool(client, "hostile", memory="192MiB"):
        async for _ in client.map(call, [item.input for item in mix(50, seed=2)], window=16):
            pass
        await ready(client, "hostile")
        processes, memory = await held(edge.edge_id, edge.pid)
        problems, seen = [], 0
        async for result in client.map(call, (item.input for item in items), window=16):
            seen += 1
            if problem := items[result.index].problem(result):
                problems.append(problem)
        assert problems == [] and seen == len(items)
        after = await ready(client, "hostile")
        assert after.idle == after.spec.size
        processes_after, memory_after = await held(edge.edge_id, edge.pid)
        assert processes_after == processes
        assert memory_after - memory < GROWTH_BYTES
