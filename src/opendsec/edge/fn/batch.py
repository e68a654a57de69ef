# SPDX-License-Identifier: Apache-2.0
"""A batch: one call and many inputs, as NDJSON in and out over one request.

    first line   a MapRequest             each further line   an FnInput
    answer       an FnResult a line, in the order in which calls end

Back-pressure. At most `window` calls (fewer if their inputs or results are very large) are read and not yet answered: further lines
stay in the socket until results have been written, and results are written as fast as the client reads. While enough calls wait for
members, results wait up to HOLD_S for others to go with: each write, and the client's waking up for it, costs some 60 us.

A line that is no FnInput ends the batch with an error line; an item that breaks a rule has a result that says so (`denied`). A client that
goes away ends the batch: its waiting calls are dropped, its running ones killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from opendsec.api import wire
from opendsec.api.errors import InvalidRequest, OpenDSecError
from opendsec.api.fn import FnCall, FnInput, FnResult, MapRequest
from opendsec.api.fn_check import Bounds, check_input, check_map
from opendsec.edge.fn import outcome
from opendsec.edge.fn.calls import Calls, Target, compile_bounds
from opendsec.edge.fn.compiled import Compiler, refused
from opendsec.edge.fn.holding import Call
from opendsec.edge.http import Disconnected, Request

LINE_BYTES = wire.MAX_BODY_BYTES
TURN = 64  # lines taken before others get a turn of the event loop
AHEAD_BYTES = 1 << 20  # of lines that are read before there is room for their calls
MOST_AHEAD_BYTES = 64 << 20
PATIENCE_S = 1.0
OPEN_BYTES = 256 << 20  # of lines whose calls have not ended: beyond that none is taken
RESULTS_BYTES = 1 << 30  # that the results of one window may have
FILES_BYTES = 64 << 20  # that come back of one call
HOLD_S, HOLD = 0.004, 16  # results; and as many calls must wait meanwhile, so that it keeps no member waiting


_decoder = msgspec.json.Decoder(FnInput)
_encoder = msgspec.json.Encoder()


def _most_open(call: FnCall, bounds: Bounds) -> int:
    """How many calls may be open so that their results find room, however slowly they are read."""
    return max(4, RESULTS_BYTES // (2 * bounds.output_bytes + (FILES_BYTES if call.outputs else 0) + 4096))


class LineBuffer:
    """Lines out of chunks; empty ones are passed over."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []  # whole ones, the next last
        self._parts: list[bytes] = []  # of the line that is not whole yet
        self.size = 0  # bytes held
        self.ended = False

    def feed(self, chunk: bytes) -> None:
        """Raises InvalidRequest for a line that is too long."""
        self.size += len(chunk)
        self._parts.append(chunk)
        if b"\n" in chunk:
            lines = b"".join(self._parts).split(b"\n")
            self._parts = [lines.pop()]
            lines.reverse()
            self._lines = lines + self._lines
        elif self.size > LINE_BYTES:
            raise InvalidRequest(f"a line must be at most {LINE_BYTES} bytes", field="body")

    def end(self) -> None:
        self._lines.insert(0, b"".join(self._parts))
        self._parts, self.ended = [], True
        self.size += 1  # as if it had ended with a newline

    @property
    def waiting(self) -> bool:
        """Whether a whole line is here; without one, reading on is all that helps."""
        return bool(self._lines)

    @property
    def exhausted(self) -> bool:
        return self.ended and not self._lines

    def next(self) -> bytes | None:
        """None: there is no whole line."""
        while self._lines:
            line = self._lines.pop()
            self.size -= len(line) + 1
            if line and not line.isspace():
                return line
        return None


class Batch:
    """One batch. `open` reads its head and raises what is wrong with it; `answer` is the rest."""

    def __init__(self, calls: Calls, compiler: Compiler, request: Request) -> None:
        self._calls, self._compiler, self._request = calls, compiler, request
        self._chunks = request.chunks()
        self._lines = LineBuffer()
        self._call = FnCall()
        self._target: Target | None = None
        self._artifacts: dict[str, bytes] | None = None
        self._window = 1
        self._open = 0  # taken and not yet answered
        self._bytes = 0  # of the lines of those that have not ended
        self._taken = 0
        self._out: list[bytes] = []
        self._running: set[Call] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()  # something for the writer
        self._drained = asyncio.Event()  # something was taken from the lines
        self._pumping: asyncio.Handle | None = None
        self._holding: asyncio.TimerHandle | None = None
        self._problem: BaseException | None = None
        self._ended = False

    async def open(self) -> None:
        """Raises InvalidRequest, NotFound, Unavailable, …"""
        while (head := self._lines.next()) is None:
            chunk = await anext(self._chunks, None)
            if chunk is not None:
                self._lines.feed(chunk)
            elif self._lines.ended:
                raise InvalidRequest("the first line must be a MapRequest", field="body")
            else:
                self._lines.end()
        request = wire.decode(head, MapRequest)
        bounds = check_map(request)
        self._call, self._window = request.call, min(request.window, _most_open(request.call, bounds))
        target = self._target = self._calls.target(request.call, bounds)
        if target.compiled and request.call.source is not None:
            await self._compile_common(target, request.call)

    async def _compile_common(self, target: Target, call: FnCall) -> None:
        """The program that all items share, unless they bring their own."""
        assert call.source is not None
        made = await self._compiler.compile(target, call.source, call.files, compile_bounds(), caller=id(self))
        if made.result.outcome == "ok":
            self._artifacts = made.artifacts

    async def answer(self) -> AsyncGenerator[bytes, None]:
        """Chunks of lines. Closed early, it ends all that is under way."""
        fetching = asyncio.ensure_future(self._fetch())
        try:
            while self._open or not (self._problem or self._lines.exhausted):
                if isinstance(self._problem, Disconnected):  # perhaps since the last look: while something was written
                    raise self._problem
                await self._wake.wait()
                self._wake.clear()
                self._let_go()
                if self._out:
                    lines, self._out = self._out, []
                    yield b"".join(lines)  # back when it is written, which the client's reading decides
                    self._open -= len(lines)
                    self._pump()
            if self._problem is not None:
                raise self._problem
        finally:
            fetching.cancel()
            await asyncio.wait((fetching,))
            await self._end()

    async def _end(self) -> None:
        """Nothing of the batch goes on."""
        if self._pumping is not None:
            self._pumping.cancel()
        self._let_go()
        for call in list(self._running):
            assert self._target is not None
            self._target.pool.cancel(call)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        # What nobody has read goes now, not when the collector comes to the circles we are in: it may be a gigabyte.
        self._ended = True
        self._out, self._lines = [], LineBuffer()

    async def _fetch(self) -> None:
        """Read lines, some ahead of those that are taken, so that the client's going away is seen also while the window is full."""
        try:
            self._pump()
            if not self._lines.ended:
                async for chunk in self._chunks:
                    self._lines.feed(chunk)
                    self._pump()
                    if self._lines.size > AHEAD_BYTES and self._lines.waiting:
                        await self._wait_drained()
                self._lines.end()
            self._pump()
            self._wake.set()
            await self._request.gone()
            raise Disconnected
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fail(error)

    async def _wait_drained(self) -> None:
        """A socket that is not read does not tell that the other side is gone: so some is read all the same, slowly."""
        self._drained.clear()
        try:
            async with asyncio.timeout(PATIENCE_S if self._lines.size < MOST_AHEAD_BYTES else None):
                await self._drained.wait()
        except TimeoutError:
            pass

    def _fail(self, error: BaseException) -> None:
        if self._problem is None or isinstance(error, Disconnected):
            self._problem = error
        self._wake.set()

    def _pump(self) -> None:
        """Take as many lines as there is room for."""
        self._pumping = None
        try:
            for _ in range(min(TURN, self._window - self._open)):
                full = self._problem is not None or self._bytes > OPEN_BYTES
                line = None if full else self._lines.next()
                if line is None:
                    break
                self._taken += 1
                self._submit(line)
            else:
                if self._open < self._window:  # others have their turn first
                    self._pumping = asyncio.get_running_loop().call_soon(self._pump)
        except Exception as error:
            self._fail(error)
        if self._lines.size <= AHEAD_BYTES or not self._lines.waiting:
            self._drained.set()
        if not self._open:
            self._wake.set()

    def _submit(self, line: bytes) -> None:
        target = self._target
        assert target is not None
        try:
            item = _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"is no FnInput: {error}", field=f"line {self._taken + 1}") from None
        self._open += 1
        try:
            check_input(item, self._call)
            call = self._call
            if call.function is None and call.source is None and item.source is None and call.argv is None and item.argv is None:
                raise InvalidRequest("neither the batch nor the item names what to run", field="source")
            if target.compiled and (self._artifacts is None or item.source is not None or item.files):
                self._bytes += len(line)
                task = asyncio.ensure_future(self._compile_and_run(target, item))
                self._tasks.add(task)
                task.add_done_callback(lambda task: self._compiled_and_ran(task, len(line)))
                return
            job = self._calls.job(self._call, target, item, artifacts=self._artifacts)
        except OpenDSecError as error:
            return self._write(outcome.failed(error, item.index))
        submitted = Call(job, target.bounds, caller=id(self), tenant=target.tenant, fresh=target.fresh, done=self._done, index=item.index)
        submitted.size = len(line)
        self._bytes += len(line)
        self._running.add(submitted)
        target.pool.submit(submitted)

    def _compiled_and_ran(self, task: asyncio.Task[None], size: int) -> None:
        self._tasks.discard(task)
        self._bytes -= size

    def _done(self, call: Call, result: FnResult | OpenDSecError) -> None:
        self._running.discard(call)
        self._bytes -= call.size
        self._write(result if isinstance(result, FnResult) else outcome.failed(result, call.index))

    async def _compile_and_run(self, target: Target, item: FnInput) -> None:
        call = self._call
        try:
            source = item.source if item.source is not None else call.source
            assert source is not None
            files = {**call.files, **item.files}
            made = await self._compiler.compile(target, source, files, compile_bounds(), caller=id(self))
            if made.result.outcome != "ok":
                return self._write(refused(made, item.index))
            job = self._calls.job(call, target, item, artifacts=made.artifacts)
            result = await self._calls.run(target, job, caller=id(self))
            self._write(msgspec.structs.replace(result, index=item.index))
        except OpenDSecError as error:
            self._write(outcome.failed(error, item.index))

    def _write(self, result: FnResult) -> None:
        if self._ended:
            return
        self._out.append(_encoder.encode(result) + b"\n")
        if self._holding is None and self._target is not None and self._target.pool.machine.waiting >= HOLD:
            self._holding = asyncio.get_running_loop().call_later(HOLD_S, self._wake.set)
        elif self._holding is None or len(self._out) >= HOLD:
            self._wake.set()

    def _let_go(self) -> None:
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None
