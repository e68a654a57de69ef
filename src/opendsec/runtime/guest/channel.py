# SPDX-License-Identifier: Apache-2.0
"""Requests, answers and streams over one connection to a guest.

Everything here runs in the event loop and never waits but in `await`. A frame is written at once if the socket takes it; what comes is
handed on in the turn of the loop that reads it, so that a command costs two turns beyond what the guest takes.

Bounds, whatever the guest does:

* one receive buffer; an answer of at most what its request allows; streams by credit (see `running` and `transfer`)
* what waits to be sent: by credit, MAX_PENDING requests, and MAX_OUT_BYTES in all
* frames about what has just ended may cross with its end, so they are dropped; but no more of them than a guest can have under way (see
  `forget`). All other nonsense breaks the channel at once.

A guest that says nothing any more is lost as well (`silence`).

A channel can stand still (`park`) while the machine's state is saved, and go on over the same connection (`unpark`) or, after the
machine has come back from memory, over another one (`resume`): nothing is lost of what goes either way.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
import select
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from opendsec.api.errors import OpenDSecError, SandboxLost, Unavailable
from opendsec.runtime.backend import Counters, ExecPlan, FileAccess, Running
from opendsec.runtime.guest import silence, wire
from opendsec.runtime.guest.requests import ANSWER_S, Requests
from opendsec.runtime.guest.requests import Refused as Refused
from opendsec.runtime.guest.wire import Fields, WireError
from opendsec.runtime.poller import Poller

if TYPE_CHECKING:
    from opendsec.api.spec import Limits
    from opendsec.runtime.guest.files import GuestFiles

OPEN_S = 30.0  # for a guest that runs to answer HELLO: of a hundred on a busy machine some wait long
PARK_S = 10.0
MAX_PENDING = 8192  # requests without an answer; more means that the guest does not listen
MAX_ANSWER = 1 << 20  # unless the request says otherwise
MAX_COMMANDS_BYTES = 4 << 20
MAX_SKIPPED = 64 << 20  # what a former connection left behind before the answer to HELLO
RECEIVE_BYTES = 256 << 10
HIGH_BYTES, LOW_BYTES = 1 << 20, 256 << 10  # waiting to be sent, before descriptors are read on
NEEDLE_AT = 10  # in a header: what comes after its type, which may be that of an error
MAX_OUT_BYTES = 256 << 20  # waiting to be sent: what keeps descriptors from being read does not keep credit from being given
FIRST_KINDS = frozenset((wire.HELLO, wire.IDENTITY, wire.LIMITS))  # what a guest that has begun anew is asked before all others
FRAMES_A_TURN = 256  # so that a guest that sends a byte a frame does not hold up the others
GATHERED = 64  # pieces sent by one system call
CROSSING_EVENTS = 16  # that a guest may have sent about a command before it heard of its end
MAX_ERRNO = 4095

Parts = list[bytes]


class Owner(Protocol):
    """Whoever began something that has streams or events. Raises WireError for what cannot be."""

    def on_data(self, stream: int, data: memoryview) -> None: ...
    def on_credit(self, stream: int, count: int) -> None: ...
    def on_eof(self, stream: int) -> None: ...
    def on_close(self, stream: int, code: int) -> None: ...
    def on_event(self, kind: int, payload: bytes) -> None: ...
    def lost(self, error: OpenDSecError) -> None:
        """The channel is gone."""


class _Pending:
    """A request without an answer. `done` is called once, unless it was given up."""

    __slots__ = ("done", "kind", "limit", "parts", "size")

    def __init__(self, kind: int, limit: int, done: Callable[[Parts | Exception], None] | None) -> None:
        self.kind, self.limit, self.done = kind, limit, done
        self.parts: Parts = []
        self.size = 0


class Channel(Requests):
    """Made by `open`. `broken` is done once it is gone for good: with a reason, empty if it was closed here."""

    def __init__(self, sock: socket.socket, poller: Poller | None) -> None:
        self._loop = asyncio.get_running_loop()
        self.broken: asyncio.Future[str] = self._loop.create_future()
        self.counters = Counters()  # as the guest told last
        self.welcome = wire.Welcome(0, 0, b"", 0, "")
        self.usage_now: wire.GuestUsage | None = None  # as the guest told last
        self._own_poller = poller is None
        self.poller = poller or Poller()
        self._sock: socket.socket | None = None
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._begin = self._end = 0  # of what is in it
        self._behind = False  # there is more in it than one turn of the loop may take
        self._needle = b""  # of the answer to HELLO, while it is looked for
        self._skipped = 0
        self._out: deque[bytes | memoryview] = deque()
        self._out_bytes = 0
        self._parked: deque[bytes] | None = None  # what waits for the end of a standstill
        self._first: frozenset[int] = frozenset()  # kinds that do not wait for it
        self._begins_anew = False
        self._pending: dict[int, _Pending] = {}
        self._owners: dict[int, Owner] = {}
        self._waiting: set[Callable[[], None]] = set()  # for room
        self._allowance = 0
        self._asking_usage = False
        self._files: GuestFiles | None = None
        self.silence = silence.Silence(self._expects, lambda: self.post(wire.PING, b""), self.give_up)
        self._attach(sock)

    # --- life --------------------------------------------------------------------------------------------------------

    @classmethod
    async def open(cls, sock: socket.socket, *, poller: Poller | None = None, timeout_s: float = OPEN_S) -> Channel:
        """Say HELLO over a connected socket, which is the channel's from now on, also if this raises. Raises SandboxLost, Unavailable."""
        channel = cls(sock, poller)
        try:
            await channel._greet(timeout_s)
        except BaseException as error:
            channel.close()
            if isinstance(error, Refused):
                raise SandboxLost(f"the guest refused the host: {error.strerror}") from error
            raise
        return channel

    @property
    def greeting(self) -> bool:
        """Whether the guest has not answered yet since it began, or began anew."""
        return bool(self._needle) or (self._begins_anew and self._sock is None)

    async def _greet(self, timeout_s: float) -> None:
        """Raises SandboxLost, Unavailable, Refused."""
        nonce, number = secrets.token_bytes(wire.NONCE_BYTES), self._number()
        self._needle = wire.header(wire.HELLO, number, 0)[NEEDLE_AT:]
        payload = wire.u32(wire.VERSION) + wire.u32(0) + nonce
        answer = await self.ask(wire.HELLO, payload, number=number, timeout_s=timeout_s)
        try:
            self.welcome = wire.only(answer, wire.welcome)
        except WireError as error:
            raise SandboxLost(f"the guest broke the protocol: {error}") from error
        if self.welcome.version != wire.VERSION or self.welcome.nonce != nonce:
            raise SandboxLost("the guest did not answer as this host's guest would")

    def _attach(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._watched = select.EPOLLIN
        self.poller.watch(sock.fileno(), select.EPOLLIN, self._on_ready)

    def _unattach(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            self.poller.unwatch(sock.fileno())
            sock.close()

    def close(self) -> None:
        """Let go of everything; what runs counts as killed. May be repeated."""
        self.give_up("")

    def give_up(self, reason: str) -> None:
        if self.broken.done():
            return
        self.broken.set_result(reason)
        self.silence.close()
        self._unattach()
        error = SandboxLost(f"the sandbox has ended: {reason}" if reason else "the sandbox has ended")
        self._out.clear()
        self._out_bytes = 0
        self._parked = None
        self._waiting.clear()
        pending, self._pending = self._pending, {}
        owners, self._owners = self._owners, {}
        for one in pending.values():
            if one.done is not None:
                one.done(error)
        for owner in owners.values():
            owner.lost(error)
        if self._own_poller:
            self.poller.close()

    def break_off(self, error: WireError) -> None:
        """The guest said what no guestd says."""
        self.give_up(f"the guest broke the protocol: {error}")

    @property
    def lost(self) -> bool:
        return self.broken.done()

    # --- standing still ----------------------------------------------------------------------------------------------

    async def park(self) -> None:
        """Bring the channel to a stop: when this returns no byte is under way, and none is sent before `unpark` or `resume`; what is
        asked meanwhile waits. Raises SandboxLost, Unavailable (then it goes on)."""
        if self._begins_anew:
            raise Unavailable("the guest is booting")
        if self._parked is not None:
            return
        answer: asyncio.Future[None] = self._loop.create_future()

        def done(result: Parts | Exception) -> None:
            if answer.done():
                return
            if isinstance(result, Refused):
                answer.set_exception(Unavailable(f"the guest cannot stand still: {result.strerror}"))
            elif isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(None)

        self.begin(wire.PARK, b"", done)
        if not self.lost:
            self._parked = deque()  # from here on: what is queued goes out before
        timer = self._loop.call_later(PARK_S, done, Unavailable(f"the guest did not come to a stop within {PARK_S:g} s"))
        try:
            await answer
        except BaseException:
            self.unpark()
            raise
        finally:
            timer.cancel()

    def unpark(self) -> None:
        """Go on over the same connection."""
        if self._begins_anew:
            return
        held, self._parked = self._parked, None
        if held is None or self.lost:
            return
        self.post(wire.UNPARK, secrets.token_bytes(wire.NONCE_BYTES))
        for data in held:
            self.send(data)
        self._tell_waiting()

    async def detach(self) -> None:
        """`park`, and let go of the connection: the machine may be saved and ended now. The channel lives, and so do its commands."""
        await self.park()
        self._unattach()

    def resume(self, sock: socket.socket) -> None:
        """Go on over a new connection to the same guest, come back from memory. The socket is the channel's from now on."""
        if self.lost:
            sock.close()
            raise SandboxLost("the sandbox has ended")
        self._unattach()
        self._begin = self._end = 0
        self._attach(sock)
        self.unpark()

    def restart(self, reason: str) -> None:
        """The guest has been reset. Whatever was under way in it is over (Unavailable); what is asked from now on waits for `reopen`."""
        if self.lost:
            return
        self._unattach()
        self._begins_anew, self._first = True, frozenset()
        self._out.clear()
        self._out_bytes = self._begin = self._end = self._allowance = 0
        self._waiting.clear()
        self._parked = deque()  # what it held was of requests that are over
        pending, self._pending = self._pending, {}
        owners, self._owners = self._owners, {}
        error = Unavailable(reason)
        for one in pending.values():
            if one.done is not None:
                one.done(error)
        for owner in owners.values():
            owner.lost(error)

    async def reopen(self, sock: socket.socket, renew: Callable[[], Awaitable[None]], *, timeout_s: float) -> None:
        """After `restart`: greet the guest once it is there, over a new connection, `renew` it (by requests of FIRST_KINDS), and go on.
        Raises SandboxLost, Unavailable, Refused."""
        if self.lost:
            sock.close()
            raise SandboxLost("the sandbox has ended")
        self._attach(sock)
        self._first = FIRST_KINDS
        await self._greet(timeout_s)
        await renew()
        self._begins_anew, self._first = False, frozenset()
        self.unpark()

    # --- asking ------------------------------------------------------------------------------------------------------

    def _number(self) -> int:
        while not (number := secrets.randbits(64)) or number in self._pending or number in self._owners:
            pass
        return number

    def begin(
        self,
        kind: int,
        payload: bytes,
        done: Callable[[Parts | Exception], None] | None,
        *,
        number: int = 0,
        limit: int = MAX_ANSWER,
        owner: Owner | None = None,
    ) -> int:
        """Send a request; `done` is called with the parts of its answer, with Refused or with SandboxLost, perhaps at once. `owner` gets
        streams and events from now on. Returns the request's id. Raises Unavailable if it is too long."""
        number = number or self._number()
        if self.lost:
            if done is not None:
                done(SandboxLost("the sandbox has ended"))
            return number
        try:
            data = wire.frames(kind, number, payload)
        except ValueError as error:
            raise Unavailable(str(error)) from error
        if len(self._pending) >= MAX_PENDING:
            self.give_up(f"the guest has left {MAX_PENDING} requests without an answer")
            if done is not None:
                done(SandboxLost("the sandbox has ended"))
            return number
        self._pending[number] = _Pending(kind, limit, done)
        if owner is not None:
            self._owners[number] = owner
        if self.silence.timer is None:
            self.silence.begin()
        if self._first and kind in self._first:
            held, self._parked = self._parked, None
            self.send(data)
            self._parked = held
        else:
            self.send(data)
        return number

    def post(self, kind: int, payload: bytes) -> None:
        """A request whose answer nobody needs."""
        self.begin(kind, payload, None)

    async def ask_parts(
        self,
        kind: int,
        payload: bytes,
        *,
        number: int = 0,
        limit: int = MAX_ANSWER,
        timeout_s: float | None = ANSWER_S,
        owner: Owner | None = None,
    ) -> Parts:
        """Raises Refused, SandboxLost, Unavailable (no answer in time)."""
        answer: asyncio.Future[Parts] = self._loop.create_future()

        def done(result: Parts | Exception) -> None:
            if answer.done():
                return
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        def late() -> None:
            done(Unavailable(f"the guest did not answer within {timeout_s:g} s"))

        self.begin(kind, payload, done, number=number, limit=limit, owner=owner)
        timer = None if timeout_s is None else self._loop.call_later(timeout_s, late)
        try:
            return await answer
        finally:
            if timer is not None:
                timer.cancel()

    async def ask(
        self, kind: int, payload: bytes, *, number: int = 0, limit: int = MAX_ANSWER, timeout_s: float | None = ANSWER_S
    ) -> bytes:
        return b"".join(await self.ask_parts(kind, payload, number=number, limit=limit, timeout_s=timeout_s))

    def ask_from_thread(
        self,
        kind: int,
        payload: bytes,
        *,
        number: int = 0,
        limit: int = MAX_ANSWER,
        owner: Owner | None = None,
        timeout_s: float = ANSWER_S,
    ) -> Parts:
        """As `ask_parts`, for a thread that is not the loop's."""
        answer: concurrent.futures.Future[Parts] = concurrent.futures.Future()

        def done(result: Parts | Exception) -> None:
            if not answer.set_running_or_notify_cancel():
                return
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        def begin() -> None:
            try:
                self.begin(kind, payload, done, number=number, limit=limit, owner=owner)
            except Exception as error:
                done(error)

        self.call_soon(begin)
        try:
            return answer.result(timeout_s)
        except concurrent.futures.TimeoutError:
            answer.cancel()
            raise Unavailable(f"the guest did not answer within {timeout_s:g} s") from None

    def call_soon(self, callback: Callable[[], None]) -> None:
        """From a thread. Raises SandboxLost when there is no loop any more."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError as error:
            raise SandboxLost("the sandbox has ended") from error

    def new_number(self) -> int:
        """An id for a request that is about to begin, from any thread."""
        return secrets.randbits(64) or 1

    def forget(self, number: int, crossing: int) -> None:
        """Nothing more is to be heard of what `number` began. `crossing`: how much of it a guest may have sent by now all the same, in
        bytes and frames."""
        if self._owners.pop(number, None) is not None:
            self._allowance += crossing + CROSSING_EVENTS

    def _expects(self) -> silence.Expected:
        if self.lost or self._sock is None or not (self._pending or self._owners):
            return silence.NOTHING
        if self._parked is not None or self._needle:  # while it is greeted, whoever does that has a time of his own
            return silence.NO_WORD
        return silence.ANSWERS if self._pending else silence.ENDS

    # --- sending -----------------------------------------------------------------------------------------------------

    @property
    def congested(self) -> bool:
        """Whether those who have more to send should wait: see `when_clear`."""
        return self._out_bytes > HIGH_BYTES or self._parked is not None

    def when_clear(self, callback: Callable[[], None]) -> None:
        """Call it once there is room again."""
        self._waiting.add(callback)

    def not_when_clear(self, callback: Callable[[], None]) -> None:
        self._waiting.discard(callback)

    def send(self, data: bytes) -> None:
        """Whole frames."""
        if self._parked is not None:
            self._parked.append(data)
            return
        if self._sock is None:
            return  # broken
        if not self._out:
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self.give_up(f"the connection to the guest failed: {error.strerror}")
                return
            if sent == len(data):
                return
            self._out.append(memoryview(data)[sent:])
            self._out_bytes = len(data) - sent
            self._watch(select.EPOLLIN | select.EPOLLOUT)
        elif self._out_bytes + len(data) > MAX_OUT_BYTES:
            self.give_up("the guest takes nothing any more")
        else:
            self._out.append(data)
            self._out_bytes += len(data)

    def send_data(self, number: int, stream: int, data: bytes | memoryview) -> None:
        """At most MAX_PAYLOAD; credit is the caller's to watch."""
        self.send(b"".join((wire.header(wire.DATA, number, len(data), stream), data)))

    def _watch(self, events: int) -> None:
        if self._sock is not None and events != self._watched:
            self._watched = events
            self.poller.change(self._sock.fileno(), events)

    def _flush(self) -> None:
        while self._out and self._sock is not None:
            pieces = [piece for piece, _ in zip(self._out, range(GATHERED), strict=False)]
            try:
                sent = self._sock.sendmsg(pieces)
            except BlockingIOError:
                break
            except OSError as error:
                self.give_up(f"the connection to the guest failed: {error.strerror}")
                return
            self._out_bytes -= sent
            while sent:
                piece = self._out.popleft()
                if len(piece) > sent:
                    self._out.appendleft(memoryview(piece)[sent:])
                    break
                sent -= len(piece)
        if not self._out:
            self._watch(select.EPOLLIN)
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        if self._waiting and self._out_bytes <= LOW_BYTES and self._parked is None:
            waiting, self._waiting = self._waiting, set()
            for callback in waiting:
                callback()

    # --- receiving ---------------------------------------------------------------------------------------------------

    def _on_ready(self) -> None:
        if self._out or self._waiting:
            self._flush()
        if self._sock is None or self._behind:
            return
        try:
            got = self._sock.recv_into(self._buffer[self._end :])
        except BlockingIOError:
            return
        except OSError as error:
            self.give_up(f"the connection to the guest failed: {error.strerror}")
            return
        if not got:
            self.give_up("the connection to the guest was closed")
            return
        self._end += got
        self.silence.heard = True
        self._handle()

    def _go_on(self) -> None:
        self._behind = False
        if self._sock is not None:
            self._handle()

    def _handle(self) -> None:
        try:
            if not self._needle or self._seek():
                self._parse()
        except WireError as error:
            self.give_up(f"the guest broke the protocol: {error}")
        except Exception:
            self.give_up("the host could not go on with what the guest said")  # ours; the loop's handler is told
            raise

    def _seek(self) -> bool:
        """While opening: skip what a former connection left, to the answer to HELLO, whose id nobody could know."""
        data = self._buffer[self._begin : self._end].tobytes()
        at = data.find(self._needle, NEEDLE_AT)
        if at >= 0:
            self._begin += at - NEEDLE_AT
            self._needle = b""
            return True
        keep = min(len(data), wire.HEADER_BYTES)
        self._skipped += len(data) - keep
        if self._skipped > MAX_SKIPPED:
            raise WireError("no answer to the host's greeting, but much else")
        self._begin = self._end - keep
        self._compact()
        return False

    def _parse(self) -> None:
        buffer, size, budget = self._buffer, wire.HEADER_BYTES, FRAMES_A_TURN
        while self._end - self._begin >= size:
            head = wire.parse_header(buffer, self._begin)
            whole = size + head.length
            if self._end - self._begin < whole:
                break
            if not budget:
                self._behind = True
                self._loop.call_soon(self._go_on)
                return
            budget -= 1
            payload = buffer[self._begin + size : self._begin + whole]
            self._begin += whole
            self._frame(head, payload)
            if self._sock is None:
                return
        self._compact()

    def _compact(self) -> None:
        left = self._end - self._begin
        if left and self._begin:
            self._buffer[:left] = self._buffer[self._begin : self._end].tobytes()
        self._begin, self._end = 0, left

    def _frame(self, head: wire.Header, payload: memoryview) -> None:
        kind = head.type
        if kind & wire.ANSWER:
            self._answered(head, payload)
            return
        owner = self._owners.get(head.id)
        if kind == wire.DATA:
            if owner is not None:
                owner.on_data(head.flags, payload)
                return
        elif kind == wire.CREDIT:
            count = wire.only(bytes(payload), Fields.u32)
            if owner is not None:
                owner.on_credit(head.flags, count)
                return
        elif kind == wire.EOF:
            wire.only(bytes(payload), wire.nothing)
            if owner is not None:
                owner.on_eof(head.flags)
                return
        elif kind == wire.CLOSE:
            code = wire.only(bytes(payload), Fields.u32)
            if owner is not None:
                owner.on_close(head.flags, code)
                return
        elif kind in wire.EVENT_TYPES:
            if owner is not None:
                owner.on_event(kind, bytes(payload))
                return
        else:
            raise WireError("a frame of a kind that guests do not send")
        # About something that is over. It may have crossed with our saying so, or not.
        self._allowance -= max(1, len(payload))
        if self._allowance < 0:
            raise WireError("a frame about nothing that is there")

    def _answered(self, head: wire.Header, payload: memoryview) -> None:
        pending = self._pending.get(head.id)
        if pending is None:
            raise WireError("an answer to nothing")
        if head.type == wire.ERROR:
            code, text = wire.only(bytes(payload), wire.failure)
            result: Parts | Exception = Refused(code if 0 < code <= MAX_ERRNO else 5, text or "refused")
            self._owners.pop(head.id, None)
        else:
            if head.type != pending.kind | wire.ANSWER or head.flags & ~wire.MORE:
                raise WireError("an answer of the wrong kind")
            pending.size += max(1, len(payload))
            if pending.size > pending.limit:
                raise WireError("an answer that is too long")
            pending.parts.append(bytes(payload))
            if head.flags & wire.MORE:
                return
            result = pending.parts
        del self._pending[head.id]
        if pending.done is not None:
            pending.done(result)

    # --- commands ----------------------------------------------------------------------------------------------------

    async def exec(self, plan: ExecPlan, fds: Sequence[int | None], limits: Limits) -> Running:
        """Start a command. `fds`: its 0, 1, 2, 3, …, as for `Handle.exec`; they stay the caller's. See `running.start`."""
        from opendsec.runtime.guest.running import start

        return await start(self, plan, fds, limits)

    async def commands(self) -> list[wire.CommandRow]:
        """What there is of commands, also of former hosts."""
        parts = await self.ask_parts(wire.COMMANDS, b"", limit=MAX_COMMANDS_BYTES)
        return [row for part in parts for row in self.read(part, lambda fields: fields.list(wire.command_row, limit=1 << 20))]

    async def cut(self, names: Sequence[str]) -> int:
        """Kill the trees of commands by name and let go of them; how many there were."""
        return self.read(await self._machine(wire.CUT, wire.strings(names)), Fields.u32)

    # --- files -------------------------------------------------------------------------------------------------------

    @property
    def files(self) -> FileAccess:
        if self._files is None:
            from opendsec.runtime.guest.files import GuestFiles

            self._files = GuestFiles(self)
        return self._files

    # --- accounting --------------------------------------------------------------------------------------------------

    def usage_nowait(self) -> wire.GuestUsage | None:
        """What was known last, None at first; asks for news, which a later call gives."""
        if not self._asking_usage and not self.lost and self._parked is None:
            self._asking_usage = True
            self.begin(wire.USAGE, b"", self._on_usage)
        return self.usage_now

    def _on_usage(self, result: Parts | Exception) -> None:
        self._asking_usage = False
        if not isinstance(result, Exception):
            used = wire.only(b"".join(result), wire.usage)
            self.counters, self.usage_now = used.counters, used
