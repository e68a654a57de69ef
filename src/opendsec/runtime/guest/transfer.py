# SPDX-License-Identifier: Apache-2.0
"""The stream of one file operation, between a worker thread, which waits, and the event loop, which never does."""

from __future__ import annotations

import threading
from collections import deque

from opendsec.api.errors import OpenDSecError, Unavailable
from opendsec.runtime.guest import wire
from opendsec.runtime.guest.channel import Channel
from opendsec.runtime.guest.wire import WireError

STALL_S = 30.0  # without any progress
GRANT_BYTES = wire.INITIAL_CREDIT // 4


class Closed(Exception):
    """The guest gave up the transfer, with an errno."""

    def __init__(self, code: int) -> None:
        self.code = code


class Transfer:
    """One stream, number 0, of the request `number`. Methods `on_…` and `lost` are the loop's, all others the thread's."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.number = channel.new_number()
        self._changed = threading.Condition()
        self._error: OpenDSecError | None = None
        self._closed: int | None = None  # by the guest
        self.over = False  # for us

    def _wait(self) -> None:
        """Until something changes, with the lock held. Raises Unavailable."""
        if not self._changed.wait(STALL_S):
            raise Unavailable(f"the guest has not gone on with the transfer for {STALL_S:g} s")

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed is not None:
            raise Closed(self._closed)

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def on_data(self, stream: int, data: memoryview) -> None:
        raise WireError("data on a stream that has none")

    def on_credit(self, stream: int, count: int) -> None:
        raise WireError("credit for a stream that takes none")

    def on_eof(self, stream: int) -> None:
        raise WireError("the end of a stream that there is not")

    def on_close(self, stream: int, code: int) -> None:
        if stream or self._closed is not None:
            raise WireError("a stream closed that there is not")
        self._closed = code
        self._tell()

    def on_event(self, kind: int, payload: bytes) -> None:
        raise WireError("an event about a transfer")

    def lost(self, error: OpenDSecError) -> None:
        self._error = error
        self._tell()


class Incoming(Transfer):
    """From the guest."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._pieces: deque[bytes] = deque()
        self._credit = wire.INITIAL_CREDIT
        self._taken = 0
        self._ended = False

    def on_data(self, stream: int, data: memoryview) -> None:
        if stream or self._ended or not 0 < len(data) <= self._credit:
            raise WireError("more of a stream than it may send")
        self._credit -= len(data)
        if not self.over:
            with self._changed:
                self._pieces.append(bytes(data))
                self._changed.notify_all()

    def on_eof(self, stream: int) -> None:
        if stream or self._ended:
            raise WireError("a stream that ended twice")
        self._ended = True
        self._tell()

    def _grant(self, count: int) -> None:
        if not self.over and not self._ended:
            self._credit += count
            self.channel.send(wire.credit(self.number, 0, count))

    def read(self, most: int) -> bytes:
        """What is there, at most `most` bytes, waiting for the first; empty at the end. Raises Closed, SandboxLost, Unavailable."""
        with self._changed:
            while not self._pieces:
                if self._ended:
                    return b""
                self._check()
                self._wait()
            piece = self._pieces.popleft()
            if len(piece) > most:
                self._pieces.appendleft(piece[most:])
                piece = piece[:most]
        self._taken += len(piece)
        if self._taken >= GRANT_BYTES and not self._ended:
            count, self._taken = self._taken, 0
            self.channel.call_soon(lambda: self._grant(count))
        return piece

    def upto(self, count: int) -> bytes:
        """`count` bytes, fewer only at the end."""
        parts, got = [], 0
        while got < count and (part := self.read(count - got)):
            parts.append(part)
            got += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def end(self) -> None:
        """No more of it. May be repeated."""
        if not self.over:
            self.over = True
            self._pieces.clear()
            self.channel.call_soon(self._end)

    def _end(self) -> None:
        if not self._ended and self._closed is None and not self.channel.lost:
            self.channel.send(wire.close(self.number, 0))
        self.channel.forget(self.number, 0 if self._ended else self._credit + 1)


class Outgoing(Transfer):
    """To the guest."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._credit = wire.INITIAL_CREDIT

    def on_credit(self, stream: int, count: int) -> None:
        with self._changed:
            if stream or not 0 < count <= wire.INITIAL_CREDIT - self._credit:
                raise WireError("more credit than there is")
            self._credit += count
            self._changed.notify_all()

    def write(self, data: bytes | memoryview) -> None:
        """All of it. Raises Closed, SandboxLost, Unavailable."""
        view = memoryview(data)
        while view:
            with self._changed:
                self._check()
                while not self._credit:
                    self._wait()
                    self._check()
                size = min(self._credit, wire.MAX_PAYLOAD, len(view))
                self._credit -= size
            piece, view = view[:size], view[size:]
            self.channel.call_soon(lambda piece=piece: self.channel.send_data(self.number, 0, piece))  # type: ignore[misc]

    def finish(self) -> None:
        """The last word. COMMIT comes next."""
        self.channel.call_soon(lambda: self.channel.send(wire.eof(self.number, 0)))

    def end(self) -> None:
        """It is over on both sides. May be repeated."""
        if not self.over:
            self.over = True
            crossing = 4 * (wire.INITIAL_CREDIT + 1)
            self.channel.call_soon(lambda: self.channel.forget(self.number, crossing))
