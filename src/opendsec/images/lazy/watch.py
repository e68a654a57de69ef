# SPDX-License-Identifier: Apache-2.0
"""Answers the readers that wait: a thread of its own, because a reader of what is here is to go on at once, whatever the loop is at.

What is not here goes to the engine, on the loop. An event's record on the board goes after its answer and before its descriptor: see
`board`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import sys
import threading
import traceback
from collections.abc import Callable

from opendsec.images.lazy.board import Board
from opendsec.images.lazy.cache import CachedLayer
from opendsec.images.lazy.engine import GUESSED, Engine
from opendsec.kernel.fanotify import Event, Group

NICE = -10  # a reader stands still until it is answered, which takes microseconds; loading may take turns with the sandboxes

Find = Callable[[tuple[int, int]], CachedLayer | None]


def or_end(run: Callable[[], None]) -> None:
    """Run a thread without which readers would wait for ever: if it fails, the process ends, and a successor comes to them."""
    try:
        run()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


class Watch:
    def __init__(self, group: Group, board: Board, find: Find, engine: Callable[[CachedLayer], Engine]) -> None:
        """`find`: the layer of a (device, inode); called in the thread, as is nothing else of what is given."""
        self._group, self._board, self._engine, self._find = group, board, engine, find
        self.on_miss: Callable[[CachedLayer], None] = lambda layer: None  # on the loop
        self._loop = asyncio.get_running_loop()
        self.own: set[int] = set()  # threads of ours: what they do to a data file asks like anybody's, but nobody else would answer
        self._thread = threading.Thread(target=or_end, args=[self._run], name="watch", daemon=True)
        self.events = self.misses = 0

    def start(self) -> None:
        """Begin, with those that a predecessor left waiting."""
        for event in self._board.recover():
            self._handle(event)
        self._thread.start()

    def _run(self) -> None:
        thread = threading.get_native_id()
        self.own.add(thread)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, NICE)  # of this thread alone
        poll = select.poll()
        poll.register(self._group.fd, select.POLLIN)
        while True:
            poll.poll()
            for event in self._board.after_read(self._group.read(self._board.before_read())):
                self._handle(event)

    def _handle(self, event: Event) -> None:
        self.events += 1
        if event.tid in self.own:
            self._answer(event, 0)
            return
        status = os.fstat(event.fd)
        layer = self._find((status.st_dev, status.st_ino))
        if layer is None:
            self._answer(event, errno.EIO)
            return
        chunks = layer.table.covering(event.offset, max(event.count, 1))
        ahead = layer.note_touch(chunks)
        if layer.try_pass(event.tid, chunks):
            self._answer(event, 0)
        else:
            self.misses += 1
            self._loop.call_soon_threadsafe(self._miss, layer, event, chunks)
        if ahead:
            self._loop.call_soon_threadsafe(self._ahead, layer, ahead)

    def _miss(self, layer: CachedLayer, event: Event, chunks: range) -> None:
        def done(error: int) -> None:
            if error == 0 and not layer.try_pass(event.tid, chunks):
                self._miss(layer, event, chunks)  # dropped again before its reader came to it
            else:
                self._answer(event, error)

        self._engine(layer).want_with_neighbours(layer, chunks, done)
        self.on_miss(layer)

    def _ahead(self, layer: CachedLayer, chunks: range) -> None:
        self._engine(layer).prefetch(layer, ((chunk, GUESSED) for chunk in chunks))

    def _answer(self, event: Event, error: int) -> None:
        # The reader may have been killed meanwhile: then nobody takes the answer.
        with contextlib.suppress(OSError):
            if error == 0:
                self._group.allow(event.fd)
            else:
                self._group.deny(event.fd, error)
        self._board.forget(event.fd)
        os.close(event.fd)
