# SPDX-License-Identifier: Apache-2.0
"""One call over many inputs, as a stream: lines go out in bulk while results come in.

Back-pressure both ways. The edge takes `window` items of a batch at a time and reads no more; from `inputs` at most twice as many are
taken as results were handed out, so that the edge never waits for the next line and a slow reader holds up everything behind it.
Items without a result are kept and sent again when a connection breaks: calls leave nothing behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence

import msgspec

from opendsec.api import fn, routes, wire
from opendsec.api.errors import Internal, InvalidRequest
from opendsec.api.fn import FnCall, FnInput, MapRequest
from opendsec.api.fn_check import check_input
from opendsec.client import _core
from opendsec.client.fn import content_bytes, fields_of, json_raw
from opendsec.client.link import Link
from opendsec.client.transport import ConnectionBroken

Input = FnInput | str | bytes | int | float | bool | None | Sequence[object] | dict[str, object]
Inputs = Iterable[Input] | AsyncIterable[Input]

AHEAD_BYTES = 32 << 20  # of items without a result; one larger item may be under way alone
LINE_BYTES = 512 << 20  # of a result: both streams and all files at their largest, in base64
WRITE_BYTES = 256 << 10  # per chunk of the request, if there are several items
NDJSON = "application/x-ndjson"


class _Line(FnInput, frozen=True, kw_only=True, omit_defaults=True):
    """An input as it is sent."""


_encoder = msgspec.json.Encoder()


def line(index: int, item: object, call: FnCall) -> bytes:
    """One line of the request. Raises InvalidRequest."""
    if isinstance(item, FnInput):
        made = _checked(index, item, call)
    elif call.function is not None:
        made = _arguments(index, item)
    elif isinstance(item, (str, bytes)):
        made = _Line(index=index, stdin=_core.text_bytes(item, f"inputs[{index}]"))
    else:
        raise InvalidRequest(f"must be text or bytes for stdin, or an FnInput; got {type(item).__name__}", field=f"inputs[{index}]")
    return _encoder.encode(made) + b"\n"


def _arguments(index: int, item: object) -> _Line:
    if isinstance(item, dict):
        return _Line(index=index, args=msgspec.Raw(b"[]"), kwargs=json_raw(item, f"inputs[{index}]"))
    return _Line(index=index, args=json_raw(item if isinstance(item, (list, tuple)) else [item], f"inputs[{index}]"))


def _checked(index: int, item: FnInput, call: FnCall) -> _Line:
    where = f"inputs[{index}]"
    fields = {**fields_of(item), "index": index}
    if item.stdin is not None:
        fields["stdin"] = _core.text_bytes(item.stdin, f"{where}.stdin")
    fields["files"] = content_bytes(item.files, f"{where}.files")
    for name in ("args", "kwargs"):
        fields[name] = json_raw(fields[name], f"{where}.{name}")
    made = _Line(**fields)  # type: ignore[arg-type]  # verified in the next line
    try:
        check_input(wire.decode(_core.encode(made), FnInput), call)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, field=f"{where}.{error.field}") from None
    return made


class _Feed:
    """Inputs as lines: numbered, made when there is room for them, kept until their results are there."""

    def __init__(self, inputs: Inputs, head: MapRequest) -> None:
        self.pending: dict[int, bytes] = {}  # without a result
        self.ended = False  # no more inputs
        self._fresh: list[bytes] = []  # of `pending`, what this connection has not been given yet
        self._held = 0  # results that the reader has not asked beyond
        self._bytes = 0
        self._next = 0
        self._most = 2 * head.window
        self._enough = max(1, head.window // 2)  # room worth waking up for
        self._call = head.call
        self._changed = asyncio.Event()
        self._plain: Iterator[Input] | None = None
        self._pump: asyncio.Task[None] | None = None
        self._failed: BaseException | None = None
        if isinstance(inputs, AsyncIterable):
            self._pump = asyncio.ensure_future(self._pumping(inputs))
        elif isinstance(inputs, Iterable) and not isinstance(inputs, (str, bytes, dict)):
            self._plain = iter(inputs)
        else:
            raise InvalidRequest(f"must be an iterable or asynchronous iterable of inputs, not {type(inputs).__name__}", field="inputs")

    async def close(self) -> None:
        if self._pump is not None and not self._pump.done():
            self._pump.cancel()
            await asyncio.wait((self._pump,))

    # --- what came back

    def took(self, results: list[fn.FnResult]) -> None:
        """Results are about to be handed out. Raises Internal for one that nobody asked for."""
        for result in results:
            line = self.pending.pop(result.index, None)
            if line is None:
                raise Internal(f"the edge sent a result for item {result.index}, which has none to come")
            self._bytes -= len(line)
        self._held = len(results)

    def handed_out(self) -> None:
        self._held = 0
        if self._most - len(self.pending) >= self._enough:
            self._changed.set()

    # --- what goes out

    async def body(self, first: bytes) -> AsyncIterator[bytes]:
        """All of one request: its first line, what a broken connection left without results, then what is new."""
        self._fresh.clear()
        again = list(self.pending.values())
        yield first
        for at in range(0, len(again), self._enough):
            yield b"".join(again[at : at + self._enough])
        while lines := await self._more():
            yield lines

    async def group(self, first: bytes) -> bytes:
        """A whole request of what is there now; waits for one item."""
        self._fresh.clear()
        if not self.pending:
            await self._more()
            self._fresh.clear()
        return first + b"".join(self.pending.values())

    async def _more(self) -> bytes:
        """Lines for the edge, as many as are there; empty at the end of the inputs."""
        while not self._fresh and not self.ended:
            if self._failed is not None:
                raise self._failed
            if self._plain is not None and self._room():
                self._take(self._plain)
            else:
                self._changed.clear()
                if self._failed is None and not (self._plain is not None and self._room()):
                    await self._changed.wait()
        lines, self._fresh = self._fresh, []
        return b"".join(lines)

    def _room(self) -> bool:
        waiting = len(self.pending)
        return waiting + self._held < self._most and (self._bytes < AHEAD_BYTES or not waiting)

    def _take(self, inputs: Iterator[Input]) -> None:
        size = 0
        while size < WRITE_BYTES and self._room():
            try:
                item = next(inputs)
            except StopIteration:
                self.ended = True
                return
            size += self._add(item)

    def _add(self, item: Input) -> int:
        made = line(self._next, item, self._call)
        self.pending[self._next] = made
        self._next += 1
        self._bytes += len(made)
        self._fresh.append(made)
        return len(made)

    async def _pumping(self, inputs: AsyncIterable[Input]) -> None:
        """A task of its own, because a connection that breaks must not end the caller's iterator with it."""
        try:
            async for item in inputs:
                self._add(item)
                self._changed.set()
                while not self._room():
                    self._changed.clear()
                    await self._changed.wait()
            self.ended = True
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failed = error
        self._changed.set()


async def run(link: Link, head: MapRequest, inputs: Inputs) -> AsyncGenerator[list[fn.FnResult], None]:
    """Results as they end, in lists of what came together. Closing the iterator ends the request, and with it what still runs."""
    first = _core.encode(head) + b"\n"
    feed = _Feed(inputs, head)
    attempt, began = 1, False
    try:
        while True:
            request = _core.request(routes.FN_MAP, {})._replace(content_type=NDJSON)
            if link.transport.duplex:
                request = request._replace(body=feed.body(first))
            else:
                request = request._replace(body=await feed.group(first))
                if began and not feed.pending:
                    return
            began = True
            try:
                async with link.transport.stream(request) as answer:
                    if answer.status >= 400:
                        _core.read_nothing(answer.status, b"".join([chunk async for chunk in answer.chunks()]))
                    reader = _core.LineReader(LINE_BYTES)
                    async for chunk in answer.chunks():
                        results = [_core.read_line(one, fn.FnResult) for one in reader.feed(chunk)]
                        if results:
                            attempt = 1
                            feed.took(results)
                            yield results
                            feed.handed_out()
                if not feed.pending and feed.ended:
                    return
                if link.transport.duplex or feed.pending:
                    raise ConnectionBroken("the edge ended the batch before its end", sent=True)
            except ConnectionBroken as error:
                await link.before_retry(error, attempt, repeatable=True)
                attempt += 1
    finally:
        await feed.close()
