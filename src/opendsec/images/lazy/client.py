# SPDX-License-Identifier: Apache-2.0
"""The edge's side of the loader: find the one that lives, or start one; ask it; hear what it has to tell.

Besides asking, the edge guards: it holds the fanotify group, so that readers wait, rather than read holes, should all of the loader's
family be killed; and it starts the next family with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from opendsec.api.errors import OpenDSecError, Unavailable, from_body
from opendsec.images.lazy.protocol import MAX_LINE, Call, Event, Hello, Mechanism, Op, Reply, Stats, TraceEntries, encode
from opendsec.kernel import features
from opendsec.kernel.fanotify import can_watch

SOCKET, LOCK, LOG = "loader.sock", "loader.lock", "loader.log"
START_S = 30.0
AGAIN_S = 5.0
# It is nobody's child, since it outlives whoever starts it.
PROGRAM = "import os\nif os.fork(): os._exit(0)\nfrom opendsec.images.lazy.keeper import main; main()"
SETTING = "OPENDSEC_LAZY"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How layers are loaded on demand. Times in seconds."""

    root: Path  # of the image store
    run_dir: Path
    stores: Path  # `stores.toml`
    mechanism: Mechanism
    limit_bytes: int = 0  # of the cache; 0 = none
    small_bytes: int = 4 << 20  # layers up to this size are loaded whole once they are used
    parallel: int = 32
    deadline_s: float = 120.0
    quiet_s: float = 30.0
    tick_s: float = 2.0
    linger_s: float = 10.0


def choose(directory: Path, asked: str = "auto") -> tuple[Mechanism, str]:
    """The mechanism for layers cached in `directory`, and why. `asked`: auto, fanotify, fuse or eager. Raises Unavailable if that one
    does not work here. Probes fork: call it before there are threads."""
    if asked not in ("auto", "fanotify", "fuse", "eager"):
        raise Unavailable(f"{SETTING} must be auto, fanotify, fuse or eager, not {asked[:40]!r}")
    if asked == "eager":
        return "eager", "forced: layers are loaded whole before they are used"
    reasons: list[str] = []
    options: tuple[tuple[Mechanism, str], ...] = (("fanotify", "fanotify_pre_content"), ("fuse", "fuse"))
    for mechanism, feature in options:
        if asked not in ("auto", mechanism):
            continue
        found = features.probe(feature)
        if not found.present:
            reasons.append(f"{feature}: {found.reason}")
        elif mechanism == "fanotify" and not can_watch(directory):
            reasons.append(f"{feature}: not on the file system of {directory}")
        else:
            return mechanism, "forced" if asked == mechanism else "; ".join(reasons) or "the best there is"
    if asked != "auto":
        raise Unavailable(f"{SETTING}={asked}, but this machine cannot: {reasons[-1]}")
    return "eager", "; ".join(reasons)


class Connection:
    """One connection, blocking, as far as the greeting."""

    def __init__(self, connected: socket.socket, hello: Hello, group: int) -> None:
        self.socket, self.hello, self.group = connected, hello, group

    def close(self) -> None:
        self.socket.close()
        if self.group >= 0:
            os.close(self.group)


def connect(path: Path, timeout_s: float) -> Connection | None:
    """None if nobody is there, or it is just ending."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds: list[int] = []
    try:
        connected.settimeout(timeout_s)
        connected.connect(os.fspath(path))
        line = b""
        while not line.endswith(b"\n"):
            data, some, _, _ = socket.recv_fds(connected, 4096, 1)
            fds += some
            if not data:
                raise ConnectionError
            line += data
        hello = msgspec.json.decode(line, type=Hello)
    except (OSError, ValueError):
        connected.close()
        for fd in fds:
            os.close(fd)
        return None
    return Connection(connected, hello, fds[0] if fds else -1)


def start_family(settings: Settings, group: int = -1) -> bool:
    """Start one, if none lives; False if one does. It answers a moment later. `group`: that of the last family."""
    settings.run_dir.mkdir(parents=True, exist_ok=True)
    lock = os.open(settings.run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # theirs, from then on, as long as any of them lives
        except BlockingIOError:
            return False
        path = settings.run_dir / SOCKET
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, open(settings.run_dir / LOG, "ab") as log:
            old = os.umask(0o177)
            try:
                listener.bind(os.fspath(path))
            finally:
                os.umask(old)
            listener.listen(128)
            if log.tell() > 1 << 20:
                log.truncate(0)
            job = {**msgspec.structs.asdict(settings), "listener": listener.fileno(), "lock": lock, "group": group}
            subprocess.run(
                [sys.executable, "-I", "-c", PROGRAM, msgspec.json.encode(job, enc_hook=os.fspath).decode()],
                pass_fds=[listener.fileno(), lock, *([group] if group >= 0 else [])],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
                check=True,
            )
        return True
    finally:
        os.close(lock)


class Loader:
    """A loader that lives, as long as this object is open: one that ends is replaced. Use from one event loop."""

    def __init__(self, settings: Settings, on_event: Callable[[Event], None] = lambda event: None) -> None:
        self.settings = settings
        self.lost: tuple[str, ...] = ()
        """Digests of layers whose mounts, made before now, may have read wrong bytes. Sandboxes that use them must end as lost; then call
        `forget_lost`."""
        self._on_event = on_event
        self._pid = 0
        self._group = -1
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._next = 0
        self._connecting = asyncio.Lock()
        self._closed = False

    @classmethod
    async def start(cls, settings: Settings, on_event: Callable[[Event], None] = lambda event: None) -> Loader:
        """Adopt the loader that lives, or start one. Look at `lost` then. Raises Unavailable."""
        loader = cls(settings, on_event)
        await loader._connected()
        return loader

    @property
    def socket_path(self) -> Path:
        return self.settings.run_dir / SOCKET

    # --- what it does ----------------------------------------------------------------------------------------------

    async def ensure(self, digest: str) -> tuple[Path, bool]:
        """The file to mount as the layer's data, and whether the path lasts. Right bytes come from it, or EIO, from now on for as long
        as it is mounted. Raises OpenDSecError."""
        reply = await self._call("ensure", digest=digest)
        return Path(reply.path), reply.lasting

    async def warm(self, digest: str, *, traced_only: bool = False) -> None:
        """Load all of a layer, or what its trace says. Raises OpenDSecError."""
        await self._call("warm", digest=digest, trace="yes" if traced_only else "")

    async def start_trace(self, name: str, digest: str) -> Path:
        """A file to mount instead of the layer's data, under another key than the layer's, for the sandbox whose reads are recorded.
        Layers with the same `name` are one run."""
        return Path((await self._call("trace_start", digest=digest, trace=name)).path)

    async def stop_trace(self, name: str, digest: str, *, keep: bool) -> TraceEntries:
        """What was read, in order; with `keep` it is replayed when the layer is first used. The file goes when it is unmounted."""
        entries = (await self._call("trace_stop", digest=digest, trace=name, keep=keep)).entries
        assert entries is not None
        return entries

    async def stats(self) -> Stats:
        stats = (await self._call("stats")).stats
        assert stats is not None
        return stats

    async def evict(self, digest: str) -> int:
        """Drop what is here of a layer that nobody has mounted; how many bytes."""
        return (await self._call("evict", digest=digest)).freed_bytes

    async def forget_lost(self) -> None:
        """All sandboxes that `lost` concerned are gone."""
        await self._call("forget_lost")
        self.lost = ()

    async def shutdown(self, *, force: bool = False) -> None:
        """End the family. Raises Conflict if it is needed, unless by `force`: then whoever still reads incomplete layers reads holes."""
        self._closed = True
        await self._call("shutdown", force=force)
        await self.close()

    async def close(self) -> None:
        """Let go. The loader lives on as long as mounts need it."""
        self._closed = True
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._group >= 0:
            os.close(self._group)
            self._group = -1

    # --- inside ----------------------------------------------------------------------------------------------------

    async def _call(self, op: Op, *, digest: str = "", trace: str = "", keep: bool = False, force: bool = False) -> Reply:
        for attempt in range(3):  # a loader that dies meanwhile is replaced; every call may be repeated
            writer = await self._connected()
            self._next += 1
            call = Call(id=self._next, op=op, digest=digest, trace=trace, keep=keep, force=force)
            future = self._calls[call.id] = asyncio.get_running_loop().create_future()
            try:
                writer.write(encode(call))
                reply: Reply = await future
            except ConnectionError:
                if attempt == 2 or (self._closed and op != "shutdown"):
                    break
                if op == "shutdown":
                    return Reply(id=call.id)
                continue
            finally:
                self._calls.pop(call.id, None)
            if reply.error is not None:
                raise from_body(reply.error)
            return reply
        raise Unavailable("the loader of layers keeps dying; its log says why")

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._connecting:
            if self._writer is not None and self._reading is not None and not self._reading.done():
                return self._writer
            connection = await asyncio.to_thread(self._find)
            reader, writer = await asyncio.open_unix_connection(sock=connection.socket, limit=MAX_LINE)
            old, self._group = self._group, connection.group
            if old >= 0:
                os.close(old)
            self.lost = connection.hello.lost
            if self._pid not in (0, connection.hello.pid):
                self._on_event(Event(event="loader.restarted", message="the loader of layers died and was replaced"))
                for digest in self.lost:
                    self._on_event(Event(event="load.lost", digest=digest, message="nobody watched its readers for a while"))
            self._pid = connection.hello.pid
            self._writer = writer
            writer.write(encode(Call(id=0, op="attach", limit_bytes=self.settings.limit_bytes)))
            self._reading = asyncio.ensure_future(self._read(reader, writer))
            return writer

    def _find(self) -> Connection:
        end = time.monotonic() + START_S
        pause = 0.005
        while True:
            connection = connect(self.socket_path, timeout_s=5.0)
            if connection is not None:
                if connection.hello.mechanism != self.settings.mechanism:
                    # Of an edge with other settings. What it serves, it goes on serving.
                    self.settings = msgspec.structs.replace(self.settings, mechanism=connection.hello.mechanism)
                connection.socket.setblocking(False)
                return connection
            if not start_family(self.settings, self._group):
                time.sleep(pause)  # it lives, but is ending, or between two loaders
                pause = min(pause * 2, 0.2)
            if time.monotonic() > end:
                raise Unavailable(f"the loader of layers does not start; see {self.settings.run_dir / LOG}")

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                said = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
                if "event" in said:
                    self._on_event(msgspec.json.decode(line, type=Event))
                else:
                    reply = msgspec.json.decode(line, type=Reply)
                    future = self._calls.get(reply.id)
                    if future is not None and not future.done():
                        future.set_result(reply)
        except (OSError, ValueError):
            pass
        finally:
            writer.close()
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(ConnectionError("the loader went away"))
            if not self._closed:
                # Not to serve calls but to guard: if all of them were killed, readers are waiting.
                asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self._again()))

    async def _again(self) -> None:
        while not self._closed:
            try:
                await self._connected()
                return
            except OpenDSecError as error:
                self._on_event(Event(event="loader.unreachable", message=str(error)))
                await asyncio.sleep(AGAIN_S)
