# SPDX-License-Identifier: Apache-2.0
"""Servers that tests and benchmarks fetch from: on loopback, or in a network namespace that is made for them and goes with them.

    with FaultServer(folder) as web:            # files with ranges; counts; fails as it is told
        web.fail("cut", match="data.blob", times=2)
        web.url, web.requests, web.sent_bytes
        gate = web.hold("data.blob")            # the next request for it waits: gate.wait_arrived(), gate.release()

    with s3_server() as s3:                     # s3.url, s3.options
    with nginx_server(folder, latency_ms=20, rate_mbit=1000) as web:      # web.url, web.counts(); needs root

`FaultServer` lives in this process, in daemon threads; the others are processes. Tests in whose process obstore runs name the fixture
`obstore_started`.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import re
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from tests import leaks
from tests.slow_line import Counts, Nginx, nginx_server


@pytest.fixture(scope="session")
def obstore_started(leak_detector: leaks.LeakDetector) -> None:
    """obstore keeps its threads and their descriptors as long as the process lives; they are no leak of the first test that uses it."""
    import obstore
    import obstore.store

    before = leaks.snapshot()
    obstore.put(obstore.store.MemoryStore(), "a", b"")
    leak_detector.hold(before)


__all__ = ["S3", "Counts", "FaultServer", "Gate", "Nginx", "Request", "nginx_server", "obstore_started", "s3_server"]

FaultKind = Literal["status", "cut", "wrong", "short", "stall", "drop"]


@dataclass
class Fault:
    """What goes wrong, at requests whose path contains `match`.

    status   an answer with `status`, 503 if not said otherwise
    cut      the connection ends in the middle of the content
    wrong    one bit of the content is another
    short    a proper answer, but to a smaller range
    stall    the headers and half of the content come, then nothing; the connection stays until the server is closed
    drop     the connection ends without an answer
    """

    kind: FaultKind
    match: str = ""
    times: int = 1 << 30
    after: int = 0  # so many matching requests go well first
    status: int = 503
    method: str = "GET"


@dataclass
class Request:
    method: str
    path: str
    start: int = 0
    length: int = 0  # of the content that was asked for
    sent: int = 0
    status: int = 0
    authorization: str = ""
    answered: bool = False


class Gate:
    """Requests that wait until they are let through."""

    def __init__(self, match: str) -> None:
        self.match = match
        self._arrived, self._released = threading.Event(), threading.Event()

    def wait_arrived(self, timeout_s: float = 30) -> None:
        assert self._arrived.wait(timeout_s), f"no request for {self.match!r} came"

    def release(self) -> None:
        self._released.set()

    def pass_through(self) -> None:
        self._arrived.set()
        self._released.wait()


class FaultServer:
    def __init__(self, root: Path, *, writable: bool = False, tls: tuple[Path, Path] | None = None) -> None:
        """`tls`: a certificate and its key."""
        self.root, self.writable, self.tls = root, writable, tls
        self.requests: list[Request] = []
        self.most_at_once = 0
        self._faults: list[Fault] = []
        self._gates: list[Gate] = []
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._active = 0
        self._connections: set[socket.socket] = set()
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True, name="fault server")

    def __enter__(self) -> FaultServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._closing.set()
        for gate in self._gates:
            gate.release()
        self._server.shutdown()
        self._server.server_close()
        self.drop_connections()
        self._thread.join()
        with self._changed:
            # So that no descriptor of a connection outlives the test.
            assert self._changed.wait_for(lambda: not self._connections, timeout=10)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self._server.server_address[1]}"

    # --- what it is to do ------------------------------------------------------------------------------------------

    def fail(
        self, kind: FaultKind, *, match: str = "", times: int = 1 << 30, after: int = 0, status: int = 503, method: str = "GET"
    ) -> Fault:
        fault = Fault(kind, match, times, after, status, method)
        with self._changed:
            self._faults.append(fault)
        return fault

    def heal(self) -> None:
        with self._changed:
            self._faults.clear()

    def hold(self, match: str) -> Gate:
        gate = Gate(match)
        with self._changed:
            self._gates.append(gate)
        return gate

    def let_go(self) -> None:
        """No request is held from now on."""
        with self._changed:
            gates, self._gates = self._gates, []
        for gate in gates:
            gate.release()

    def drop_connections(self) -> None:
        """As if the server's machine had died and come back."""
        with self._changed:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    # --- what it saw -----------------------------------------------------------------------------------------------

    @property
    def sent_bytes(self) -> int:
        """Of content, headers left out."""
        return sum(request.sent for request in list(self.requests))

    def reset(self) -> None:
        with self._changed:
            self.requests.clear()
            self.most_at_once = 0

    def wait_requests(self, count: int, match: str = "", timeout_s: float = 30) -> None:
        """Until so many requests for paths with `match` in them have been answered."""
        with self._changed:
            found = self._changed.wait_for(lambda: sum(r.answered and match in r.path for r in self.requests) >= count, timeout_s)
        assert found, f"{len(self.requests)} requests came"

    # --- for the handler -------------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> Fault | None:
        with self._changed:
            self.requests.append(request)  # now, since the client may go on as soon as it has the answer
            self._active += 1
            self.most_at_once = max(self.most_at_once, self._active)
            gate = next((gate for gate in self._gates if gate.match in request.path), None)
        if gate is not None:
            gate.pass_through()
        with self._changed:
            for fault in self._faults:
                if fault.match in request.path and fault.method == request.method and fault.times > 0:
                    if fault.after > 0:
                        fault.after -= 1
                        return None
                    fault.times -= 1
                    return fault
        return None

    def leave(self, request: Request) -> None:
        with self._changed:
            self._active -= 1
            request.answered = True
            self._changed.notify_all()

    def stay(self) -> None:
        self._closing.wait()

    def connected(self, connection: socket.socket) -> None:
        with self._changed:
            self._connections.add(connection)

    def disconnected(self, connection: socket.socket) -> None:
        with self._changed:
            self._connections.discard(connection)
            self._changed.notify_all()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, owner: FaultServer) -> None:
        self.owner = owner
        super().__init__(("127.0.0.1", 0), _Handler)
        if owner.tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*owner.tls)
            self.socket = context.wrap_socket(self.socket, server_side=True)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away are part of the tests."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def handle(self) -> None:
        self.server.owner.connected(self.connection)
        try:
            super().handle()
        finally:
            self.server.owner.disconnected(self.connection)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def _serve(self) -> None:
        owner = self.server.owner
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        request = Request(self.command, path, authorization=self.headers.get("Authorization", ""))
        fault = owner.arrive(request)
        try:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            if fault is not None and fault.kind == "drop":
                self.close_connection = True
            elif fault is not None and fault.kind == "status":
                self._answer(request, fault.status, b"told to fail\n")
            elif self.command == "PUT":
                self._put(request, body)
            elif self.command == "DELETE":
                self._delete(request)
            else:
                self._get(request, fault)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            owner.leave(request)

    def _file(self, request: Request) -> Path:
        root = self.server.owner.root
        path = (root / request.path.lstrip("/")).resolve()
        return path if path.is_relative_to(root.resolve()) else root / "nowhere"

    def _answer(self, request: Request, status: int, body: bytes = b"") -> None:
        request.status = status
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _put(self, request: Request, body: bytes) -> None:
        if not self.server.owner.writable:
            return self._answer(request, 405)
        path = self._file(request)
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f"{path.name}.{threading.get_ident()}")
        staged.write_bytes(body)
        os.replace(staged, path)
        return self._answer(request, 201)

    def _delete(self, request: Request) -> None:
        self._file(request).unlink(missing_ok=True)
        self._answer(request, 204)

    def _get(self, request: Request, fault: Fault | None) -> None:
        try:
            file = open(self._file(request), "rb")  # noqa: SIM115
        except OSError:
            return self._answer(request, 404)
        with file:
            size = os.fstat(file.fileno()).st_size
            start, end = 0, size
            if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                start, end = int(found[1]), min(size, int(found[2] or size) + 1)
                if start >= size:
                    return self._answer(request, 416)
            request.start, request.length = start, end - start
            if fault is not None and fault.kind == "short":
                end = start + (end - start) // 2
            request.status = 206 if "Range" in self.headers else 200
            self.send_response(request.status)
            self.send_header("Content-Length", str(end - start))
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Last-Modified", self.date_time_string(int(os.fstat(file.fileno()).st_mtime)))
            if request.status == 206:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
            self.end_headers()
            if self.command == "HEAD":
                return None
            if fault is not None and fault.kind in ("cut", "stall"):
                end = start + (end - start) // 2
            self._content(request, file.fileno(), start, end, wrong=fault is not None and fault.kind == "wrong")
            if fault is not None and fault.kind in ("cut", "stall"):
                self.close_connection = True
                if fault.kind == "stall":
                    self.server.owner.stay()
        return None

    def _content(self, request: Request, fd: int, start: int, end: int, *, wrong: bool) -> None:
        at = start
        while at < end:
            block = bytearray(os.pread(fd, min(1 << 20, end - at), at))
            if wrong:
                block[len(block) // 2] ^= 1
                wrong = False
            at += len(block)
            request.sent += len(block)  # before, since the client may look as soon as it has it
            self.wfile.write(block)


# --- S3 ------------------------------------------------------------------------------------------------------------


@dataclass
class S3:
    url: str  # of a bucket that is there
    endpoint: str
    options: dict[str, str] = field(default_factory=dict)


S3_SECRET = "PLANTED-S3-SECRET"


@contextlib.contextmanager
def s3_server() -> Iterator[S3]:
    """moto: it checks no signatures, but is S3 in all else that we use."""
    port = _free_port()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log, start_new_session=True
        )
        try:
            _until_listening(("127.0.0.1", port), process)
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("PUT", "/images")
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            connection.close()
            endpoint = f"http://127.0.0.1:{port}"
            options = {"endpoint": endpoint, "region": "us-east-1", "access_key_id": "test", "secret_access_key": S3_SECRET}
            yield S3("s3://images/some/prefix", endpoint, options)
        finally:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _until_listening(address: tuple[str, int], process: subprocess.Popen[bytes], timeout_s: float = 30) -> None:
    """A server that somebody else wrote tells nobody when it listens, so this asks."""
    waited = threading.Event()
    for _ in range(int(timeout_s / 0.05)):
        try:
            socket.create_connection(address, timeout=1).close()
            return
        except OSError:
            assert process.poll() is None, f"the server ended with {process.returncode}"
            waited.wait(0.05)
    raise AssertionError(f"nothing listens on {address}")
