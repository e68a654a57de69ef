# SPDX-License-Identifier: Apache-2.0
"""kill -9 of an edge with pools at work: members end with it, the next edge clears what is left, and fills the declared pools again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import opendsec as od
from opendsec.kernel import cgroups, procfs
from opendsec.runtime.container.plan import edge_group
from tests.edges import EdgeProcess
from tests.images import BASE

ROUNDS = 2
TIMEOUT_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def edge(test_images: Path) -> Iterator[EdgeProcess]:
    process = EdgeProcess(test_images, ["--scratch-driver=tmpfs", f"--fn-images=*={BASE}"])
    process.start()
    try:
        yield process
    finally:
        process.remove()


def processes_of(edge_id: str) -> set[int]:
    """All that runs in control groups of this edge's members."""
    mark = f"{edge_group(edge_id)}-fn".encode()
    found = set()
    for pid in procfs.pids():
        try:
            if any(mark in path for path in procfs.cgroup(pid).values()):
                found.add(pid)
        except OSError:
            continue
    return found


async def settled(client: od.Client, name: str, idle: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not any(pool.spec.name == name and pool.idle == idle for pool in await client.pools.list()):
            await asyncio.sleep(0.02)


async def test_pools_survive_their_edge_and_nothing_else_does(edge: EdgeProcess) -> None:
    async with edge.client() as client:
        edge_id = (await client.info()).edge_id
        await client.pools.set("kept", image=BASE, size=3, max=4, preload=["json"], labels={"a": "b"})
        await client.pools.set("dropped", image=BASE, size=1)
        await settled(client, "kept", 3)
        await client.pools.remove("dropped")
    for _ in range(ROUNDS):
        async with edge.client() as client:
            calls = [asyncio.ensure_future(client.call(source="import time; time.sleep(1000)", pool="kept")) for _ in range(2)]
            calls += [
                asyncio.ensure_future(client.call(source=f"print({number})", pool="kept", action_id=f"a{number}")) for number in range(5)
            ]
            async with asyncio.timeout(TIMEOUT_S):
                while not any(pool.busy for pool in await client.pools.list()):
                    await asyncio.sleep(0.01)
            edge.kill()
            for task in calls:
                task.cancel()
            await asyncio.wait(calls)
        async with asyncio.timeout(TIMEOUT_S):
            while processes_of(edge_id):  # members end by themselves: their edge's socket is gone
                await asyncio.sleep(0.02)
        edge.start()
        async with edge.client() as client:
            await settled(client, "kept", 3)
            (pool,) = [pool for pool in await client.pools.list() if not pool.implicit]
            assert (pool.spec.labels, pool.spec.preload, pool.calls, pool.lost) == ({"a": "b"}, ("json",), 0, 0)
            result = await client.call(source="print(6 * 7)", pool="kept")
            assert (result.outcome, result.stdout) == ("ok", "42\n")
            info = await client.info()
            assert info.sandboxes == 0 and info.memory_promised_bytes == 3 * (512 << 20)
    async with edge.client() as client:
        await client.pools.remove("kept")
        assert (await client.info()).memory_promised_bytes == 0
    assert not processes_of(edge_id)
    hierarchies = cgroups.discover()
    top = hierarchies.group(f"{edge_group(edge_id)}-fn")
    assert not top.exists() or not list(top.children())
