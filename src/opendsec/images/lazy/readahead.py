# SPDX-License-Identifier: Apache-2.0
"""Read-ahead: what will probably be asked for next of one layer. Pure.

Several sequential readers of one file are told apart as streams. A stream is never ahead by more than half of what it has read.

All others read here and there, but not anywhere: a program comes back to its own file and to the files beside it, which the layer's data
has side by side. So what nobody foresaw is loaded with what lies around it: each wait for a store costs as much as a MiB on the line.
"""

from __future__ import annotations

LARGEST = 64  # chunks
STREAMS = 16
AROUND = 16  # chunks; half as many where nothing else has been asked for yet


class _Stream:
    __slots__ = ("ahead", "first", "next")

    def __init__(self, first: int, following: int) -> None:
        self.first = first
        self.next = following  # chunk that a sequential reader reads next
        self.ahead = following  # chunk up to which (excluded) has been asked for


class ReadAhead:
    def __init__(self, count: int, *, largest: int = LARGEST) -> None:
        self._count, self._largest = count, largest
        self._streams: list[_Stream] = []  # most recently used last
        self._asked = bytearray(count)

    def note(self, first: int, last: int) -> range:
        """Chunks `first` to `last` are being read: the chunks to load beforehand. Each is named once as long as its stream lives."""
        for chunk in range(first, min(last + 1, self._count)):
            self._asked[chunk] = 1
        for stream in self._streams:
            # Large reads come as several events, in parallel and not quite in order.
            if stream.next - 1 <= first <= max(stream.next + 1, stream.ahead):
                return self._go_on(stream, last)
        if len(self._streams) >= STREAMS:
            del self._streams[0]
        self._streams.append(_Stream(first, last + 1))
        return range(0)

    def around(self, chunk: int) -> range:
        """What to load along with this one, which is being read and which nobody foresaw."""
        size = AROUND
        if self._asked.count(1, chunk // size * size, chunk // size * size + size) <= 1:
            size //= 2
        start = chunk // size * size
        return range(start, min(start + size, self._count))

    def _go_on(self, stream: _Stream, last: int) -> range:
        self._streams.remove(stream)
        self._streams.append(stream)
        if last < stream.next:
            return range(0)  # the same chunk again
        stream.next = last + 1
        window = min((stream.next - stream.first) // 2, self._largest)
        # Not before half of the window is used up: few requests for much, and the next is under way before the reader needs it.
        if stream.ahead - stream.next > window // 2:
            return range(0)
        start = max(stream.next, stream.ahead)
        stream.ahead = min(self._count, max(start, stream.next + window))
        return range(start, stream.ahead)
