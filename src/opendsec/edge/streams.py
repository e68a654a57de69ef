# SPDX-License-Identifier: Apache-2.0
"""The edge's ends of the pipes and terminals of commands.

Facts that shaped this:

* They are watched by an epoll instance of our own: `runtime.poller` says why.
* A pipe belongs to who made it, and opening `/dev/stdout` or `/dev/stderr` opens the pipe anew with the opener's own rights. Inside a
  sandbox nobody is the host's root, so `echo x > /dev/stderr` would fail; hence the mode.
* What a process wrote before it ended is in its pipe when the end is known, and in a terminal's buffer once a read has found that empty:
  both give it up without waiting. A child that lives on may refill the pipe as fast as we read, so a drain reads at most what the pipe
  can hold.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import select
from collections import deque
from collections.abc import Callable

from opendsec.runtime.poller import Poller as Poller

WRITE_BYTES = 64 << 10
TERMINAL_BYTES = 1 << 20  # more than a terminal's buffers hold
PIPE_MODE = 0o666  # see above; reaching it still takes the right to look into the process's descriptors
END_OF_FILE = b"\x04"  # what ends the input of a terminal in its usual mode


def output_pipe() -> tuple[int, int]:
    """(our reading end, the command's writing end)."""
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(ours, False)
    os.fchmod(theirs, PIPE_MODE)
    return ours, theirs


def input_pipe() -> tuple[int, int]:
    """(our writing end, the command's reading end)."""
    theirs, ours = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(ours, False)
    os.fchmod(theirs, PIPE_MODE)
    return ours, theirs


class Reader:
    """Reads a pipe or terminal to its end and hands the bytes on. Owns the descriptor."""

    __slots__ = ("_feed", "_on_end", "_paused", "_poller", "fd")

    def __init__(self, poller: Poller, fd: int, feed: Callable[[memoryview], None], on_end: Callable[[], None]) -> None:
        self._poller, self.fd, self._feed, self._on_end = poller, fd, feed, on_end
        self._paused = False
        poller.watch(fd, select.EPOLLIN, self._on_ready)

    @property
    def open(self) -> bool:
        return self.fd >= 0

    def _on_ready(self) -> None:
        if self._read() == 0:
            self._on_end()

    def _read(self) -> int:
        """How many bytes came; 0 at the end, and then it is closed; -1 if there are none now."""
        try:
            size = os.readv(self.fd, [self._poller.buffer])
        except BlockingIOError:
            return -1
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ECONNRESET):  # of a terminal that nobody has open any more, here or in a machine
                raise
            size = 0
        if size:
            self._feed(self._poller.buffer[:size])
        else:
            self.close()
        return size

    def pause(self, paused: bool) -> None:
        """Whether to leave what comes where it is: then whoever writes waits, once the pipe is full."""
        if paused == self._paused or self.fd < 0:
            return
        self._paused = paused
        if paused:
            self._poller.unwatch(self.fd)
        else:
            self._poller.watch(self.fd, select.EPOLLIN, self._on_ready)

    def drain(self) -> None:
        """Read what is there now, without waiting, paused or not."""
        if self.fd < 0:
            return
        left = -1
        while self.fd >= 0 and (size := self._read()) > 0:
            if left < 0:
                left = capacity(self.fd)
            left -= size
            if left <= 0:
                return

    def close(self) -> None:
        """May be repeated."""
        if self.fd >= 0:
            self._poller.unwatch(self.fd)
            os.close(self.fd)
            self.fd = -1


class Writer:
    """Writes to a pipe or terminal as it takes the bytes. Owns the descriptor. What the command does not read stays with us, so whoever
    puts something waits for it."""

    __slots__ = ("_ending", "_fd", "_poller", "_queue", "_terminal", "_waiting", "reason")

    def __init__(self, poller: Poller, fd: int, *, terminal: bool) -> None:
        self._poller, self._fd, self._terminal = poller, fd, terminal
        self._queue: deque[tuple[memoryview, asyncio.Future[None] | None]] = deque()
        self._waiting = False  # for room
        self._ending = False
        self.reason = ""  # why it accepts no more

    def put(self, data: bytes, done: asyncio.Future[None] | None = None, *, end: bool = False) -> None:
        """Write `data`, then with `end` close. `done` gets a result once all of it is written, ConnectionError if that cannot be."""
        if end:
            self._ending = True
            self.reason = "its standard input was closed"
            if self._terminal:
                data += END_OF_FILE
        self._queue.append((memoryview(data), done))
        if not self._waiting:
            self._pump()

    def has_reader(self) -> bool:
        """Whether the other end of the pipe is open anywhere."""
        if self._fd < 0:
            return False
        poll = select.poll()
        poll.register(self._fd, 0)
        return not poll.poll(0)

    @property
    def accepts(self) -> bool:
        return self._fd >= 0 and not self._ending

    def _pump(self) -> None:
        while self._queue:
            data, done = self._queue[0]
            try:
                while data:
                    data = data[os.write(self._fd, data[:WRITE_BYTES]) :]
            except BlockingIOError:
                self._queue[0] = (data, done)
                if not self._waiting:
                    self._waiting = True
                    self._poller.watch(self._fd, select.EPOLLOUT, self._pump)
                return
            except OSError:  # EPIPE; EIO of a terminal
                self.close("nothing reads its standard input any more")
                return
            self._queue.popleft()
            if done is not None and not done.done():
                done.set_result(None)
        if self._waiting:
            self._poller.unwatch(self._fd)
            self._waiting = False
        if self._ending:
            self.close(self.reason)

    def close(self, reason: str) -> None:
        """Close now; what was not written yet fails. May be repeated."""
        if self._fd < 0:
            return
        self._poller.unwatch(self._fd)
        os.close(self._fd)
        self._fd = -1
        self._waiting = False
        self.reason = reason
        while self._queue:
            _, done = self._queue.popleft()
            if done is not None and not done.done():
                done.set_exception(ConnectionError(reason))


def capacity(fd: int) -> int:
    """What a pipe can hold, in bytes; what a terminal can at most."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
    except OSError:
        return TERMINAL_BYTES
