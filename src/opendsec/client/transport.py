# SPDX-License-Identifier: Apache-2.0
"""The one seam between the SDK and an edge: a request in, a status and a body out.

`UnixTransport` (unix.py) serves the edge of this machine, `HttpxTransport` everything else: TCP, TLS, and an ASGI app in this
process. They differ in speed only; the contract suite runs over both.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from opendsec.client._core import Request

if TYPE_CHECKING:
    import httpx

CONNECT_TIMEOUT_S = 10.0
CHUNK_BYTES = 256 << 10


class ConnectionBroken(Exception):
    """No answer, or half of one. `sent` says whether the edge may have got the request."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class Streamed(Protocol):
    """An answer whose body is read as it comes."""

    @property
    def status(self) -> int: ...
    @property
    def length(self) -> int | None:
        """Bytes of the body, if the edge said so."""

    def chunks(self) -> AsyncIterator[bytes]:
        """The body. Raises ConnectionBroken if it ends early."""


class Transport(Protocol):
    """Raises ConnectionBroken and nothing else; safe to use from many tasks of one event loop."""

    @property
    def local(self) -> bool:
        """Whether the edge shares this machine's files."""

    @property
    def duplex(self) -> bool:
        """Whether a streamed body of a request is still sent while the answer is read."""

    async def call(self, request: Request) -> tuple[int, bytes]:
        """Status and whole body."""

    def stream(self, request: Request) -> AbstractAsyncContextManager[Streamed]: ...
    async def aclose(self) -> None: ...


class HttpxTransport:
    """HTTP/1.1 by httpx. Cheap to make: the library is loaded and the pool opened with the first request."""

    def __init__(self, base: str, *, token: str | None = None, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._base = base.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._transport = transport
        self._client: httpx.AsyncClient | None = None

    @property
    def local(self) -> bool:
        return False

    @property
    def duplex(self) -> bool:
        return False  # httpcore sends all of a body before it reads

    def _open(self) -> httpx.AsyncClient:
        if self._client is None:
            import httpx

            # A command may be silent for days, so reading has no time-out; keep-alive probes notice a peer that is gone.
            transport = self._transport or httpx.AsyncHTTPTransport(
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=3.0),
                socket_options=[
                    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
                    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20),
                    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
                    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6),
                    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
                ],
            )
            self._client = httpx.AsyncClient(
                transport=transport,
                headers=self._headers,
                timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
                trust_env=False,
            )
        return self._client

    async def call(self, request: Request) -> tuple[int, bytes]:
        async with self.stream(request) as answer:
            return answer.status, b"".join([chunk async for chunk in answer.chunks()])

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[Streamed]:
        import httpx

        client = self._open()
        headers = {"content-type": request.content_type} if request.content_type else {}
        built = client.build_request(request.method, self._base + request.target, content=request.body or None, headers=headers)
        try:
            response = await client.send(built, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol) as error:
            raise ConnectionBroken(f"cannot reach {self._base}: {error}", sent=False) from None
        except httpx.TransportError as error:
            raise ConnectionBroken(f"the connection to {self._base} broke: {type(error).__name__} {error}", sent=True) from None
        try:
            yield _HttpxStreamed(response)
        finally:
            await response.aclose()

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


class _HttpxStreamed:
    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.status = response.status_code
        length = response.headers.get("content-length", "")
        self.length = int(length) if length.isdigit() else None

    async def chunks(self) -> AsyncIterator[bytes]:
        import httpx

        try:
            async for chunk in self._response.aiter_raw():
                yield chunk
        except httpx.TransportError as error:
            raise ConnectionBroken(f"the answer was cut off: {type(error).__name__} {error}", sent=True) from None
