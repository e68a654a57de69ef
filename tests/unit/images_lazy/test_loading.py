# SPDX-License-Identifier: Apache-2.0
"""What is under way at once, which other layer has a chunk, and runs of chunks that are partly wrong. Without any loader."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.images.chunks import Builder, ChunkTable
from opendsec.images.lazy.cache import CachedLayer
from opendsec.images.lazy.engine import Engine, Failures
from opendsec.images.lazy.fetch import LocalIndex
from opendsec.images.lazy.line import FIRST, Line

CHUNK = 4096
BOOT = "11111111-2222-3333-4444-555555555555"

_opened: list[CachedLayer] = []


@pytest.fixture(autouse=True)
def close_layers() -> Iterator[None]:
    yield
    for one in _opened:
        one.close()
    _opened.clear()


def table_of(data: bytes) -> ChunkTable:
    builder = Builder(CHUNK)
    builder.add(data)
    return builder.finish()[0]


def layer_of(directory: Path, table: ChunkTable) -> CachedLayer:
    _opened.append(CachedLayer("sha256:" + "0" * 64, directory, table, bytes(32), None, boot_id=BOOT))
    return _opened[-1]


def blocks(*numbers: int, tail: int = 0) -> bytes:
    return b"".join(bytes([number]) * CHUNK for number in numbers) + b"t" * tail


# --- the line --------------------------------------------------------------------------------------------------------


def test_a_line_without_a_queue_gets_more_and_one_with_a_queue_less() -> None:
    line = Line()
    for _ in range(8):
        line.note(0.02, 16)
    assert line.window == FIRST + 8 * 16
    line.note(0.06, 16)  # neither: it is let be
    assert line.window == FIRST + 8 * 16
    for _ in range(20):
        line.note(0.2, 16)
    assert line.window == FIRST


def test_a_line_whose_times_are_short_has_no_queue_whatever_they_are() -> None:
    line = Line()
    for seconds in (0.0001, 0.009, 0.0002, 0.008):
        line.note(seconds, 1)
    assert line.window == FIRST + 4


class Stopped:
    """A store that answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.go = asyncio.Event()

    async def fetch(self, layer: CachedLayer, first: int, count: int) -> Failures:
        self.asked.append((first, count))
        await self.go.wait()
        for index in range(first, first + count):
            assert layer.store(index, blocks(index % 251))
        return {}


async def test_what_is_prefetched_at_once_is_bounded_and_demand_is_not_held_up_by_it(tmp_path: Path) -> None:
    count = 4 * FIRST
    layer, store = layer_of(tmp_path / "a", table_of(blocks(*(index % 251 for index in range(count))))), Stopped()
    engine, done, fetched = Engine(store), asyncio.Event(), list[CachedLayer]()
    engine.on_fetched = fetched.append
    engine.prefetch(layer, ((chunk, chunk) for chunk in range(count)), lambda error: done.set())
    await asyncio.sleep(0)
    assert [first for first, _ in store.asked] == list(range(0, FIRST, 16))  # the first in their order, and no more
    engine.want(layer, [count - 1], lambda error: None)
    await asyncio.sleep(0)
    assert store.asked[-1] == (count - 16, 16)
    store.go.set()
    await done.wait()
    assert layer.complete and len(fetched) == len(store.asked) == count // 16 and set(fetched) == {layer}


# --- other layers ------------------------------------------------------------------------------------------------------


def test_who_was_known_first_is_asked_and_nobody_for_what_nobody_has(tmp_path: Path) -> None:
    index, wanted = LocalIndex(), layer_of(tmp_path / "new", table_of(blocks(1, 2, 3)))
    for name, numbers in (("a", (9, 1)), ("b", (1, 2))):
        (tmp_path / f"{name}.blob").write_bytes(blocks(*numbers))
        index.add(str(tmp_path / f"{name}.blob"), table_of(blocks(*numbers)).digests)
    index.add(wanted, wanted.table.digests)
    assert [index.knows(wanted, chunk) for chunk in range(3)] == [True, True, False]
    # Places are in chunks of the reader's size.
    assert [index.find(wanted, chunk) for chunk in range(3)] == [blocks(1), blocks(2), None]
    (tmp_path / "a.blob").unlink()  # b has it too, but it was known later
    assert index.find(wanted, 0) is None


def test_a_chunk_of_a_layer_that_has_not_got_it_yet_is_not_worth_a_try(tmp_path: Path) -> None:
    index, old, new = LocalIndex(), layer_of(tmp_path / "old", table_of(blocks(1))), layer_of(tmp_path / "new", table_of(blocks(1)))
    index.add(old, old.table.digests)
    assert not index.knows(new, 0) and index.find(new, 0) is None
    assert old.store(0, blocks(1))
    assert index.knows(new, 0) and index.find(new, 0) == blocks(1)


# --- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [[], [0], [3], [5], [0, 1], [2, 4], [0, 1, 2, 3, 4, 5]])
def test_of_a_run_what_is_right_is_kept(tmp_path: Path, wrong: list[int]) -> None:
    data = blocks(1, 2, 3, 4, 5, 6, tail=100)
    layer, came = layer_of(tmp_path / "a", table_of(data)), bytearray(data)
    for index in wrong:
        came[index * CHUNK + 7] ^= 1
    assert layer.store_run(0, bytes(came)) == wrong
    assert layer.missing(range(7)) == wrong and layer.here == 7 - len(wrong)
    assert all(layer.read_chunk(index) == data[index * CHUNK : (index + 1) * CHUNK] for index in range(7) if index not in wrong)
    assert layer.store_run(2, memoryview(data)[2 * CHUNK :]) == []
    assert layer.missing(range(7)) == [index for index in wrong if index < 2]
