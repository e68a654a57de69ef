# SPDX-License-Identifier: Apache-2.0
"""The streams of a command in a guest, each between the channel and one descriptor of the host. What holds for all of them together is in
`running`."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import select
from collections import deque
from typing import TYPE_CHECKING

from opendsec.runtime.guest import wire
from opendsec.runtime.guest.wire import WireError

if TYPE_CHECKING:
    from opendsec.runtime.guest.running import GuestRunning

GRANT_BYTES = wire.INITIAL_CREDIT // 4  # taken before the guest is told so
ROOM_BYTES = 1 << 20  # of a pipe that has to take all that is left


class Output:
    """A stream from the guest, written to a descriptor, which it owns."""

    __slots__ = (
        "_command",
        "_credit",
        "_fd",
        "_gate",
        "_queue",
        "_stream",
        "_taken",
        "_waits",
        "ended",
        "received",
        "rejected",
        "written",
    )

    def __init__(self, command: GuestRunning, stream: int, fd: int) -> None:
        self._command, self._stream, self._fd = command, stream, fd
        self._credit = wire.INITIAL_CREDIT
        self._taken = 0  # not granted again yet
        self._queue: deque[bytes] = deque()
        self._waits = False
        self._gate: tuple[tuple[Output, int], ...] = ()
        self.received = self.written = 0
        self.ended = False  # the guest has said its last word
        self.rejected = False  # the host wants no more of it

    @property
    def open(self) -> bool:
        return self._fd >= 0

    @property
    def crossing(self) -> int:
        """What the guest may have under way."""
        return 0 if self.ended else self._credit + 1

    def on_data(self, data: memoryview) -> None:
        size = len(data)
        if self.ended or not 0 < size <= self._credit:
            raise WireError("more of a stream than it may send")
        self._credit -= size
        self.received += size
        if self._fd < 0:
            self.written = self.received
            return
        if self._stream > 2:
            self._gate = self._command.before(self)
        if not self._queue and self._gate_open():
            done = self._write(data)
            if done == size:
                self._grant()
                self._command.noticed()
                return
            data = data[done:]
        self._queue.append(bytes(data))
        self._grant()
        if self._gate_open():
            self._wait()
        else:
            self._command.gated = True
            for other, _ in self._gate:
                other.make_room()

    def _gate_open(self) -> bool:
        """Whether what was written to lower streams before is out."""
        return all(other.written >= mark or not other.open for other, mark in self._gate)

    def _write(self, data: bytes | memoryview) -> int:
        """How much the descriptor took."""
        done = 0
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:] if done else data)
        except BlockingIOError:
            pass
        except OSError as error:  # EPIPE: nobody reads it any more
            self.reject(error.errno or errno.EPIPE)
            return len(data)
        self.written += done
        self._taken += done
        return done

    def _grant(self) -> None:
        if self._taken >= GRANT_BYTES and not self.ended and self._fd >= 0:
            self._credit += self._taken
            self._command.channel.send(wire.credit(self._command.number, self._stream, self._taken))
            self._taken = 0

    def _wait(self) -> None:
        if not self._waits and self._fd >= 0:
            self._waits = True
            self._command.channel.poller.watch(self._fd, select.EPOLLOUT, self.pump)

    def _unwait(self) -> None:
        if self._waits:
            self._waits = False
            self._command.channel.poller.unwatch(self._fd)

    def pump(self) -> None:
        """Write what waits."""
        if self._fd < 0 or not self._gate_open():
            return
        while self._queue:
            data = self._queue[0]
            done = self._write(data)
            if self._fd < 0:
                break
            if done < len(data):
                self._queue[0] = data[done:]
                self._grant()
                self._wait()
                self._command.progressed()
                return
            self._queue.popleft()
        self._gate = ()
        self._unwait()
        self._grant()
        if self.ended:
            self._close()
        self._command.progressed()

    def make_room(self) -> None:
        """Let the descriptor take all that is under way, whoever reads it."""
        if self._fd < 0:
            return
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, ROOM_BYTES)
        except OSError:
            self._command.widen_terminal()
        if self._queue:
            self.pump()

    def on_eof(self) -> None:
        if self.ended:
            raise WireError("a stream that ended twice")
        self.ended = True
        if not self._queue:
            self._close()
        self._command.progressed()

    def reject(self, code: int = errno.EPIPE) -> None:
        """Nobody on the host wants more of it."""
        self.rejected = True
        if not self.ended:
            self._command.channel.send(wire.close(self._command.number, self._stream, code))
        self.shut()
        self._command.noticed()

    def _close(self) -> None:
        if self._fd >= 0:
            self._unwait()
            fd, self._fd = self._fd, -1
            self._command.close_output(fd)

    def shut(self) -> None:
        """Drop what waits, and close."""
        self._queue.clear()
        self.written = self.received
        self._close()

    def lost(self) -> None:
        if self._queue and self._fd >= 0:
            self._gate = ()
            for data in self._queue:
                if self._write(data) < len(data) or self._fd < 0:
                    break
        self.shut()

    @property
    def blocked(self) -> bool:
        """Whether something waits for other streams alone."""
        return bool(self._queue) and not self._waits


class Input:
    """A stream to the guest, read from a descriptor, which it owns."""

    __slots__ = ("_command", "_credit", "_fd", "_regular", "_stream", "_watched")

    def __init__(self, command: GuestRunning, stream: int, fd: int) -> None:
        self._command, self._stream, self._fd = command, stream, fd
        self._credit = wire.INITIAL_CREDIT
        self._watched = self._regular = False

    @property
    def open(self) -> bool:
        return self._fd >= 0

    @property
    def crossing(self) -> int:
        """What the guest may have under way: frames of four bytes, each for a byte at least."""
        return 4 * (wire.INITIAL_CREDIT - self._credit + 1)

    def watch(self) -> None:
        if self._fd < 0 or self._watched or not self._credit:
            return
        if self._regular:
            asyncio.get_running_loop().call_soon(self.pump)
            return
        try:
            self._command.channel.poller.watch(self._fd, select.EPOLLIN, self.pump)
        except PermissionError:  # a regular file is always ready
            self._regular = True
            self.watch()
            return
        self._watched = True

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._command.channel.poller.unwatch(self._fd)

    def pump(self) -> None:
        channel = self._command.channel
        if self._fd < 0:
            return
        if channel.congested:
            self._unwatch()
            channel.when_clear(self.watch)
            return
        size = min(self._credit, wire.MAX_PAYLOAD)
        if not size:
            self._unwatch()
            return
        try:
            data = os.read(self._fd, size)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # a terminal whose other end is gone
        if not data:
            channel.send(wire.eof(self._command.number, self._stream))
            self.close()
            self._command.input_ended(self._stream)
            return
        self._credit -= len(data)
        channel.send_data(self._command.number, self._stream, data)
        if not self._credit:
            self._unwatch()
        elif self._regular:
            self.watch()

    def on_credit(self, count: int) -> None:
        if not 0 < count <= wire.INITIAL_CREDIT - self._credit:
            raise WireError("more credit than there is")
        self._credit += count
        self.watch()

    def close(self) -> None:
        if self._fd >= 0:
            self._unwatch()
            self._command.channel.not_when_clear(self.watch)
            fd, self._fd = self._fd, -1
            os.close(fd)
