# SPDX-License-Identifier: Apache-2.0
"""Read-ahead: what will probably be asked for next of one layer. Pure.

Several sequential readers of one file are told apart as streams. A stream starts with nothing: most reads of a cold image are of small
files here and there, and what is loaded in vain costs more than a wait. Each further read that goes on where the stream stands doubles
its window.
"""

from __future__ import annotations

FIRST, LARGEST = 2, 64  # chunks
STREAMS = 16


class _Stream:
    __slots__ = ("ahead", "next", "window")

    def __init__(self, following: int) -> None:
        self.next = following  # chunk that a sequential reader reads next
        self.ahead = following  # chunk up to which (excluded) has been asked for
        self.window = 0


class ReadAhead:
    def __init__(self, count: int, *, largest: int = LARGEST) -> None:
        self._count, self._largest = count, largest
        self._streams: list[_Stream] = []  # most recently used last

    def note(self, first: int, last: int) -> range:
        """Chunks `first` to `last` are being read: the chunks to load beforehand. Each is named once as long as its stream lives."""
        for stream in self._streams:
            # Large reads come as several events, in parallel and not quite in order.
            if stream.next - 1 <= first <= max(stream.next + 1, stream.ahead):
                return self._go_on(stream, last)
        if len(self._streams) >= STREAMS:
            del self._streams[0]
        self._streams.append(_Stream(last + 1))
        return range(0)

    def _go_on(self, stream: _Stream, last: int) -> range:
        self._streams.remove(stream)
        self._streams.append(stream)
        if last < stream.next:
            return range(0)  # the same chunk again
        stream.next = last + 1
        # Half of the window used up, then the next one: the reader never waits for the start of a request.
        if stream.ahead - stream.next > stream.window // 2:
            return range(0)
        stream.window = min(max(FIRST, stream.window * 2), self._largest)
        start = max(stream.next, stream.ahead)
        stream.ahead = min(self._count, max(start, stream.next + stream.window))
        return range(start, stream.ahead)
