# SPDX-License-Identifier: Apache-2.0
"""The layers that the loader knows: their files, their marks, and the copies made for traces.

    cache/sha256-<hex>/                 a layer
    cache/view-<trace>--sha256-<hex>/   a copy of its own for the sandbox whose reads are recorded: a mount of this file has a page
                                        cache of its own, still empty, and nobody else's reads come in between

Blocking; one thread at a time.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from opendsec.api.errors import Internal, InvalidRequest, NotFound, OpenDSecError
from opendsec.images import chunks, origins
from opendsec.images import layers as formats
from opendsec.images.lazy.board import Board
from opendsec.images.lazy.cache import MAP, CachedLayer, Key
from opendsec.images.lazy.chunkmap import ABSENT
from opendsec.images.lazy.fetch import LocalIndex
from opendsec.images.origins import Origin
from opendsec.images.records import Damaged
from opendsec.images.store import ImageStore
from opendsec.kernel import procfs
from opendsec.kernel.fanotify import Group

LOST = "lost"  # in the cache
_TRACE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_VIEW = re.compile(r"view-([a-z0-9][a-z0-9_-]{0,63})--(sha256-[0-9a-f]{64})")

Change = Callable[[CachedLayer], None]


class Registry:
    def __init__(self, root: Path, group: Group | None, board: Board) -> None:
        self.store = ImageStore(root)
        self.index = LocalIndex()
        self._group, self._board = group, board
        self._boot_id = procfs.boot_id()
        self.layers: dict[str, CachedLayer] = {}  # by digest
        self.views: dict[tuple[str, str], CachedLayer] = {}  # by trace and digest
        self.on_change: tuple[Change, Change] = (_nothing, _nothing)  # called with a layer that came, or is about to go
        self._indexed: set[str] = set()
        self.by_key: dict[Key, CachedLayer] = {}

    def load(self, inherited: Mapping[Key, int]) -> list[CachedLayer]:
        """Everything the cache holds. Those that are incomplete and in use are returned: were the marks there all the time?"""
        found = []
        names = sorted(entry.name for entry in os.scandir(self.store.cache)) if self.store.cache.is_dir() else []
        for name in names:  # layers come before their views, by name
            directory = self.store.cache / name
            view = _VIEW.fullmatch(name)
            if not (directory / MAP).exists():
                continue
            with contextlib.suppress(OpenDSecError, OSError, formats.Missing):  # of a layer that has been collected
                if view is not None:
                    layer = self.open_view(view[1], formats.digest_of(Path(view[2])), inherited)
                else:
                    layer = self.open(formats.digest_of(directory), inherited)
                if layer.in_use():
                    # A predecessor may have let a reader through that has not read yet.
                    layer.was_unmarked = True
                    if not layer.complete:
                        found.append(layer)
        return found

    def open(self, digest: str, inherited: Mapping[Key, int] | None = None) -> CachedLayer:
        """The cached layer; files are made, the mark set. Raises NotFound, Internal, OSError."""
        layer = self.layers.get(digest)
        if layer is not None and not layer.replaced():
            return layer
        if layer is not None and not layer.in_use():
            self.close(layer)
        directory, table = self.store.directory(digest), self.store.chunk_table(digest)
        layer = CachedLayer(
            digest,
            self.store.cache / formats.directory_name(digest),
            table,
            bytes.fromhex(self.store.record(digest).chunks_sha256),
            _origin(directory),
            boot_id=self._boot_id,
            inherited=inherited or {},
        )
        self.layers[digest] = layer
        self.index_local()
        self.index.add(layer, table.digests)
        self._added(layer)
        return layer

    def open_view(self, trace: str, digest: str, inherited: Mapping[Key, int] | None = None) -> CachedLayer:
        """A copy of the layer for a trace. Raises InvalidRequest, NotFound, Internal, OSError."""
        if not _TRACE_NAME.fullmatch(trace):
            raise InvalidRequest("must be at most 64 of a-z, 0-9, - and _", field="trace")
        if (trace, digest) in self.views:
            return self.views[trace, digest]
        whole = self.store.directory(digest) / formats.DATA
        view = CachedLayer(
            digest,
            self.store.cache / f"view-{trace}--{formats.directory_name(digest)}",
            self.store.chunk_table(digest),
            bytes.fromhex(self.store.record(digest).chunks_sha256),
            None,
            boot_id=self._boot_id,
            upstream=whole if whole.exists() else self.open(digest),
            inherited=inherited or {},
        )
        self.views[trace, digest] = view
        self._added(view)
        return view

    def index_local(self) -> None:
        """Learn of the chunks of layers that are whole here, as far as they are new."""
        for directory in sorted((self.store.root / "layers").glob("sha256-*")):
            data = directory / formats.DATA
            if directory.name in self._indexed or not data.exists() or not (directory / formats.TABLE).exists():
                continue
            self._indexed.add(directory.name)
            with contextlib.suppress(Damaged, OSError):
                table = chunks.read(directory / formats.TABLE)
                if table.chunk_bytes == chunks.CHUNK_BYTES:
                    self.index.add(os.fspath(data), table.digests)

    def _added(self, layer: CachedLayer) -> None:
        self.by_key[layer.key] = layer
        self._board.keep(layer.fd)
        self.on_change[0](layer)
        if layer.complete and layer.upstream is None:
            layer.was_unmarked = True
        else:
            self.mark(layer)

    def mark(self, layer: CachedLayer) -> None:
        if self._group is not None:
            self._group.mark(layer.fd)
        layer.marked = True

    def unmark_if_complete(self, layer: CachedLayer) -> None:
        """Reads of what is all here cost nothing any more. Not of views: those are about the questions."""
        if layer.marked and layer.complete and layer.upstream is None:
            layer.was_unmarked, layer.marked = True, False
            if self._group is not None:
                self._group.unmark(layer.fd)

    def all(self) -> Iterator[CachedLayer]:
        yield from list(self.layers.values())
        yield from list(self.views.values())

    # What was lost is kept in a file until the edge has ended all who were concerned: a mount made since then is right.

    def add_lost(self, digests: Iterable[str]) -> None:
        if new := [*self.lost(), *digests]:
            (self.store.cache / LOST).write_text("\n".join(new))

    def lost(self) -> tuple[str, ...]:
        try:
            return tuple(sorted(set((self.store.cache / LOST).read_text().split())))
        except FileNotFoundError:
            return ()

    def forget_lost(self) -> None:
        (self.store.cache / LOST).unlink(missing_ok=True)

    def local_bytes(self) -> int:
        return sum(layer.local_bytes for layer in self.all())

    def drop_whole(self, layer: CachedLayer) -> int:
        """Everything of a layer that nobody has open; 0 if somebody has. The order is what makes it safe: whoever opens it from the
        mark on asks."""
        was_marked = layer.marked
        self.mark(layer)
        if layer.in_use():
            if not was_marked:
                self.unmark_if_complete(layer)
            return 0
        layer.was_unmarked = layer.replayed = False
        return layer.drop([index for index, state in enumerate(layer.map.states) if state != ABSENT], quiet_s=0.0)

    def close(self, layer: CachedLayer, *, remove: bool = False) -> None:
        """Forget a layer that nobody has open."""
        self.layers = {digest: one for digest, one in self.layers.items() if one is not layer}
        self.views = {key: one for key, one in self.views.items() if one is not layer}
        self.by_key.pop(layer.key, None)
        if self._group is not None:
            self._group.unmark(layer.fd)
        self.on_change[1](layer)
        self._board.forget(layer.fd)
        layer.close()
        if remove:
            shutil.rmtree(layer.directory, ignore_errors=True)

    def traces_of(self, digest: str) -> Path:
        return self.store.traces / formats.directory_name(digest)

    def view_of(self, trace: str, digest: str) -> CachedLayer:
        try:
            return self.views[trace, digest]
        except KeyError:
            raise NotFound(f"no trace {trace[:64]!r} of layer {digest[:19]} is being recorded", field="trace") from None


def _nothing(layer: CachedLayer) -> None:
    pass


def _origin(directory: Path) -> Origin | None:
    try:
        return origins.read(directory)
    except Damaged as error:
        raise Internal(f"layer {directory.name[:19]} is damaged: {error}") from None
