# SPDX-License-Identifier: Apache-2.0
"""Blocking calls that may never return: a read of a network file system whose server has gone sleeps in the kernel, where nothing
reaches it. So these threads are daemons, which the end of the program does not wait for; who awaits a call may give up on it; and a
call that was given up on learns so when it looks."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

Abandoned = threading.Event
Job = Callable[[], None]

LIMIT = 16


class Workers:
    """At most `limit` threads, made when needed. If all are stuck, further calls wait, and their callers give up in time."""

    def __init__(self, name: str, limit: int = LIMIT) -> None:
        self._name, self._limit = name, limit
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._idle = 0
        self._closed = False

    async def run(self, call: Callable[[Abandoned], T]) -> T:
        """`call` in a thread. On cancellation this returns at once, and `call` sees its argument set when it next looks."""
        loop, abandoned = asyncio.get_running_loop(), Abandoned()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]  # T may be None itself

        def job() -> None:
            if abandoned.is_set():
                return
            result, error = None, None
            try:
                result = call(abandoned)
            except BaseException as caught:
                error = caught
            try:
                loop.call_soon_threadsafe(settle, result, error)
            except RuntimeError:
                pass  # the loop was closed meanwhile: nobody waits

        self._start(job)
        try:
            return await future
        finally:
            abandoned.set()

    def _start(self, job: Job) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            if self._idle > 0:
                self._idle -= 1
            elif self._threads < self._limit:
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            else:
                self._idle -= 1  # a debt: the next thread that gets free is taken already
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._lock:
                self._idle += 1

    def close(self) -> None:
        """Idle threads end; stuck ones when they can."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._jobs.put(None)
