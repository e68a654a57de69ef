# SPDX-License-Identifier: Apache-2.0
"""Our HTTP over a unix socket, against peers that say exactly what a test wants said."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from opendsec.client._core import Request
from opendsec.client.transport import ConnectionBroken
from opendsec.client.unix import UnixTransport, _Frames

Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
GET = Request("GET", "/v1/info")
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@asynccontextmanager
async def serving(peer: Peer) -> AsyncIterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "s"))
        served = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await peer(reader, writer)
            finally:
                writer.close()
                served.set()

        server = await asyncio.start_unix_server(serve, path)
        async with server:
            yield path


def saying(*parts: bytes, before: int = 1) -> Peer:
    """A peer that reads `before` request heads, answers, and hangs up."""

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(before):
            await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()

    return peer


@pytest.mark.parametrize(
    ("parts", "answer"),
    [
        ([OK], (200, b"ok")),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], (204, b"")),
        ([OK[:5], OK[5:30], OK[30:]], (200, b"ok")),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", b"2;x=y\r\nde\r\n0\r\n\r\n"], (200, b"abcde")),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" + OK], (200, b"ok")),
        ([b"HTTP/1.1 404 Not Found\r\nConnection: close\r\ncontent-length: 1\r\n\r\nx"], (404, b"x")),
    ],
)
async def test_answers(parts: list[bytes], answer: tuple[int, bytes]) -> None:
    async with serving(saying(*parts)) as path:
        transport = UnixTransport(path)
        assert await transport.call(GET) == answer
        await transport.aclose()


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b"HTTP/1.1 200 OK\r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok"],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab"],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n"],
        [b"HTTP/1.1 200 OK\r\n\r\nno length"],
        [b"SSH-2.0-OpenSSH\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n"],
    ],
)
async def test_half_answers_are_broken_connections(parts: list[bytes]) -> None:
    async with serving(saying(*parts)) as path:
        transport = UnixTransport(path)
        with pytest.raises(ConnectionBroken) as broken:
            await transport.call(GET)
        assert broken.value.sent
        with pytest.raises(ConnectionBroken):
            async with transport.stream(GET) as answer:
                _ = [chunk async for chunk in answer.chunks()]
        await transport.aclose()


async def test_connections_are_used_again() -> None:
    connections = 0

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            try:
                await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                return
            writer.write(OK)

    async with serving(peer) as path:
        transport = UnixTransport(path)
        for _ in range(5):
            await transport.call(GET)
        assert connections == 1
        await asyncio.gather(*(transport.call(GET) for _ in range(5)))
        assert 1 < connections <= 5
        await transport.aclose()
        await transport.call(GET)  # closing is no end
        await transport.aclose()


async def test_a_connection_that_the_peer_closed_is_not_used() -> None:
    async with serving(saying(OK)) as path:
        transport = UnixTransport(path)
        for _ in range(3):
            assert await transport.call(GET) == (200, b"ok")
            await asyncio.sleep(0)  # the end of the peer's stream is read before the next call
        await transport.aclose()


async def test_nobody_listens() -> None:
    with tempfile.TemporaryDirectory() as folder:
        transport = UnixTransport(str(Path(folder, "absent")))
        with pytest.raises(ConnectionBroken) as broken:
            await transport.call(GET)
        assert not broken.value.sent
        started = 0

        async def start() -> None:
            nonlocal started
            started += 1

        transport = UnixTransport(str(Path(folder, "absent")), start=start)
        with pytest.raises(ConnectionBroken):
            await transport.call(GET)
        assert started == 1
        await transport.aclose()


async def test_many_that_find_nobody_start_one() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "s"))
        servers: list[asyncio.Server] = []

        async def start() -> None:
            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(OK)
                writer.close()

            await asyncio.sleep(0)
            servers.append(await asyncio.start_unix_server(serve, path))

        transport = UnixTransport(path, start=start)
        answers = await asyncio.gather(*(transport.call(GET) for _ in range(20)))
        assert answers == [(200, b"ok")] * 20 and len(servers) == 1
        await transport.aclose()
        servers[0].close()
        await servers[0].wait_closed()


async def test_a_streamed_body_is_chunked_and_watched() -> None:
    got = bytearray()

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        while size := int(await reader.readline(), 16):
            got.extend(await reader.readexactly(size))
            await reader.readexactly(2)
        await reader.readexactly(2)
        writer.write(OK)

    async def body() -> AsyncIterator[bytes]:
        yield b"one"
        yield b""
        yield b"two"

    async with serving(peer) as path:
        transport = UnixTransport(path)
        assert await transport.call(Request("PUT", "/x", body())) == (200, b"ok")
        assert got == b"onetwo"
        await transport.aclose()


async def test_a_refusal_ends_a_body_that_nobody_reads() -> None:
    """The peer answers and never reads: sending must not go on for ever."""
    refused = b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig"
    done = asyncio.Event()

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(refused)
        await done.wait()

    async def body() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 100_000

    async with serving(peer) as path:
        transport = UnixTransport(path)
        async with asyncio.timeout(10):
            assert await transport.call(Request("PUT", "/x", body())) == (413, b"big")
        done.set()
        await transport.aclose()


async def test_an_error_of_the_body_is_the_callers() -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"x"
        raise RuntimeError("the disk broke")

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(peer) as path:
        transport = UnixTransport(path)
        with pytest.raises(RuntimeError, match="the disk broke"):
            await transport.call(Request("PUT", "/x", body()))
        await transport.aclose()


async def test_an_answer_is_read_while_the_body_is_sent() -> None:
    """The peer says back what it hears, chunk by chunk; the body waits for each answer."""

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            size = await reader.readline()
            writer.write(size + await reader.readexactly(int(size, 16) + 2))
            if size == b"0\r\n":
                return

    heard = asyncio.Queue[bytes]()

    async def body() -> AsyncIterator[bytes]:
        yield b"a"
        for _ in range(3):
            yield (await heard.get()) * 2

    async with serving(peer) as path:
        transport = UnixTransport(path)
        async with asyncio.timeout(10), transport.stream(Request("POST", "/x", body())) as answer:
            said = []
            async for chunk in answer.chunks():
                said.append(chunk)
                heard.put_nowait(chunk)
        assert said == [b"a", b"aa", b"aaaa", b"a" * 8]
        await transport.aclose()


async def test_leaving_an_answer_ends_the_body() -> None:
    ended = asyncio.Event()

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        assert await reader.read() == b"1\r\na\r\n"  # and no end of the body
        ended.set()

    async def body() -> AsyncIterator[bytes]:
        yield b"a"
        await asyncio.Event().wait()

    async with serving(peer) as path, asyncio.timeout(10):
        transport = UnixTransport(path)
        async with transport.stream(Request("POST", "/x", body())) as answer:
            assert await anext(aiter(answer.chunks())) == b"x"
        await ended.wait()
        await transport.aclose()


async def test_an_error_of_the_body_wakes_who_reads_the_answer() -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        with pytest.raises(ConnectionResetError):
            while await reader.read():
                pass
            raise ConnectionResetError

    read = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b"a"
        await read.wait()
        raise RuntimeError("the disk broke")

    async with serving(peer) as path, asyncio.timeout(10):
        transport = UnixTransport(path)
        with pytest.raises(RuntimeError, match="the disk broke"):
            async with transport.stream(Request("POST", "/x", body())) as answer:
                async for _ in answer.chunks():
                    read.set()
        await transport.aclose()


CODED = b"3\r\nabc\r\n1a;x=y\r\n" + b"d" * 26 + b"\r\n00002\r\n\r\n\r\n0\r\n\r\n"


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 100])
def test_chunks_in_pieces(step: int) -> None:
    frames = _Frames()
    content = b"".join(frames.feed(CODED[at : at + step]) for at in range(0, len(CODED), step))
    assert content == b"abc" + b"d" * 26 + b"\r\n" and frames.ended and frames.rest == b""


def test_what_follows_the_last_chunk_is_left() -> None:
    frames = _Frames()
    assert frames.feed(CODED + b"HTTP/1.1") and frames.ended and frames.rest == b"HTTP/1.1"


@pytest.mark.parametrize(
    "bad", [b"\r\n", b"x\r\n", b"-1\r\n", b"1\r\nabc", b"1" * 17 + b"\r\n", b"1_0\r\n", b"0\r\nTrailer: x\r\n", b"1" * 70_000]
)
def test_what_is_no_chunk(bad: bytes) -> None:
    with pytest.raises(ValueError):
        _Frames().feed(bad)
