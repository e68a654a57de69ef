# SPDX-License-Identifier: Apache-2.0
"""nginx behind a slow line: in a network namespace of its own, with latency, a bandwidth and counts. Use it by `tests.services`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT


@dataclass
class Counts:
    """Of what crossed the line, all headers included."""

    connections: int
    requests: int
    sent_bytes: int  # to clients


@dataclass
class Nginx:
    url: str
    _log: Path
    _proxy: subprocess.Popen[bytes]

    def counts(self) -> Counts:
        """Since the start."""
        assert self._proxy.stdin is not None and self._proxy.stdout is not None
        self._proxy.stdin.write(b"counts\n")
        self._proxy.stdin.flush()
        connections, sent = json.loads(self._proxy.stdout.readline())
        return Counts(connections, len(self._log.read_bytes().splitlines()), sent)


_NGINX = """
daemon off; master_process off; pid {work}/pid; error_log {work}/error.log; worker_rlimit_nofile 4096; user root;
events {{ worker_connections 2048; }}
http {{
    access_log {work}/access.log combined; sendfile on; tcp_nodelay on; keepalive_requests 1000000;
    client_body_temp_path {work}/b; proxy_temp_path {work}/p; fastcgi_temp_path {work}/f; uwsgi_temp_path {work}/u; scgi_temp_path {work}/s;
    default_type application/octet-stream;
    server {{ listen 127.0.0.1:80; location / {{ root {root}; }} }}
}}
"""


@contextlib.contextmanager
def nginx_server(root: Path, *, latency_ms: float = 0, rate_mbit: int = 0) -> Iterator[Nginx]:
    """nginx in a network namespace of its own, reached over a veth that carries `rate_mbit` (tc tbf). Kernels without netem have
    nothing that delays packets, so a proxy in the namespace does: what goes either way waits half of `latency_ms`."""
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (work / "nginx.conf").write_text(_NGINX.format(work=work, root=root))
        start = f"ip link set lo up && exec nginx -c {work}/nginx.conf -e {work}/error.log"
        nginx = stack.enter_context(_running(["unshare", "--net", "sh", "-c", start]))
        _until_apart(nginx)
        here, number = f"dsect{secrets.token_hex(4)}", secrets.randbelow(1 << 14) * 4
        network = f"10.231.{number >> 8}."
        mine, address = f"{network}{(number & 255) + 1}", f"{network}{(number & 255) + 2}"
        inside = ["nsenter", f"--net=/proc/{nginx.pid}/ns/net"]
        _run("ip", "link", "add", here, "type", "veth", "peer", "name", "dsec0", "netns", str(nginx.pid))
        # The veth goes with the namespace, but some time later.
        stack.callback(subprocess.run, ["ip", "link", "del", here], check=False, stderr=subprocess.DEVNULL)
        _run("ip", "addr", "add", f"{mine}/30", "dev", here)
        _run("ip", "link", "set", here, "up")
        _run(*inside, "ip", "addr", "add", f"{address}/30", "dev", "dsec0")
        _run(*inside, "ip", "link", "set", "dsec0", "up")
        if rate_mbit:
            shape = ("root", "tbf", "burst", "256kb", "latency", "400ms", "rate", f"{rate_mbit}mbit")
            _run(*inside, "tc", "qdisc", "add", "dev", "dsec0", *shape)
        program = [*inside, sys.executable, "-m", "tests.slow_line", address, str(latency_ms / 2000)]
        proxy = stack.enter_context(_running(program, piped=True))
        assert proxy.stdout is not None
        assert proxy.stdout.readline() == b"ready\n"
        yield Nginx(f"http://{address}:8080", work / "access.log", proxy)


@contextlib.contextmanager
def _running(command: list[str], *, piped: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE if piped else None
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _until_apart(process: subprocess.Popen[bytes]) -> None:
    waited = threading.Event()
    for _ in range(400):
        assert process.poll() is None, f"nginx ended with {process.returncode}"
        if os.readlink(f"/proc/{process.pid}/ns/net") != os.readlink("/proc/self/ns/net"):
            return
        waited.wait(0.01)
    raise AssertionError("no network namespace")


class _Proxy:
    """Passes connections on to nginx, everything later by a fixed time, and counts."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s, self.connections, self.sent = delay_s, 0, 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        await asyncio.sleep(2 * self.delay_s)  # the round trip of the handshake, for which the kernel took no time
        from_nginx, to_nginx = await self.connect()
        there = self.pump(reader, to_nginx, 0)
        await asyncio.gather(there, self.pump(from_nginx, writer, 1))

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            try:
                return await asyncio.open_connection("127.0.0.1", 80, limit=1 << 20)
            except ConnectionRefusedError:
                await asyncio.sleep(0.02)  # nginx is starting

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counted: int) -> None:
        clock = asyncio.get_running_loop().time
        line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(256)

        async def read() -> None:
            block = b"-"
            while block:
                try:
                    block = await reader.read(256 << 10)
                except OSError:
                    block = b""
                await line.put((clock() + self.delay_s, block))

        reading = asyncio.ensure_future(read())
        try:
            while True:
                due, block = await line.get()
                if (wait := due - clock()) > 0:
                    await asyncio.sleep(wait)
                if not block:
                    break
                writer.write(block)
                await writer.drain()
                self.sent += counted * len(block)
        except OSError:
            pass
        finally:
            reading.cancel()
            writer.close()


async def _proxy(address: str, delay_s: float) -> None:
    proxy, loop = _Proxy(delay_s), asyncio.get_running_loop()
    async with await asyncio.start_server(proxy.connected, address, 8080, limit=1 << 20, backlog=1024):
        print("ready", flush=True)
        while await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps([proxy.connections, proxy.sent]), flush=True)


if __name__ == "__main__":
    asyncio.run(_proxy(sys.argv[1], float(sys.argv[2])))
