# SPDX-License-Identifier: Apache-2.0
"""The image store as the event loop may use it: nothing here blocks the loop for long, and long work streams its progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Protocol

from opendsec.api.errors import Denied, Internal, NotFound, Unsupported
from opendsec.api.images import (
    BuildEvent,
    BuildRequest,
    Collected,
    ComposeRequest,
    DiffReport,
    DiskSource,
    DockerfileSource,
    Finding,
    ImageDetail,
    ImageInfo,
    ImageList,
    LayerDetail,
    LayerInfo,
    LintReport,
    PullRequest,
    PushRequest,
    StoreList,
    WarmRequest,
)
from opendsec.api.references import Reference
from opendsec.edge import building, disks
from opendsec.edge.loading import Loading
from opendsec.edge.progress import Work, streamed
from opendsec.images import layers as formats
from opendsec.images.build import build, check
from opendsec.images.diff import diff
from opendsec.images.lazy.client import Loader
from opendsec.images.lazy.protocol import LayerStats
from opendsec.images.lint import lint
from opendsec.images.oci.pull import pull as oci_pull
from opendsec.images.oci.push import push as oci_push
from opendsec.images.process import Progress
from opendsec.images.remote.config import Stores
from opendsec.images.store import GRACE_S, ImageStore, Resolved
from opendsec.images.transfer import pull_image, push_image

if TYPE_CHECKING:
    from opendsec.edge.node import Node

TELL_S = 0.25  # between two events about how far loading is
FRESH_S = 1.0  # a resolved name is trusted for so long: resolving reads several small files, a burst of creates asks the same


class Emit(Protocol):
    """Tells that something happened."""

    def __call__(self, kind: str, sandbox_id: str | None = None, **data: str | int | float | bool | None) -> None: ...


def _silent(kind: str, sandbox_id: str | None = None, **data: str | int | float | bool | None) -> None: ...


class Catalog:
    """Images by name, with the names of the last second kept in memory."""

    def __init__(self, store: ImageStore, *, stores: Stores | None = None, loading: Loading | None = None, emit: Emit = _silent) -> None:
        self.store, self.loading, self.emit = store, loading, emit
        self.remotes = stores or Stores({})
        self._fresh: dict[tuple[str, tuple[str, ...]], tuple[float, Resolved]] = {}
        self._pinned: dict[str, Resolved] = {}

    # --- reading -----------------------------------------------------------------------------------------------------

    async def resolve(self, image: str, layers: Sequence[str]) -> Resolved:
        """Raises NotFound, InvalidRequest, Internal (a damaged layer); `field` says which name."""
        if image in self._pinned:
            return self._pinned[image]
        key, now = (image, tuple(layers)), asyncio.get_running_loop().time()
        known = self._fresh.get(key)
        if known is not None and now - known[0] < FRESH_S:
            return known[1]
        if len(self._fresh) > 1000:
            self._fresh.clear()
        resolved = await asyncio.to_thread(self.store.resolve, image, layers)
        self._fresh[key] = (now, resolved)
        return resolved

    def forget(self) -> None:
        """A name has been given a new meaning."""
        self._fresh.clear()

    @contextmanager
    def pinned(self, name: str, resolved: Resolved) -> Iterator[None]:
        """Let `name`, which no image has, mean this for the edge itself."""
        self._pinned[name] = resolved
        try:
            yield
        finally:
            del self._pinned[name]

    async def list(self) -> ImageList:
        return await asyncio.to_thread(self.store.list)

    async def image(self, name: str, field: str = "name") -> ImageInfo:
        """Raises NotFound."""
        listed = await self.list()
        for image in listed.images:
            if image.name == name:
                return image
        raise NotFound(f"no image {name!r}", field=field)

    def stores(self) -> StoreList:
        """The remote stores, without credentials."""
        return StoreList(self.remotes.infos())

    async def inspect(self, name: str) -> ImageDetail:
        """An image, and how much of each of its layers is here. Raises NotFound."""
        here = await self.loading.layers() if self.loading is not None else {}
        return await asyncio.to_thread(self._inspect, name, here)

    def _inspect(self, name: str, here: Mapping[str, LayerStats]) -> ImageDetail:
        ref, listed = self.store.image(name), self.store.list()
        image = next(one for one in listed.images if one.name == name)
        layers = {one.digest: one for one in listed.layers}
        details = tuple(self._detail(layers[digest], here.get(digest)) for digest in ref.layers if digest in layers)
        return ImageDetail(image=image, layers=details, notes=ref.notes, source=ref.source)

    def _detail(self, layer: LayerInfo, here: LayerStats | None) -> LayerDetail:
        record, origin = self.store.record(layer.digest), self.store.origin(layer.digest)
        traces = self.store.traces / formats.directory_name(layer.digest)
        local_bytes = layer.data_bytes if origin is None else here.local_bytes if here is not None else 0
        return LayerDetail(
            layer=layer,
            local_bytes=local_bytes,
            complete=origin is None or (here is not None and here.complete),
            origin=" ".join(origin.stores) if origin is not None else "",
            chunks=-(-layer.data_bytes // record.chunk_bytes) if record.chunk_bytes else 0,
            chunk_bytes=record.chunk_bytes,
            traces=len(list(traces.iterdir())) if traces.is_dir() else 0,
        )

    async def diff(self, a: str, b: str) -> DiffReport:
        """How the trees of two images or layers differ."""
        return await asyncio.to_thread(diff, self.store, a, b)

    async def lint(self, name: str, packages: tuple[str, ...]) -> LintReport:
        """What an image or a layer holds that would give an answer away."""
        return await asyncio.to_thread(lint, self.store, name, packages)

    async def verify(self, name: str) -> LintReport:
        """Read all local content of an image, or of one layer, and compare it with its checksums."""
        findings: list[Finding] = []
        for digest in await asyncio.to_thread(self.store.digests_of, name):
            try:
                await asyncio.to_thread(self.store.verify, digest)
            except Internal as error:
                findings.append(Finding(rule="verify.damaged", path=digest, message=error.message))
        for finding in findings:
            self.emit("layer.damaged", digest=finding.path, message=finding.message)
        return LintReport(name=name, findings=tuple(findings))

    # --- changing ----------------------------------------------------------------------------------------------------

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

    async def collect(self, in_use: frozenset[str], *, dry_run: bool, grace_s: float = GRACE_S) -> Collected:
        """Remove layers that neither a name nor a living sandbox uses and that were published longer than `grace_s` ago."""
        try:
            return await asyncio.to_thread(lambda: self.store.gc(in_use, dry_run=dry_run, grace_s=grace_s))
        finally:
            self._fresh.clear()

    def check_build(self, request: BuildRequest, *, local: bool) -> None:
        """Raises InvalidRequest, Denied."""
        if isinstance(request.source, DockerfileSource):
            building.check(request, local=local)
        elif isinstance(request.source, DiskSource):
            disks.check(request, local=local)
        else:
            check(request, allow_host_paths=local)

    async def build(self, node: Node, request: BuildRequest, *, local: bool) -> AsyncGenerator[BuildEvent, None]:
        """Progress, then `done`, or `failed` followed by the error. Closing the generator cancels the build."""

        async def work(progress: Progress) -> ImageInfo | LayerInfo:
            if isinstance(request.source, DockerfileSource):
                return await building.build_dockerfile(node, request, progress=progress, local=local)
            if isinstance(request.source, DiskSource):
                return await disks.import_disk(node, request, progress=progress, local=local)
            return await build(self.store, request, progress=progress, allow_host_paths=local)

        async with aclosing(self._streamed(work)) as events:
            async for event in events:
                yield event

    async def pull(self, request: PullRequest, reference: Reference, *, local: bool) -> AsyncGenerator[BuildEvent, None]:
        """As `build`, of an image that comes from elsewhere."""

        async def work(progress: Progress) -> ImageInfo:
            if reference.transport == "store":
                remote, name = self.remotes.get(reference.place, field="reference"), request.name or reference.image_name
                if request.lazy:
                    await self._loader()  # before there is a layer that needs it
                image = await pull_image(
                    self.store, reference.name, remote, name=name, progress=progress, lazy=request.lazy, stores=self.remotes
                )
            else:
                image = await oci_pull(self.store, request, progress=progress, allow_host_paths=local)
            self.emit("image.pulled", image=image.name, source=str(reference), layers=len(image.layers), size_bytes=image.size_bytes)
            return image

        async with aclosing(self._streamed(work)) as events:
            async for event in events:
                yield event

    async def push(self, request: PushRequest, reference: Reference, *, local: bool) -> AsyncGenerator[BuildEvent, None]:
        """As `build`, of an image that goes elsewhere; `done` names it."""

        async def work(progress: Progress) -> ImageInfo:
            image = await self.image(request.name)
            if reference.transport == "store":
                remote = self.remotes.get(reference.place, field="reference")
                if not remote.writable:
                    raise Denied(f"the store {reference.place!r} is configured read-only", field="reference")
                await push_image(self.store, request.name, remote, name=reference.name, progress=progress, stores=self.remotes)
            else:
                await oci_push(self.store, request, progress=progress, allow_host_paths=local)
            self.emit("image.pushed", image=image.name, target=str(reference), layers=len(image.layers), size_bytes=image.size_bytes)
            return image

        async with aclosing(self._streamed(work)) as events:
            async for event in events:
                yield event

    async def warm(self, request: WarmRequest) -> AsyncGenerator[BuildEvent, None]:
        """As `build`, loading what is not here yet of an image."""

        async def work(progress: Progress) -> ImageInfo:
            image = await self.image(request.name)
            elsewhere = await asyncio.to_thread(lambda: [one for one in image.layers if self.store.origin(one) is not None])
            if elsewhere:
                await self._warm(await self._loader(), elsewhere, request.trace, progress)
            return image

        async with aclosing(self._streamed(work)) as events:
            async for event in events:
                yield event

    async def _warm(self, loader: Loader, digests: Sequence[str], traced_only: bool, progress: Progress) -> None:
        """Load layers, and tell every moment how far that is."""
        work = asyncio.gather(*(loader.warm(digest, traced_only=traced_only) for digest in digests))
        try:
            ended = False
            while not ended:
                done, _ = await asyncio.wait((work,), timeout=TELL_S)
                ended = bool(done)
                layers = [layer for layer in (await loader.stats()).layers if layer.digest in digests]
                done_bytes, data_bytes = sum(one.local_bytes for one in layers), sum(one.data_bytes for one in layers)
                total_bytes = 0 if traced_only else data_bytes
                progress(BuildEvent(kind="progress", what=f"{len(digests)} layers", done_bytes=done_bytes, total_bytes=total_bytes))
            await work
        finally:
            work.cancel()  # the loader goes on with what it has begun: it does no harm

    async def _loader(self) -> Loader:
        if self.loading is None:
            raise Unsupported("this edge loads nothing on demand", field="reference")
        return await self.loading.loader()

    async def _streamed(self, work: Work) -> AsyncGenerator[BuildEvent, None]:
        try:
            with self.store.at_work():
                async with aclosing(streamed(work)) as events:
                    async for event in events:
                        yield event
        finally:
            self._fresh.clear()
