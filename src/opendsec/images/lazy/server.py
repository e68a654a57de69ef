# SPDX-License-Identifier: Apache-2.0
"""The loader's socket: see `protocol`. Whoever can open it is the host's root or the edge."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from collections.abc import Coroutine
from typing import TYPE_CHECKING

import msgspec

from opendsec.api.errors import Conflict, Internal, InvalidRequest, OpenDSecError, Unavailable
from opendsec.images.lazy import trace
from opendsec.images.lazy.cache import CachedLayer
from opendsec.images.lazy.protocol import MAX_LINE, Call, Event, Hello, LayerStats, Line, Reply, Stats, TraceEntries, encode

if TYPE_CHECKING:
    from opendsec.images.lazy.loader import Loader

MAX_UNSENT = 4 << 20  # of events to an edge that does not read


class _Peer:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.attached = False

    def send(self, line: Line) -> None:
        if isinstance(line, Event) and self._writer.transport.get_write_buffer_size() > MAX_UNSENT:
            return
        self._writer.write(encode(line))


class Server:
    def __init__(self, loader: Loader, listener: socket.socket) -> None:
        self._loader, self._listener = loader, listener
        self._peers: set[_Peer] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def asked_for(self) -> bool:
        """Whether anybody is connected, or about to be."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        return bool(self._peers or poll.poll(0))

    async def start(self) -> None:
        self._listener.setblocking(False)
        self._spawn(self._accept())

    def tell(self, event: Event) -> None:
        for peer in self._peers:
            if peer.attached:
                peer.send(event)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._listener)
            self._spawn(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        loader = self._loader
        hello = Hello(mechanism=loader.job.mechanism, pid=os.getpid(), lost=loader.lost)
        group = loader.family.group
        try:
            socket.send_fds(connection, [encode(hello)], [] if group is None else [group.fd])
            reader, writer = await asyncio.open_unix_connection(sock=connection, limit=MAX_LINE)
        except OSError:
            connection.close()
            return
        peer = _Peer(writer)
        self._peers.add(peer)
        try:
            while line := await reader.readline():
                call = msgspec.json.decode(line, type=Call)
                self._spawn(self._answer(peer, call))
        except (OSError, ValueError):  # it went away, or does not speak our language
            pass
        finally:
            self._peers.discard(peer)
            writer.close()

    async def _answer(self, peer: _Peer, call: Call) -> None:
        try:
            reply = await self._do(peer, call)
        except OpenDSecError as error:
            reply = Reply(id=call.id, error=error.body())
        except OSError as error:
            reply = Reply(id=call.id, error=Unavailable(f"the cache of layers: {error.strerror or error}").body())
        except Exception as error:
            reply = Reply(id=call.id, error=Internal(f"{type(error).__name__}: {error}").body())
        with contextlib.suppress(OSError):
            peer.send(reply)

    async def _do(self, peer: _Peer, call: Call) -> Reply:
        loader = self._loader
        if call.op == "attach":
            peer.attached = True
            if call.limit_bytes >= 0:
                loader.limit_bytes = call.limit_bytes
            return Reply(id=call.id)
        if call.op == "ensure":
            return self._mountable(call, await loader.ensure(call.digest))
        if call.op == "warm":
            await loader.all_of(await loader.ensure(call.digest), traced_only=call.trace == "yes")
            return Reply(id=call.id)
        if call.op == "trace_start":
            view = await loader.in_registry(lambda: loader.registry.open_view(call.trace, call.digest))
            if view.trace is None:
                view.record_trace(loader.places(call.trace))
            return self._mountable(call, view)
        if call.op == "trace_stop":
            return await self._stop_trace(call)
        if call.op == "stats":
            return Reply(id=call.id, stats=await loader.in_registry(self._stats))
        if call.op == "evict":
            layer = loader.registry.layers.get(call.digest)
            freed = 0 if layer is None else await loader.in_registry(lambda: loader.registry.drop_whole(layer))
            return Reply(id=call.id, freed_bytes=freed)
        if call.op == "forget_lost":
            await loader.forget_lost()
            return Reply(id=call.id)
        if call.op == "shutdown":
            needed = await loader.in_registry(lambda: [one.digest for one in loader.registry.all() if one.marked and one.in_use()])
            if needed and not call.force:
                raise Conflict(f"{len(needed)} layers that are not complete are mounted", data={"digest": needed[0]})
            loader.end()
            return Reply(id=call.id)
        raise InvalidRequest("is not known", field="op")

    def _mountable(self, call: Call, layer: CachedLayer) -> Reply:
        fuse = self._loader.fuse
        if fuse is not None:
            return Reply(id=call.id, path=fuse.path(layer))
        return Reply(id=call.id, path=os.fspath(layer.path), lasting=True)

    async def _stop_trace(self, call: Call) -> Reply:
        loader = self._loader
        view = loader.registry.view_of(call.trace, call.digest)
        entries, view.trace = view.trace, None
        if entries is None:
            raise Conflict("the loader died while this trace was recorded: record it again", field="trace")
        if call.keep:
            content = trace.encode(entries, view.table_sha256)
            await loader.in_registry(lambda: trace.write(loader.registry.traces_of(view.digest), content))
        size = sum(view.table.span(chunk)[1] for chunk, _ in entries)
        return Reply(id=call.id, entries=TraceEntries(chunks=tuple(chunk for chunk, _ in entries), bytes=size))

    def _stats(self) -> Stats:
        loader = self._loader
        watch = loader.watch or loader.fuse
        return Stats(
            layers=tuple(
                LayerStats(
                    digest=layer.digest,
                    data_bytes=layer.table.data_bytes,
                    local_bytes=layer.local_bytes,
                    complete=layer.complete,
                    in_use=layer.in_use(),
                    chunks=layer.table.count,
                    chunk_bytes=layer.table.chunk_bytes,
                )
                for layer in loader.registry.layers.values()
            ),
            local_bytes=loader.registry.local_bytes(),
            limit_bytes=loader.limit_bytes,
            fetched_bytes=loader.fetcher.fetched_bytes,
            copied_bytes=loader.fetcher.copied_bytes,
            requests=loader.fetcher.requests,
            events=watch.events if watch else 0,
            misses=watch.misses if watch else 0,
        )
