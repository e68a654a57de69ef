# SPDX-License-Identifier: Apache-2.0
"""A fake edge: the whole route table on an ASGI app, with plain directories for sandboxes and plain processes for commands.

Nothing is isolated: a path inside is a path beneath a temporary directory, and a command runs on this machine with its working
directory there. It passes the client's contract suite and needs no privilege, no image and no kernel feature.

    with FakeEdge() as edge:                 # serves on a unix socket, from a thread of its own
        client = Client(f"unix:{edge.socket_path}")
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from types import TracebackType

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from opendsec.api import exec as x
from opendsec.api import sandboxes as s
from opendsec.api import wire
from opendsec.api.errors import Conflict, NotFound, OpenDSecError, QuotaExceeded, Unauthorized, Unavailable
from opendsec.api.ids import EDGE, SANDBOX, SESSION, check_action_id, new_id
from opendsec.api.routes import ROUTES
from opendsec.api.spec import CreateRequest, check_integer
from opendsec.testing.fakes.edge_files import FileRoutes
from opendsec.testing.fakes.edge_fn import FnRoutes
from opendsec.testing.fakes.edge_images import ImageRoutes
from opendsec.testing.fakes.edge_machines import QUIET, MachineRoutes
from opendsec.testing.fakes.edge_parts import FakeBox, FakeSession, Handler, json_answer, lines_answer, query_of
from opendsec.testing.fakes.hostrun import FakeProcess, FakeShell
from opendsec.testing.fakes.machines import MEMORY


class FakeEdge:
    """Use as a context manager. `images`: names that exist. `memory_limit_bytes`: what may be promised in all."""

    def __init__(self, *, memory_limit_bytes: int = 64 << 30, images: tuple[str, ...] = ("debian", "python:3.12"), token: str = "") -> None:
        self.memory_limit_bytes = memory_limit_bytes
        self.token = token
        self.edge_id = new_id(EDGE)
        self.boxes: dict[str, FakeBox] = {}
        self.gone: dict[str, s.SandboxInfo] = {}
        self.images = ImageRoutes(images, self._box)
        self.fn = FnRoutes()
        self.machines = MachineRoutes(self._box, self._add, lambda: self._folder)
        self.requests: list[str] = []  # names of the routes that were called, in order
        self.failures: list[tuple[str, OpenDSecError]] = []  # what the next calls of a route raise instead of doing their work
        self._draining = False
        self._creates: dict[str, tuple[bytes, s.CreateResponse]] = {}
        self._actions: dict[str, tuple[tuple[object, ...], asyncio.Task[Response]]] = {}  # of routes with the id in their query
        self._log: list[s.Event] = []
        self._happened = asyncio.Event()
        self._folder = Path(tempfile.mkdtemp(prefix="fake-edge-"))
        self.socket_path = self._folder / "edge.sock"
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    # --- serving

    def app(self) -> Starlette:
        handlers = {**FileRoutes(self._box).handlers(), **self.images.handlers(), **self.fn.handlers(), **self.machines.handlers()}
        routes = [
            Route(route.path, self._guarded(name, handlers.get(name) or getattr(self, f"_{name.lower()}")), methods=[route.method])
            for name, route in sorted(ROUTES.items(), key=lambda item: item[1].path.count("{"))
        ]
        return Starlette(routes=routes)

    def __enter__(self) -> FakeEdge:
        # Not uvloop: away from the main thread its children's ends get lost now and then.
        config = uvicorn.Config(
            self.app(), uds=str(self.socket_path), loop="asyncio", log_level="error", lifespan="off", timeout_graceful_shutdown=2
        )
        self._server = _Server(config, self._close)
        self._thread = threading.Thread(target=self._server.run, name="fake-edge")
        self._thread.start()
        if not self._server.ready.wait(30):
            raise Unavailable("the fake edge did not start")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join()
        shutil.rmtree(self._folder)

    async def _close(self) -> None:
        for box in list(self.boxes.values()):
            await self._end(box)

    def _guarded(self, name: str, handler: Handler) -> Handler:
        async def call(request: Request) -> Response:
            self.requests.append(name)
            try:
                for failure in self.failures:
                    if failure[0] == name:
                        self.failures.remove(failure)
                        raise failure[1]
                if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
                    raise Unauthorized("no token, or a wrong one")
                self._wake(name, request)
                return await self._once(name, handler, request)
            except OpenDSecError as error:
                return Response(wire.encode_error(error), status_code=error.status, media_type="application/json")

        return call

    async def _once(self, name: str, handler: Handler, request: Request) -> Response:
        """The answer of `handler`, or the earlier one to the request's action id. A refusal leaves the id free."""
        query = query_of(request)
        given = query.pop("action_id", None)
        if given is None or "action_id" not in ROUTES[name].query:
            return await handler(request)
        action_id = check_action_id(given.decode("utf-8", "replace"))
        asked = (name, request.url.path, query, await request.body())
        if action_id not in self._actions:
            self._actions[action_id] = (asked, asyncio.ensure_future(handler(request)))
        before, answering = self._actions[action_id]
        if before != asked:
            raise Conflict("this action id was used for another request", field="action_id")
        try:
            return await asyncio.shield(answering)
        except OpenDSecError:
            self._actions.pop(action_id, None)
            raise

    def _wake(self, name: str, request: Request) -> None:
        box = self.boxes.get(str(request.path_params.get("sandbox_id")))
        if box is not None and box.info.state == "paused" and name not in QUIET:
            box.info = msgspec.structs.replace(box.info, state="running")

    def _add(self, box: FakeBox) -> None:
        self.boxes[box.info.id] = box
        self._emit("sandbox.created", box.info.id)

    def _box(self, request: Request) -> FakeBox:
        box_id = str(request.path_params["sandbox_id"])
        if box_id not in self.boxes:
            raise NotFound(f"no sandbox {box_id}", field="sandbox_id")
        return self.boxes[box_id]

    def _emit(self, kind: str, sandbox_id: str | None = None) -> None:
        self._log.append(s.Event(seq=len(self._log) + 1, at=time.time(), kind=kind, sandbox_id=sandbox_id))
        happened, self._happened = self._happened, asyncio.Event()
        happened.set()

    # --- the edge itself

    def _edge_info(self) -> s.EdgeInfo:
        return s.EdgeInfo(
            edge_id=self.edge_id,
            version="fake",
            api=wire.API_GENERATION,
            state="draining" if self._draining else "ready",
            pid=os.getpid(),
            started_at=0.0,
            sandboxes=len(self.boxes),
            memory_promised_bytes=self._promised(),
            memory_limit_bytes=self.memory_limit_bytes,
            disk_promised_bytes=0,
            disk_limit_bytes=0,
            scratch_driver="directory",
        )

    def _promised(self) -> int:
        return sum(box.info.limits.memory_bytes for box in self.boxes.values() if box.info.state != "paused")

    async def _info(self, request: Request) -> Response:
        return json_answer(self._edge_info())

    async def _capabilities(self, request: Request) -> Response:
        can = (s.Capability(name="exec", available=True), s.Capability(name="isolation", available=False, reason="this is a fake"))
        feature = s.Feature(name="fake", present=True, needed_for="tests", without_it="no tests")
        machine = tuple(s.Capability(name=name, available=True) for name in ("create", "pause", "fork", "snapshot"))
        return json_answer(s.Capabilities(backends={"container": can, "microvm": machine, "vm": machine}, features=(feature,)))

    async def _events(self, request: Request) -> Response:
        query = query_of(request)
        after, follow, only = int(query.get("after", b"0")), query.get("follow") == b"1", query.get("sandbox_id", b"").decode()

        async def lines() -> AsyncGenerator[s.Event, None]:
            at = after
            while True:
                happened = self._happened
                for event in self._log[at:]:
                    at = event.seq
                    if not only or event.sandbox_id == only:
                        yield event
                if not follow:
                    return
                await happened.wait()

        return lines_answer(lines())

    async def _drain(self, request: Request) -> Response:
        self._draining = True
        return json_answer(self._edge_info())

    async def _shutdown(self, request: Request) -> Response:
        if query_of(request).get("kill") == b"1":
            await self._close()
        return json_answer(self._edge_info())

    # --- sandboxes

    async def _create(self, request: Request) -> Response:
        raw = await request.body()
        asked = wire.decode(raw, CreateRequest)
        check_integer(asked.count, "count", (1, 32_000))
        limits = asked.spec.check()
        if asked.action_id is not None and check_action_id(asked.action_id) in self._creates:
            before, answer = self._creates[asked.action_id]
            if before != raw:
                raise Conflict("this action id was used for another request", field="action_id")
            return json_answer(answer)
        if self._draining:
            raise Unavailable("the edge is draining")
        if asked.spec.image not in self.images.images:
            raise NotFound(f"no image {asked.spec.image!r}", field="image")
        digests = self.images.digests(asked.spec.layers)
        base = self.machines.base(asked.spec)
        slots = []
        for _ in range(asked.count):
            if self._promised() + limits.memory_bytes > self.memory_limit_bytes:
                error = QuotaExceeded("more memory than may be promised", data={"resource": "memory"})
                slots.append(s.Slot(error=error.body()))
                continue
            box_id = new_id(SANDBOX)
            root = self._folder / box_id
            if base is not None:
                shutil.copytree(base, root, symlinks=True)
            for place in ("tmp", MEMORY):
                (root / place).mkdir(parents=True, exist_ok=True)
            info = s.SandboxInfo(
                id=box_id,
                backend=asked.spec.kind,
                state="running",
                image=asked.spec.image,
                layers=(*self.images.images[asked.spec.image].layers, *digests),
                limits=limits,
                labels=asked.spec.labels,
                origin="" if base is None else base.name,
                created_at=time.time(),
                spec=asked.spec,
            )
            self._add(FakeBox(info, root, {**self.images.images[asked.spec.image].config.env, **asked.spec.env}))
            slots.append(s.Slot(sandbox=info))
        answer = s.CreateResponse(slots=tuple(slots))
        if asked.action_id is not None:
            self._creates[asked.action_id] = (raw, answer)
        return json_answer(answer)

    async def _list(self, request: Request) -> Response:
        query = query_of(request)
        label, state = query.get("label", b"").decode(), query.get("state", b"").decode()
        key, _, value = label.partition("=")
        infos = [*self.gone.values(), *(box.info for box in self.boxes.values())]
        living = ("running", "paused")
        chosen = (
            info
            for info in infos
            if (info.state in living if not state else state in ("all", info.state)) and (not label or info.labels.get(key) == value)
        )
        return json_answer(s.SandboxList(sandboxes=tuple(chosen)))

    async def _get(self, request: Request) -> Response:
        return json_answer(self.gone.get(str(request.path_params["sandbox_id"])) or self._box(request).info)

    async def _usage(self, request: Request) -> Response:
        box = self._box(request)
        if box.info.state == "paused":
            return json_answer(s.Usage())
        return json_answer(s.Usage(memory_bytes=1 << 20, pids=1 + sum(process.result is None for process in box.processes.values())))

    async def _kill(self, request: Request) -> Response:
        gone = self.gone.get(str(request.path_params["sandbox_id"]))
        return json_answer(gone or await self._end(self._box(request)))

    async def _end(self, box: FakeBox) -> s.SandboxInfo:
        self.boxes.pop(box.info.id, None)
        for process in list(box.processes.values()):
            await process.close()
        for session in box.sessions.values():
            await session.shell.close("the sandbox was killed")
        shutil.rmtree(box.root)
        info = msgspec.structs.replace(box.info, state="stopped", message="killed by the caller")
        self.gone[info.id] = info
        self._emit("sandbox.stopped", info.id)
        return info

    # --- commands

    async def _launch(self, request: Request) -> FakeProcess:
        """The process of a request, or of the one before with its action id."""
        box = self._box(request)
        raw = await request.body()
        command = wire.decode(raw, x.Command)
        command.check()
        if command.action_id is not None and command.action_id in box.actions:
            before, process = box.actions[command.action_id]
            if before != raw:
                raise Conflict("this action id was used for another request", field="action_id")
            return process
        text = command.shell if command.shell is not None else shlex.join(command.argv or ())
        process = FakeProcess(box.info.id, command, text)
        box.processes[process.id] = process
        if command.action_id is not None:
            box.actions[command.action_id] = (raw, process)
        await process.start(Path(os.fsdecode(box.path((command.cwd or "/").encode("utf-8", "surrogateescape")))), box.env)
        return process

    async def _run(self, request: Request) -> Response:
        process = await self._launch(request)
        await process.ended.wait()
        assert process.result is not None
        return json_answer(process.result)

    async def _stream(self, request: Request) -> Response:
        process = await self._launch(request)
        return lines_answer(process.events({"stdout": 0, "stderr": 0}))

    async def _start(self, request: Request) -> Response:
        return json_answer((await self._launch(request)).info())

    async def _processes(self, request: Request) -> Response:
        return json_answer(x.ProcessList(processes=tuple(process.info() for process in self._box(request).processes.values())))

    def _process_of(self, request: Request) -> FakeProcess:
        process = self._box(request).processes.get(str(request.path_params["process_id"]))
        if process is None:
            raise NotFound("no such process", field="process_id")
        return process

    async def _process(self, request: Request) -> Response:
        return json_answer(self._process_of(request).info())

    async def _wait(self, request: Request) -> Response:
        process = self._process_of(request)
        await process.ended.wait()
        assert process.result is not None
        return json_answer(process.result)

    async def _attach(self, request: Request) -> Response:
        query = query_of(request)
        return lines_answer(
            self._process_of(request).events(
                {"stdout": int(query.get("stdout_offset", b"0")), "stderr": int(query.get("stderr_offset", b"0"))}
            )
        )

    async def _stdin(self, request: Request) -> Response:
        process = self._process_of(request)
        if data := await request.body():
            await process.feed(data)
        if query_of(request).get("close") == b"1":
            process.close_stdin()
        return Response(status_code=204)

    async def _signal(self, request: Request) -> Response:
        asked = wire.decode(await request.body(), x.SignalRequest)
        asked.check()
        process = self._process_of(request)
        process.signal(asked.signal, tree=asked.tree)
        return json_answer(process.info())

    async def _resize(self, request: Request) -> Response:
        process = self._process_of(request)
        process.resize(wire.decode(await request.body(), x.Pty))
        return json_answer(process.info())

    # --- sessions

    async def _open_session(self, request: Request) -> Response:
        box = self._box(request)
        asked = wire.decode(await request.body(), x.SessionRequest)
        asked.check()
        folder = self._folder / f"{box.info.id}-sessions"
        folder.mkdir(exist_ok=True)
        shell = FakeShell(folder, lambda message: None)
        await shell.start(Path(os.fsdecode(box.path((asked.cwd or "/").encode()))), {**box.env, **asked.env})
        session_id = new_id(SESSION)
        box.sessions[session_id] = FakeSession(shell)
        return json_answer(x.SessionInfo(id=session_id, sandbox_id=box.info.id, state="open"))

    def _session_of(self, request: Request) -> FakeSession:
        session = self._box(request).sessions.get(str(request.path_params["session_id"]))
        if session is None:
            raise NotFound("no such session", field="session_id")
        return session

    def _session_info(self, request: Request) -> x.SessionInfo:
        message = self._session_of(request).shell.message
        return x.SessionInfo(
            id=request.path_params["session_id"],
            sandbox_id=request.path_params["sandbox_id"],
            state="closed" if message else "open",
            message=message,
        )

    async def _session(self, request: Request) -> Response:
        return json_answer(self._session_info(request))

    async def _session_run(self, request: Request) -> Response:
        session = self._session_of(request)
        raw = await request.body()
        asked = wire.decode(raw, x.SessionRun)
        asked.check()
        if asked.action_id is None:
            return json_answer(await session.shell.run(asked))
        if asked.action_id not in session.actions:
            session.actions[asked.action_id] = (raw, asyncio.ensure_future(session.shell.run(asked)))
        before, running = session.actions[asked.action_id]
        if before != raw:
            raise Conflict("this action id was used for another request", field="action_id")
        return json_answer(await asyncio.shield(running))

    async def _session_close(self, request: Request) -> Response:
        await self._session_of(request).shell.close()
        return json_answer(self._session_info(request))


class _Server(uvicorn.Server):
    """Tells when it accepts connections, and cleans up on its own loop."""

    def __init__(self, config: uvicorn.Config, cleanup: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self.ready = threading.Event()
        self._cleanup = cleanup

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup()
        self.ready.set()

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await self._cleanup()
        await super().shutdown()
