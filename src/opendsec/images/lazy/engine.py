# SPDX-License-Identifier: Apache-2.0
"""Who waits for which chunk, and what is fetched next. Runs on the loader's event loop; no method blocks.

A chunk that somebody wants is one job, however many wait for it. A job is queued until a fetch takes it, together with queued neighbours.
Demand, which a reader waits for, goes first and has fetches of its own; prefetch (read-ahead, traces, warming) takes what is left, in
its own order, as much as the line carries (`line`). A job moves from prefetch to demand when a reader comes for it.
"""

from __future__ import annotations

import asyncio
import errno
import heapq
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from opendsec.images.lazy.cache import CachedLayer
from opendsec.images.lazy.chunkmap import HERE
from opendsec.images.lazy.line import Line

PARALLEL = 32
FOR_DEMAND = 8  # of these, never taken by prefetch
LARGEST_FETCH = 16  # chunks
SPECULATE_UP_TO = 2 * LARGEST_FETCH  # chunks under way: 2 MiB are what a line of 1 Gbit/s carries in 16 ms
GUESSED = -1  # the place of read-ahead and the like among what is prefetched: before traces and warming
REMEMBER_FAILURE_S = 1.0
"""A reader that is refused asks again at once, by the page: it is not to wait for a second deadline."""

Failures = dict[int, int]  # chunk → errno
Done = Callable[[int], None]  # gets 0 or an errno, on the loop
OnFetched = Callable[[CachedLayer], None]


class Fetcher(Protocol):
    async def fetch(self, layer: CachedLayer, first: int, count: int) -> Failures:
        """Make these chunks HERE; those that could not be, and why. Raises nothing, ends in bounded time."""


class Waiter:
    __slots__ = ("done", "error", "left")

    def __init__(self, done: Done) -> None:
        self.done, self.left, self.error = done, 0, 0

    def one(self, error: int) -> None:
        self.error = self.error or error
        self.left -= 1
        if self.left == 0:
            self.done(self.error)


class _Job:
    __slots__ = ("running", "waiters")

    def __init__(self) -> None:
        self.running = False
        self.waiters: list[Waiter] = []


class _Queue:
    """The jobs of one layer."""

    __slots__ = ("failed", "jobs", "layer")

    def __init__(self, layer: CachedLayer) -> None:
        self.layer = layer
        self.jobs: dict[int, _Job] = {}
        self.failed: dict[int, tuple[float, int]] = {}


class Engine:
    def __init__(
        self,
        fetcher: Fetcher,
        *,
        parallel: int = PARALLEL,
        for_demand: int = FOR_DEMAND,
        largest: int = LARGEST_FETCH,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetcher, self._clock = fetcher, clock
        self.on_fetched: OnFetched = _ignore  # called after each fetch
        self._parallel, self._for_demand, self._largest = parallel, min(for_demand, parallel - 1), largest
        self._queues: dict[CachedLayer, _Queue] = {}
        self._demand: dict[tuple[CachedLayer, int], None] = {}  # in order of arrival
        self._prefetch: list[tuple[int, int, CachedLayer, int]] = []  # heap by place, then by arrival
        self._arrivals = 0
        self._running: set[asyncio.Task[None]] = set()
        self._prefetching = self._chunks_prefetching = 0
        self._line = Line()

    def want(self, layer: CachedLayer, chunks: Iterable[int], done: Done) -> list[int]:
        """A reader waits: `done` is called when all are HERE, perhaps at once, or when one cannot be had. Returns those that nobody had
        foreseen."""
        waiter = Waiter(done)
        queue = self._queue(layer)
        unforeseen = []
        waiter.left = 1  # until all are counted
        for index in chunks:
            if layer.map.states[index] == HERE:
                continue
            until, error = queue.failed.get(index, (0.0, 0))
            if until > self._clock():
                waiter.error = error
                break
            job = queue.jobs.get(index)
            if job is None:
                job = queue.jobs[index] = _Job()
                unforeseen.append(index)
            waiter.left += 1
            job.waiters.append(waiter)
            if not job.running:
                self._demand[layer, index] = None
        waiter.one(0)
        self._dispatch()
        return unforeseen

    def want_with_neighbours(self, layer: CachedLayer, chunks: Iterable[int], done: Done) -> None:
        """`want`, and load what lies around if nobody had foreseen this, as long as the line has not enough to do."""
        for index in self.want(layer, chunks, done):
            if layer.readahead is not None and self._chunks_prefetching < SPECULATE_UP_TO:
                self.prefetch(layer, ((chunk, GUESSED) for chunk in layer.readahead.around(index)))

    def prefetch(self, layer: CachedLayer, entries: Iterable[tuple[int, int]], done: Done | None = None) -> None:
        """Nobody waits, but somebody will. `entries`: chunks, each with its place: smaller ones first. `done` as of `want`."""
        waiter = Waiter(done or _nothing)
        waiter.left = 1
        queue = self._queue(layer)
        for index, place in entries:
            if layer.map.states[index] == HERE:
                continue
            until, error = queue.failed.get(index, (0.0, 0))
            if until > self._clock():
                waiter.error = error
                continue
            job = queue.jobs.get(index)
            if job is None:
                job = queue.jobs[index] = _Job()
                self._arrivals += 1
                heapq.heappush(self._prefetch, (place, self._arrivals, layer, index))
            if done is not None:
                waiter.left += 1
                job.waiters.append(waiter)
        waiter.one(0)
        self._dispatch()

    async def have(self, layer: CachedLayer, chunks: Iterable[int]) -> int:
        """`want`, to wait for."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.want(layer, chunks, lambda error: _resolve(future, error))
        return await future

    async def load(self, layer: CachedLayer, entries: Iterable[tuple[int, int]]) -> int:
        """`prefetch`, to wait for."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.prefetch(layer, entries, lambda error: _resolve(future, error))
        return await future

    def forget(self, layer: CachedLayer) -> None:
        """Nothing more is fetched for this layer; whoever waits is refused."""
        queue = self._queues.pop(layer, None)
        for index, job in list(queue.jobs.items()) if queue else ():
            self._demand.pop((layer, index), None)
            for waiter in job.waiters:
                waiter.one(errno.EIO)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _queue(self, layer: CachedLayer) -> _Queue:
        queue = self._queues.get(layer)
        if queue is None:
            queue = self._queues[layer] = _Queue(layer)
        return queue

    def _dispatch(self) -> None:
        while self._demand and len(self._running) < self._parallel:
            (layer, index) = next(iter(self._demand))
            self._start(layer, index, prefetching=False)
        while self._prefetch and self._may_prefetch():
            _, _, layer, index = heapq.heappop(self._prefetch)
            queue = self._queues.get(layer)
            job = queue.jobs.get(index) if queue else None
            if job is not None and not job.running:
                self._start(layer, index, prefetching=True)

    def _may_prefetch(self) -> bool:
        free = self._prefetching < self._parallel - self._for_demand and len(self._running) < self._parallel
        return free and self._chunks_prefetching < self._line.window

    def _start(self, layer: CachedLayer, index: int, *, prefetching: bool) -> None:
        queue = self._queue(layer)
        first, last = index, index
        # Forward first: that is where readers go.
        while last - first + 1 < self._largest and self._is_queued(queue, last + 1):
            last += 1
        while last - first + 1 < self._largest and self._is_queued(queue, first - 1):
            first -= 1
        for each in range(first, last + 1):
            queue.jobs[each].running = True
            self._demand.pop((layer, each), None)
        self._prefetching += prefetching
        self._chunks_prefetching += (last - first + 1) * prefetching
        task = asyncio.ensure_future(self._fetch(queue, first, last - first + 1, prefetching))
        self._running.add(task)

    def _is_queued(self, queue: _Queue, index: int) -> bool:
        job = queue.jobs.get(index)
        return job is not None and not job.running

    async def _fetch(self, queue: _Queue, first: int, count: int, prefetching: bool) -> None:
        failures: Failures = {}
        began = self._clock()
        try:
            failures = await self._fetcher.fetch(queue.layer, first, count)
        except BaseException:
            failures = dict.fromkeys(range(first, first + count), errno.EIO)
            raise
        finally:
            self._prefetching -= prefetching
            self._chunks_prefetching -= count * prefetching
            task = asyncio.current_task()
            if task is not None:
                self._running.discard(task)
            now = self._clock()
            if not failures:
                self._line.note(now - began, count)
            until = now + REMEMBER_FAILURE_S
            for index in range(first, first + count):
                error = failures.get(index, 0)
                if error:
                    queue.failed[index] = (until, error)
                else:
                    queue.failed.pop(index, None)
                job = queue.jobs.pop(index, None)
                for waiter in job.waiters if job else ():
                    waiter.one(error)
            self._dispatch()
            self.on_fetched(queue.layer)


def _resolve(future: asyncio.Future[int], error: int) -> None:
    if not future.done():
        future.set_result(error)


def _nothing(error: int) -> None:
    pass


def _ignore(layer: CachedLayer) -> None:
    pass
