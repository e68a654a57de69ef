# SPDX-License-Identifier: Apache-2.0
"""Images and layers of the fake edge: names, and nothing behind them."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import AsyncGenerator, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from opendsec.api import images as i
from opendsec.api import wire
from opendsec.api.errors import Conflict, InvalidRequest, NotFound
from opendsec.api.references import (
    GRACE_S,
    check_content_name,
    check_image_name,
    check_packages,
    check_pull,
    check_push,
    check_trace,
    check_warm,
    pack_names,
)
from opendsec.api.spec import check_number
from opendsec.testing.fakes.edge_parts import FakeBox, Handler, json_answer, lines_answer, query_of


class ImageRoutes:
    """Handlers of the image routes, and the images themselves."""

    def __init__(self, names: tuple[str, ...], box: Callable[[Request], FakeBox], stores: tuple[str, ...] = ("depot",)) -> None:
        self.images = {name: _image(name, ()) for name in names}
        self.layers: dict[str, i.LayerInfo] = {}
        self.stored: dict[str, dict[str, i.ImageInfo]] = {name: {} for name in stores}  # what was pushed to each store
        self.elsewhere: dict[str, i.ImageInfo] = {}  # what was pushed to registries and files, by reference
        self._box = box
        self._packed: dict[str, tuple[bytes, i.PackResult]] = {}  # by action id

    def handlers(self) -> dict[str, Handler]:
        return {
            "IMAGES": self._images,
            "IMAGE_BUILD": self._image_build,
            "IMAGE_COMPOSE": self._image_compose,
            "IMAGE_REMOVE": self._image_remove,
            "IMAGE_GC": self._image_gc,
            "IMAGE_PULL": self._image_pull,
            "IMAGE_PUSH": self._image_push,
            "IMAGE_WARM": self._image_warm,
            "IMAGE_TRACE": self._image_trace,
            "IMAGE_INSPECT": self._image_inspect,
            "IMAGE_DIFF": self._image_diff,
            "IMAGE_LINT": self._image_lint,
            "IMAGE_VERIFY": self._image_lint,
            "STORES": self._stores,
            "PACK": self._pack,
        }

    def _image_list(self) -> i.ImageList:
        return i.ImageList(images=tuple(self.images.values()), layers=tuple(self.layers.values()))

    async def _images(self, request: Request) -> Response:
        return json_answer(self._image_list())

    async def _image_build(self, request: Request) -> Response:
        asked = wire.decode(await request.body(), i.BuildRequest)
        if isinstance(asked.source, i.DirectorySource) and not os.path.isdir(asked.source.path):
            raise InvalidRequest("no such directory", field="source.path")
        if isinstance(asked.source, i.DockerfileSource) and not os.path.isdir(asked.source.context):
            raise InvalidRequest("no such directory", field="source.context")

        async def lines() -> AsyncGenerator[i.BuildEvent, None]:
            yield i.BuildEvent(kind="step", message="packing")
            yield i.BuildEvent(kind="progress", done=1, total=1)
            if asked.name == "broken":
                yield i.BuildEvent(kind="failed", message="it is broken")
                return
            label = f"{asked.kind}:{asked.name}@{asked.version}"
            digest = _digest(label)
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
        horizon = time.time() - check_number(float(query_of(request).get("grace_s", b"0")), "grace_s", GRACE_S)
        unused = tuple(digest for digest, layer in self.layers.items() if digest not in used and layer.created_at <= horizon)
        dry_run = query_of(request).get("dry_run") == b"1"
        if not dry_run:
            for digest in unused:
                del self.layers[digest]
        return json_answer(i.Collected(digests=unused, freed_bytes=2 * len(unused), dry_run=dry_run))

    # --- to and from elsewhere

    def _known(self, name: str, field: str = "name") -> i.ImageInfo:
        if name not in self.images:
            raise NotFound(f"no image {name!r}", field=field)
        return self.images[name]

    async def _image_pull(self, request: Request) -> Response:
        asked = wire.decode(await request.body(), i.PullRequest)
        reference = check_pull(asked, local=True)
        if reference.transport == "store":
            if reference.place not in self.stored:
                raise NotFound(f"no store {reference.place!r}", field="reference")
            there = self.stored[reference.place].get(reference.name)
        else:
            there = self.elsewhere.get(str(reference))
        if there is None:
            raise NotFound(f"there is no {reference}", field="reference")
        found = msgspec.structs.replace(there, name=asked.name or reference.image_name)

        async def lines() -> AsyncGenerator[i.BuildEvent, None]:
            yield i.BuildEvent(kind="progress", what="layer 1 of 1", done_bytes=1 << 20, total_bytes=4 << 20)
            self.images[found.name] = found
            yield i.BuildEvent(kind="done", message=found.name, image=found)

        return lines_answer(lines())

    async def _image_push(self, request: Request) -> Response:
        asked = wire.decode(await request.body(), i.PushRequest)
        reference = check_push(asked, local=True)
        image = self._known(asked.name)
        if reference.transport == "store":
            if reference.place not in self.stored:
                raise NotFound(f"no store {reference.place!r}", field="reference")
            self.stored[reference.place][reference.name] = image
        else:
            self.elsewhere[str(reference)] = image
        return _progress(image)

    async def _image_warm(self, request: Request) -> Response:
        asked = wire.decode(await request.body(), i.WarmRequest)
        check_warm(asked)
        return _progress(self._known(asked.name))

    async def _image_trace(self, request: Request) -> Response:
        asked = wire.decode(await request.body(), i.TraceRequest)
        check_trace(asked)
        self._known(asked.name)
        return json_answer(i.TraceInfo(name=asked.name, chunks=1, bytes=65536, exit_code=0))

    async def _stores(self, request: Request) -> Response:
        return json_answer(i.StoreList(tuple(i.StoreInfo(name=name, url=f"memory:///{name}", writable=True) for name in self.stored)))

    # --- looking

    async def _image_inspect(self, request: Request) -> Response:
        image = self._known(check_image_name(_parameter(request, "name"), "name"))
        details = (i.LayerDetail(layer=self.layers[one], local_bytes=1, complete=True) for one in image.layers if one in self.layers)
        return json_answer(i.ImageDetail(image=image, layers=tuple(details)))

    def _content(self, request: Request, field: str) -> tuple[str, ...]:
        name = check_content_name(_parameter(request, field), field)
        if name in self.images:
            return self.images[name].layers
        for layer in self.layers.values():
            if name in (*layer.names, layer.digest):
                return (layer.digest,)
        raise NotFound(f"no image or layer {name!r}", field=field)

    async def _image_diff(self, request: Request) -> Response:
        a, b = self._content(request, "a"), self._content(request, "b")
        changed = [("removed", one) for one in a if one not in b] + [("added", one) for one in b if one not in a]
        entries = [msgspec.convert({"change": change, "path": f"/{digest}", "kind": "file"}, i.DiffEntry) for change, digest in changed]
        return json_answer(i.DiffReport(entries=tuple(entries)))

    async def _image_lint(self, request: Request) -> Response:
        packages = query_of(request).get("packages", b"").decode()
        check_packages(tuple(packages.split(",")) if packages else ())
        self._content(request, "name")
        return json_answer(i.LintReport(name=_parameter(request, "name"), findings=()))

    # --- packing

    async def _pack(self, request: Request) -> Response:
        body = await request.body()
        asked = wire.decode(body, i.PackRequest)
        name, version = pack_names(asked)
        if asked.action_id is not None and asked.action_id in self._packed:
            before, result = self._packed[asked.action_id]
            if before != body:
                raise Conflict("this action id was used for another request", field="action_id")
            return json_answer(result)
        box = self._box(request)
        label = f"{asked.kind}:{name}@{version}"
        content = sum(os.lstat(os.path.join(folder, file)).st_size for folder, _, files in os.walk(box.root) for file in files)
        layer = i.LayerInfo(
            digest=_digest(label), kind=asked.kind, names=(label,), meta_bytes=1, data_bytes=content, created_at=time.time()
        )
        self.layers[layer.digest] = layer
        below = self.images.get(box.info.image)
        image = _image(f"{name}:{version}", (*(below.layers if below else ()), layer.digest), below.config if below else None)
        self.images[image.name] = image
        result = i.PackResult(image=image, layer=layer, frozen_ms=0.1)
        if asked.action_id is not None:
            self._packed[asked.action_id] = (body, result)
        return json_answer(result)


def _parameter(request: Request, name: str) -> str:
    value = query_of(request).get(name, b"").decode()
    if not value:
        raise InvalidRequest("is required", field=name)
    return value


def _progress(image: i.ImageInfo) -> Response:
    async def lines() -> AsyncGenerator[i.BuildEvent, None]:
        yield i.BuildEvent(kind="progress", what="layer 1 of 1", done_bytes=1 << 20, total_bytes=4 << 20)
        yield i.BuildEvent(kind="done", message=image.name, image=image)

    return lines_answer(lines())


def _digest(label: str) -> str:
    return "sha256:" + hashlib.sha256(label.encode()).hexdigest()


def _image(name: str, layers: tuple[str, ...], config: i.ImageConfig | None = None) -> i.ImageInfo:
    return i.ImageInfo(name=name, layers=layers, config=config or i.ImageConfig(), size_bytes=0, created_at=time.time())
