# SPDX-License-Identifier: Apache-2.0
"""The route table as an ASGI application: calls handlers, sends their answers, turns what they raise into error bodies."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Coroutine, Mapping
from functools import partial

import msgspec

from opendsec.api import wire
from opendsec.api.errors import Internal, OpenDSecError, PlatformError, Unauthorized, Unavailable
from opendsec.api.routes import ROUTES
from opendsec.edge.http import NDJSON, Disconnected, Duplex, Lines, Message, Raw, Receive, Request, Router, Send, parse_query
from opendsec.edge.log import Log
from opendsec.edge.shortage import shortage
from opendsec.edge.turns import Turns, size_of

_JSON = (b"content-type", b"application/json")
_NDJSON = (b"content-type", NDJSON)


class CutOff(Exception):
    """An answer that had begun cannot be completed: the server cuts the connection, so that the client sees that something is missing."""


class App:
    """The ASGI application of one listener. `token` None: the listener itself decides who may connect."""

    def __init__(self, router: Router, log: Log, *, local: bool, token: bytes | None = None, turns: Turns | None = None) -> None:
        self._router, self._log, self._local, self._token = router, log, local, token
        self._turns = turns or Turns()
        self.stopping = asyncio.Event()  # set: streams end

    async def __call__(self, scope: Mapping[str, object], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        method, path, query, headers = scope["method"], scope["path"], scope["query_string"], scope["headers"]
        assert isinstance(method, str) and isinstance(path, str) and isinstance(query, bytes) and isinstance(headers, list)
        request: Request | None = None
        length = _body_length(headers)
        try:
            if self._token is not None:
                _authorize(headers, self._token)
            route, handler, allowed, params = self._router.find(method, path)
            request = Request(route, params, parse_query(query, allowed) if query else {}, receive, length, self._local)
            answer = await handler(request)
            if isinstance(answer, msgspec.Struct):
                await _send_json(send, 200, await self._turns.do(partial(wire.encode, answer), size_of(answer)))
            elif answer is None:
                await send({"type": "http.response.start", "status": 204, "headers": []})
                await send({"type": "http.response.body", "body": b""})
            elif isinstance(answer, Lines):
                await self._send_lines(request, answer, send)
            elif isinstance(answer, Duplex):
                await self._send_duplex(request, answer, send)
            else:
                await self._send_raw(request, answer, send)
        except Disconnected:
            return
        except OpenDSecError as error:
            await self._send_error(request or self._unrouted(receive, length), send, error, routed=request is not None)
        except Exception as error:
            internal = self._internal(method, path, error)
            await self._send_error(request or self._unrouted(receive, length), send, internal, routed=request is not None)

    def _internal(self, method: str, path: str, error: Exception) -> PlatformError:
        """What the caller learns of a bug of ours: a number under which the log has the rest. Want of descriptors or of
        space is none."""
        if (want := shortage(error)) is not None:
            kind = "edge.no_space" if want.data["resource"] == "disk" else "edge.no_descriptors"
            self._log.error(kind, method=method, path=path, reason=str(error))
            return want
        incident = secrets.token_hex(6)
        self._log.exception("edge.internal_error", incident=incident, method=method, path=path, kind=type(error).__name__)
        return Internal(f"a bug of the edge; its log tells more under incident {incident}", data={"incident": incident})

    def _unrouted(self, receive: Receive, length: int | None) -> Request:
        """A request that was refused before its route was known, for its body."""
        return Request(ROUTES["INFO"], (), {}, receive, length, self._local)

    async def _send_error(self, request: Request, send: Send, error: OpenDSecError, *, routed: bool) -> None:
        if request.started:
            raise CutOff from error  # too late for a status
        if routed and error.field is None and error.status < 500:
            error.field = _subject(request)
        body = wire.encode_error(error)
        if await request.swallow():
            return await _send_json(send, error.status, body)
        headers = [_JSON, (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send(_part(body))
        await request.linger()
        await send({"type": "http.response.body", "body": b""})

    async def _send_lines(self, request: Request, lines: Lines, send: Send) -> None:
        """Send lines until they end, the reader goes away, or the edge stops. The generator is closed in each case."""
        items = lines.items

        async def pump() -> None:
            async for item in items:
                await send(_part(wire.encode(item) + b"\n"))

        try:
            first = await anext(items, None)  # an error before the first line still becomes a status
            request.started = True
            await send({"type": "http.response.start", "status": 200, "headers": [_NDJSON]})
            if first is not None:
                await send(_part(wire.encode(first) + b"\n"))
                await self._while_read(request, pump())
        except Exception as error:
            if not request.started or isinstance(error, Disconnected):
                raise
            known = error if isinstance(error, OpenDSecError) else self._internal(request.route.method, request.route.path, error)
            await send(_part(wire.encode_error(known) + b"\n"))
        finally:
            await items.aclose()
        await send({"type": "http.response.body", "body": b""})

    async def _send_duplex(self, request: Request, duplex: Duplex, send: Send) -> None:
        """Send chunks of lines until they end, the client goes away, or the edge stops."""

        async def pump() -> None:
            try:
                async for chunk in duplex.chunks:
                    await send(_part(chunk))
            finally:
                await duplex.chunks.aclose()

        request.started = True
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", duplex.content_type)]})
        await send(_part(b""))  # the head at once: the client may send its body only as it gets answers
        pumping, stop = asyncio.ensure_future(pump()), asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait((pumping, stop), return_when=asyncio.FIRST_COMPLETED)
            if not pumping.done():
                raise Unavailable("the edge is stopping")
            pumping.result()
        except Disconnected:
            raise
        except Exception as error:
            known = error if isinstance(error, OpenDSecError) else self._internal(request.route.method, request.route.path, error)
            if duplex.content_type != NDJSON:
                raise CutOff from error  # there is no place in it for an error
            await send(_part(wire.encode_error(known) + b"\n"))
        finally:
            stop.cancel()
            if not pumping.done():
                pumping.cancel()
                await asyncio.wait((pumping,))
        await send({"type": "http.response.body", "body": b""})

    async def _send_raw(self, request: Request, raw: Raw, send: Send) -> None:
        """Send the chunks; an answer that turns out shorter or longer than promised is cut off, never padded."""

        async def pump() -> None:
            async for chunk in raw.chunks:
                await send(_part(chunk))

        try:
            first = await anext(raw.chunks, b"")
            headers = [(b"content-type", raw.content_type)]
            if raw.length is not None:
                headers.append((b"content-length", b"%d" % raw.length))
            request.started = True
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if raw.length is not None and len(first) == raw.length:
                return await send({"type": "http.response.body", "body": first})
            await send(_part(first))
            await self._while_read(request, pump())
            await send({"type": "http.response.body", "body": b""})
        finally:
            await raw.chunks.aclose()
            raw.close()

    async def _while_read(self, request: Request, pump: Coroutine[object, object, None]) -> None:
        """Run `pump` unless the reader goes away (Disconnected) or the edge stops (Unavailable)."""
        working = asyncio.ensure_future(pump)
        gone = asyncio.ensure_future(request.gone())
        stop = asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait((working, gone, stop), return_when=asyncio.FIRST_COMPLETED)
            left = gone.done()
        finally:
            gone.cancel()
            stop.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait((working,))
        if not working.cancelled():
            return working.result()
        raise Disconnected if left else Unavailable("the edge is stopping")


def _subject(request: Request) -> str:
    """What a request is about, for errors that concern no single field: the last thing its path names, or its body."""
    names = [part[1:-1] for part in request.route.path.split("/") if part.startswith("{")]
    return names[-1] if names else "body"


def _part(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


async def _send_json(send: Send, status: int, body: bytes) -> None:
    headers = [_JSON, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _body_length(headers: list[tuple[bytes, bytes]]) -> int | None:
    """0: no body. None: chunked."""
    length = 0
    for name, value in headers:
        if name == b"content-length":
            length = int(value)  # the HTTP parser has verified that it is a number
        elif name == b"transfer-encoding":
            return None
    return length


def _authorize(headers: list[tuple[bytes, bytes]], token: bytes) -> None:
    given = b""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            given = value[7:].strip()
    if not hmac.compare_digest(given, token):
        message = "the token is wrong" if given else "send the header 'Authorization: Bearer <token>'"
        raise Unauthorized(message, field="authorization")
