# SPDX-License-Identifier: Apache-2.0
"""Images and layers of an edge."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TypeAlias

import msgspec

from opendsec.api import references, routes, wire
from opendsec.api.errors import Internal, InvalidRequest, Unavailable
from opendsec.api.images import (
    BuildEvent,
    BuildRequest,
    Collected,
    ComposeRequest,
    DebianDiskSource,
    DebianSource,
    DiffReport,
    DirectorySource,
    DiskSource,
    DockerfileSource,
    ImageConfig,
    ImageDetail,
    ImageInfo,
    ImageList,
    LayerInfo,
    LayerKind,
    LintReport,
    PullRequest,
    PushRequest,
    StoreInfo,
    StoreList,
    TraceInfo,
    TraceRequest,
    WarmRequest,
)
from opendsec.api.routes import Route
from opendsec.client import _core
from opendsec.client.link import Link
from opendsec.client.transport import ConnectionBroken

Source: TypeAlias = DirectorySource | DebianSource | DockerfileSource | DebianDiskSource | DiskSource
Progress: TypeAlias = Callable[[BuildEvent], None]


class Images:
    """What sandboxes are made of. `progress` of long work is called with events: bytes done, bytes in all, and what they are of."""

    def __init__(self, link: Link) -> None:
        self._link = link

    # --- what is there

    async def list(self) -> ImageList:
        """All images and layers."""
        return await self._link.call(routes.IMAGES, ImageList)

    async def inspect(self, name: str) -> ImageDetail:
        """An image's layers, how much of each is here, where the rest comes from, and what was left out when it came in."""
        return await self._link.call(
            routes.IMAGE_INSPECT, ImageDetail, query={"name": references.check_image_name(_text(name, "name"), "name")}
        )

    async def diff(self, a: str, b: str) -> DiffReport:
        """How the file trees of two images, or layers, differ."""
        query = {field: references.check_content_name(_text(name, field), field) for field, name in (("a", a), ("b", b))}
        return await self._link.call(routes.IMAGE_DIFF, DiffReport, query=query)

    async def lint(self, name: str, *, packages: Sequence[str] = ()) -> LintReport:
        """What an image or layer holds that would give an answer away: git objects newer than HEAD, reflogs, caches that hold one of
        `packages`, core dumps."""
        wanted = references.check_packages(tuple(_text(one, f"packages[{index}]") for index, one in enumerate(packages)))
        query: _core.Query = {"name": references.check_content_name(_text(name, "name"), "name"), "packages": ",".join(wanted) or None}
        return await self._link.call(routes.IMAGE_LINT, LintReport, query=query)

    async def verify(self, name: str) -> LintReport:
        """Read all that is here of an image or layer and compare it with its checksums; what does not match is a finding."""
        query = {"name": references.check_content_name(_text(name, "name"), "name")}
        return await self._link.call(routes.IMAGE_VERIFY, LintReport, query=query)

    async def stores(self) -> Sequence[StoreInfo]:
        """The remote stores that the edge's operator has configured."""
        return (await self._link.call(routes.STORES, StoreList)).stores

    # --- building

    async def build_events(
        self,
        name: str,
        source: Source,
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
        async with aclosing(self._events(routes.IMAGE_BUILD, _checked(fields, BuildRequest))) as events:
            async for event in events:
                yield event

    async def build(
        self,
        name: str,
        source: Source,
        *,
        kind: LayerKind = "base",
        version: str = "1",
        config: ImageConfig | None = None,
        exclude: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> ImageInfo | LayerInfo:
        """Build a layer: of a base the image `name`, of other kinds the layer `kind:name@version`. Raises Internal if the build fails."""
        events = self.build_events(name, source, kind=kind, version=version, config=config, exclude=exclude)
        last = await _last(events, progress, "build")
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

    # --- to and from elsewhere

    async def pull(
        self,
        reference: str,
        *,
        name: str = "",
        platform: str = "",
        tls_verify: bool = True,
        lazy: bool = True,
        token: str = "",
        progress: Progress | None = None,
    ) -> ImageInfo:
        """Bring an image here: from a registry (`docker://HOST/NAME:TAG`), from a file of the edge's machine (`oci:/PATH:TAG`,
        `docker-archive:/PATH`) or from a store (`store:STORE/NAME`), whose content is loaded when it is first read unless `lazy` is False.
        It is called as it is called there, without the host, unless `name` is given."""
        fields = {"reference": reference, "name": name, "platform": platform, "tls_verify": tls_verify, "lazy": lazy, "token": token}
        body = _checked(fields, PullRequest)
        references.check_pull(body, local=True)
        return await self._image(routes.IMAGE_PULL, body, progress, "pull")

    async def push(
        self, name: str, reference: str, *, tls_verify: bool = True, token: str = "", progress: Progress | None = None
    ) -> ImageInfo:
        """Send an image to a registry, a layout or an archive, as OCI layers that others can run; or to a store, as layers of ours."""
        body = _checked({"name": name, "reference": reference, "tls_verify": tls_verify, "token": token}, PushRequest)
        references.check_push(body, local=True)
        return await self._image(routes.IMAGE_PUSH, body, progress, "push")

    async def warm(self, name: str, *, trace: bool = False, progress: Progress | None = None) -> ImageInfo:
        """Load an image's content now: all of it, or with `trace` what its recorded traces say."""
        body = _checked({"name": name, "trace": trace}, WarmRequest)
        references.check_warm(body)
        return await self._image(routes.IMAGE_WARM, body, progress, "warming")

    async def trace(self, name: str, argv: Sequence[str], *, timeout_s: float = 600.0, action_id: str | None = None) -> TraceInfo:
        """Run a program in a sandbox of an image and record which content it reads, in order; a later cold start loads that first."""
        body = _checked({"name": name, "argv": argv, "timeout_s": timeout_s}, TraceRequest)
        references.check_trace(body)
        return await self._link.call(routes.IMAGE_TRACE, TraceInfo, body=body, query={"action_id": action_id})

    # --- removing

    async def remove(self, name: str, *, action_id: str | None = None) -> ImageList:
        """Forget an image or layer name; the content goes with the next `gc` if nothing else uses it. The rest that is left."""
        return await self._link.call(routes.IMAGE_REMOVE, ImageList, query={"name": name, "action_id": action_id})

    async def gc(self, *, dry_run: bool = False, grace_s: float | None = None, action_id: str | None = None) -> Collected:
        """Remove content that no name and no sandbox uses, and that is older than the grace period (an hour unless given)."""
        return await self._link.call(routes.IMAGE_GC, Collected, query={"dry_run": dry_run, "grace_s": grace_s, "action_id": action_id})

    # --- inside

    async def _events(self, route: Route, body: msgspec.Struct) -> AsyncGenerator[BuildEvent, None]:
        try:
            async with aclosing(self._link.lines(route, BuildEvent, body=body)) as events:
                async for event in events:
                    yield event
        except ConnectionBroken as error:
            raise Unavailable(str(error), data={"sent": error.sent}) from None

    async def _image(self, route: Route, body: msgspec.Struct, progress: Progress | None, what: str) -> ImageInfo:
        last = await _last(self._events(route, body), progress, what)
        if last.image is None:
            raise Internal(f"the {what} ended without naming the image")
        return last.image


async def _last(events: AsyncGenerator[BuildEvent, None], progress: Progress | None, what: str) -> BuildEvent:
    """The event with which the work ended well."""
    last: BuildEvent | None = None
    async with aclosing(events):
        async for event in events:
            last = event
            if progress is not None:
                progress(event)
    if last is None or last.kind not in ("done", "failed"):
        raise Unavailable(f"the progress of the {what} ended before the {what} did")
    if last.kind == "failed":
        raise Internal(last.message or f"the {what} failed")
    return last


def _checked(fields: Mapping[str, object], kind: type[_core.T]) -> _core.T:
    """A request whose types are right all the way down: through JSON and back, since constructors do not look at types."""
    return wire.decode(_core.encode(wire.convert(fields, kind)), kind)


def _text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"must be text, not {type(value).__name__}", field=field)
    return value
