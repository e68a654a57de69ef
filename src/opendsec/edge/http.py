# SPDX-License-Identifier: Apache-2.0
"""Requests of the HTTP interface: which route, which parameters, which body; all of it checked strictly.

Why not a framework: with 40 routes, Starlette's router, middleware and request objects cost some 47 µs of 108 µs of CPU a request
(uvicorn, httptools and uvloop included in both; a POST with a small JSON body on the 2-core reference machine), and strict queries, our
error bodies and streams that end with their reader would be ours to write all the same.

Trust: everything parsed here comes from a caller, who is trusted with sandboxes but makes mistakes; nothing of it is believed before it
was checked. `local` tells requests over the unix socket, whose callers may name paths of this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from typing import Protocol, TypeAlias, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec

from opendsec.api import wire
from opendsec.api.errors import InvalidRequest, NotFound
from opendsec.api.routes import ROUTES, Route
from opendsec.api.spec import check_path

Message: TypeAlias = MutableMapping[str, object]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")

NDJSON = b"application/x-ndjson"
SWALLOW_BYTES = 1 << 20  # of a refused request's body: as much is read to keep the connection, if the client said that it is no more
LINGER_BYTES = 64 << 20  # as much is read, or for so long, of a body that goes on after its refusal
LINGER_S = 10.0


class Raw:
    """A raw answer: `chunks`, of `length` bytes in all if that is known. `close` runs whatever happens."""

    __slots__ = ("chunks", "close", "content_type", "length")

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        length: int | None,
        close: Callable[[], None],
        *,
        content_type: bytes = b"application/octet-stream",
    ) -> None:
        self.chunks, self.length, self.close, self.content_type = chunks, length, close, content_type


class Lines:
    """A stream of NDJSON lines. Its generator is closed when the reader goes away."""

    __slots__ = ("items",)

    def __init__(self, items: AsyncGenerator[msgspec.Struct, None]) -> None:
        self.items = items


class Duplex:
    """Chunks, such as of NDJSON lines, that begin while the request's body is still read. The generator reads the body itself and notices
    when the client goes away (Disconnected); it is closed in each case."""

    __slots__ = ("chunks", "content_type")

    def __init__(self, chunks: AsyncGenerator[bytes, None], *, content_type: bytes = NDJSON) -> None:
        self.chunks, self.content_type = chunks, content_type


Answer: TypeAlias = msgspec.Struct | Raw | Lines | Duplex | None
Handler: TypeAlias = Callable[["Request"], Awaitable[Answer]]


class Disconnected(Exception):
    """The client went away before its request or its answer was complete."""


class Intent(Protocol):
    """What a handler tells about its side effect, see `once`. Of a request without an action id nobody listens."""

    def begin(self) -> None:
        """It comes now: what was wrong with the request has been found. Raises Unavailable if the journal cannot be written."""

    def forget(self) -> None:
        """Nothing came of it that a repetition would not do again: the action id may be used again."""


class _NoIntent:
    def begin(self) -> None: ...

    def forget(self) -> None: ...


_NO_INTENT = _NoIntent()


class Request:
    """One request: path parameters, query, body."""

    __slots__ = ("_body_done", "_held", "_length", "_receive", "intent", "local", "params", "query", "route", "started")

    def __init__(
        self, route: Route, params: tuple[str, ...], query: dict[str, bytes], receive: Receive, length: int | None, local: bool
    ) -> None:
        self.route, self.params, self.query, self.local = route, params, query, local
        self._receive, self._length = receive, length
        self._body_done = length == 0
        self._held = b""  # read by `hold` and not yet given to anybody
        self.intent: Intent = _NO_INTENT
        self.started = False  # whether an answer has begun

    async def hold(self, most: int) -> bytes | None:
        """The body as a whole, for a look: it can still be read as if it came now. None, and nothing is read, if it is said to be longer
        than `most` bytes or not said how long. Raises Disconnected."""
        if self._length is None or self._length > most:
            return None
        self._held = b"".join([chunk async for chunk in self.chunks()])
        return self._held

    @property
    def length(self) -> int | None:
        """Of the body, as announced; None: it was not."""
        return self._length

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The raw body as it arrives. Raises Disconnected."""
        if self._held:
            held, self._held = self._held, b""
            yield held
        while not self._body_done:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            self._body_done = not message.get("more_body", False)
            body = message.get("body", b"")
            assert isinstance(body, bytes)
            if body:
                yield body

    async def json(self, kind: type[S]) -> S:
        """The body as `kind`. Raises InvalidRequest."""
        if self._length is not None and self._length > wire.MAX_BODY_BYTES:
            raise _too_large(self._length)
        parts, size = [], 0
        async for chunk in self.chunks():
            size += len(chunk)
            if size > wire.MAX_BODY_BYTES:
                raise _too_large(size)
            parts.append(chunk)
        return wire.decode(parts[0] if len(parts) == 1 else b"".join(parts), kind)

    async def no_body(self) -> None:
        """Raises InvalidRequest if there is a body where none belongs."""
        async for _ in self.chunks():
            raise InvalidRequest("this request takes no body", field="body")

    async def swallow(self) -> bool:
        """Read what is left of a body that nobody wants; False, at once, if that might be much."""
        if self._body_done:
            return True
        if self._length is None or self._length > SWALLOW_BYTES:
            return False
        try:
            async for _ in self.chunks():
                pass
        except Disconnected:
            return False
        return True

    async def linger(self) -> None:
        """Read on after the answer, for a while. A connection that is closed with bytes unread is reset, and whoever still writes
        to it would learn of that instead of the answer."""
        size = 0
        try:
            async with asyncio.timeout(LINGER_S):
                async for chunk in self.chunks():
                    size += len(chunk)
                    if size > LINGER_BYTES:
                        return
        except (Disconnected, TimeoutError):
            pass

    async def gone(self) -> None:
        """Returns once the client has gone away."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def while_wanted(self, work: Awaitable[T]) -> T:
        """The result of `work`, or Disconnected once it is cancelled and over because nobody waits for it any more."""
        working, gone = asyncio.ensure_future(work), asyncio.ensure_future(self.gone())
        try:
            await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Disconnected
            return working.result()
        finally:
            gone.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait((working,))

    def raw(self, name: str) -> bytes | None:
        """A query parameter's bytes."""
        return self.query.get(name)

    def text(self, name: str) -> str | None:
        value = self.query.get(name)
        if value is None:
            return None
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise InvalidRequest("is not UTF-8", field=name) from None

    def flag(self, name: str) -> bool:
        """A parameter that is 1 or true, 0 or false; absent means false."""
        value = self.query.get(name, b"0")
        if value in (b"1", b"true"):
            return True
        if value in (b"0", b"false"):
            return False
        raise InvalidRequest("must be 0 or 1", field=name)

    def integer(self, name: str, bounds: tuple[int, int], *, base: int = 10) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        digits = "01234567" if base == 8 else "0123456789"
        number = int(value, base) if value and len(value) <= 20 and not value.strip(digits) else -1
        if not bounds[0] <= number <= bounds[1]:
            rule = (
                f"an octal number from {bounds[0]:o} to {bounds[1]:o}" if base == 8 else f"a whole number from {bounds[0]} to {bounds[1]}"
            )
            raise InvalidRequest(f"must be {rule}", field=name)
        return number

    def number(self, name: str, bounds: tuple[float, float]) -> float | None:
        value = self.text(name)
        if value is None:
            return None
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not bounds[0] <= number <= bounds[1]:
            raise InvalidRequest(f"must be a number from {bounds[0]:.12g} to {bounds[1]:.12g}", field=name)
        return number

    def path(self, name: str) -> bytes:
        """A required absolute path, as raw bytes."""
        value = self.query.get(name)
        if value is None:
            raise InvalidRequest("is required", field=name)
        check_path(value.decode("utf-8", "surrogateescape"), name)
        return value


def _too_large(size: int) -> InvalidRequest:
    return InvalidRequest(f"must be at most {wire.MAX_BODY_BYTES} bytes", field="body", data={"size": size})


class Router:
    """Paths to routes, by a tree of their segments."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        missing, unknown = set(ROUTES) - set(handlers), set(handlers) - set(ROUTES)
        if missing or unknown:
            raise ValueError(f"routes without handler: {sorted(missing)}; handlers without route: {sorted(unknown)}")
        self._tree: dict[str, _Node] = {}
        self._root = _Node()
        for name, route in ROUTES.items():
            node = self._root
            for segment in route.path.split("/")[1:]:
                node = node.next.setdefault("" if segment.startswith("{") else segment, _Node())
            node.methods[route.method] = (route, handlers[name], frozenset(route.query))

    def find(self, method: str, path: str) -> tuple[Route, Handler, frozenset[str], tuple[str, ...]]:
        """Raises NotFound for an unknown path, InvalidRequest for a method that the path does not have."""
        node, params = self._root, []
        for segment in path.split("/")[1:]:
            found = node.next.get(segment) if segment else None
            if found is None:
                found = node.next.get("")
                if found is None or not segment:
                    raise NotFound(f"there is no {path[:200]!r} here", field="path")
                params.append(segment)
            node = found
        if not node.methods:
            raise NotFound(f"there is no {path[:200]!r} here", field="path")
        entry = node.methods.get(method)
        if entry is None:
            raise InvalidRequest(f"must be one of {', '.join(sorted(node.methods))} for this path", field="method")
        return (*entry, tuple(params))


class _Node:
    __slots__ = ("methods", "next")

    def __init__(self) -> None:
        self.next: dict[str, _Node] = {}
        self.methods: dict[str, tuple[Route, Handler, frozenset[str]]] = {}


def parse_query(data: bytes, allowed: frozenset[str]) -> dict[str, bytes]:
    """Each parameter at most once and only those of the route, values as raw bytes. Raises InvalidRequest naming it."""
    query: dict[str, bytes] = {}
    for part in data.split(b"&"):
        if not part:
            continue
        raw_name, _, value = part.partition(b"=")
        name = unquote_to_bytes(raw_name.replace(b"+", b" ")).decode("utf-8", "replace")
        if name not in allowed:
            known = f"; this route knows {', '.join(sorted(allowed))}" if allowed else "; this route knows none"
            raise InvalidRequest(f"no such query parameter{known}", field=name[:80] or "query")
        if name in query:
            raise InvalidRequest("is given twice", field=name)
        query[name] = unquote_to_bytes(value.replace(b"+", b" "))
    return query
