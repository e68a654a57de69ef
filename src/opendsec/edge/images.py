# SPDX-License-Identifier: Apache-2.0
"""The image store as the event loop may use it: nothing here blocks the loop for long, and a build streams its progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from opendsec.api.errors import OpenDSecError
from opendsec.api.images import BuildEvent, BuildRequest, Collected, ComposeRequest, ImageInfo, ImageList
from opendsec.images.build import build, check
from opendsec.images.store import ImageStore, Resolved

FRESH_S = 1.0  # a resolved name is trusted for so long: resolving reads several small files, a burst of creates asks the same
PROGRESS = 256  # events that may wait for a slow reader; beyond that progress is dropped, the end never


class Catalog:
    """Images by name, with the names of the last second kept in memory."""

    def __init__(self, store: ImageStore) -> None:
        self.store = store
        self._fresh: dict[tuple[str, tuple[str, ...]], tuple[float, Resolved]] = {}

    async def resolve(self, image: str, layers: Sequence[str]) -> Resolved:
        """Raises NotFound, InvalidRequest, Internal (a damaged layer); `field` says which name."""
        key, now = (image, tuple(layers)), asyncio.get_running_loop().time()
        known = self._fresh.get(key)
        if known is not None and now - known[0] < FRESH_S:
            return known[1]
        if len(self._fresh) > 1000:
            self._fresh.clear()
        resolved = await asyncio.to_thread(self.store.resolve, image, layers)
        self._fresh[key] = (now, resolved)
        return resolved

    async def list(self) -> ImageList:
        return await asyncio.to_thread(self.store.list)

    async def compose(self, request: ComposeRequest) -> ImageInfo:
        self._fresh.clear()
        try:
            return await asyncio.to_thread(self.store.compose, request)
        finally:
            self._fresh.clear()

    async def remove(self, name: str) -> ImageList:
        try:
            await asyncio.to_thread(self.store.remove, name)
        finally:
            self._fresh.clear()
        return await self.list()

    async def collect(self, in_use: frozenset[str], *, dry_run: bool) -> Collected:
        """Remove layers that neither a name nor a living sandbox uses."""
        try:
            return await asyncio.to_thread(lambda: self.store.gc(in_use, dry_run=dry_run))
        finally:
            self._fresh.clear()

    def check_build(self, request: BuildRequest, *, local: bool) -> None:
        """Raises InvalidRequest, Denied."""
        check(request, allow_host_paths=local)

    async def build(self, request: BuildRequest, *, local: bool) -> AsyncGenerator[BuildEvent, None]:
        """Progress, then `done`, or `failed` followed by the error. Closing the generator cancels the build."""
        waiting: asyncio.Queue[BuildEvent] = asyncio.Queue()

        def progress(event: BuildEvent) -> None:
            if waiting.qsize() < PROGRESS or event.kind == "done":
                waiting.put_nowait(event)

        task = asyncio.ensure_future(build(self.store, request, progress=progress, allow_host_paths=local))
        try:
            while True:
                following = asyncio.ensure_future(waiting.get())
                await asyncio.wait((following, task), return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    yield following.result()
                    continue
                following.cancel()
                while not waiting.empty():
                    yield waiting.get_nowait()
                break
            try:
                task.result()
            except OpenDSecError as error:
                yield BuildEvent(kind="failed", message=str(error))
                raise
        finally:
            self._fresh.clear()
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
