# SPDX-License-Identifier: Apache-2.0
"""One handler for each route of the contract. Handlers check, ask the node, and return what is to be sent; `asgi` sends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import msgspec

from opendsec.api.errors import InvalidRequest, NotFound
from opendsec.api.ids import check_action_id
from opendsec.api.sandboxes import (
    Capabilities,
    CreateResponse,
    EdgeInfo,
    Event,
    Feature,
    SandboxInfo,
    SandboxList,
    SandboxState,
    Usage,
)
from opendsec.api.snapshots import ForkRequest, SnapshotInfo, SnapshotList, SnapshotRequest
from opendsec.api.spec import CreateRequest
from opendsec.edge import pausing
from opendsec.edge.commands import Commands
from opendsec.edge.fn.routes import FnRoutes, Functions
from opendsec.edge.http import Handler, Lines, Request, Router
from opendsec.edge.lifecycle import LIVING
from opendsec.edge.node import Node
from opendsec.edge.once import exactly_once
from opendsec.edge.serve_exec import ExecRoutes
from opendsec.edge.serve_files import FileRoutes
from opendsec.edge.serve_images import ImageRoutes
from opendsec.edge.serve_screen import ScreenRoutes
from opendsec.policy import POLICIES

STATES: frozenset[SandboxState] = LIVING | {"stopped", "lost"}
PAGE = 500  # stored events read at once


class NodeRoutes:
    """Handlers about the edge itself and its sandboxes."""

    def __init__(self, node: Node, features: Sequence[Feature], functions: Functions) -> None:
        self._node, self._features, self._functions = node, tuple(features), functions

    def handlers(self) -> dict[str, Handler]:
        return {
            "INFO": self.info,
            "CAPABILITIES": self.capabilities,
            "EVENTS": self.events,
            "DRAIN": self.drain,
            "SHUTDOWN": self.shutdown,
            "CREATE": self.create,
            "LIST": self.list,
            "GET": self.get,
            "USAGE": self.usage,
            "KILL": self.kill,
            "PAUSE": self.pause,
            "RESUME": self.resume,
            "FORK": self.fork,
            "SNAPSHOT": self.snapshot,
            "SNAPSHOTS": self.snapshots,
            "SNAPSHOT_REMOVE": self.remove_snapshot,
        }

    # --- the edge --------------------------------------------------------------------------------------------------------

    async def info(self, request: Request) -> EdgeInfo:
        return self._node.info()

    async def capabilities(self, request: Request) -> Capabilities:
        backends = {name: backend.capabilities() for name, backend in self._node.backends.items()}
        return Capabilities(backends=backends | self._functions.capabilities(), features=self._features)

    async def events(self, request: Request) -> Lines:
        after = request.integer("after", (0, 1 << 62)) or 0
        return Lines(self.follow(after, request.text("sandbox_id"), request.flag("follow")))

    async def follow(self, after: int, sandbox_id: str | None, follow: bool) -> AsyncGenerator[Event, None]:
        """Events numbered above `after`; with `follow` also those to come, without gap or repetition in between."""
        node = self._node
        with node.events.subscribe(sandbox_id=sandbox_id) as subscription:
            last = node.events.seq  # from here on the subscription tells
            node.flush()
            while page := node.journal.events(after=after, sandbox_id=sandbox_id, limit=PAGE):
                for event in page:
                    if event.seq > last:
                        break
                    yield event
                after = page[-1].seq
                if after >= last:
                    break
            if follow:
                async for event in subscription:
                    yield event

    async def drain(self, request: Request) -> EdgeInfo:
        await request.no_body()
        request.intent.begin()
        self._node.drain()
        return self._node.info()

    async def shutdown(self, request: Request) -> EdgeInfo:
        kill = request.flag("kill")
        await request.no_body()
        request.intent.begin()
        self._node.drain()
        if kill:
            await self._node.kill_all("the edge was shut down")
        # The answer first: whoever asked wants to hear that it is done.
        asyncio.get_running_loop().call_soon(self._node.on_shutdown)
        return self._node.info()

    # --- sandboxes -------------------------------------------------------------------------------------------------------

    async def create(self, request: Request) -> CreateResponse:
        wanted = await request.json(CreateRequest)
        if wanted.spec.policy not in POLICIES:
            wanted.spec.check()
            # Never ignored: whoever names a policy counts on what it forbids.
            raise NotFound(f"no policy {wanted.spec.policy!r}; policies here: {', '.join(POLICIES)}", field="policy")
        return await self._node.create(wanted)

    async def list(self, request: Request) -> SandboxList:
        """Living ones unless `state` names another state or `all`. `label`: `key` or `key=value`."""
        state, label = request.text("state"), request.text("label")
        states = LIVING
        if state is not None and state != "all":
            states = frozenset(name for name in STATES if name == state)
            if not states:
                raise InvalidRequest(f"must be one of {', '.join(sorted(STATES))}, all", field="state")
        elif state == "all":
            states = STATES
        wanted = None
        if label is not None:
            key, equals, value = label.partition("=")
            if not key:
                raise InvalidRequest("must be a key, or key=value", field="label")
            wanted = (key, value if equals else None)
        return SandboxList(tuple(self._node.list(states, wanted)))

    async def get(self, request: Request) -> SandboxInfo:
        return self._node.box(request.params[0]).info()

    async def usage(self, request: Request) -> Usage:
        box = self._node.box(request.params[0])
        if box.state.phase == "paused":  # looking at it does not wake it
            used = box.used or Usage()
            return msgspec.structs.replace(used, memory_bytes=0, pids=0)
        _, handle = self._node.running(request.params[0])
        return handle.usage()

    async def kill(self, request: Request) -> SandboxInfo:
        action_id = request.text("action_id")
        if action_id is not None:
            check_action_id(action_id)
        await request.no_body()
        return await self._node.kill(request.params[0], action_id=action_id)

    # --- pause, copies ---------------------------------------------------------------------------------------------------

    async def pause(self, request: Request) -> SandboxInfo:
        await request.no_body()
        return await pausing.pause(self._node, request.params[0], begin=request.intent.begin)

    async def resume(self, request: Request) -> SandboxInfo:
        await request.no_body()
        return await pausing.resume(self._node, request.params[0], begin=request.intent.begin)

    async def fork(self, request: Request) -> CreateResponse:
        return await self._node.snapshots.fork(request.params[0], await request.json(ForkRequest))

    async def snapshot(self, request: Request) -> SnapshotInfo:
        return await self._node.snapshots.make(request.params[0], await request.json(SnapshotRequest))

    async def snapshots(self, request: Request) -> SnapshotList:
        return self._node.snapshots.list()

    async def remove_snapshot(self, request: Request) -> SnapshotList:
        await request.no_body()
        self._node.snapshots.get(request.params[0], "name")
        request.intent.begin()
        return await self._node.snapshots.remove(request.params[0])


class Routes:
    """The router of one node, and what stands behind it. To be closed after the last request."""

    def __init__(self, node: Node, features: Sequence[Feature] = (), functions: Functions | None = None) -> None:
        functions = functions or Functions(node, None, Path())
        self._files, self.commands = FileRoutes(node), Commands(node)
        self.node_routes = NodeRoutes(node, features, functions)
        handlers = self.node_routes.handlers() | ExecRoutes(node, self.commands).handlers() | self._files.handlers()
        handlers |= ScreenRoutes(node).handlers()
        handlers |= ImageRoutes(node, self.commands).handlers() | FnRoutes(functions).handlers()
        self.router = Router(exactly_once(node.actions, handlers))

    async def close(self) -> None:
        self._files.close()
        await self.commands.close()
