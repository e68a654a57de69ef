# SPDX-License-Identifier: Apache-2.0
"""One fetch: a few neighbouring chunks, from wherever they can be had soonest. Whatever their origin, each is checked before it is kept.

1. what the map only hints at is compared with its checksum
2. chunks that another layer here has are copied
3. the rest comes from the origin's stores, in turn, one request for each run of neighbours; a store's wrong chunks come from the next,
   and if all were wrong, from each once more
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from opendsec.api.errors import OpenDSecError
from opendsec.images.layers import DATA
from opendsec.images.lazy.cache import CachedLayer
from opendsec.images.lazy.chunkmap import ABSENT
from opendsec.images.lazy.engine import Failures
from opendsec.images.origins import Origin
from opendsec.images.remote.store import RemoteStore, StoreError

DEADLINE_S = 120.0  # for one fetch, with all stores, their retries and waits for disk space

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

Tell = Callable[[str, str, str], None]  # kind, digest, message


class Stores(Protocol):
    def get(self, name: str) -> RemoteStore:
        """Raises OpenDSecError if there is none of that name, or it cannot be used."""


class LayerFetcher:
    def __init__(
        self,
        stores: Stores,
        pool: ThreadPoolExecutor,
        tell: Tell,
        *,
        local: LocalIndex | None = None,
        make_room: Callable[[int], Awaitable[None]] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._stores, self._pool, self._tell = stores, pool, tell
        self._local = local or LocalIndex()
        self._make_room = make_room
        self._deadline_s = deadline_s
        self.fetched_bytes = self.copied_bytes = self.requests = 0

    async def fetch(self, layer: CachedLayer, first: int, count: int) -> Failures:
        left = list(range(first, first + count))
        code, why = errno.EIO, "nothing has it"
        try:
            async with asyncio.timeout(self._deadline_s):
                if self._may_be_here(layer, left):
                    left = await self._in_thread(self._from_here, layer, left)
                if left:
                    left, code, why = await self._from_stores(layer, left)
        except TimeoutError:
            left = layer.missing(left)
            why = f"nothing came within {self._deadline_s:.3g} s"
        except OSError as error:
            left = layer.missing(left)
            code, why = errno.EIO, f"{error.strerror or error} in the cache"
            if error.errno in NO_SPACE:
                code, why = errno.ENOSPC, "no space left in the cache"
        if left:
            kind = "cache.full" if code == errno.ENOSPC else "load.failed"
            self._tell(kind, layer.digest, f"{len(left)} chunks from chunk {left[0]} on cannot be read: {why}")
        return dict.fromkeys(left, code)

    async def _in_thread(self, work: Callable[[CachedLayer, list[int]], list[int]], layer: CachedLayer, chunks: list[int]) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, layer, chunks)

    def _may_be_here(self, layer: CachedLayer, chunks: list[int]) -> bool:
        """Seen without a look at the disk: mostly nothing is, and a thread would be asked for nothing."""
        return any(layer.map.states[index] != ABSENT or self._local.knows(layer, index) for index in chunks)

    def _from_here(self, layer: CachedLayer, chunks: list[int]) -> list[int]:
        left = []
        for index in chunks:
            if layer.confirm(index):
                continue
            data = self._local.find(layer, index)
            if data is not None and layer.store(index, data):
                self.copied_bytes += len(data)
            else:
                left.append(index)
        return left

    async def _from_stores(self, layer: CachedLayer, chunks: list[int]) -> tuple[list[int], int, str]:
        """What is left, and the last reason."""
        why = "it is not known where its data can be had"
        origin = layer.origin or Origin(stores=(), prefix="")
        left, given_up, wrong = chunks, list[int](), set[int]()
        for attempt in (1, 2):
            for name in origin.stores if left else ():
                # Not what is missing now: on a full disk what was kept may have been dropped again. Its readers see that, and ask again.
                still = list[int]()
                for start, length in _runs(left):
                    run = list(range(start, start + length))
                    try:
                        bad = await self._from_store(layer, name, origin.key(DATA), run)
                    except (StoreError, OpenDSecError) as error:
                        why = str(error)
                        still += run
                        continue
                    still += bad
                    wrong = (wrong - set(run)) | set(bad)
                    if bad:
                        why = f"store {name}: {origin.key(DATA)}: chunk {bad[0]} does not match its checksum"
                        self._tell("load.damaged", layer.digest, why)
                left = still
            if attempt == 1:
                given_up = [index for index in left if index not in wrong]
                left = sorted(wrong)
        return sorted(given_up + left), errno.EIO, why

    async def _from_store(self, layer: CachedLayer, name: str, key: str, run: list[int]) -> list[int]:
        """The chunks that were wrong. Raises StoreError, OpenDSecError, OSError."""
        start, length = layer.table.span(run[0], len(run))
        store = self._stores.get(name)
        self.requests += 1
        data = await store.get_range(key, start, length)
        self.fetched_bytes += len(data)
        for attempt in (1, 2):
            try:
                return await self._in_thread(lambda layer, chunks: layer.store_run(chunks[0], data), layer, run)
            except OSError as error:
                if error.errno not in NO_SPACE or attempt == 2 or self._make_room is None:
                    raise
            await self._make_room(length)
        return run


def _runs(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive numbers as (first, count)."""
    runs: list[tuple[int, int]] = []
    for index in chunks:
        if runs and index == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs


_DIGEST_BYTES, _INDEX_BITS = 32, 32


def _keys(digests: bytes) -> list[int]:
    """Of each checksum its first eight bytes."""
    return memoryview(digests).cast("Q")[:: _DIGEST_BYTES // 8].tolist()


class LocalIndex:
    """Chunks that other layers here have, by checksum. Layers are added as they become known; one that is gone is skipped.

    Eight bytes of each checksum name it: what is found is checked anyway.
    """

    MAX_ENTRIES = 1 << 20  # some 100 MB

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # number of the source and index in it
        self._sources: list[CachedLayer | str] = []

    def add(self, source: CachedLayer | str, digests: bytes) -> None:
        """`source`: a cached layer, or the path of a whole data file in chunks of the usual size."""
        first = len(self._sources) << _INDEX_BITS
        self._sources.append(source)
        fitting = digests[: max(0, self.MAX_ENTRIES - len(self._places)) * _DIGEST_BYTES]
        # Without a loop: of a large layer these are tens of thousands, while its `create` waits. Who was known first, stays.
        keys = _keys(fitting)
        known = {key: self._places[key] for key in self._places.keys() & keys}
        self._places.update(zip(keys, range(first, first + len(keys)), strict=True))
        self._places.update(known)

    def knows(self, layer: CachedLayer, index: int) -> bool:
        """Whether `find` is worth a try."""
        source, place = self._place(layer, index)
        return source is not layer and not (isinstance(source, CachedLayer) and source.missing([place]))

    def _place(self, layer: CachedLayer, index: int) -> tuple[CachedLayer | str, int]:
        """The source that has this chunk, `layer` if none other has, and the chunk's number there."""
        (key,) = _keys(layer.table.digest(index))
        found = self._places.get(key, -1)
        return self._sources[found >> _INDEX_BITS] if found >= 0 else layer, found & ((1 << _INDEX_BITS) - 1)

    def find(self, layer: CachedLayer, index: int) -> bytes | None:
        """The bytes of a chunk that another layer here has; unchecked. Blocking."""
        source, place = self._place(layer, index)
        if source is layer:
            return None
        _, length = layer.table.span(index)
        with contextlib.suppress(OSError, IndexError):
            if isinstance(source, CachedLayer):
                return source.read_chunk(place) if not source.missing([place]) else None
            with open(source, "rb", buffering=0) as file:
                return os.pread(file.fileno(), length, place * layer.table.chunk_bytes)
        return None
