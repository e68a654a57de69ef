# SPDX-License-Identifier: Apache-2.0
"""Where the kernel has no pre-content events: the data files as files of a FUSE file system, which is attached nowhere.

    <the file system>/sha256-<hex>, /view-…     by the names of their directories in the cache

EROFS mounts such a file as it would the sparse one, and what the page cache has costs nothing, but every first read copies once more. The
device is in the descriptor table that the family shares, and requests are on its board, so a loader may be killed here too. A whole
family's death makes reads fail; it never makes holes. A note beside each open file tells the next family whose reads do.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import select
import threading
from collections.abc import Callable

from opendsec.images.lazy.board import MAX_ASKED, Board
from opendsec.images.lazy.cache import CachedLayer
from opendsec.images.lazy.engine import GUESSED, Engine
from opendsec.images.lazy.watch import or_end
from opendsec.kernel import fuse, procfs
from opendsec.kernel.fuse import Request


class FuseFiles:
    def __init__(self, board: Board, engine: Callable[[CachedLayer], Engine]) -> None:
        self._board, self._engine = board, engine
        self.on_miss: Callable[[CachedLayer], None] = lambda layer: None  # on the loop
        self._loop = asyncio.get_running_loop()
        self._nodes: dict[int, CachedLayer] = {}
        self._asked: set[int] = set()  # numbers on the board that are taken
        self._lock = threading.Lock()
        self._device = self._mount = -1
        self.events = self.misses = 0

    def add(self, layer: CachedLayer) -> None:
        self._nodes[node_of(layer)] = layer

    def remove(self, layer: CachedLayer) -> None:
        self._nodes.pop(node_of(layer), None)

    def path(self, layer: CachedLayer) -> str:
        """Of its file, for as long as this process lives; what is mounted by then stays."""
        return procfs.path_of(os.getpid(), "fd", str(self._mount), layer.directory.name)

    def start(self) -> None:
        """Mount, or go on with what a predecessor had mounted."""
        if self._board.get("fuse") >= 0:
            self._device, self._mount = self._board.fuse()
            for layer in self._nodes.values():
                layer.opens = 1 << 20  # who has it open is not known any more
            asked = self._board.asked()
            self._asked = {number for number, *_ in asked}  # first: the request that follows takes a free number
            if self._board.unsettled():
                self._handle(Request(self._board.raw))
            for number, unique, node, offset, size in asked:
                self._read(number, unique, node, offset, size)
        else:
            self._device = fuse.open_device()
            self._mount = fuse.mount(self._device)
            self._board.keep(self._device)
            self._board.keep(self._mount)
            self._board.set("fuse", self._device | self._mount << 16)
        threading.Thread(target=or_end, args=[self._run], name="fuse", daemon=True).start()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._device, select.POLLIN)
        while True:
            poll.poll()
            try:
                used = fuse.receive(self._device, self._board.before_read())
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return  # unmounted, by whomever
                raise
            if used:
                self._board.received(used)
                self._handle(Request(self._board.raw))
            self._board.settled()

    def _handle(self, request: Request) -> None:
        device, unique, node = self._device, request.unique, request.node
        layer = self._nodes.get(node)
        if request.opcode in fuse.SILENT:
            return
        if request.opcode == fuse.INIT:
            fuse.reply(device, unique, fuse.init_answer(request))
        elif request.opcode == fuse.GETATTR and (node == fuse.ROOT or layer is not None):
            fuse.reply(device, unique, fuse.attributes(node, None if layer is None else layer.table.data_bytes))
        elif request.opcode == fuse.LOOKUP and (found := self._named(request.name())) is not None:
            fuse.reply(device, unique, fuse.entry(node_of(found), found.table.data_bytes))
        elif request.opcode == fuse.OPEN and layer is not None:
            if layer.opens == 0:
                layer.note_open(True)
            layer.opens += 1
            fuse.reply(device, unique, fuse.opened())
        elif request.opcode == fuse.READ:
            with self._lock:
                number = next((number for number in range(MAX_ASKED) if number not in self._asked), -1)
                self._asked.add(number)
            if number < 0:
                fuse.refuse(device, unique, errno.EAGAIN)
                return
            self._board.put_asked(number, unique, node, *request.read())
            self._read(number, unique, node, *request.read())
        elif request.opcode == fuse.RELEASE:
            if layer is not None:
                layer.opens = max(0, layer.opens - 1)
                if layer.opens == 0:
                    layer.note_open(False)
            fuse.reply(device, unique)
        elif request.opcode in (fuse.OPENDIR, fuse.RELEASEDIR, fuse.READDIR, fuse.FLUSH):
            fuse.reply(device, unique, fuse.opened() if request.opcode == fuse.OPENDIR else b"")
        elif request.opcode == fuse.STATFS:
            fuse.reply(device, unique, fuse.statfs())
        else:
            unknown = request.opcode in (fuse.LOOKUP, fuse.GETATTR, fuse.OPEN)
            fuse.refuse(device, unique, errno.ENOENT if unknown else errno.ENOSYS)

    def _named(self, name: bytes) -> CachedLayer | None:
        return self._nodes.get(_node(os.fsdecode(name)))

    def _read(self, number: int, unique: int, node: int, offset: int, size: int) -> None:
        self.events += 1
        layer = self._nodes.get(node)
        if layer is None:
            self._answer(number, unique, errno.EIO, b"")
            return
        chunks = layer.table.covering(offset, size)
        ahead = layer.note_touch(chunks)
        if not self._try(layer, number, unique, offset, size, chunks):
            self.misses += 1
            self._loop.call_soon_threadsafe(self._miss, layer, number, unique, offset, size, chunks)
        if ahead:
            entries = [(chunk, GUESSED) for chunk in ahead]
            self._loop.call_soon_threadsafe(self._engine(layer).prefetch, layer, entries)

    def _try(self, layer: CachedLayer, number: int, unique: int, offset: int, size: int, chunks: range) -> bool:
        # Read by this very thread, so nothing is dropped that it is still to read: see `CachedLayer.drop`.
        if not layer.try_pass(threading.get_native_id(), chunks):
            return False
        data = os.pread(layer.fd, max(0, min(size, layer.table.data_bytes - offset)), offset)
        if layer.missing(chunks):
            return False  # dropped meanwhile
        self._answer(number, unique, 0, data)
        return True

    def _miss(self, layer: CachedLayer, number: int, unique: int, offset: int, size: int, chunks: range) -> None:
        def done(error: int) -> None:
            if error:
                self._answer(number, unique, error, b"")
            elif not self._try(layer, number, unique, offset, size, chunks):
                self._miss(layer, number, unique, offset, size, chunks)

        self._engine(layer).want_with_neighbours(layer, chunks, done)
        self.on_miss(layer)

    def _answer(self, number: int, unique: int, error: int, data: bytes) -> None:
        if error:
            fuse.refuse(self._device, unique, error)
        else:
            fuse.reply(self._device, unique, data)
        self._board.forget_asked(number)
        with self._lock:
            self._asked.discard(number)


def node_of(layer: CachedLayer) -> int:
    return _node(layer.directory.name)


def _node(name: str) -> int:
    """The same for every loader, and never the root's."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]) | 2
