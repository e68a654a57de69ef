# SPDX-License-Identifier: Apache-2.0
"""Images and layers of an edge."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from opendsec.api import routes, wire
from opendsec.api.errors import Internal, Unavailable
from opendsec.api.images import (
    BuildEvent,
    BuildRequest,
    Collected,
    ComposeRequest,
    DebianSource,
    DirectorySource,
    ImageConfig,
    ImageInfo,
    ImageList,
    LayerInfo,
    LayerKind,
)
from opendsec.client import _core
from opendsec.client.link import Link
from opendsec.client.transport import ConnectionBroken


class Images:
    """What sandboxes are made of."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def list(self) -> ImageList:
        """All images and layers."""
        return await self._link.call(routes.IMAGES, ImageList)

    async def build_events(
        self,
        name: str,
        source: DirectorySource | DebianSource,
        *,
        kind: LayerKind = "base",
        version: str = "1",
        config: ImageConfig | None = None,
        exclude: Sequence[str] = (),
    ) -> AsyncGenerator[BuildEvent, None]:
        """Build a layer and iterate over the progress; the last event is `done` or `failed`."""
        fields = {
            "name": name,
            "source": source,
            "kind": kind,
            "version": version,
            "config": config or ImageConfig(),
            "exclude": list(exclude),
        }
        body = wire.decode(_core.encode(wire.convert(fields, BuildRequest)), BuildRequest)
        try:
            async with aclosing(self._link.lines(routes.IMAGE_BUILD, BuildEvent, body=body)) as events:
                async for event in events:
                    yield event
        except ConnectionBroken as error:
            raise Unavailable(str(error), data={"sent": error.sent}) from None

    async def build(
        self,
        name: str,
        source: DirectorySource | DebianSource,
        *,
        kind: LayerKind = "base",
        version: str = "1",
        config: ImageConfig | None = None,
        exclude: Sequence[str] = (),
        progress: Callable[[BuildEvent], None] | None = None,
    ) -> ImageInfo | LayerInfo:
        """Build a layer: of a base the image `name`, of other kinds the layer `kind:name@version`. Raises Internal if the build fails."""
        last: BuildEvent | None = None
        async for event in self.build_events(name, source, kind=kind, version=version, config=config, exclude=exclude):
            last = event
            if progress is not None:
                progress(event)
        if last is None or last.kind not in ("done", "failed"):
            raise Unavailable("the build's progress ended before the build did")
        if last.kind == "failed":
            raise Internal(last.message or "the build failed")
        made = last.image or last.layer
        if made is None:
            raise Internal("the build ended without saying what it made")
        return made

    async def compose(
        self, name: str, base: str, layers: Sequence[str], *, config: ImageConfig | None = None, action_id: str | None = None
    ) -> ImageInfo:
        """Name the image `base` with `layers` on top, lowest first."""
        body = wire.convert({"name": name, "base": base, "layers": list(layers), "config": config}, ComposeRequest)
        return await self._link.call(routes.IMAGE_COMPOSE, ImageInfo, body=body, query={"action_id": action_id})

    async def remove(self, name: str, *, action_id: str | None = None) -> ImageList:
        """Forget an image or layer name; the content goes with the next `gc` if nothing else uses it. The rest that is left."""
        return await self._link.call(routes.IMAGE_REMOVE, ImageList, query={"name": name, "action_id": action_id})

    async def gc(self, *, dry_run: bool = False, action_id: str | None = None) -> Collected:
        """Remove content that no name and no sandbox uses."""
        return await self._link.call(routes.IMAGE_GC, Collected, query={"dry_run": dry_run, "action_id": action_id})
