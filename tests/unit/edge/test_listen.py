# SPDX-License-Identifier: Apache-2.0
"""Sockets and locks, and what is sent over them: errors, streams whose reader leaves, answers that must not be completed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import stat
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from opendsec.api.errors import Internal, QuotaExceeded, Unavailable
from opendsec.api.routes import ROUTES
from opendsec.api.sandboxes import Event
from opendsec.edge import listen
from opendsec.edge.asgi import App
from opendsec.edge.http import Answer, Lines, Raw, Request, Router
from opendsec.edge.listen import AlreadyRunning, Listener, locked
from opendsec.edge.log import Field, NullLog
from tests.unit.edge.conftest import World

TOKEN = b"a-token-for-tests-only"


class RecordingLog(NullLog):
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Field]]] = []

    def exception(self, event: str, /, **fields: Field) -> None:
        self.lines.append((event, fields))


class Server:
    """One listener on a unix socket whose INFO and EVENTS routes a test defines."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "edge.sock"
        self.log = RecordingLog()
        self.answer: Callable[[Request], Awaitable[Answer]]
        self.listener = Listener(App(Router(dict.fromkeys(ROUTES, self._handle)), self.log, local=True))

    async def _handle(self, request: Request) -> Answer:
        return await self.answer(request)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url="http://edge", transport=httpx.AsyncHTTPTransport(uds=str(self.path)), timeout=10)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Server, None]:
    server = Server(tmp_path)
    await server.listener.open_unix(server.path)
    yield server
    await server.listener.close()


def test_one_edge_holds_the_lock(tmp_path: Path) -> None:
    with locked(tmp_path):
        assert (tmp_path / "edge.lock").read_text() == f"{os.getpid()}\n"
        with pytest.raises(AlreadyRunning, match=f"an edge \\(process {os.getpid()}\\) already uses"), locked(tmp_path):
            pass
    with locked(tmp_path):
        pass


async def test_the_socket_is_for_its_owner_alone(server: Server) -> None:
    mode = server.path.stat().st_mode
    assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600
    assert [entry.name for entry in server.path.parent.iterdir()] == ["edge.sock"]
    await server.listener.close()
    assert not server.path.exists()


async def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "edge.sock"))
    server = Server(tmp_path)

    async def answer(request: Request) -> Answer:
        return None

    server.answer = answer
    await server.listener.open_unix(server.path)
    async with server.client() as client:
        assert (await client.get("/v1/info")).status_code == 204
    await server.listener.close()


async def test_a_bug_is_told_by_number_and_logged(server: Server) -> None:
    async def answer(request: Request) -> Answer:
        raise KeyError("secret detail")

    server.answer = answer
    async with server.client() as client:
        response = await client.get("/v1/info")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (500, "internal")
    ((event, fields),) = server.log.lines
    assert (event, fields["incident"]) == ("edge.internal_error", error["data"]["incident"])
    assert "secret detail" not in response.text


async def test_a_stream_ends_when_its_reader_leaves(server: Server) -> None:
    closed = asyncio.Event()

    async def events() -> AsyncGenerator[Event, None]:
        try:
            yield Event(seq=1, at=0.0, kind="one")
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def answer(request: Request) -> Answer:
        return Lines(events())

    server.answer = answer
    async with server.client() as client, client.stream("GET", "/v1/events") as response:
        assert json.loads(await anext(response.aiter_lines()))["kind"] == "one"
    await closed.wait()


async def test_a_stream_that_fails_says_so_in_its_last_line(server: Server) -> None:
    async def events() -> AsyncGenerator[Event, None]:
        yield Event(seq=1, at=0.0, kind="one")
        raise Unavailable("no more")

    async def answer(request: Request) -> Answer:
        return Lines(events())

    server.answer = answer
    async with server.client() as client:
        lines = (await client.get("/v1/events")).text.splitlines()
    assert json.loads(lines[1])["error"]["code"] == "unavailable"


async def test_a_stream_that_fails_at_once_has_a_status(server: Server) -> None:
    async def events() -> AsyncGenerator[Event, None]:
        raise Internal("no")
        yield

    async def answer(request: Request) -> Answer:
        return Lines(events())

    server.answer = answer
    async with server.client() as client:
        assert (await client.get("/v1/events")).status_code == 500


async def test_streams_end_when_the_edge_stops(server: Server) -> None:
    async def events() -> AsyncGenerator[Event, None]:
        yield Event(seq=1, at=0.0, kind="one")
        await asyncio.Event().wait()

    async def answer(request: Request) -> Answer:
        return Lines(events())

    server.answer = answer
    async with server.client() as client, client.stream("GET", "/v1/events") as response:
        lines = response.aiter_lines()
        await anext(lines)
        await server.listener.close()
        assert json.loads(await anext(lines))["error"]["message"] == "the edge is stopping"


async def test_an_answer_that_cannot_be_completed_is_cut(server: Server) -> None:
    closed = []

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b"first"
        raise Unavailable("the file became shorter while it was read")

    async def answer(request: Request) -> Answer:
        return Raw(pieces(), 100, lambda: closed.append(1))

    server.answer = answer
    async with server.client() as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/v1/info")
    assert closed == [1]


async def test_a_large_body_that_is_refused_is_not_read_to_its_end(server: Server) -> None:
    async def answer(request: Request) -> Answer:
        raise Unavailable("not now")

    sent = 0

    async def body() -> AsyncGenerator[bytes, None]:
        nonlocal sent
        for _ in range(1000):
            sent += 1 << 20
            yield bytes(1 << 20)

    server.answer = answer
    async with server.client() as client:
        response = await client.post("/v1/drain", content=body())
        assert response.status_code == 503 and response.headers["connection"] == "close"
        assert sent < 100 << 20
        assert (await client.post("/v1/drain")).status_code == 503


async def test_what_is_no_http_is_refused_in_our_form(server: Server) -> None:
    reader, writer = await asyncio.open_unix_connection(str(server.path))
    writer.write(b"\x16\x03\x01 hello\r\n\r\n")
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400 ") and b'"code":"invalid_request"' in answer
    writer.close()
    await writer.wait_closed()


async def test_tokens_are_compared_whole(tmp_path: Path) -> None:
    async def answer(request: Request) -> Answer:
        return None

    listener = Listener(App(Router(dict.fromkeys(ROUTES, answer)), NullLog(), local=False, token=TOKEN))
    port = await listener.open_tcp("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        good = TOKEN.decode()
        for given, status in (("", 401), ("Bearer", 401), ("Bearer a-token", 401), (f"Bearer {good}", 204), (f"bearer {good}", 204)):
            response = await client.get("/v1/info", headers={"authorization": given} if given else {})
            assert response.status_code == status, given
        two = [("authorization", "Bearer x"), ("authorization", f"Bearer {good}")]
        assert (await client.get("/v1/info", headers=two)).status_code == 204
    await listener.close()


async def test_events_are_followed_without_gap_or_repetition(world: World) -> None:
    node, kinds = world.node, []
    node.events.emit("one", "sb")
    stream = world.routes.node_routes.follow(0, "sb", True)
    kinds.append((await anext(stream)).kind)
    node.events.emit("two", "sb")
    node.flush()
    node.events.emit("three", "sb")
    kinds += [(await anext(stream)).kind for _ in range(2)]
    await stream.aclose()
    assert kinds == ["one", "two", "three"]


@pytest.mark.parametrize("declared", (True, False), ids=("of a known length", "chunked"))
async def test_whoever_still_sends_gets_the_refusal(server: Server, declared: bool) -> None:
    """Not a broken pipe: closing a connection with bytes unread resets it under the writer."""
    took = asyncio.Event()

    async def answer(request: Request) -> Answer:
        await anext(request.chunks())
        took.set()
        raise QuotaExceeded("no space", field="disk")

    server.answer = answer
    reader, writer = await asyncio.open_unix_connection(str(server.path))
    size = 16 << 20
    header = f"content-length: {size}" if declared else "transfer-encoding: chunked"
    writer.write(f"POST /v1/drain HTTP/1.1\r\nhost: edge\r\n{header}\r\n\r\n".encode())
    if not declared:
        writer.write(b"%x\r\n" % size)
    # All of it, without reading in between, as a client does that reads the answer when it has sent the request.
    piece = bytes(1 << 20)
    writer.write(piece)
    await took.wait()
    for _ in range(size // len(piece) - 1):
        writer.write(piece)
        await writer.drain()
    if not declared:
        writer.write(b"\r\n0\r\n\r\n")
    text = await reader.read()
    assert text.startswith(b"HTTP/1.1 429") and b'"field":"disk"' in text and b"connection: close" in text
    writer.close()


async def test_a_refusal_does_not_wait_for_a_slow_sender(server: Server) -> None:
    async def answer(request: Request) -> Answer:
        raise Unavailable("not now")

    server.answer = answer
    reader, writer = await asyncio.open_unix_connection(str(server.path))
    writer.write(b"POST /v1/drain HTTP/1.1\r\nhost: edge\r\ntransfer-encoding: chunked\r\n\r\n1\r\n.\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 503")
    writer.close()


LINE = b"GET /v1/info HTTP/1.1\r\n"


@pytest.mark.parametrize("head", (LINE + b"x: " + b"a" * 10_000_000, b"GET /" + b"a" * 10_000_000, LINE + b"x: y\r\n" * 2_000_000))
async def test_the_head_of_a_request_has_a_limit(server: Server, head: bytes) -> None:
    """It applies before a token is asked for, and each byte of it stays in memory."""
    reader, writer = await asyncio.open_unix_connection(str(server.path))
    writer.write(head)
    with contextlib.suppress(ConnectionError):  # it may be gone before all was sent
        await writer.drain()
    with contextlib.suppress(ConnectionError):
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    writer.close()


async def test_many_requests_on_a_connection_and_large_bodies_have_no_such_limit(server: Server) -> None:
    async def answer(request: Request) -> Answer:
        await request.swallow()
        return None

    server.answer = answer
    reader, writer = await asyncio.open_unix_connection(str(server.path))
    one = b"POST /v1/drain HTTP/1.1\r\nhost: x\r\ncontent-length: 300000\r\n\r\n" + bytes(300_000)
    writer.write(one * 5 + b"GET /v1/info HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert (await reader.read()).count(b"HTTP/1.1 204") == 6
    writer.close()


async def test_whoever_sends_no_whole_head_is_let_go(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "HEAD_S", 0.05)
    server.answer = lambda request: asyncio.sleep(0)
    for sent in (b"", b"GET /v1/in", b"GET /v1/info HTTP/1.1\r\nx: y\r\n", b"GET /v1/info HTTP/1.1\r\nhost: x\r\n\r\nGET /"):
        reader, writer = await asyncio.open_unix_connection(str(server.path))
        writer.write(sent)
        answered = await reader.read()  # returns because the edge closes
        assert answered.count(b"HTTP/1.1 204") == sent.count(b"\r\n\r\n")
        writer.close()


@pytest.mark.parametrize(("number", "resource"), [(errno.EMFILE, "descriptors"), (errno.ENOSPC, "disk"), (errno.EDQUOT, "disk")])
async def test_nothing_left_is_no_bug(server: Server, number: int, resource: str) -> None:
    async def answer(request: Request) -> Answer:
        raise OSError(number, os.strerror(number))

    server.answer = answer
    async with server.client() as client:
        response = await client.get("/v1/info")
    assert response.status_code == 503 and response.json()["error"]["data"] == {"resource": resource}
