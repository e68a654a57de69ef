# SPDX-License-Identifier: Apache-2.0
"""Images and layers of the fake edge: names, and nothing behind them."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from opendsec.api import images as i
from opendsec.api import wire
from opendsec.api.errors import InvalidRequest, NotFound
from opendsec.testing.fakes.edge_parts import Handler, json_answer, lines_answer, query_of


class ImageRoutes:
    """Handlers of the image routes, and the images themselves."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.images = {name: _image(name, ()) for name in names}
        self.layers: dict[str, i.LayerInfo] = {}

    def handlers(self) -> dict[str, Handler]:
        return {
            "IMAGES": self._images,
            "IMAGE_BUILD": self._image_build,
            "IMAGE_COMPOSE": self._image_compose,
            "IMAGE_REMOVE": self._image_remove,
            "IMAGE_GC": self._image_gc,
        }

    def _image_list(self) -> i.ImageList:
        return i.ImageList(images=tuple(self.images.values()), layers=tuple(self.layers.values()))

    async def _images(self, request: Request) -> Response:
        return json_answer(self._image_list())

    async def _image_build(self, request: Request) -> Response:
        asked = wire.decode(await request.body(), i.BuildRequest)
        if isinstance(asked.source, i.DirectorySource) and not os.path.isdir(asked.source.path):
            raise InvalidRequest("no such directory", field="source.path")

        async def lines() -> AsyncGenerator[i.BuildEvent, None]:
            yield i.BuildEvent(kind="step", message="packing")
            yield i.BuildEvent(kind="progress", done=1, total=1)
            if asked.name == "broken":
                yield i.BuildEvent(kind="failed", message="it is broken")
                return
            label = f"{asked.kind}:{asked.name}@{asked.version}"
            digest = "sha256:" + label.encode().hex().ljust(64, "0")[:64]
            layer = i.LayerInfo(digest=digest, kind=asked.kind, names=(label,), meta_bytes=1, data_bytes=1, created_at=time.time())
            self.layers[digest] = layer
            image = None
            if asked.kind == "base":
                image = self.images[asked.name] = _image(asked.name, (digest,), asked.config)
            yield i.BuildEvent(kind="done", image=image, layer=layer)

        return lines_answer(lines())

    def digests(self, names: tuple[str, ...]) -> tuple[str, ...]:
        known = {name: layer.digest for layer in self.layers.values() for name in (*layer.names, layer.digest)}
        for name in names:
            if name not in known:
                raise NotFound(f"no layer {name!r}", field="layers")
        return tuple(known[name] for name in names)

    async def _image_compose(self, request: Request) -> Response:
        asked = wire.decode(await request.body(), i.ComposeRequest)
        base = self.images.get(asked.base)
        if base is None:
            raise NotFound(f"no image {asked.base!r}", field="base")
        layers = (*base.layers, *self.digests(asked.layers))
        self.images[asked.name] = _image(asked.name, layers, asked.config or base.config)
        return json_answer(self.images[asked.name])

    async def _image_remove(self, request: Request) -> Response:
        name = query_of(request).get("name", b"").decode()
        if name not in self.images:
            raise NotFound(f"no image {name!r}", field="name")
        del self.images[name]
        return json_answer(self._image_list())

    async def _image_gc(self, request: Request) -> Response:
        used = {digest for image in self.images.values() for digest in image.layers}
        unused = tuple(digest for digest in self.layers if digest not in used)
        dry_run = query_of(request).get("dry_run") == b"1"
        if not dry_run:
            for digest in unused:
                del self.layers[digest]
        return json_answer(i.Collected(digests=unused, freed_bytes=2 * len(unused), dry_run=dry_run))


def _image(name: str, layers: tuple[str, ...], config: i.ImageConfig | None = None) -> i.ImageInfo:
    return i.ImageInfo(name=name, layers=layers, config=config or i.ImageConfig(), size_bytes=0, created_at=time.time())
