# SPDX-License-Identifier: Apache-2.0
"""Machines of the fake edge: paused in name only, copied by their directories, with a screen that is black."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from opendsec.api import sandboxes as s
from opendsec.api import screen as c
from opendsec.api import snapshots as n
from opendsec.api import wire
from opendsec.api.errors import Conflict, InvalidRequest, NotFound, Unsupported
from opendsec.api.ids import SANDBOX, SNAPSHOT, new_id
from opendsec.api.spec import VM, AnySpec, Machine
from opendsec.testing.fakes.edge_parts import FakeBox, Handler, json_answer
from opendsec.testing.fakes.machines import MEMORY, FakeScreen

QUIET = frozenset({"GET", "USAGE", "KILL", "PAUSE", "RESUME", "PROCESSES", "PROCESS"})  # these leave a paused sandbox paused


class MachineRoutes:
    """Handlers, and what they keep. `add`: takes up a new sandbox."""

    def __init__(self, box: Callable[[Request], FakeBox], add: Callable[[FakeBox], None], folder: Callable[[], Path]) -> None:
        self._box, self._add, self._folder = box, add, folder
        self.snapshots: dict[str, n.SnapshotInfo] = {}
        self.screens: dict[str, FakeScreen] = {}
        self._done: dict[str, tuple[bytes, msgspec.Struct]] = {}  # by action id
        self._tickets: dict[str, str] = {}

    def handlers(self) -> dict[str, Handler]:
        return {
            "PAUSE": self._pause,
            "RESUME": self._resume,
            "FORK": self._fork,
            "SNAPSHOT": self._snapshot,
            "SNAPSHOTS": self._list,
            "SNAPSHOT_REMOVE": self._remove,
            "SCREEN": self._png,
            "SCREEN_SIZE": self._size,
            "SCREEN_RESIZE": self._resize_screen,
            "INPUT": self._input,
            "VNC": self._ticket,
            "VNC_STREAM": self._vnc,
        }

    def base(self, spec: AnySpec) -> Path | None:
        """What a new sandbox begins as."""
        if not isinstance(spec, Machine) or not spec.snapshot:
            return None
        found = self._find(spec.snapshot, "snapshot")
        if spec.image != found.image:
            raise InvalidRequest(f"must be {found.image!r}, as of the sandbox that the snapshot was made of", field="image")
        if spec.limits() != found.limits:
            raise InvalidRequest("must be as of the sandbox that the snapshot was made of", field="memory")
        return self._folder() / found.id

    def _find(self, name: str, field: str) -> n.SnapshotInfo:
        found = self.snapshots.get(name) or next((one for one in self.snapshots.values() if one.id == name), None)
        if found is None:
            raise NotFound(f"no snapshot {name!r}", field=field)
        return found

    def _machine(self, request: Request, what: str) -> FakeBox:
        box = self._box(request)
        if box.info.backend == "container":
            raise Unsupported(f"containers {what}", field="sandbox_id")
        return box

    async def _pause(self, request: Request) -> Response:
        box = self._machine(request, "cannot be paused")
        box.info = replace(box.info, state="paused")
        return json_answer(box.info)

    async def _resume(self, request: Request) -> Response:
        box = self._box(request)
        box.info = replace(box.info, state="running")
        return json_answer(box.info)

    def _before(self, action_id: str | None, raw: bytes) -> Response | None:
        if action_id is None or action_id not in self._done:
            return None
        before, answer = self._done[action_id]
        if before != raw:
            raise Conflict("this action id was used for another request", field="action_id")
        return json_answer(answer)

    async def _fork(self, request: Request) -> Response:
        raw = await request.body()
        asked = wire.decode(raw, n.ForkRequest)
        asked.check()
        if answer := self._before(asked.action_id, raw):
            return answer
        box = self._machine(request, "cannot be copied")
        slots = []
        for _ in range(asked.count):
            box_id = new_id(SANDBOX)
            root = box.root.parent / box_id
            shutil.copytree(box.root, root, symlinks=True)
            info = replace(box.info, id=box_id, origin=box.info.id, created_at=time.time())
            self._add(FakeBox(info, root, box.env))
            slots.append(s.Slot(sandbox=info))
        made = s.CreateResponse(tuple(slots))
        if asked.action_id is not None:
            self._done[asked.action_id] = (raw, made)
        return json_answer(made)

    async def _snapshot(self, request: Request) -> Response:
        raw = await request.body()
        asked = wire.decode(raw, n.SnapshotRequest)
        asked.check()
        if answer := self._before(asked.action_id, raw):
            return answer
        box = self._machine(request, "have no snapshots")
        snapshot_id = new_id(SNAPSHOT)
        name = asked.name or snapshot_id
        if name in self.snapshots:
            raise Conflict(f"there is a snapshot {name!r} already", field="name")
        place = self._folder() / snapshot_id
        shutil.copytree(box.root, place, symlinks=True)
        if not asked.memory:
            shutil.rmtree(place / MEMORY, ignore_errors=True)
        spec = box.info.spec
        info = self.snapshots[name] = n.SnapshotInfo(
            id=snapshot_id,
            name=name,
            backend=box.info.backend,
            sandbox_id=box.info.id,
            memory=asked.memory,
            image=box.info.image,
            layers=box.info.layers,
            limits=box.info.limits,
            stored_bytes=1,
            created_at=time.time(),
            spec=replace(spec, snapshot=name) if isinstance(spec, Machine) else None,
        )
        if asked.action_id is not None:
            self._done[asked.action_id] = (raw, info)
        return json_answer(info)

    async def _list(self, request: Request) -> Response:
        return json_answer(n.SnapshotList(tuple(self.snapshots.values())))

    async def _remove(self, request: Request) -> Response:
        found = self._find(str(request.path_params["name"]), "name")
        del self.snapshots[found.name]
        shutil.rmtree(self._folder() / found.id)
        return await self._list(request)

    # --- screen

    def _screen(self, request: Request) -> FakeScreen:
        box = self._box(request)
        pixels = box.info.spec.pixels() if isinstance(box.info.spec, VM) else None
        if pixels is None:
            raise Unsupported("it has no screen", field="sandbox_id")
        return self.screens.setdefault(box.info.id, FakeScreen(*pixels))

    def _size_of(self, screen: FakeScreen) -> Response:
        return json_answer(c.ScreenSize(width=screen.size[0], height=screen.size[1]))

    async def _png(self, request: Request) -> Response:
        return Response(await self._screen(request).png(), media_type="image/png")

    async def _size(self, request: Request) -> Response:
        return self._size_of(self._screen(request))

    async def _resize_screen(self, request: Request) -> Response:
        asked = wire.decode(await request.body(), c.ScreenSize)
        asked.check()
        screen = self._screen(request)
        await screen.resize(asked.width, asked.height)
        return self._size_of(screen)

    async def _input(self, request: Request) -> Response:
        asked = wire.decode(await request.body(), c.InputRequest)
        asked.check()
        screen = self._screen(request)
        screen.done += [msgspec.structs.astuple(event) for event in asked.events]
        return self._size_of(screen)

    async def _ticket(self, request: Request) -> Response:
        self._screen(request)
        token = secrets.token_urlsafe(8)
        self._tickets[token] = self._box(request).info.id
        return json_answer(c.VncTicket(token=token, expires_at=time.time() + 60))

    async def _vnc(self, request: Request) -> Response:
        if self._tickets.pop(str(request.path_params["token"]), None) is None:
            raise NotFound("no such ticket", field="token")
        return _Echo()


class _Echo(Response):
    """A VNC server that greets, and then says again what it hears, as it hears it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"RFB 003.008\n", "more_body": True})
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            more = message.get("more_body", False)
            await send({"type": "http.response.body", "body": message.get("body", b""), "more_body": more})
