# SPDX-License-Identifier: Apache-2.0
"""What the parts of the fake edge share: a sandbox as it keeps it, and how it reads queries and answers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import unquote_to_bytes

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from opendsec.api import exec as x
from opendsec.api import files as f
from opendsec.api import sandboxes as s
from opendsec.api import wire
from opendsec.testing.fakes.hostrun import FakeProcess, FakeShell

Handler = Callable[[Request], Awaitable[Response]]
NDJSON = "application/x-ndjson"


class FakeSession:
    def __init__(self, shell: FakeShell) -> None:
        self.shell = shell
        self.actions: dict[str, tuple[bytes, asyncio.Task[x.ExecResult]]] = {}


class FakeBox:
    """One sandbox: a directory, its commands, its shells, and what was done under which action id."""

    def __init__(self, info: s.SandboxInfo, root: Path, env: dict[str, str]) -> None:
        self.info = info
        self.root = root
        self.env = env
        self.processes: dict[str, FakeProcess] = {}
        self.sessions: dict[str, FakeSession] = {}
        self.actions: dict[str, tuple[bytes, FakeProcess]] = {}
        self.watchers: dict[bytes, set[asyncio.Queue[f.WatchEvent]]] = {}

    def path(self, raw: bytes) -> bytes:
        return os.fsencode(self.root) + b"/" + raw.lstrip(b"/")

    def tell(self, raw: bytes, kind: str) -> None:
        """Tell who watches the directory of `raw`."""
        folder, name = os.path.split(raw.rstrip(b"/"))
        event = msgspec.convert(
            {"kind": kind, "name": name.decode("utf-8", "replace"), "raw_name": name}, f.WatchEvent, builtin_types=(bytes,)
        )
        for queue in self.watchers.get(folder.rstrip(b"/"), ()):
            queue.put_nowait(event)


def query_of(request: Request) -> dict[str, bytes]:
    """Query parameters as raw bytes: names of files need not be text."""
    raw: bytes = request.scope["query_string"]
    pairs = (part.partition(b"=") for part in raw.split(b"&") if part)
    return {key.decode("ascii"): unquote_to_bytes(value.replace(b"+", b" ")) for key, _, value in pairs}


def json_answer(value: msgspec.Struct) -> Response:
    return Response(wire.encode(value), media_type="application/json")


def lines_answer(items: AsyncIterator[msgspec.Struct]) -> Response:
    async def encoded() -> AsyncGenerator[bytes, None]:
        async for item in items:
            yield wire.encode(item) + b"\n"

    return StreamingResponse(encoded(), media_type=NDJSON)
