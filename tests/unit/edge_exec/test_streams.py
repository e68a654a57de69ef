# SPDX-License-Identifier: Apache-2.0
"""Readers and writers on real pipes."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import AsyncIterator

import pytest

from opendsec.api.exec import Command
from opendsec.edge.process import summary
from opendsec.edge.streams import Poller, Reader, Writer, capacity, input_pipe, output_pipe


@pytest.fixture
async def poller() -> AsyncIterator[Poller]:
    poller = Poller()
    yield poller
    assert poller.watched() == 0
    poller.close()


class Sink:
    def __init__(self) -> None:
        self.data = b""
        self.ended = False

    def feed(self, data: memoryview) -> None:
        self.data += data

    def end(self) -> None:
        self.ended = True


async def test_reader(poller: Poller) -> None:
    ours, theirs = output_pipe()
    sink = Sink()
    reader = Reader(poller, ours, sink.feed, sink.end)
    os.write(theirs, b"one")
    while not sink.data:
        await asyncio.sleep(0)
    os.write(theirs, b"two")
    reader.drain()
    assert sink.data == b"onetwo" and reader.open
    os.close(theirs)
    while not sink.ended:
        await asyncio.sleep(0)
    assert not reader.open
    reader.drain()
    reader.close()


async def test_a_drain_is_bounded_though_the_pipe_is_refilled(poller: Poller) -> None:
    ours, theirs = output_pipe()
    os.set_blocking(theirs, False)
    total = 0

    def refill(data: memoryview) -> None:
        nonlocal total
        total += len(data)
        os.write(theirs, bytes(len(data)))

    size = capacity(ours)
    os.write(theirs, bytes(size))
    reader = Reader(poller, ours, refill, lambda: None)
    reader.drain()
    assert total == size
    reader.close()
    os.close(theirs)


async def test_writer_waits_for_room(poller: Poller) -> None:
    ours, theirs = input_pipe()
    writer = Writer(poller, ours, terminal=False)
    done = asyncio.get_running_loop().create_future()
    data = os.urandom(300_000)
    writer.put(data[:1000])
    writer.put(data[1000:], done)
    assert not done.done() and writer.accepts and poller.watched() == 1
    writer.put(b"end", end=True)
    assert not writer.accepts and writer.reason == "its standard input was closed"
    received = b""
    while chunk := os.read(theirs, 4096):
        received += chunk
        await asyncio.sleep(0)
    assert received == data + b"end" and done.done()
    os.close(theirs)


@pytest.mark.parametrize("when", ["at once", "while it waits"])
async def test_writer_without_a_reader(poller: Poller, when: str) -> None:
    ours, theirs = input_pipe()
    writer = Writer(poller, ours, terminal=False)
    done = asyncio.get_running_loop().create_future()
    if when == "at once":
        os.close(theirs)
    writer.put(bytes(300_000), done)
    if when == "while it waits":
        assert not done.done()
        os.close(theirs)
    with pytest.raises(ConnectionError, match="nothing reads"):
        await done
    assert not writer.accepts
    writer.close("again")
    assert writer.reason.startswith("nothing reads")


async def test_a_handler_that_fails_is_told_and_stopped(poller: Poller) -> None:
    told: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    ours, theirs = output_pipe()

    def fail() -> None:
        raise ValueError("no")

    poller.watch(ours, select.EPOLLIN, fail)
    os.write(theirs, b"x")
    while not told:
        await asyncio.sleep(0)
    assert isinstance(told[0]["exception"], ValueError) and poller.watched() == 0
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (Command(shell="echo hi"), "echo hi"),
        (Command(shell="x" * 201), "x" * 199 + "…"),
        (Command(shell="x" * 200), "x" * 200),
        (Command(argv=("a b", "it's", "")), "'a b' 'it'\"'\"'s' ''"),
        (Command(argv=("a", "\udcff")), "a '\ufffd'"),
    ],
)
def test_summary(command: Command, text: str) -> None:
    assert summary(command) == text
