# SPDX-License-Identifier: Apache-2.0
"""Packing: what a sandbox has written becomes a layer, and with what is below it an image, while the sandbox goes on.

freeze, snapshot, thaw      milliseconds (the handle does it)
scrub, convert, publish     from the snapshot, by a worker process
lint                        the layers together, as a new sandbox would see them
name                        the layer, then the image: only a finished one has a name
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from opendsec.api import wire
from opendsec.api.errors import Conflict, InvalidRequest, NotFound
from opendsec.api.images import Finding, ImageConfig, ImageInfo, LayerInfo, LayerKind, PackRequest, PackResult
from opendsec.api.references import pack_names
from opendsec.api.spec import Limits
from opendsec.edge.actions import Action, request_digest
from opendsec.edge.box import Box
from opendsec.edge.pausing import awake
from opendsec.images import lint
from opendsec.images.build import make_layer
from opendsec.images.names import LayerName
from opendsec.images.process import Progress
from opendsec.images.scrub import Scrub
from opendsec.images.store import MAX_LAYERS, ImageStore
from opendsec.images.upper import UpperSource
from opendsec.images.waiting import in_thread
from opendsec.runtime.backend import Handle

if TYPE_CHECKING:
    from opendsec.edge.node import Node

SPARSE = 4  # the files of a layer may seem to hold so many times what the sandbox's disk can; reading zeros takes time as well
SPARSE_BYTES = 1 << 30


async def pack(node: Node, sandbox_id: str, request: PackRequest) -> PackResult:
    """Make a layer of what the sandbox has written. Raises InvalidRequest, NotFound, SandboxLost, Conflict (with `fail_on_warnings`),
    QuotaExceeded, Unsupported, Unavailable. Cancelled or failed it leaves nothing, and the sandbox runs."""
    plain, version = pack_names(request)
    name, image_name = LayerName(request.kind, plain, version), f"{plain}:{version}"
    node.box(sandbox_id)  # it may have ended since it was packed: a repeated action id gets what was recorded

    async def work(action: Action[PackResult]) -> PackResult:
        box = node.box(sandbox_id)
        if len(box.template.layers) >= MAX_LAYERS:
            raise InvalidRequest(f"the sandbox has {MAX_LAYERS} layers already, and no sandbox may have more", field="name")
        async with awake(node, sandbox_id) as (box, handle):
            action.begin("", node.clock.time())
            with node.images.store.at_work(box.template.layers):
                return await _pack(node, box, handle, request, name, image_name)

    return await node.actions.once(
        request.action_id,
        work,
        result=PackResult,
        kind="pack",
        digest=lambda: request_digest("pack", sandbox_id.encode(), wire.encode(request)),
        sandbox_id=sandbox_id,
    )


async def _pack(node: Node, box: Box, handle: Handle, request: PackRequest, name: LayerName, image_name: str) -> PackResult:
    store = node.images.store
    scrubbed: list[Finding] = []
    scrub = Scrub(rules=request.scrub, more=request.scrub_paths, keep=request.keep_paths)
    layer, frozen_ms = await layer_of(
        store, handle, box.template.layers, limits=box.template.limits, kind=request.kind, scrub=scrub, scrubbed=scrubbed
    )
    # A layer that is there already, lower down, would hide nothing there that it hides on top.
    digests = [*(digest for digest in box.template.layers if digest != layer.digest), layer.digest]
    config = await _config(node, box)
    warnings = await in_thread(lint.lint_layers, store, digests, request.packages, of=layer.digest)
    if warnings and request.fail_on_warnings:
        raise Conflict(
            f"{len(warnings)} warnings, the first one: {warnings[0].message}: {warnings[0].path!r}",
            field="fail_on_warnings",
            data={"warnings": len(warnings), "rule": warnings[0].rule, "path": warnings[0].path},
        )

    def publish() -> tuple[LayerInfo, ImageInfo]:
        return store.name_layer(name, layer.digest), store.name_image(image_name, digests, config)

    named, image = await in_thread(publish)
    node.images.forget()
    node.events.emit("sandbox.packed", box.id, layer=str(name), digest=layer.digest, image=image_name, frozen_ms=round(frozen_ms, 3))
    return PackResult(image=image, layer=named, scrubbed=tuple(scrubbed), warnings=tuple(warnings), frozen_ms=frozen_ms)


async def layer_of(
    store: ImageStore,
    handle: Handle,
    below: tuple[str, ...],
    *,
    limits: Limits,
    kind: LayerKind,
    scrub: Scrub | None,
    scrubbed: list[Finding] | None = None,
    progress: Progress = lambda event: None,
) -> tuple[LayerInfo, float]:
    """A published, nameless layer of what a sandbox has written, and for how many milliseconds it stood still."""
    lower = await asyncio.to_thread(lambda: [store.layer_ref(digest) for digest in below])
    snapshot = await handle.snapshot_disk()
    try:
        source = UpperSource(
            path=str(snapshot.upper),
            aside=str(snapshot.aside),
            uid_base=snapshot.uid_base,
            lower=tuple((str(layer.meta), str(layer.data)) for layer in lower),
            max_bytes=SPARSE * limits.disk_bytes + SPARSE_BYTES,
            scrub=scrub,
        )
        found = (lambda finding: None) if scrubbed is None else scrubbed.append
        return await make_layer(store, source, kind, progress=progress, found=found), snapshot.frozen_ms
    finally:
        await snapshot.release()


async def _config(node: Node, box: Box) -> ImageConfig:
    """The image's own, not with what the spec added: that may be secrets of one sandbox."""
    template = box.template
    try:
        return (await node.images.resolve(template.spec.image, ())).config
    except NotFound:
        env = {key: value for key, value in template.env.items() if key not in template.spec.env}
        return ImageConfig(env=env, user=template.user, workdir=template.workdir)
