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
import stat
import tarfile
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote_to_bytes

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from opendsec.api import exec as x
from opendsec.api import files as f
from opendsec.api import images as i
from opendsec.api import sandboxes as s
from opendsec.api import wire
from opendsec.api.errors import Conflict, InvalidRequest, NotFound, OpenDSecError, QuotaExceeded, Unauthorized, Unavailable
from opendsec.api.ids import EDGE, SANDBOX, SESSION, check_action_id, new_id
from opendsec.api.routes import ROUTES
from opendsec.api.spec import CreateRequest, check_integer, check_path, check_user
from opendsec.testing.fakes.hostrun import FakeProcess, FakeShell

Handler = Callable[[Request], Awaitable[Response]]
NDJSON = "application/x-ndjson"
KINDS: dict[int, f.FileKind] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character_device",
    stat.S_IFBLK: "block_device",
}


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
        self.writes: dict[str, f.Written] = {}
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


class FakeEdge:
    """Use as a context manager. `images`: names that exist. `memory_limit_bytes`: what may be promised in all."""

    def __init__(self, *, memory_limit_bytes: int = 64 << 30, images: tuple[str, ...] = ("debian", "python:3.12"), token: str = "") -> None:
        self.memory_limit_bytes = memory_limit_bytes
        self.token = token
        self.edge_id = new_id(EDGE)
        self.boxes: dict[str, FakeBox] = {}
        self.gone: dict[str, s.SandboxInfo] = {}
        self.images = {name: _image(name, ()) for name in images}
        self.layers: dict[str, i.LayerInfo] = {}
        self.requests: list[str] = []  # names of the routes that were called, in order
        self.failures: list[tuple[str, OpenDSecError]] = []  # what the next calls of a route raise instead of doing their work
        self._draining = False
        self._creates: dict[str, tuple[bytes, s.CreateResponse]] = {}
        self._log: list[s.Event] = []
        self._happened = asyncio.Event()
        self._folder = Path(tempfile.mkdtemp(prefix="fake-edge-"))
        self.socket_path = self._folder / "edge.sock"
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    # --- serving

    def app(self) -> Starlette:
        routes = [
            Route(route.path, self._guarded(name, getattr(self, f"_{name.lower()}")), methods=[route.method])
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
                return await handler(request)
            except OpenDSecError as error:
                return Response(wire.encode_error(error), status_code=error.status, media_type="application/json")

        return call

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
        return sum(box.info.limits.memory_bytes for box in self.boxes.values())

    async def _info(self, request: Request) -> Response:
        return _json(self._edge_info())

    async def _capabilities(self, request: Request) -> Response:
        can = (s.Capability(name="exec", available=True), s.Capability(name="isolation", available=False, reason="this is a fake"))
        feature = s.Feature(name="fake", present=True, needed_for="tests", without_it="no tests")
        return _json(s.Capabilities(backends={"container": can}, features=(feature,)))

    async def _events(self, request: Request) -> Response:
        query = _query(request)
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

        return _lines(lines())

    async def _drain(self, request: Request) -> Response:
        self._draining = True
        return _json(self._edge_info())

    async def _shutdown(self, request: Request) -> Response:
        if _query(request).get("kill") == b"1":
            await self._close()
        return _json(self._edge_info())

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
            return _json(answer)
        if self._draining:
            raise Unavailable("the edge is draining")
        if asked.spec.image not in self.images:
            raise NotFound(f"no image {asked.spec.image!r}", field="image")
        digests = self._digests(asked.spec.layers)
        slots = []
        for _ in range(asked.count):
            if self._promised() + limits.memory_bytes > self.memory_limit_bytes:
                error = QuotaExceeded("more memory than may be promised", data={"resource": "memory"})
                slots.append(s.Slot(error=error.body()))
                continue
            box_id = new_id(SANDBOX)
            root = self._folder / box_id
            (root / "tmp").mkdir(parents=True)
            info = s.SandboxInfo(
                id=box_id,
                backend="container",
                state="running",
                image=asked.spec.image,
                layers=(*self.images[asked.spec.image].layers, *digests),
                limits=limits,
                labels=asked.spec.labels,
                created_at=time.time(),
                spec=asked.spec,
            )
            self.boxes[box_id] = FakeBox(info, root, {**self.images[asked.spec.image].config.env, **asked.spec.env})
            self._emit("sandbox.created", box_id)
            slots.append(s.Slot(sandbox=info))
        answer = s.CreateResponse(slots=tuple(slots))
        if asked.action_id is not None:
            self._creates[asked.action_id] = (raw, answer)
        return _json(answer)

    async def _list(self, request: Request) -> Response:
        label = _query(request).get("label", b"").decode()
        key, _, value = label.partition("=")
        infos = [box.info for box in self.boxes.values()]
        return _json(s.SandboxList(sandboxes=tuple(info for info in infos if not label or info.labels.get(key) == value)))

    async def _get(self, request: Request) -> Response:
        return _json(self.gone.get(str(request.path_params["sandbox_id"])) or self._box(request).info)

    async def _usage(self, request: Request) -> Response:
        box = self._box(request)
        return _json(s.Usage(memory_bytes=1 << 20, pids=1 + sum(process.result is None for process in box.processes.values())))

    async def _kill(self, request: Request) -> Response:
        gone = self.gone.get(str(request.path_params["sandbox_id"]))
        return _json(gone or await self._end(self._box(request)))

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
        return _json(process.result)

    async def _stream(self, request: Request) -> Response:
        process = await self._launch(request)
        return _lines(process.events({"stdout": 0, "stderr": 0}))

    async def _start(self, request: Request) -> Response:
        return _json((await self._launch(request)).info())

    async def _processes(self, request: Request) -> Response:
        return _json(x.ProcessList(processes=tuple(process.info() for process in self._box(request).processes.values())))

    def _process_of(self, request: Request) -> FakeProcess:
        process = self._box(request).processes.get(str(request.path_params["process_id"]))
        if process is None:
            raise NotFound("no such process", field="process_id")
        return process

    async def _process(self, request: Request) -> Response:
        return _json(self._process_of(request).info())

    async def _wait(self, request: Request) -> Response:
        process = self._process_of(request)
        await process.ended.wait()
        assert process.result is not None
        return _json(process.result)

    async def _attach(self, request: Request) -> Response:
        query = _query(request)
        return _lines(
            self._process_of(request).events(
                {"stdout": int(query.get("stdout_offset", b"0")), "stderr": int(query.get("stderr_offset", b"0"))}
            )
        )

    async def _stdin(self, request: Request) -> Response:
        process = self._process_of(request)
        if data := await request.body():
            await process.feed(data)
        if _query(request).get("close") == b"1":
            process.close_stdin()
        return Response(status_code=204)

    async def _signal(self, request: Request) -> Response:
        asked = wire.decode(await request.body(), x.SignalRequest)
        asked.check()
        process = self._process_of(request)
        process.signal(asked.signal, tree=asked.tree)
        return _json(process.info())

    async def _resize(self, request: Request) -> Response:
        process = self._process_of(request)
        process.resize(wire.decode(await request.body(), x.Pty))
        return _json(process.info())

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
        return _json(x.SessionInfo(id=session_id, sandbox_id=box.info.id, state="open"))

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
        return _json(self._session_info(request))

    async def _session_run(self, request: Request) -> Response:
        session = self._session_of(request)
        raw = await request.body()
        asked = wire.decode(raw, x.SessionRun)
        asked.check()
        if asked.action_id is None:
            return _json(await session.shell.run(asked))
        if asked.action_id not in session.actions:
            session.actions[asked.action_id] = (raw, asyncio.ensure_future(session.shell.run(asked)))
        before, running = session.actions[asked.action_id]
        if before != raw:
            raise Conflict("this action id was used for another request", field="action_id")
        return _json(await asyncio.shield(running))

    async def _session_close(self, request: Request) -> Response:
        await self._session_of(request).shell.close()
        return _json(self._session_info(request))

    # --- files

    async def _read(self, request: Request) -> Response:
        box, query = self._box(request), _query(request)
        path = box.path(_path(query))
        with _files():
            if os.path.isdir(path):
                raise Conflict("is a directory", field="path")
            with open(path, "rb") as file:
                file.seek(int(query.get("offset", b"0")))
                data = file.read(int(query["length"]) if "length" in query else -1)
        return Response(data, media_type="application/octet-stream")

    async def _write(self, request: Request) -> Response:
        box, query = self._box(request), _query(request)
        raw, action_id = _path(query), query.get("action_id", b"").decode()
        check_user(query.get("user", b"").decode(), "user")
        if action_id and check_action_id(action_id) in box.writes:
            return _json(box.writes[action_id])
        path, data = box.path(raw), await request.body()
        with _files():
            if query.get("parents") == b"1":
                os.makedirs(os.path.dirname(path), exist_ok=True)
            if os.path.isdir(path):
                raise Conflict("is a directory", field="path")
            existed = os.path.exists(path)
            with open(path, "ab" if query.get("append") == b"1" else "wb") as file:
                file.write(data)
            if "mode" in query and not existed:
                os.chmod(path, int(query["mode"], 8))
            written = f.Written(size_bytes=os.path.getsize(path))
        box.tell(raw, "modified" if existed else "created")
        if action_id:
            box.writes[action_id] = written
        return _json(written)

    async def _stat(self, request: Request) -> Response:
        query = _query(request)
        return _json(_file_info(self._box(request).path(_path(query)), follow=query.get("follow") != b"0"))

    async def _list_files(self, request: Request) -> Response:
        path = self._box(request).path(_path(_query(request)))
        with _files():
            names = sorted(os.listdir(path))
        return _json(f.FileList(entries=tuple(_file_info(os.path.join(path, name), follow=False) for name in names)))

    async def _mkdir(self, request: Request) -> Response:
        box, query = self._box(request), _query(request)
        raw = _path(query)
        path = box.path(raw)
        with _files():
            if query.get("parents") == b"1":
                os.makedirs(path, exist_ok=True)
            else:
                os.mkdir(path)
            if "mode" in query:
                os.chmod(path, int(query["mode"], 8))
        box.tell(raw, "created")
        return _json(_file_info(path))

    async def _move(self, request: Request) -> Response:
        box, query = self._box(request), _query(request)
        raw, to = _path(query), _path(query, "to")
        with _files():
            os.rename(box.path(raw), box.path(to))
        box.tell(raw, "moved_from")
        box.tell(to, "moved_to")
        return _json(_file_info(box.path(to), follow=False))

    async def _remove(self, request: Request) -> Response:
        box, query = self._box(request), _query(request)
        raw = _path(query)
        path = box.path(raw)
        with _files():
            if stat.S_ISDIR(os.lstat(path).st_mode):
                shutil.rmtree(path) if query.get("recursive") == b"1" else os.rmdir(path)
            else:
                os.unlink(path)
        box.tell(raw, "deleted")
        return Response(status_code=204)

    async def _chmod(self, request: Request) -> Response:
        query = _query(request)
        path = self._box(request).path(_path(query))
        with _files():
            if "mode" in query:
                os.chmod(path, int(query["mode"], 8))
        return _json(_file_info(path))

    async def _download(self, request: Request) -> Response:
        path = self._box(request).path(_path(_query(request)))
        with _files():
            names = sorted(os.listdir(path))
        with tempfile.TemporaryFile() as spool:
            with tarfile.open(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for name in names:
                    tar.add(os.fsdecode(os.path.join(path, name)), arcname=os.fsdecode(name))
            spool.seek(0)
            return Response(spool.read(), media_type="application/x-tar")

    async def _upload(self, request: Request) -> Response:
        path = self._box(request).path(_path(_query(request)))
        total = 0
        with tempfile.TemporaryFile() as spool:
            async for chunk in request.stream():
                spool.write(chunk)
            spool.seek(0)
            with _files():
                os.makedirs(path, exist_ok=True)
                try:
                    with tarfile.open(fileobj=spool, mode="r:") as tar:
                        total = sum(member.size for member in tar if member.isfile())
                        tar.extractall(os.fsdecode(path), filter="tar")
                except tarfile.TarError as error:
                    raise InvalidRequest(f"is not a tar stream: {error}", field="body") from None
        return _json(f.Written(size_bytes=total))

    async def _watch(self, request: Request) -> Response:
        box, raw = self._box(request), _path(_query(request))
        if not os.path.isdir(box.path(raw)):
            raise NotFound("no such directory", field="path")

        async def lines() -> AsyncGenerator[f.WatchEvent, None]:
            queue: asyncio.Queue[f.WatchEvent] = asyncio.Queue()
            watchers = box.watchers.setdefault(raw.rstrip(b"/"), set())
            watchers.add(queue)
            try:
                yield f.WatchEvent(kind="ready")
                while True:
                    yield await queue.get()
            finally:
                watchers.discard(queue)

        return _lines(lines())

    # --- images

    def _image_list(self) -> i.ImageList:
        return i.ImageList(images=tuple(self.images.values()), layers=tuple(self.layers.values()))

    async def _images(self, request: Request) -> Response:
        return _json(self._image_list())

    async def _image_build(self, request: Request) -> Response:
        asked = wire.decode(await request.body(), i.BuildRequest)
        if isinstance(asked.source, i.DirectorySource) and not os.path.isdir(asked.source.path):
            raise InvalidRequest("no such directory", field="source.path")

        async def lines() -> AsyncGenerator[i.BuildEvent, None]:
            yield i.BuildEvent(kind="step", message="packing")
            yield i.BuildEvent(kind="progress", done=1, total=1)
            if asked.name == "broken":
                yield i.BuildEvent(kind="failed", message="it is broken")
                return
            label = f"{asked.kind}:{asked.name}@{asked.version}"
            digest = "sha256:" + label.encode().hex().ljust(64, "0")[:64]
            layer = i.LayerInfo(digest=digest, kind=asked.kind, names=(label,), meta_bytes=1, data_bytes=1, created_at=time.time())
            self.layers[digest] = layer
            image = None
            if asked.kind == "base":
                image = self.images[asked.name] = _image(asked.name, (digest,), asked.config)
            yield i.BuildEvent(kind="done", image=image, layer=layer)

        return _lines(lines())

    def _digests(self, names: tuple[str, ...]) -> tuple[str, ...]:
        known = {name: layer.digest for layer in self.layers.values() for name in (*layer.names, layer.digest)}
        for name in names:
            if name not in known:
                raise NotFound(f"no layer {name!r}", field="layers")
        return tuple(known[name] for name in names)

    async def _image_compose(self, request: Request) -> Response:
        asked = wire.decode(await request.body(), i.ComposeRequest)
        base = self.images.get(asked.base)
        if base is None:
            raise NotFound(f"no image {asked.base!r}", field="base")
        layers = (*base.layers, *self._digests(asked.layers))
        self.images[asked.name] = _image(asked.name, layers, asked.config or base.config)
        return _json(self.images[asked.name])

    async def _image_remove(self, request: Request) -> Response:
        name = _query(request).get("name", b"").decode()
        if name not in self.images:
            raise NotFound(f"no image {name!r}", field="name")
        del self.images[name]
        return _json(self._image_list())

    async def _image_gc(self, request: Request) -> Response:
        used = {digest for image in self.images.values() for digest in image.layers}
        unused = tuple(digest for digest in self.layers if digest not in used)
        dry_run = _query(request).get("dry_run") == b"1"
        if not dry_run:
            for digest in unused:
                del self.layers[digest]
        return _json(i.Collected(digests=unused, freed_bytes=2 * len(unused), dry_run=dry_run))


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


class _files:
    """Turns OSError into what the contract says."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise NotFound(error.strerror or "not found", field="path") from None
        if isinstance(error, OSError):
            raise Conflict(error.strerror or str(error), field="path") from None


def _query(request: Request) -> dict[str, bytes]:
    """Query parameters as raw bytes: names of files need not be text."""
    raw: bytes = request.scope["query_string"]
    pairs = (part.partition(b"=") for part in raw.split(b"&") if part)
    return {key.decode("ascii"): unquote_to_bytes(value.replace(b"+", b" ")) for key, _, value in pairs}


def _path(query: dict[str, bytes], name: str = "path") -> bytes:
    raw = query.get(name, b"")
    check_path(raw.decode("utf-8", "surrogateescape"), name)
    return raw


def _file_info(path: bytes, *, follow: bool = True) -> f.FileInfo:
    with _files():
        info = os.stat(path, follow_symlinks=follow)
        target = os.readlink(path) if stat.S_ISLNK(info.st_mode) else None
    raw = os.path.basename(path.rstrip(b"/"))
    return f.FileInfo(
        name=raw.decode("utf-8", "replace"),
        raw_name=raw,
        kind=KINDS[stat.S_IFMT(info.st_mode)],
        size_bytes=info.st_size,
        mode=stat.S_IMODE(info.st_mode),
        uid=0,
        gid=0,
        modified_at=info.st_mtime,
        target=target,
    )


def _image(name: str, layers: tuple[str, ...], config: i.ImageConfig | None = None) -> i.ImageInfo:
    return i.ImageInfo(name=name, layers=layers, config=config or i.ImageConfig(), size_bytes=0, created_at=time.time())


def _json(value: msgspec.Struct) -> Response:
    return Response(wire.encode(value), media_type="application/json")


def _lines(items: AsyncIterator[msgspec.Struct]) -> Response:
    async def encoded() -> AsyncGenerator[bytes, None]:
        async for item in items:
            yield wire.encode(item) + b"\n"

    return StreamingResponse(encoded(), media_type=NDJSON)
