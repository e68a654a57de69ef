# SPDX-License-Identifier: Apache-2.0
"""A registry on loopback (Debian's docker-registry), and a proxy before it that breaks what it is told to.

registry (fixture)          the registry's address, HOST:PORT; speaks plain HTTP, so `tls_verify=False`
async with Proxy(registry) as proxy:
    proxy.faults.append(Fault(kind="cut", path="/blobs/"))
    … docker://{proxy.address}/name:tag …
    proxy.requests, proxy.sent          what was asked for, and how many bytes of content went to the client
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import subprocess
import tempfile
import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

_CONFIG = """
version: 0.1
log: {level: info, accesslog: {disabled: true}}
storage: {filesystem: {rootdirectory: %s}, delete: {enabled: true}}
http: {addr: "127.0.0.1:0"}
"""


@pytest.fixture(scope="module")
def registry() -> Generator[str, None, None]:
    """HOST:PORT of a registry that is empty at first; each test uses names of its own."""
    with tempfile.TemporaryDirectory(prefix="registry-") as folder:
        config = Path(folder, "config.yml")
        config.write_text(_CONFIG % Path(folder, "data"))
        process = subprocess.Popen(
            ["docker-registry", "serve", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": "/usr/bin:/bin", "OTEL_TRACES_EXPORTER": "none"},
        )
        with process:
            try:
                address = _address(process)
                drain = threading.Thread(target=process.stdout.read if process.stdout else None, daemon=True)
                drain.start()  # it logs, and would wait for ever on a full pipe
                yield address
            finally:
                process.kill()
                process.wait()
                drain.join()


def _address(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    said = b""
    for line in process.stdout:
        said += line
        if found := re.search(rb"listening on (127\.0\.0\.1:\d+)", line):
            return found[1].decode()
    raise RuntimeError(f"the registry did not start: {said.decode(errors='replace')}")


@dataclass
class Fault:
    """What goes wrong with requests whose path has `path` in it, the next `times` times."""

    kind: Literal["cut", "wrong", "status", "stall"]
    path: str = "/blobs/sha256:"
    times: int = 1_000_000
    status: int = 503
    after: int = 1000  # bytes of content that are well

    def takes(self, method: str, path: str) -> bool:
        if self.path not in path or method != "GET" or self.times <= 0:
            return False
        self.times -= 1
        return True


@dataclass
class Proxy:
    """One request a connection; the registry sees the client's Host, so its redirects come back here."""

    upstream: str
    password: str = ""  # `user:password` that it asks for
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)
    sent: int = 0
    address: str = ""
    stalled: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def blobs(self) -> list[str]:
        """Digests of blobs that were fetched."""
        return [path.rpartition("/")[2] for method, path in self.requests if method == "GET" and "/blobs/sha256:" in path]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.readexactly(1)
        if first == b"\x16":  # TLS, which clients try first: told as Go's servers tell it
            await _answer(writer, 400, b"")
            return
        head = first + await reader.readuntil(b"\r\n\r\n")
        lines = head[:-4].split(b"\r\n")
        method, path, _ = lines[0].decode().split(" ", 2)
        headers = [line for line in lines[1:] if not line.lower().startswith(b"connection:")]
        given = next((line.partition(b":")[2].strip().decode() for line in headers if line.lower().startswith(b"authorization:")), "")
        self.requests.append((method, path))
        self.authorizations.append(given)
        if self.password and given != "Basic " + base64.b64encode(self.password.encode()).decode():
            await _answer(writer, 401, b'Www-Authenticate: Basic realm="test"\r\n')
            return
        fault = next((fault for fault in self.faults if fault.takes(method, path)), None)
        if fault is not None and fault.kind == "status":
            await _answer(writer, fault.status, b"")
            return
        host, _, port = self.upstream.partition(":")
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        body = asyncio.ensure_future(_pump(reader, up_writer))
        try:
            up_writer.write(b"\r\n".join([lines[0], *headers, b"Connection: close", b"", b""]))
            writer.write(await up_reader.readuntil(b"\r\n\r\n"))
            done = 0
            while data := await up_reader.read(65536):
                if fault is not None and done + len(data) > fault.after:
                    well = max(0, fault.after - done)
                    if fault.kind == "wrong":
                        data = data[:well] + bytes(byte ^ 0xFF for byte in data[well:])
                    else:
                        writer.write(data[:well])
                        await writer.drain()
                        if fault.kind == "stall":
                            self.stalled.set()
                            await asyncio.Event().wait()
                        writer.transport.abort()
                        return
                done += len(data)
                self.sent += len(data)
                writer.write(data)
                await writer.drain()
        finally:
            body.cancel()
            await asyncio.gather(body, return_exceptions=True)
            up_writer.close()
            with contextlib.suppress(ConnectionError):
                await up_writer.wait_closed()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


async def _answer(writer: asyncio.StreamWriter, status: int, headers: bytes) -> None:
    code = b"UNAUTHORIZED" if status == 401 else b"UNAVAILABLE"
    body = b'{"errors":[{"code":"%s","message":"made up"}]}' % code
    writer.write(b"HTTP/1.1 %d Made up\r\n%sConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (status, headers, len(body), body))
    await writer.drain()


def skopeo_copy(source: str, target: str) -> None:
    """Copy between transports, as a user of skopeo would; the registry speaks plain HTTP."""
    options = ["--quiet", "--all", "--src-tls-verify=false", "--dest-tls-verify=false"]
    command = ["skopeo", "--insecure-policy", "copy", *options, source, target]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
