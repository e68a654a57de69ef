# SPDX-License-Identifier: Apache-2.0
"""A command in a guest: its streams are pumped from and to the descriptors that the host gave it.

To the holder of those descriptors it is as if the command had them:

* The end is told (`exited`) once all that had been written until then is in the host's pipes, whatever comes after; so a pipe whose
  reader takes its time is made larger then. If the whole tree has ended, its outputs have too, and that is waited for, for a moment: some
  process elsewhere may have got hold of one. The same holds between streams: what a command says on descriptor 3 or above (a session's
  status) is passed on only after what it wrote to 1 and 2 before.
* When the host's reader of an output is gone, the command's pipe is closed, and it gets SIGPIPE. When nothing inside reads an input, the
  host's writer gets EPIPE.
* Credit binds each direction of each stream to INITIAL_CREDIT bytes under way, so a slow reader makes the command wait, and nobody else.

A terminal is a socket here; its size goes by `resize`.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Sequence
from typing import TYPE_CHECKING

from opendsec.api.errors import OpenDSecError, Unavailable, Unsupported
from opendsec.kernel import fds as kernel_fds
from opendsec.runtime.backend import ExecPlan, Exit, Running
from opendsec.runtime.container.handle import NotStarted
from opendsec.runtime.guest import wire
from opendsec.runtime.guest.channel import Channel, Refused
from opendsec.runtime.guest.streams import ROOM_BYTES, Input, Output
from opendsec.runtime.guest.wire import WireError

if TYPE_CHECKING:
    from opendsec.api.spec import Limits

GRACE_S = 0.1  # from the end of a tree to that of its outputs
NULL_DEVICE = os.makedev(1, 3)
MAX_CPU_US = 1 << 53
DRAINS = 64
_SO_SNDBUFFORCE = 32


class GuestRunning:
    """Implements `backend.Running`, and owns the streams of one command. Made by `start`."""

    pid = 0

    def __init__(self, channel: Channel, number: int) -> None:
        self.channel, self.number = channel, number
        self.terminal: int | None = None
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.inputs: dict[int, Input] = {}
        self.outputs: dict[int, Output] = {}
        self.is_over = False  # nothing more will be heard of it
        self.gated = False  # an output may wait for others
        self._near: socket.socket | None = None  # our end of the terminal
        self._exit: wire.Ended | None = None
        self._tree_empty = False
        self._released = False
        self._grace: asyncio.TimerHandle | None = None

    # --- Running -----------------------------------------------------------------------------------------------------

    def signal(self, number: int, *, tree: bool = False, since_mark: bool = False) -> None:
        if self.is_over or (self._exit is not None and not tree):
            return
        flags = (wire.SIGNAL_TREE if tree else 0) | (wire.SIGNAL_SINCE_MARK if since_mark and tree else 0)
        self.channel.post(wire.SIGNAL, wire.u64(self.number) + wire.u32(number) + wire.u32(flags))

    def mark(self) -> None:
        if not self.is_over:
            self.channel.post(wire.MARK, wire.u64(self.number))

    def kill_since_mark(self) -> None:
        self.signal(9, tree=True, since_mark=True)  # guestd does it until there is nobody new

    def resize(self, rows: int, columns: int) -> None:
        if not self.is_over and self.terminal is not None:
            self.channel.post(wire.RESIZE, wire.u64(self.number) + wire.u16(rows) + wire.u16(columns))

    def kill_tree(self) -> None:
        self.signal(9, tree=True)

    def alive_children(self) -> bool:
        return not self.is_over and not self._tree_empty

    async def release(self) -> None:
        self._released = True
        self._let_go()

    # --- Owner -------------------------------------------------------------------------------------------------------

    def on_data(self, stream: int, data: memoryview) -> None:
        output = self.outputs.get(stream)
        if output is None:
            raise WireError("output on a stream that has none")
        output.on_data(data)

    def on_credit(self, stream: int, count: int) -> None:
        input = self.inputs.get(stream)
        if input is None:
            raise WireError("credit for a stream that takes none")
        input.on_credit(count)

    def on_eof(self, stream: int) -> None:
        output = self.outputs.get(stream)
        if output is None:
            raise WireError("the end of a stream that there is not")
        output.on_eof()

    def on_close(self, stream: int, code: int) -> None:
        input = self.inputs.get(stream)
        if input is None:
            raise WireError("nobody reads a stream that there is not")
        input.close()
        self._let_go()

    def on_event(self, kind: int, payload: bytes) -> None:
        if kind == wire.EXIT and self._exit is None:
            self._exit = ended = wire.only(payload, wire.ended)
            self.channel.counters = ended.counters
            self._tree_empty = not ended.tree_alive
            for stream, output in self.outputs.items():
                if output.written < self._end_of(ended, stream):
                    output.make_room()
            self.progressed()
        elif kind == wire.TREE_EMPTY and self._exit is not None:
            wire.only(payload, wire.nothing)
            self._tree_empty = True
            self._close_inputs()
            self._let_go()
        else:
            raise WireError("an event out of turn")

    def lost(self, error: OpenDSecError) -> None:
        self.is_over = True
        for output in self.outputs.values():
            output.lost()
        self._close_all()
        if not self.exited.done():
            # As a container's commands end when its first process does. Whoever holds the sandbox says that it is lost.
            # It may also be that the guest began anew.
            reason = error.message if isinstance(error, Unavailable) else ""
            self.exited.set_result(_exit(self._exit) if self._exit is not None else Exit(signal=9, reason=reason))

    # --- streams -----------------------------------------------------------------------------------------------------

    def _end_of(self, ended: wire.Ended, stream: int) -> int:
        return ended.ends[stream] if stream < len(ended.ends) else 0

    def before(self, output: Output) -> tuple[tuple[Output, int], ...]:
        """What has come on 1 and 2 so far, which goes first."""
        return tuple((lower, lower.received) for stream, lower in self.outputs.items() if stream <= 2 and lower is not output)

    def noticed(self) -> None:
        """`progressed`, where it is not known whether that matters."""
        if self.gated or self._exit is not None:
            self.progressed()

    def progressed(self) -> None:
        """Some output was written, or will never be."""
        if self.gated:
            waiting = [output for output in self.outputs.values() if output.blocked]
            self.gated = bool(waiting)
            for output in waiting:
                output.pump()
        ended = self._exit
        if ended is not None and not self.exited.done():
            for stream, output in self.outputs.items():
                if output.open and output.written < self._end_of(ended, stream):
                    return
            if self._tree_empty and any(output.open for output in self.outputs.values()):
                if self._grace is None:
                    self._grace = asyncio.get_running_loop().call_later(GRACE_S, self._settle)
                return
            self._settle()
        self._let_go()

    def _settle(self) -> None:
        """It has ended, and so has its output."""
        if self._grace is not None:
            self._grace.cancel()
        if self.exited.done() or self._exit is None:
            return
        self.exited.set_result(_exit(self._exit))
        if self._tree_empty:
            self._close_inputs()
        self._let_go()

    def _close_inputs(self) -> None:
        """Nobody is there to read them."""
        for input in self.inputs.values():
            input.close()

    def close_output(self, fd: int) -> None:
        """The end of an output. A terminal's socket has another direction, which ends when its holder closes it."""
        if self._near is not None:
            try:
                self._near.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the other end is gone
        os.close(fd)

    def input_ended(self, stream: int) -> None:
        """The host has closed its end. Of a terminal there is one for both directions: nobody sees its output any more either."""
        if self._near is not None:
            for output in self.outputs.values():
                if output.open:
                    output.reject()
        self._let_go()

    def widen_terminal(self) -> None:
        if self._near is not None:
            try:
                self._near.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, ROOM_BYTES)
            except OSError:
                pass  # as large as it is then; it waits for its reader

    # --- end ---------------------------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """Forget it on both sides once nothing more can come of it."""
        if self.is_over or not self._released or not self._tree_empty or not self.exited.done():
            return
        if any(output.open or not (output.ended or output.rejected) for output in self.outputs.values()):
            return
        self._forget()

    def abandon(self) -> None:
        """Nobody wants it any more: kill what it started, forget it."""
        if not self.is_over:
            self.kill_tree()
            self._forget()
        self._close_terminal()

    def _forget(self) -> None:
        self.channel.post(wire.RELEASE, wire.u64(self.number))
        crossing = sum(one.crossing for one in self.outputs.values()) + sum(one.crossing for one in self.inputs.values())
        self.channel.forget(self.number, crossing)
        self.is_over = True
        self._close_all()

    def _close_all(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
        for output in self.outputs.values():
            output.shut()
        for input in self.inputs.values():
            input.close()
        if self._near is not None:
            _drain(self._near)
            self._near.close()
            self._near = None

    # --- start -------------------------------------------------------------------------------------------------------

    def take_terminal(self) -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        self._near, self.terminal = near, far.detach()
        self.outputs[1] = Output(self, 1, os.dup(near.fileno()))
        self.inputs[0] = Input(self, 0, os.dup(near.fileno()))

    def take(self, given: Sequence[int | None]) -> bytes:
        """Own copies of the descriptors; the kinds of the command's. Raises InvalidRequest."""
        kinds = bytearray()
        for stream, fd in enumerate(given):
            kind = wire.KIND_NULL if fd is None else _kind(fd, stream)
            kinds.append(kind)
            if fd is None or kind == wire.KIND_NULL:
                continue
            if kind == wire.KIND_IN:
                self.inputs[stream] = Input(self, stream, _own(fd, os.O_RDONLY))
            else:
                self.outputs[stream] = Output(self, stream, _own(fd, os.O_WRONLY))
        return bytes(kinds)

    def give_back(self) -> None:
        """It never started."""
        self.is_over = True
        self._close_all()
        self._close_terminal()

    def _close_terminal(self) -> None:
        """The caller's end, which it has not got yet."""
        if self.terminal is not None:
            os.close(self.terminal)
            self.terminal = None

    def begin(self) -> None:
        """It runs: pump its input."""
        for input in self.inputs.values():
            input.watch()


def _exit(ended: wire.Ended) -> Exit:
    return Exit(
        code=ended.code,
        signal=ended.signal,
        cpu_ms=min(ended.cpu_us, MAX_CPU_US) / 1000,
        max_rss_bytes=min(ended.max_rss_bytes, MAX_CPU_US),
    )


def _kind(fd: int, stream: int) -> int:
    """What the command does with a descriptor. Of those that can do both, 0 is read, 1 and 2 are written."""
    about = os.fstat(fd)
    if stat.S_ISCHR(about.st_mode) and about.st_rdev == NULL_DEVICE:
        return wire.KIND_NULL
    mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    if mode == os.O_RDWR and stream > 2:
        raise Unsupported("a command in a virtual machine cannot have a descriptor that goes both ways")
    return wire.KIND_IN if mode == os.O_RDONLY or (mode == os.O_RDWR and not stream) else wire.KIND_OUT


def _own(fd: int, flags: int) -> int:
    """A copy that does not block; of a pipe one whose flags are its own, since other holders' copies are to stay as they are."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode):
        try:
            return kernel_fds.reopen(fd, flags | os.O_NONBLOCK)
        except OSError:
            pass  # no reader is there; writing will tell
    copy = os.dup(fd)
    if stat.S_ISSOCK(mode):
        os.set_blocking(copy, False)
    return copy


def _drain(near: socket.socket) -> None:
    """Take what was typed and not read: a socket closed with that in it would give its other end an error instead of the end."""
    try:
        for _ in range(DRAINS):
            if not near.recv(wire.MAX_PAYLOAD):
                return
    except OSError:
        pass


async def start(channel: Channel, plan: ExecPlan, given: Sequence[int | None], limits: Limits) -> Running:
    """Start a command: see `backend.Handle.exec`. Raises SandboxLost, Unavailable, Unsupported."""
    running = GuestRunning(channel, channel.new_number())
    try:
        if plan.pty is not None:
            running.take_terminal()
            kinds = b""
        else:
            kinds = running.take(given)
        payload = exec_payload(plan, kinds, limits.open_files)
    except ValueError as error:
        running.give_back()
        return NotStarted(f"cannot execute {plan.argv[0]!r}: {error}")
    except BaseException:
        running.give_back()
        raise
    try:
        answer = await channel.ask_parts(wire.EXEC, payload, number=running.number, timeout_s=None, owner=running)
        channel.read(b"".join(answer), lambda fields: (fields.u32(), fields.u32()))
    except Refused as error:
        running.give_back()
        if error.errno == errno.EEXIST:
            raise Unavailable(f"cannot start the command: {error.strerror}") from error
        return NotStarted(error.strerror or "refused")
    except asyncio.CancelledError:
        running.abandon()
        raise
    except BaseException:
        running.give_back()
        raise
    running.begin()
    return running


def exec_payload(plan: ExecPlan, kinds: bytes, open_files: int) -> bytes:
    """Raises ValueError for what no program can be given."""
    if kinds and not wire.MIN_KINDS <= len(kinds) <= wire.MAX_STREAMS:
        raise ValueError(f"at most {wire.MAX_STREAMS} descriptors")
    rows, columns = (plan.pty.rows, plan.pty.cols) if plan.pty else (0, 0)
    payload = b"".join(
        (
            wire.u32(wire.EXEC_PTY if plan.pty else 0),
            wire.u16(rows),
            wire.u16(columns),
            wire.u32(open_files),
            wire.string(plan.process_id),
            wire.u32(len(kinds)),
            kinds,
            wire.string(plan.user),
            wire.string(plan.cwd),
            wire.strings(plan.argv),
            wire.strings(f"{name}={value}" for name, value in plan.env.items()),
        )
    )
    if len(payload) > wire.MAX_REQUEST:
        raise ValueError(os.strerror(errno.E2BIG))
    return payload
