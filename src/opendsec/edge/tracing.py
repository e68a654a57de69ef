# SPDX-License-Identifier: Apache-2.0
"""Recording which content a command reads: a sandbox over copies of the layers, and the loader listening to what is read of them.

A mount of the layers themselves would tell little: what others have read already is in the page cache, and nobody asks for it again.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from opendsec.api.errors import InvalidRequest, Unsupported, from_body
from opendsec.api.exec import Command, ExecResult
from opendsec.api.images import TraceInfo, TraceRequest
from opendsec.api.spec import Container, CreateRequest
from opendsec.edge.commands import Commands
from opendsec.edge.node import Node
from opendsec.images.layers import LayerRef
from opendsec.images.lazy.client import Loader
from opendsec.images.store import Resolved

DISK_BYTES = 1 << 30
LABEL = "opendsec.trace"
ROOM_S = 120.0  # for creating the sandbox and ending it; beyond the command's own time-out its sandbox is gone in any case


async def trace(node: Node, commands: Commands, request: TraceRequest, *, begin: Callable[[], None]) -> TraceInfo:
    """Run the command and keep what was read with the image. Raises NotFound, Unsupported, InvalidRequest if the command does not end by
    itself, and whatever creating a sandbox raises."""
    images = node.images
    ref = await asyncio.to_thread(images.store.image, request.name)
    if images.loading is None:
        raise Unsupported("this edge loads nothing on demand, so there is nothing to record")
    if images.loading.mechanism == "eager":
        raise Unsupported("this machine downloads images whole, so there is nothing to record; `dsec doctor` says why")
    begin()
    loader, name = await images.loading.loader(), f"t{secrets.token_hex(8)}"
    try:
        layers = [await _copy(node, loader, name, digest) for digest in dict.fromkeys(ref.layers)]
        resolved = Resolved(image=request.name, config=ref.config, layers=tuple(layers))
        with images.pinned(name, resolved):
            result = await _run(node, commands, name, request)
    except BaseException:
        await _stop(loader, name, ref.layers, keep=False)
        raise
    finally:
        for backend in node.backends.values():
            await backend.unmount_unused()  # the copies' mounts; nobody else has them
    ended = result.outcome == "exited"
    entries = await _stop(loader, name, ref.layers, keep=ended)
    if not ended:  # what it would have read is not known
        why = result.outcome.replace("_", " ") + (f": {result.message}" if result.message else "")
        field = "timeout_s" if result.outcome == "timed_out" else "argv"
        raise InvalidRequest(f"nothing was kept, for the command did not end by itself: {why}", field=field)
    chunks, size = sum(one[0] for one in entries), sum(one[1] for one in entries)
    images.emit("image.traced", image=request.name, chunks=chunks, bytes=size)
    return TraceInfo(name=request.name, chunks=chunks, bytes=size, exit_code=result.exit_code)


async def _copy(node: Node, loader: Loader, name: str, digest: str) -> LayerRef:
    layer = await asyncio.to_thread(node.images.store.layer_ref, digest)
    return LayerRef(f"{digest}+{name}", layer.meta, await loader.start_trace(name, digest))


async def _run(node: Node, commands: Commands, image: str, request: TraceRequest) -> ExecResult:
    most = node.policy.max_disk_bytes or node.policy.disk_bytes or DISK_BYTES
    spec = Container(image=image, disk=min(DISK_BYTES, most), labels={LABEL: image}, ttl_s=request.timeout_s + ROOM_S)
    slot = (await node.create(CreateRequest(spec=spec))).slots[0]
    if slot.sandbox is None:
        assert slot.error is not None
        raise from_body(slot.error)
    try:
        return await commands.run(slot.sandbox.id, Command(argv=request.argv, timeout_s=request.timeout_s, capture_bytes=0))
    finally:
        await node.kill(slot.sandbox.id, message="what it read has been recorded")


async def _stop(loader: Loader, name: str, digests: tuple[str, ...], *, keep: bool) -> list[tuple[int, int]]:
    """Chunks and bytes that were read of each layer."""
    stopped = [await loader.stop_trace(name, digest, keep=keep) for digest in dict.fromkeys(digests)]
    return [(len(one.chunks), one.bytes) for one in stopped]
