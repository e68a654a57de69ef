# SPDX-License-Identifier: Apache-2.0
"""The contract of function calls over the fake edge, by both transports; and what breaks on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator

import httpx
import pytest

from opendsec.api.errors import NotFound, Unavailable
from opendsec.api.fn import FnCall
from opendsec.client import sync
from opendsec.client._core import RetryPolicy
from opendsec.client.aio import Client
from opendsec.client.transport import HttpxTransport
from opendsec.testing.contracts import client_fn as contract
from opendsec.testing.fakes.edge import FakeEdge

CALL = FnCall(argv=("cat",))
SLOW = ("maps_over_large_inputs", "inputs_wait_for_the_reader", "limits_hold", "maps_over_texts")


@pytest.mark.parametrize("transport", ["unix", "httpx"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in contract.CHECKS])
async def test_contract(name: str, transport: str, edge: FakeEdge) -> None:
    def make() -> Client:
        if transport == "unix":
            return Client(f"unix:{edge.socket_path}")
        return Client(transport=HttpxTransport("http://edge", transport=httpx.AsyncHTTPTransport(uds=str(edge.socket_path))))

    await contract.CHECKS[name](contract.Setup(make=make))


async def test_a_batch_goes_on_after_a_broken_connection(edge: FakeEdge) -> None:
    edge.fn.cut_after[:] = [3, 0, 5]
    async with Client(f"unix:{edge.socket_path}", retry=RetryPolicy(first_delay_s=0.001)) as client:
        results = [result async for result in client.map(CALL, map(str, range(30)), window=4)]
    assert sorted(result.index for result in results) == list(range(30))
    assert all(result.stdout == str(result.index) for result in results)


async def test_a_caller_that_yields_late_keeps_its_place_over_a_broken_connection(edge: FakeEdge) -> None:
    """Its iterator is in the middle of a step when the connection breaks."""
    edge.fn.cut_after[:] = [1]
    more = asyncio.Event()

    async def inputs() -> AsyncGenerator[str, None]:
        yield "a"
        yield "b"
        await more.wait()
        yield "c"

    async with Client(f"unix:{edge.socket_path}", retry=RetryPolicy(first_delay_s=0.001)) as client:
        said = []
        async for result in client.map(CALL, inputs(), window=2):
            said.append(result.stdout)
            if len(said) == 2:
                more.set()
    assert sorted(said) == ["a", "b", "c"]


async def test_a_batch_that_always_breaks_gives_up(edge: FakeEdge) -> None:
    edge.fn.cut_after[:] = [0] * 3
    async with Client(f"unix:{edge.socket_path}", retry=RetryPolicy(attempts=3, first_delay_s=0.001)) as client:
        with pytest.raises(Unavailable):
            _ = [result async for result in client.map(CALL, ["x"])]
    assert edge.fn.cut_after == []


async def test_never_more_than_the_window_at_once(edge: FakeEdge) -> None:
    edge.fn.most = 0
    async with Client(f"unix:{edge.socket_path}") as client:
        assert len([result async for result in client.map(CALL, ["x"] * 40, window=3)]) == 40
    assert edge.fn.most <= 3


async def test_leaving_early_without_closing(edge: FakeEdge) -> None:
    async with Client(f"unix:{edge.socket_path}") as client:
        async for _ in client.map(FnCall(argv=("sh", "-c", 'read line; test "$line" = go || exec sleep 600')), ["go", "stay", "stay"]):
            break
        async with asyncio.timeout(20):
            while edge.fn.running:
                await client.info()


@pytest.mark.slow
def test_the_blocking_client(edge: FakeEdge) -> None:
    with sync.Client(f"unix:{edge.socket_path}") as client:
        assert client.call(source="print(5)").stdout == "5\n"
        assert client.languages() and client.pools.list() == ()

        def inputs() -> Iterator[str]:
            for number in range(70):
                if number == 20:
                    assert client.call(argv=["true"]).ok  # its own client, in the middle of its batch
                yield str(number)

        assert sorted(int(result.stdout) for result in client.map(CALL, inputs(), window=4)) == list(range(70))
        assert [result.stdout for result in client.map(CALL, ["a"])] == ["a"]
        for _ in client.map(CALL, iter(["a"] * 50), window=1):
            break

        def broken() -> Iterator[str]:
            yield "a"
            raise KeyError("mine")

        with pytest.raises(KeyError):
            list(client.map(CALL, broken()))
        with pytest.raises(NotFound):
            list(client.map(FnCall(argv=("cat",), pool="none"), ["a"]))
