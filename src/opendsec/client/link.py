# SPDX-License-Identifier: Apache-2.0
"""One edge as the SDK's classes see it: typed calls over a transport, retries, errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

import msgspec

from opendsec.api.errors import Unavailable
from opendsec.api.routes import Route
from opendsec.client import _core
from opendsec.client.transport import ConnectionBroken, Streamed, Transport

T = TypeVar("T", bound=msgspec.Struct)


class Link:
    """Shared by a client and everything it hands out."""

    def __init__(self, transport: Transport, retry: _core.RetryPolicy) -> None:
        self.transport = transport
        self.retry = retry

    async def call(
        self,
        route: Route,
        kind: type[T],
        ids: Mapping[str, str] | None = None,
        *,
        body: msgspec.Struct | None = None,
        query: _core.Query | None = None,
        repeatable: bool = False,
    ) -> T:
        """Send, and read the answer as `kind`. `repeatable` marks a mutating call that carries an action id in its body."""
        request = _core.request(route, ids or {}, body=_core.encode(body) if body is not None else b"", query=query)
        status, data = await self.send(request._replace(repeatable=request.repeatable or repeatable))
        return _core.read(status, data, kind)

    async def command(self, route: Route, ids: Mapping[str, str], *, query: _core.Query | None = None) -> None:
        """Send, and expect no content."""
        _core.read_nothing(*await self.send(_core.request(route, ids, query=query)))

    async def upload(
        self,
        route: Route,
        kind: type[T],
        ids: Mapping[str, str],
        body: Callable[[], AsyncIterable[bytes]] | bytes,
        *,
        query: _core.Query,
        repeatable: bool = False,
    ) -> T:
        """Send a raw body. It is given as a function where it is streamed, so that it can be sent again."""
        request = _core.request(route, ids, query=query)._replace(repeatable=repeatable)
        make = (lambda: request._replace(body=body)) if isinstance(body, bytes) else (lambda: request._replace(body=body()))
        return _core.read(*await self._sent(make, repeatable), kind)

    async def send(self, request: _core.Request) -> tuple[int, bytes]:
        return await self._sent(lambda: request, request.repeatable)

    async def _sent(self, make: Callable[[], _core.Request], repeatable: bool) -> tuple[int, bytes]:
        attempt = 1
        while True:
            try:
                return await self.transport.call(make())
            except ConnectionBroken as error:
                await self.before_retry(error, attempt, repeatable)
            attempt += 1

    async def before_retry(self, error: ConnectionBroken, attempt: int, repeatable: bool) -> None:
        """Wait before the next attempt, or raise Unavailable if there may be none."""
        if not self.retry.again(attempt, sent=error.sent, repeatable=repeatable):
            raise Unavailable(str(error), data={"sent": error.sent, "attempts": attempt}) from None
        await asyncio.sleep(self.retry.delay_s(attempt))

    @asynccontextmanager
    async def download(self, route: Route, ids: Mapping[str, str], *, query: _core.Query) -> AsyncIterator[Streamed]:
        """An answer's raw body, read as it comes."""
        async with self._opened(_core.request(route, ids, query=query)) as answer:
            yield answer

    async def lines(
        self,
        route: Route,
        kind: type[T],
        ids: Mapping[str, str] | None = None,
        *,
        body: msgspec.Struct | None = None,
        query: _core.Query | None = None,
    ) -> AsyncGenerator[T, None]:
        """An NDJSON answer, item by item. Raises ConnectionBroken if it ends early: the caller knows how to go on."""
        request = _core.request(route, ids or {}, body=_core.encode(body) if body is not None else b"", query=query)
        reader = _core.LineReader()
        async with self.transport.stream(request) as answer:
            if answer.status >= 400:
                _core.read_nothing(answer.status, b"".join([chunk async for chunk in answer.chunks()]))
            async for chunk in answer.chunks():
                for line in reader.feed(chunk):
                    yield _core.read_line(line, kind)

    @asynccontextmanager
    async def _opened(self, request: _core.Request) -> AsyncIterator[Streamed]:
        attempt = 1
        while True:
            opening: AbstractAsyncContextManager[Streamed] = self.transport.stream(request)
            try:
                answer = await opening.__aenter__()
            except ConnectionBroken as error:
                await self.before_retry(error, attempt, request.repeatable)
                attempt += 1
                continue
            break
        try:
            if answer.status >= 400:
                _core.read_nothing(answer.status, b"".join([chunk async for chunk in answer.chunks()]))
            yield answer
        except ConnectionBroken as error:
            raise Unavailable(str(error), data={"sent": error.sent, "attempts": attempt}) from None
        finally:
            await opening.__aexit__(None, None, None)
