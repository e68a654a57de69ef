# SPDX-License-Identifier: Apache-2.0
"""Content of the copies made for traces: it comes from the layer itself, which loads it if need be. See `registry`.

Copies have an engine of their own. In one, all fetches could be copies that wait for fetches.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from opendsec.images.lazy.cache import CachedLayer
from opendsec.images.lazy.engine import Engine, Failures


class ViewFetcher:
    """See `engine.Fetcher`."""

    def __init__(self, layers: Engine, pool: ThreadPoolExecutor) -> None:
        self._layers, self._pool = layers, pool

    async def fetch(self, layer: CachedLayer, first: int, count: int) -> Failures:
        chunks, upstream = range(first, first + count), layer.upstream
        if isinstance(upstream, CachedLayer) and (error := await self._layers.have(upstream, chunks)):
            return dict.fromkeys(chunks, error)
        left = await asyncio.get_running_loop().run_in_executor(self._pool, _copy, layer, upstream, chunks)
        return dict.fromkeys(left, errno.EIO)


def _copy(layer: CachedLayer, upstream: CachedLayer | Path | None, chunks: range) -> list[int]:
    left = []
    for index in chunks:
        stored = layer.confirm(index)
        if not stored:
            with contextlib.suppress(OSError):
                stored = layer.store(index, _read(layer, upstream, index))
        if not stored:
            left.append(index)
    return left


def _read(layer: CachedLayer, upstream: CachedLayer | Path | None, index: int) -> bytes:
    if isinstance(upstream, CachedLayer):
        return upstream.read_chunk(index)
    if upstream is None:
        return b""
    start, length = layer.table.span(index)
    with open(upstream, "rb", buffering=0) as file:
        return os.pread(file.fileno(), length, start)
