# SPDX-License-Identifier: Apache-2.0
"""Many descriptors in one event loop, by an epoll instance of our own.

* libuv reports an error, and no event, for a pipe whose reader is gone, and uvloop then drops the callback: a writer that waits for room
  would wait for ever. So the descriptors live in an epoll instance of our own, which is itself the one thing the loop watches. It also
  costs one system call to watch a pipe instead of a handle with its life cycle.
* epoll watches open file descriptions, not numbers: a descriptor must be unregistered before it is closed, or a copy of it keeps firing.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

READ_BYTES = 64 << 10
BATCH = 128  # events taken in one turn of the loop


class Poller:
    """Calls handlers when their descriptors are ready. One an event loop; `buffer` is for whoever reads in a handler."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self.buffer = memoryview(bytearray(READ_BYTES))
        self._loop.add_reader(self._epoll.fileno(), self._ready)

    def watch(self, fd: int, events: int, handler: Callable[[], None]) -> None:
        """Call `handler` while any of `events`, an error or a hang-up is there."""
        self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def change(self, fd: int, events: int) -> None:
        """Other events for what is watched already."""
        self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        """To be called before `fd` is closed; may be repeated until then."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _ready(self) -> None:
        for fd, _ in self._epoll.poll(0, BATCH):
            handler = self._handlers.get(fd)
            if handler is None:
                continue  # unwatched by a handler before it
            try:
                handler()
            except Exception as error:
                self.unwatch(fd)  # a handler that fails would be called again at once, for ever
                self._loop.call_exception_handler({"message": f"the handler of descriptor {fd} failed", "exception": error})

    def watched(self) -> int:
        """How many descriptors are watched."""
        return len(self._handlers)

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        self._handlers.clear()
