# SPDX-License-Identifier: Apache-2.0
"""Bounded capture of a byte stream: its first half and its last half. Pure; the command writes, clients read by offset.

Capture   one stream up to a limit: a head that fills once, then a ring that holds the newest bytes
Output    what a command keeps of one stream: a Capture of its life, and a smaller one of what its children write after its end
Budget    what all running commands together may keep: when it is used up the largest Capture gives up the middle of what it has
"""

from __future__ import annotations

from opendsec.api.exec import Captured

LATE_BYTES = 256 << 10  # kept of a stream after the command's own end, at most
LEAST_BYTES = 128 << 10  # what a capture may keep whatever others hold
LIVE_BYTES = 256 << 10  # the newest of a stream that somebody follows and of which less is kept than this


class Budget:
    """Bytes that captures may hold together. Without it a few hundred commands that flood, each within its own limit, would be more memory
    than there is. Those that hold most pay: a sandbox that floods costs the output of no other that writes little."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._captures: set[Capture] = set()

    def grown(self, capture: Capture, size: int) -> None:
        self.held += size
        self._captures.add(capture)
        while self.held > self.limit:
            largest = max(self._captures, key=lambda one: one.held_bytes)
            freed = largest.halve()
            if not freed:
                return  # all are as small as they get
            self.held -= freed

    def release(self, capture: Capture) -> None:
        """It is no longer counted here."""
        if capture in self._captures:
            self._captures.discard(capture)
            self.held -= capture.held_bytes


class Capture:
    """At most `limit` bytes of a stream, and its exact length. Memory grows with what is written, never above the limit."""

    __slots__ = ("_budget", "_head", "_head_limit", "_ring", "_ring_limit", "dropped", "halved", "total")

    def __init__(self, limit: int, *, ring_only: bool = False, budget: Budget | None = None) -> None:
        self._budget = budget
        self._ring_limit = limit if ring_only else limit // 2
        self._head_limit = limit - self._ring_limit
        self._head = bytearray()
        # Position p of the stream after the head lies at p % _ring_limit. It grows at its end until it is full, then it goes round.
        self._ring = bytearray()
        self.total = 0
        self.dropped = False
        self.halved = False

    @property
    def held_bytes(self) -> int:
        return len(self._head) + len(self._ring)

    def write(self, data: memoryview) -> None:
        before = len(self._head) + len(self._ring)
        self._write(data)
        if self._budget is not None and (size := len(self._head) + len(self._ring) - before):
            self._budget.grown(self, size)

    def _write(self, data: memoryview) -> None:
        self.total += len(data)
        if self.dropped:
            return
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        limit = self._ring_limit
        if not data or not limit:
            return
        end = self.total - self._head_limit
        if len(data) >= limit:
            self._fill(data[-limit:])
            return
        at = (end - len(data)) % limit
        first = data[: limit - at]
        if at == len(self._ring):
            self._ring += first
        else:
            self._ring[at : at + len(first)] = first
        rest = data[len(first) :]
        self._ring[: len(rest)] = rest

    def _fill(self, newest: bytes | memoryview) -> None:
        """Make the whole ring these bytes."""
        start = len(newest) - (self.total - self._head_limit) % len(newest)
        self._ring = bytearray(newest[start:]) + newest[:start]

    def halve(self) -> int:
        """Keep half as much at either end, from now on; the bytes given back, 0 if there is little to give."""
        before = self.held_bytes
        if before <= LEAST_BYTES:
            return 0
        after_head = self.total - len(self._head)
        newest = self._newest(after_head - len(self._ring), len(self._ring)) if self._ring else b""
        head, ring = self._head[: (len(self._head) + 1) // 2], newest[len(newest) // 2 :]
        if not ring:  # nothing was written beyond the head: what comes now is the tail
            head, ring = self._head[: len(self._head) // 2], bytes(self._head[-(len(self._head) // 4) :])
        self._head, self._head_limit, self._ring_limit, self.halved = head, len(head), len(ring), True
        self._fill(ring)
        return before - self.held_bytes

    def drop(self) -> None:
        """Give the memory back; from now on only the length is kept."""
        if self._budget is not None:
            self._budget.release(self)
        self._head, self._ring, self.dropped = bytearray(), bytearray(), True

    def _newest(self, start: int, size: int) -> bytes:
        """`size` bytes of the ring from position `start` after the head."""
        at = start % self._ring_limit
        first = bytes(self._ring[at : at + size])
        return first + self._ring[: size - len(first)] if len(first) < size else first

    def snapshot(self) -> Captured:
        """What is kept. If something is missing in between, neither edge of the cut splits a UTF-8 character."""
        if self.dropped:
            return Captured(total_bytes=self.total)
        kept = len(self._ring)
        after_head = self.total - len(self._head)
        newest = self._newest(after_head - kept, kept) if kept else b""
        if kept == after_head:
            return Captured(head=bytes(self._head) + newest, total_bytes=self.total)
        return Captured(head=whole_end(bytes(self._head)), tail=whole_start(newest), total_bytes=self.total)

    def read_from(self, offset: int, size: int) -> tuple[bytes, int, int]:
        """(data, next offset, missing): up to `size` bytes from `offset` on, the first `missing` of which are no longer kept.

        `next offset` is where to go on; without data it is `offset` itself, or the end if all in between is missing.
        """
        head = len(self._head)
        if offset < head:
            data = bytes(self._head[offset : offset + size])
            return data, offset + len(data), 0
        if offset >= self.total:
            return b"", offset, 0
        start = max(offset, self.total - len(self._ring))
        size = min(size, self.total - start)
        return self._newest(start - head, size) if size else b"", start + size, start - offset


class Output:
    """What is kept of one stream of a command. Until `freeze` bytes go to the capture that its result shows; what children that
    outlive it write afterwards goes to another, so that the result stays what it was. Offsets run through both.

    Who follows a stream wants all of it, however little of it is to be kept: so while somebody does, its newest bytes are kept besides."""

    __slots__ = ("_budget", "_followers", "_late", "_live", "_live_start", "kept", "limit")

    def __init__(self, limit: int, budget: Budget | None = None) -> None:
        self.limit, self._budget = limit, budget
        self.kept = Capture(limit, budget=budget)
        self._late: Capture | None = None
        self._live: Capture | None = None
        self._live_start = 0  # its first byte's offset in the stream
        self._followers = 0

    @property
    def total(self) -> int:
        return self.kept.total + (self._late.total if self._late else 0)

    @property
    def held_bytes(self) -> int:
        return self.kept.held_bytes + (self._late.held_bytes if self._late else 0)

    @property
    def bound_bytes(self) -> int:
        """What it can come to hold at most from now on, followers apart."""
        return self.kept.held_bytes + min(self.limit, LATE_BYTES) if self._late else self.limit

    def freeze(self) -> None:
        """The command has ended."""
        if self._late is None:
            if self._budget is not None:
                self._budget.release(self.kept)  # what is kept of ended commands is another's to count
            self._late = Capture(min(self.limit, LATE_BYTES))

    def write(self, data: memoryview) -> None:
        (self._late or self.kept).write(data)
        if self._live:
            self._live.write(data)

    def drop(self) -> None:
        self.kept.drop()
        if self._late:
            self._late.drop()
        if self._live:
            self._live.drop()

    def follow(self) -> None:
        self._followers += 1
        if self._live is None and self.limit // 2 < LIVE_BYTES:
            self._live, self._live_start = Capture(LIVE_BYTES, ring_only=True), self.total

    def unfollow(self) -> None:
        self._followers -= 1
        if not self._followers:
            self._live = None

    def read_from(self, offset: int, size: int) -> tuple[bytes, int, int]:
        """As `Capture.read_from`."""
        data, following, missing = self._read_kept(offset, size)
        if missing and self._live:
            start = max(offset - self._live_start, 0)
            newest, after, gap = self._live.read_from(start, size)
            gap += self._live_start + start - offset
            if gap < missing:
                return newest, after + self._live_start, gap
        return data, following, missing

    def _read_kept(self, offset: int, size: int) -> tuple[bytes, int, int]:
        start = self.kept.total
        if self._late is None or offset < start:
            return self.kept.read_from(offset, size)
        data, following, missing = self._late.read_from(offset - start, size)
        return data, following + start, missing


def whole_end(data: bytes) -> bytes:
    """`data` without a UTF-8 character that is cut off at its end."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue  # the middle of a character: look further back for its start
        needed = 2 if byte >> 5 == 0b110 else 3 if byte >> 4 == 0b1110 else 4 if byte >> 3 == 0b11110 else 1
        return data[:-back] if needed > back else data
    return data


def whole_start(data: bytes) -> bytes:
    """`data` without the rest of a UTF-8 character that began before it. More than three such bytes are no text: kept."""
    for index in range(min(4, len(data))):
        if data[index] & 0xC0 != 0x80:
            return data[index:]
    return data if len(data) > 3 else b""
