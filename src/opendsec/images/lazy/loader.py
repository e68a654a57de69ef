# SPDX-License-Identifier: Apache-2.0
"""The loader: the process of the family that does the work. Puts the parts together, keeps house, and decides when the family ends.

It may be killed at any instruction; the keeper then forks another one, which finds all it needs on the disk, on the board and in the
descriptor table that they share.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from opendsec.api.errors import OpenDSecError, Unavailable
from opendsec.images.lazy import evict, trace
from opendsec.images.lazy.board import Board
from opendsec.images.lazy.cache import CachedLayer, Key
from opendsec.images.lazy.chunkmap import ABSENT
from opendsec.images.lazy.engine import PARALLEL, Engine
from opendsec.images.lazy.fetch import DEADLINE_S, LayerFetcher
from opendsec.images.lazy.fuse import FuseFiles
from opendsec.images.lazy.protocol import Event, Mechanism
from opendsec.images.lazy.registry import Registry
from opendsec.images.lazy.server import Server
from opendsec.images.lazy.views import ViewFetcher
from opendsec.images.lazy.watch import Watch
from opendsec.images.records import Damaged
from opendsec.images.remote import config
from opendsec.images.remote.store import RemoteStore
from opendsec.kernel import procfs
from opendsec.kernel.fanotify import Group

T = TypeVar("T")

THREADS = 4
GIL_S = 0.0005  # how long a thread may keep the interpreter from the one that answers readers
SMALL_PLACE = 1 << 39  # after what traces say
WARM_PLACE = 1 << 40  # after all that readers and traces want
PATROL_PLACE = 1 << 41  # after everything else: comparing what a map only hints at


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the family is started with."""

    root: str  # of the image store
    stores: str  # `stores.toml`
    mechanism: Mechanism
    listener: int  # descriptors
    lock: int
    group: int = -1
    limit_bytes: int = 0  # of the cache; 0 = none
    parallel: int = PARALLEL
    small_bytes: int = 4 << 20
    deadline_s: float = DEADLINE_S
    quiet_s: float = evict.QUIET_S
    tick_s: float = 2.0
    linger_s: float = 10.0  # without an edge and without a use


class Family(msgspec.Struct, frozen=True, kw_only=True):
    job: Job
    board: Board
    group: Group | None
    listener: int
    lock: int


def run(family: Family) -> int:
    """The main function of a forked loader."""
    sys.setswitchinterval(GIL_S)
    inherited = _sweep(family)
    return asyncio.run(_main(family, inherited))


def _sweep(family: Family) -> dict[Key, int]:
    """Close what a predecessor had open, but for what is still needed; its data files."""
    board = family.board
    waiting = {event.fd for event in board.recover()} if family.group is not None else set()
    kept = board.kept()
    needed = {0, 1, 2, family.listener, family.lock, *waiting, *kept}
    if family.group is not None:
        needed.add(family.group.fd)
    for fd, name in procfs.fds().items():
        # Descriptors of processes are the keepers': one of them may be making one at this moment.
        if fd not in needed and b"[pidfd]" not in name:
            with contextlib.suppress(OSError):
                os.close(fd)
    found = {}
    ours = board.fuse() if board.get("fuse") >= 0 else ()
    for fd in kept:
        if fd in ours:
            continue  # asking about our own file system would be asking ourselves
        status = os.fstat(fd)
        found[status.st_dev, status.st_ino] = fd
    return found


class ReloadingStores:
    """The stores of `stores.toml` as it is now: an operator adds one without ending any sandbox."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._stores = config.Stores({})

    def _look(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self._path)
            return status.st_mtime_ns, status.st_ino
        except FileNotFoundError:
            return None

    def refresh(self) -> None:
        """Blocking, 0.1 s the first time and 10 ms a store. Raises OpenDSecError."""
        if (stamp := self._look()) != self._stamp:
            self._stores = config.load(self._path)  # the old ones may be at work: they go with their last request
            self._stamp = stamp
            for info in self._stores.infos():  # now: setting up a client takes 10 ms, for which the first reader would wait
                with contextlib.suppress(OpenDSecError):
                    self._stores.get(info.name)

    def get(self, name: str) -> RemoteStore:
        self.refresh()
        return self._stores.get(name)


class Loader:
    def __init__(self, family: Family, inherited: dict[Key, int]) -> None:
        job = self.job = family.job
        self.family = family
        self._pool = ThreadPoolExecutor(THREADS, "chunks", initializer=self._own_thread)
        self._registry_pool = ThreadPoolExecutor(1, "registry", initializer=self._own_thread)
        self._own: set[int] = {threading.get_native_id()}
        self.registry = Registry(Path(job.root), family.group, family.board)
        self._stores = ReloadingStores(Path(job.stores))
        self.fetcher = LayerFetcher(
            self._stores,
            self._pool,
            self._tell,
            local=self.registry.index,
            make_room=self._make_room,
            deadline_s=job.deadline_s,
        )
        self.engine = Engine(self.fetcher, parallel=job.parallel)
        self.engine.on_fetched = self._fetched
        self.view_engine = Engine(ViewFetcher(self.engine, self._pool), parallel=job.parallel)
        self.watch: Watch | None = None
        self.fuse: FuseFiles | None = None
        self.limit_bytes = job.limit_bytes  # the last edge's word
        self.lost: tuple[str, ...] = ()
        self.server = Server(self, socket.socket(fileno=os.dup(family.listener)))
        self._inherited = inherited
        self._ended = asyncio.Event()
        self._places: dict[str, Iterator[int]] = {}

    def _own_thread(self) -> None:
        self._own.add(threading.get_native_id())

    def engine_of(self, layer: CachedLayer) -> Engine:
        return self.engine if layer.upstream is None else self.view_engine

    async def in_registry(self, work: Callable[[], T]) -> T:
        """Registry calls block, and come one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._registry_pool, work)

    # --- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        board, group = self.family.board, self.family.group
        successor = bool(board.get("started"))
        watched = successor or bool(board.get("adopted"))
        suspects = await self.in_registry(lambda: self.registry.load(self._inherited))
        if group is not None:
            self.watch = Watch(group, board, self.registry.by_key.get, self.engine_of)
            self.watch.own = self._own
            self.watch.on_miss = self._replay
            self.watch.start()
            if not watched:
                await self._pool_run(lambda: self.registry.add_lost(layer.digest for layer in suspects if not _whole(layer)))
        elif self.job.mechanism == "fuse":
            self.fuse = FuseFiles(board, self.engine_of)
            self.fuse.on_miss = self._replay
            if not watched:
                opened = [layer for layer in self.registry.all() if layer.noted_open()]
                await self._pool_run(lambda: self.registry.add_lost(layer.digest for layer in opened))
                for layer in opened:
                    layer.note_open(False)
            for layer in self.registry.all():
                self.fuse.add(layer)
            self.fuse.start()
            self.registry.on_change = (self.fuse.add, self.fuse.remove)
        board.set("started", 1)
        self.lost = await self.in_registry(self.registry.lost)
        for layer in suspects:
            self._patrol(layer)
        await self.server.start()
        # Not when the first reader waits. What is wrong with the file is told to those who need a store.
        with contextlib.suppress(OpenDSecError):
            await self._pool_run(self._stores.refresh)

    async def _pool_run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def serve(self) -> None:
        """Until nobody needs us."""
        unneeded = 0.0
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), self.job.tick_s)
            needed = await self.in_registry(self._keep_house)
            if self.server.asked_for or needed:
                unneeded = 0.0
            elif (unneeded := unneeded + self.job.tick_s) > self.job.linger_s:
                break
        self.family.board.set("ending", 1)

    def end(self) -> None:
        self._ended.set()

    def close(self) -> None:
        for layer in self.registry.all():
            layer.map.close()

    def _keep_house(self) -> bool:
        """In the registry's thread. Whether a mount needs us."""
        for layer in list(self.registry.all()):
            self.registry.unmark_if_complete(layer)
            if layer.replaced() and not layer.in_use():
                self.registry.close(layer)
        for view in list(self.registry.views.values()):
            if view.trace is None and not view.in_use():
                self.registry.close(view, remove=True)
        if self.limit_bytes:
            evict.trim(self.registry, self.limit_bytes, quiet_s=self.job.quiet_s)
        return any(layer.in_use() for layer in self.registry.all() if layer.marked or self.fuse is not None)

    async def _make_room(self, need_bytes: int) -> None:
        freed = await self.in_registry(lambda: evict.drop(self.registry, max(need_bytes, 16 << 20), quiet_s=self.job.quiet_s))
        self._tell("cache.full", "", f"no space left: {freed} bytes were dropped")

    def _tell(self, kind: str, digest: str, message: str) -> None:
        self.server.tell(Event(event=kind, digest=digest, message=message))

    # --- what the edge asks ----------------------------------------------------------------------------------------

    async def ensure(self, digest: str) -> CachedLayer:
        """The layer, ready to be mounted. Raises OpenDSecError, OSError."""
        layer = await self.in_registry(lambda: self.registry.open(digest))
        self._replay(layer)
        self._patrol(layer)
        if self.job.mechanism == "eager":
            await self.all_of(layer)
        return layer

    def traced(self, layer: CachedLayer) -> list[trace.Entry]:
        path = self.registry.traces_of(layer.digest) / trace.FILE
        try:
            return trace.read(path, count=layer.table.count, table_sha256=layer.table_sha256)
        except FileNotFoundError:
            return []
        except Damaged as error:
            self._tell("trace.damaged", layer.digest, str(error))
            return []

    def places(self, name: str) -> Iterator[int]:
        """The order of one run, which may go through several layers."""
        return self._places.setdefault(name, itertools.count())

    def _replay(self, layer: CachedLayer) -> None:
        """Once for each time that it is loaded anew. A small layer is loaded whole: to watch its readers costs more."""
        if not layer.replayed and layer.upstream is None and not layer.complete:
            layer.replayed = True
            self.engine.prefetch(layer, self.traced(layer))
            if layer.table.data_bytes <= self.job.small_bytes:
                self.engine.prefetch(layer, ((chunk, SMALL_PLACE) for chunk in range(layer.table.count)))

    def _fetched(self, layer: CachedLayer) -> None:
        """At once, not when house is kept: each read of what has a mark costs its reader two switches between threads."""
        if layer.complete and layer.marked:
            self._registry_pool.submit(self.registry.unmark_if_complete, layer)

    def _patrol(self, layer: CachedLayer) -> None:
        """All seems to be here, but for certain: then it needs no mark."""
        if layer.upstream is None and not layer.complete and ABSENT not in layer.map.states:
            self.engine.prefetch(layer, ((chunk, PATROL_PLACE) for chunk in range(layer.table.count)))

    async def forget_lost(self) -> None:
        self.lost = ()
        await self.in_registry(self.registry.forget_lost)

    async def all_of(self, layer: CachedLayer, *, traced_only: bool = False) -> None:
        """Load all, or what the trace says, and wait for it. Raises OpenDSecError."""
        entries = self.traced(layer) if traced_only else ((chunk, WARM_PLACE) for chunk in range(layer.table.count))
        if error := await self.engine.load(layer, entries):
            why = "there is no space left" if error == errno.ENOSPC else "its stores do not give it; the events say why"
            raise Unavailable(f"layer {layer.digest[:19]} cannot be loaded: {why}", data={"digest": layer.digest})
        await self.in_registry(lambda: self.registry.unmark_if_complete(layer))


def _whole(layer: CachedLayer) -> bool:
    return all(layer.confirm(index) for index in range(layer.table.count))


def _give_up(loop: asyncio.AbstractEventLoop, context: Mapping[str, object]) -> None:
    error = context.get("exception")
    print(f"the loader gives up: {context.get('message')}", file=sys.stderr)
    if isinstance(error, BaseException):
        traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)


async def _main(family: Family, inherited: dict[Key, int]) -> int:
    # A mistake of ours must not leave a reader waiting for ever: a successor comes to those who wait.
    asyncio.get_running_loop().set_exception_handler(_give_up)
    loader = Loader(family, inherited)
    await loader.start()
    await loader.serve()
    loader.close()
    return 0
