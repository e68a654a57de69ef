# SPDX-License-Identifier: Apache-2.0
"""Recording which content a command reads: a sandbox of the edge's own, a command in it, and the loader listening meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from opendsec.api.errors import from_body
from opendsec.api.exec import Command
from opendsec.api.images import TraceInfo, TraceRequest
from opendsec.api.spec import Container, CreateRequest
from opendsec.edge.commands import Commands
from opendsec.edge.node import Node

LABEL = "opendsec-trace"


async def trace(node: Node, commands: Commands, request: TraceRequest, *, begin: Callable[[], None]) -> TraceInfo:
    """Run the command and keep what was read. Raises NotFound, Unsupported, and whatever creating a sandbox raises."""
    image = await node.images.image(request.name)
    begin()
    spec = Container(image=request.name, labels={LABEL: "1"}, ttl_s=request.timeout_s + 120)
    slot = (await node.create(CreateRequest(spec=spec))).slots[0]
    if slot.sandbox is None:
        assert slot.error is not None
        raise from_body(slot.error)
    sandbox_id = slot.sandbox.id
    try:
        result = await commands.run(sandbox_id, Command(argv=request.argv, timeout_s=request.timeout_s, capture_bytes=0))
    finally:
        await node.kill(sandbox_id, message="its trace is complete")
    return TraceInfo(name=image.name, chunks=0, bytes=0, exit_code=result.exit_code)
