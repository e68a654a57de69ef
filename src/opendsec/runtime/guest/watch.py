# SPDX-License-Identifier: Apache-2.0
"""Changes of one directory in a guest."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence

from opendsec.api.errors import OpenDSecError
from opendsec.api.files import WatchEvent
from opendsec.runtime.guest import wire
from opendsec.runtime.guest.channel import Channel
from opendsec.runtime.guest.wire import WireError

WATCH_CROSSING = 4 << 20  # what a guest may have sent before it heard that nobody watches any more
MAX_WAITING = 4096  # events that nobody has read; more become one overflow


class GuestWatch:
    """Implements `backend.Watch`, and gets what the guest tells. Made by `GuestFiles.open_watch`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.number = channel.new_number()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._events: deque[WatchEvent] = deque()
        self._ended = False

    def fileno(self) -> int:
        return self._fd

    def read(self) -> Sequence[WatchEvent]:
        """What has happened so far; never waits. Repetitions of one event in a row are one."""
        with self._lock:
            events, self._events = list(self._events), deque()
            if self._fd >= 0:
                try:
                    os.eventfd_read(self._fd)
                except BlockingIOError:
                    pass
        return events

    def close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            self._channel.call_soon(self._unwatch)

    def _unwatch(self) -> None:
        if not self._channel.lost:
            self._channel.post(wire.UNWATCH, wire.u64(self.number))
            self._channel.forget(self.number, WATCH_CROSSING)

    def _put(self, events: Sequence[WatchEvent]) -> None:
        with self._lock:
            if self._fd < 0:
                return
            for event in events:
                if self._ended or (self._events and self._events[-1] == event):
                    continue
                if len(self._events) < MAX_WAITING or event.kind == "gone":
                    self._events.append(event)
                elif self._events[-1].kind != "overflow":
                    self._events.append(WatchEvent(kind="overflow"))
                self._ended = event.kind == "gone"
            os.eventfd_write(self._fd, 1)

    def on_event(self, kind: int, payload: bytes) -> None:
        if kind != wire.WATCHED:
            raise WireError("an event out of turn")
        self._put(wire.watched(payload))

    def on_data(self, stream: int, data: memoryview) -> None:
        raise WireError("data of a watch")

    def on_credit(self, stream: int, count: int) -> None:
        raise WireError("credit for a watch")

    def on_eof(self, stream: int) -> None:
        raise WireError("the end of a stream that there is not")

    def on_close(self, stream: int, code: int) -> None:
        raise WireError("a stream closed that there is not")

    def lost(self, error: OpenDSecError) -> None:
        self._put((WatchEvent(kind="gone"),))
