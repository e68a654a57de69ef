# SPDX-License-Identifier: Apache-2.0
"""The whole data file of a layer, fetched in parallel ranges, each chunk checked before it is kept.

What is in the file already counts if its checksum is right: that is how a download goes on after a kill -9, without a map of what is
there that would have to be kept true to it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import TypeVar

from opendsec.images.chunks import ChunkTable
from opendsec.images.remote.store import RemoteStore, StoreError
from opendsec.images.waiting import in_thread

T = TypeVar("T")

RANGE_BYTES = 2 << 20
PARALLEL = 8
_ROUNDS = 3  # over all stores, for chunks that come wrong


async def each(items: Iterable[T], work: Callable[[T], Coroutine[object, object, None]], *, at_once: int) -> None:
    """`work` for each item, some at once. The first error ends all and is raised as it is."""
    slots = asyncio.Semaphore(at_once)

    async def one(item: T) -> None:
        async with slots:
            await work(item)

    first: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for item in items:
                group.create_task(one(item))
    except BaseExceptionGroup as errors:
        first = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
    if first is not None:
        raise first


async def download(
    remotes: Sequence[RemoteStore], key: str, table: ChunkTable, fd: int, *, progress: Callable[[int], None] = lambda done: None
) -> None:
    """Make the file at `fd` the object at `key`. `progress` gets the bytes that are right so far. Raises StoreError, OSError (no space)."""
    await in_thread(os.ftruncate, fd, table.data_bytes)
    have = await in_thread(_right_already, table, fd)
    done = sum(table.span(index)[1] for index in have)
    progress(done)

    async def work(run: tuple[int, int]) -> None:
        nonlocal done
        await _fetch(remotes, key, table, fd, *run)
        done += table.span(*run)[1]
        progress(done)

    await each(_missing_runs(table, have), work, at_once=PARALLEL)


async def _fetch(remotes: Sequence[RemoteStore], key: str, table: ChunkTable, fd: int, first: int, count: int) -> None:
    start, length = table.span(first, count)
    error: StoreError | None = None
    for _ in range(_ROUNDS):
        answered = False
        for remote in remotes:
            try:
                data = await remote.get_range(key, start, length)
            except StoreError as caught:
                error = caught
                continue
            answered = True
            wrong = await in_thread(_keep, table, fd, first, data)
            if wrong is None:
                return
            error = StoreError("damaged", remote.name, key, f"chunk {wrong} does not match its checksum")
        if not answered:
            break  # they have been patient themselves
    assert error is not None
    raise error


def _keep(table: ChunkTable, fd: int, first: int, data: bytes | memoryview) -> int | None:
    wrong = table.first_mismatch(first, data)
    if wrong is None:
        view, at = memoryview(data), table.span(first)[0]
        while view:
            written = os.pwrite(fd, view, at)
            view, at = view[written:], at + written
    return wrong


def _right_already(table: ChunkTable, fd: int) -> set[int]:
    have: set[int] = set()
    at = 0
    while at < table.data_bytes:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: nothing but holes from here on
            break
        index = at // table.chunk_bytes
        start, length = table.span(index)
        if table.matches(index, os.pread(fd, length, start)):
            have.add(index)
        at = start + length
    return have


def _missing_runs(table: ChunkTable, have: set[int]) -> Iterator[tuple[int, int]]:
    most = max(1, RANGE_BYTES // table.chunk_bytes)
    index = 0
    while index < table.count:
        if index in have:
            index += 1
            continue
        first = index
        while index < table.count and index - first < most and index not in have:
            index += 1
        yield first, index - first
