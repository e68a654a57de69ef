# SPDX-License-Identifier: Apache-2.0
"""Handlers of the image routes. All that comes in is checked here, before anything is read or begun: this is the trust boundary."""

from __future__ import annotations

from opendsec.api.errors import InvalidRequest
from opendsec.api.images import (
    BuildRequest,
    Collected,
    ComposeRequest,
    DiffReport,
    ImageDetail,
    ImageInfo,
    ImageList,
    LintReport,
    PackRequest,
    PackResult,
    PullRequest,
    PushRequest,
    StoreList,
    TraceInfo,
    TraceRequest,
    WarmRequest,
)
from opendsec.api.references import (
    GRACE_S,
    check_content_name,
    check_image_name,
    check_packages,
    check_pull,
    check_push,
    check_trace,
    check_warm,
)
from opendsec.edge.commands import Commands
from opendsec.edge.http import Handler, Lines, Request
from opendsec.edge.node import Node
from opendsec.edge.packing import pack
from opendsec.edge.tracing import trace
from opendsec.images.build import check_config
from opendsec.images.store import GRACE_S as DEFAULT_GRACE_S


class ImageRoutes:
    """Of one node."""

    def __init__(self, node: Node, commands: Commands) -> None:
        self._node, self._commands = node, commands

    def handlers(self) -> dict[str, Handler]:
        return {
            "IMAGES": self.images,
            "IMAGE_BUILD": self.build,
            "IMAGE_COMPOSE": self.compose,
            "IMAGE_REMOVE": self.remove,
            "IMAGE_GC": self.collect,
            "IMAGE_PULL": self.pull,
            "IMAGE_PUSH": self.push,
            "IMAGE_WARM": self.warm,
            "IMAGE_TRACE": self.trace,
            "IMAGE_INSPECT": self.inspect,
            "IMAGE_DIFF": self.diff,
            "IMAGE_LINT": self.lint,
            "IMAGE_VERIFY": self.verify,
            "STORES": self.stores,
            "PACK": self.pack,
        }

    # --- what is here ----------------------------------------------------------------------------------------------------

    async def images(self, request: Request) -> ImageList:
        return await self._node.images.list()

    async def inspect(self, request: Request) -> ImageDetail:
        return await self._node.images.inspect(_name(request, "name", image=True))

    async def diff(self, request: Request) -> DiffReport:
        return await self._node.images.diff(_name(request, "a"), _name(request, "b"))

    async def lint(self, request: Request) -> LintReport:
        packages = request.text("packages")
        wanted = check_packages(tuple(packages.split(","))) if packages else ()
        return await self._node.images.lint(_name(request, "name"), wanted)

    async def verify(self, request: Request) -> LintReport:
        name = _name(request, "name")
        await request.no_body()
        return await self._node.images.verify(name)

    async def stores(self, request: Request) -> StoreList:
        return self._node.images.stores()

    # --- changing it -----------------------------------------------------------------------------------------------------

    async def build(self, request: Request) -> Lines:
        wanted = await request.json(BuildRequest)
        self._node.images.check_build(wanted, local=request.local)
        return Lines(self._node.images.build(self._node, wanted, local=request.local))

    async def compose(self, request: Request) -> ImageInfo:
        wanted = await request.json(ComposeRequest)
        if wanted.config is not None:
            check_config(wanted.config)
        request.intent.begin()
        return await self._node.images.compose(wanted)

    async def remove(self, request: Request) -> ImageList:
        name = request.text("name")
        if not name:
            raise InvalidRequest("is required", field="name")
        request.intent.begin()
        return await self._node.images.remove(name)

    async def collect(self, request: Request) -> Collected:
        dry_run, grace_s = request.flag("dry_run"), request.number("grace_s", GRACE_S)
        await request.no_body()
        request.intent.begin()
        return await self._node.collect(dry_run=dry_run, grace_s=DEFAULT_GRACE_S if grace_s is None else grace_s)

    async def pull(self, request: Request) -> Lines:
        wanted = await request.json(PullRequest)
        return Lines(self._node.images.pull(wanted, check_pull(wanted, local=request.local), local=request.local))

    async def push(self, request: Request) -> Lines:
        wanted = await request.json(PushRequest)
        return Lines(self._node.images.push(wanted, check_push(wanted, local=request.local), local=request.local))

    async def warm(self, request: Request) -> Lines:
        wanted = await request.json(WarmRequest)
        check_warm(wanted)
        return Lines(self._node.images.warm(wanted))

    # --- with a sandbox --------------------------------------------------------------------------------------------------

    async def trace(self, request: Request) -> TraceInfo:
        wanted = await request.json(TraceRequest)
        check_trace(wanted)
        return await trace(self._node, self._commands, wanted, begin=request.intent.begin)

    async def pack(self, request: Request) -> PackResult:
        wanted = await request.json(PackRequest)
        return await pack(self._node, request.params[0], wanted)  # checked, and exactly once, by itself


def _name(request: Request, parameter: str, *, image: bool = False) -> str:
    value = request.text(parameter)
    if not value:
        raise InvalidRequest("is required", field=parameter)
    return check_image_name(value, parameter) if image else check_content_name(value, parameter)
