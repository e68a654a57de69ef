# SPDX-License-Identifier: Apache-2.0
"""Sockets and locks: where the edge can be reached, and that there is one edge only.

uvicorn's HTTP protocol serves the connections; its own server loop is not used, because it makes unix sockets that anybody may
connect to, takes over the signals, and offers no socket that appears only when all is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from opendsec.api import wire
from opendsec.api.errors import InvalidRequest
from opendsec.edge.asgi import App

BACKLOG = 4096
KEEP_ALIVE_S = 300  # longer than the SDK keeps a connection, so that it never writes into one that is being closed
HEAD_BYTES = 128 << 10  # the longest that can be right, a move from one path to another, has some 25 KiB
HEAD_S = 30.0
GRACE_S = 10.0  # for requests under way at a stop


class AlreadyRunning(Exception):
    """Another edge holds the lock."""


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold `directory`/edge.lock, which holds our pid. Raises AlreadyRunning. The kernel drops the lock when we end, however that is."""
    fd = os.open(directory / "edge.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                raise
            pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            raise AlreadyRunning(f"an edge (process {pid}) already uses {directory}") from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


class _Protocol(HttpToolsProtocol):
    """uvicorn's, with a limit of bytes and of time for the head of a request: both apply before anybody has shown a token."""

    _head = 0  # bytes of the head that is being read
    _in_head = False
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self._in_head
        super().data_received(data)
        # What came along with the end of the request before is not counted.
        self._head += len(data) if before and self._in_head else 0
        if self._head > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("too large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head, self._in_head = 0, True
        if self._patience is None:
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()

    def _wait_for_head(self) -> None:
        self._patience = asyncio.get_running_loop().call_later(HEAD_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP at all is answered in the contract's form, too."""
        body = wire.encode_error(InvalidRequest("is not an HTTP request that this edge understands", field="request"))
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % len(body) + body)
        self.transport.close()


class Listener:
    """One listening socket with its application and its connections."""

    def __init__(self, app: App) -> None:
        # Its logger would write tracebacks of answers that were cut off on purpose to stderr.
        logging.getLogger("uvicorn.error").addHandler(logging.NullHandler())
        logging.getLogger("uvicorn.error").propagate = False
        self.app = app
        self._config = Config(
            app,
            http=_Protocol,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=BACKLOG,
        )
        self._config.load()
        self._state = ServerState()
        self._server: asyncio.Server | None = None
        self._path: Path | None = None

    def _protocol(self) -> asyncio.Protocol:
        return _Protocol(config=self._config, server_state=self._state, app_state={})

    async def open_unix(self, path: Path) -> None:
        """Listen on `path` (mode 0600). It appears only when connections are accepted; a stale one of a dead edge is replaced."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        before = os.umask(0o177)
        try:
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listening.bind(os.fspath(temporary))
            except BaseException:
                listening.close()
                raise
        finally:
            os.umask(before)
        self._server = await asyncio.get_running_loop().create_unix_server(self._protocol, sock=listening, backlog=BACKLOG)
        os.rename(temporary, path)
        self._path = path

    async def open_tcp(self, host: str, port: int) -> int:
        """Listen there; the port, which matters if 0 was asked for."""
        self._server = await asyncio.get_running_loop().create_server(self._protocol, host, port, backlog=BACKLOG, reuse_address=True)
        chosen: int = self._server.sockets[0].getsockname()[1]
        return chosen

    async def close(self) -> None:
        """No new connections, streams end with an error line, requests under way may finish for GRACE_S."""
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        if self._server is not None:
            self._server.close()
        self.app.stopping.set()
        for connection in list(self._state.connections):
            connection.shutdown()  # at once if idle, else after its answer
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=GRACE_S)
        for task in list(self._state.tasks):
            task.cancel()
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks))
        for connection in list(self._state.connections):
            transport: asyncio.BaseTransport = connection.transport
            transport.close()
