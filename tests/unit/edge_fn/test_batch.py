# SPDX-License-Identifier: Apache-2.0
"""Lines out of chunks, and batches as their client sees them: windows, back-pressure, going away."""

from __future__ import annotations

import asyncio
import gc
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.api.errors import InvalidRequest
from opendsec.edge.fn import batch
from opendsec.edge.fn.batch import LineBuffer
from opendsec.runtime.fncall.interface import Ended
from tests.unit.edge_fn.conftest import World


def drain(buffer: LineBuffer) -> list[bytes]:
    found = []
    while (line := buffer.next()) is not None:
        found.append(line)
    return found


@given(st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line), max_size=20), st.integers(0, 2**16), st.booleans())
def test_lines_are_whole_however_they_come(lines: list[bytes], seed: int, newline: bool) -> None:
    rand = random.Random(seed)
    data = b"\n".join(lines) + (b"\n" if newline else b"")
    buffer, found = LineBuffer(), []
    while data:
        size = rand.randint(1, 30)
        buffer.feed(data[:size])
        data = data[size:]
        if rand.random() < 0.5:
            found += drain(buffer)
    buffer.end()
    found += drain(buffer)
    assert found == [line for line in lines if line and not line.isspace()]
    assert buffer.exhausted and buffer.size == 0


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "LINE_BYTES", 100)
    buffer = LineBuffer()
    with pytest.raises(InvalidRequest, match="at most 100 bytes"):
        for _ in range(20):
            buffer.feed(b"x" * 10)


class Stream:
    """A batch over a raw connection: what was sent and what came back are the test's to see."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, world: World, head: dict[str, object]) -> Stream:
        stream = cls(*await asyncio.open_unix_connection(world.edge.settings.socket))
        stream.writer.write(b"POST /v1/fn/map HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        stream.send(head)
        return stream

    def send(self, *lines: dict[str, object]) -> None:
        data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def finish(self) -> None:
        self.writer.write(b"0\r\n\r\n")

    async def head(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def results(self) -> list[dict[str, object]]:
        """Those of the next chunk; none at the end."""
        size = int(await self.reader.readline(), 16)
        data = await self.reader.readexactly(size + 2)
        return [json.loads(line) for line in data.splitlines() if line]

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


async def test_results_come_while_the_body_is_still_sent(world: World) -> None:
    stream = await Stream.open(world, {"call": {"source": "pass"}, "window": 4})
    assert b"200 OK" in await stream.head(), "the head comes before any item"
    for index in range(3):
        stream.send({"index": index})
        await world.members.until(lambda: bool(world.members.open))
        world.members.end()
        assert [result["index"] for result in await stream.results()] == [index]
    stream.finish()
    assert await stream.results() == []
    await stream.close()


async def test_no_more_than_the_window_is_taken(world: World) -> None:
    stream = await Stream.open(world, {"call": {"source": "pass"}, "window": 3})
    stream.send(*({"index": index} for index in range(50)))
    stream.finish()
    await stream.head()
    await world.members.until(lambda: len(world.members.open) == 3)
    (pool,) = world.pools.implicit.values()
    assert pool.machine.busy + pool.machine.waiting == 3
    seen: list[object] = []

    def ready() -> bool:
        return bool(world.members.running) or len(seen) == 50

    while True:
        await world.members.until(ready)
        if world.members.running:
            world.members.end()
        if not (results := await stream.results()):
            break
        seen += [result["index"] for result in results]
        assert pool.machine.busy + pool.machine.waiting <= 3
    assert sorted(map(str, seen)) == sorted(str(index) for index in range(50))
    await stream.close()


async def test_a_client_that_does_not_read_is_not_served_ahead(world: World) -> None:
    stream = await Stream.open(world, {"call": {"source": "pass", "limits": {"output_bytes": 1 << 20}}, "window": 2})
    await stream.head()
    stream.send(*({"index": index} for index in range(100)))
    large = Ended(code=0, stdout=bytes(1 << 20), stdout_total=1 << 20)
    await world.members.until(lambda: bool(world.members.running))
    (pool,) = world.pools.implicit.values()
    while world.members.running:
        world.members.end(large)
        await world.members.until(lambda: bool(world.members.running) or not pool.machine.busy)
    begun = len(world.members.jobs)
    assert begun < 10, "its results are not read, so nothing more is begun"
    while len(world.members.jobs) == begun:
        assert (await stream.results())[0]["outcome"] == "ok"
        await asyncio.sleep(0)
    await stream.close()
    await world.members.until(lambda: not world.members.open)


@pytest.mark.parametrize("window", [1, 100])
async def test_a_client_that_goes_away_ends_what_it_asked_for(world: World, window: int) -> None:
    stream = await Stream.open(world, {"call": {"source": "pass"}, "window": window})
    await stream.head()
    stream.send(*({"index": index} for index in range(60)))
    await world.members.until(lambda: bool(world.members.open))
    await stream.close()
    await world.members.until(lambda: not world.members.open)
    (pool,) = world.pools.implicit.values()
    await world.members.until(lambda: not pool.machine.waiting and not pool.machine.busy)
    assert pool.machine.idle > 0, "members serve on"


async def test_a_client_that_goes_away_with_megabytes_unread_is_noticed(world: World) -> None:
    stream = await Stream.open(world, {"call": {"source": "pass"}, "window": 1})
    await stream.head()
    stream.send(*({"index": index, "stdin": "A" * 400_000} for index in range(20)))  # more than is read ahead
    await world.members.until(lambda: bool(world.members.open))
    stream.writer.transport.abort()
    await world.members.until(lambda: not world.members.open)
    await stream.close()


async def test_large_inputs_and_results_make_the_window_smaller(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "OPEN_BYTES", 100_000)
    stream = await Stream.open(world, {"call": {"source": "pass"}, "window": 8})
    stream.send(*({"index": index, "stdin": "A" * 60_000} for index in range(8)))
    stream.finish()
    await world.members.until(lambda: len(world.members.open) == 2)
    (pool,) = world.pools.implicit.values()
    for left in range(7, -1, -1):
        assert pool.machine.busy + pool.machine.waiting <= 2
        await world.members.until(lambda: bool(world.members.running))
        world.members.end()
        await world.members.until(lambda left=left: len(world.members.jobs) >= min(8, 10 - left))  # type: ignore[misc]
    await stream.close()
    monkeypatch.setattr(batch, "RESULTS_BYTES", 5 << 20)
    stream = await Stream.open(world, {"call": {"source": "pass", "limits": {"output_bytes": 1 << 20}}, "window": 100})
    stream.send(*({"index": index} for index in range(20)))
    await world.members.until(lambda: len(world.members.open) == 4)
    assert pool.machine.busy + pool.machine.waiting == 4, "as few as may be"
    await stream.close()


async def test_results_that_nobody_reads_go_with_their_batch(world: World) -> None:
    """Not when the collector comes by: nobody knows when, and they may be a gigabyte."""
    stream = await Stream.open(world, {"call": {"source": "pass"}, "window": 64})
    stream.send(*({"index": index} for index in range(64)))
    await world.members.until(lambda: bool(world.members.running))
    (held,) = [item for item in gc.get_objects() if isinstance(item, batch.Batch) and not item._ended]

    def unread() -> int:  # in few pieces or in many, as they come
        return sum(map(len, held._out))

    for number in range(64):
        await world.members.until(lambda number=number: len(world.members.jobs) > number and bool(world.members.running))  # type: ignore[misc]
        world.members.end(Ended(code=0, stdout=b"x" * 300_000, stdout_total=300_000))
        if unread() > 1_000_000:
            break
    await world.members.until(lambda: unread() > 1_000_000)
    await stream.close()
    async with asyncio.timeout(20):
        while held._out:
            await asyncio.sleep(0)


async def test_an_edge_that_stops_ends_the_batch_with_an_error(world: World) -> None:
    stream = await Stream.open(world, {"call": {"source": "pass"}, "window": 4})
    await stream.head()
    stream.send({"index": 0})
    await world.members.until(lambda: bool(world.members.open))
    stopping = asyncio.ensure_future(world.edge.stop())
    (last,) = await stream.results()
    error = last["error"]
    assert isinstance(error, dict) and error["code"] == "unavailable"
    await stopping
    await stream.close()
