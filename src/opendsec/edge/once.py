# SPDX-License-Identifier: Apache-2.0
"""Action ids in queries: one wrapper makes the handlers of all such routes run exactly once, as `actions` describes.

What makes two requests the same: route, path parameters, query and body. Of a raw body that is longer than HELD_BYTES, or whose length
is not announced, only the length counts: it streams through, and nobody keeps what a repetition would have to be compared with.

A handler tells by `request.intent.begin()` when its side effect comes; what it refused before leaves no record. Of these actions the
outcome of one that a dead edge had begun is Unavailable with `data["outcome"] == "unknown"` (see `reconcile`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from opendsec.api import wire
from opendsec.api.ids import check_action_id
from opendsec.api.routes import ROUTES
from opendsec.edge.actions import Action, Actions, request_digest
from opendsec.edge.http import Answer, Handler, Request

HELD_BYTES = 1 << 20  # of a raw body; also taken whole before any of it is passed on, so that a broken connection breaks nothing
OWN = frozenset({"KILL", "WRITE"})  # these tell more of an earlier action than was recorded: the state as it is now; another content
FREEING = frozenset({"IMAGE_REMOVE", "IMAGE_GC", "SNAPSHOT_REMOVE", "SHUTDOWN"})  # must work on a full disk, and may well be done twice
ENDLESS = frozenset({"STDIN"})  # takes as long as the command lets its input wait


class Nothing(msgspec.Struct, frozen=True):
    """The result of a route that answers without content."""


def exactly_once(actions: Actions, handlers: Mapping[str, Handler]) -> dict[str, Handler]:
    """`handlers`, those of routes with an `action_id` in their query wrapped."""
    return {
        name: _once(actions, name, handler) if "action_id" in ROUTES[name].query and name not in OWN else handler
        for name, handler in handlers.items()
    }


def _once(actions: Actions, name: str, handler: Handler) -> Handler:
    route = ROUTES[name]
    kind, result = name.lower(), route.response or Nothing
    most = wire.MAX_BODY_BYTES if route.request is not None else HELD_BYTES

    async def call(request: Request) -> Answer:
        action_id = request.text("action_id")
        if action_id is None:
            return await handler(request)
        check_action_id(action_id)
        body = await request.hold(most)
        digest = _digest(kind, request, body)
        ran = False

        async def work(action: Action[msgspec.Struct]) -> msgspec.Struct:
            nonlocal ran
            ran = True
            action.frees = name in FREEING
            request.intent = action
            answer = await handler(request)
            if not action.begun:
                action.begin()
            if answer is None:
                return Nothing()
            assert isinstance(answer, msgspec.Struct)
            return answer

        answer = await actions.once(
            action_id,
            work,
            result=result,
            kind=kind,
            digest=lambda: digest,
            sandbox_id=request.params[0] if "{sandbox_id}" in route.path else None,
            outlived=name in ENDLESS,
        )
        if not ran:
            async for _ in request.chunks():  # the client sends all of it before it looks for an answer
                pass
        return None if route.response is None else answer

    return call


def _digest(kind: str, request: Request, body: bytes | None) -> bytes:
    parts = [param.encode() for param in request.params]
    for name, value in sorted(request.query.items()):
        if name != "action_id":
            parts += (name.encode(), value)
    content = repr(request.length).encode() if body is None else hashlib.sha256(body).digest()
    return request_digest(kind, b"%d" % len(request.params), *parts, content)
