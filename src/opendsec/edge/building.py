# SPDX-License-Identifier: Apache-2.0
"""Building an image from a Dockerfile: each step works in a sandbox of the layers so far, and what it wrote becomes the next layer.

So a RUN has exactly the isolation, the limits and the (missing) network of any command here; a COPY goes into the sandbox by the same
way as a file transfer, where no link of the image leads out. Unlike `pack` nothing is scrubbed: what a step leaves is what it made.
A step that was done before, with the same layers below and the same content, is not done again (`dockerfile.cache`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from opendsec.api import spec
from opendsec.api.errors import CallerError, InvalidRequest, NotFound, OpenDSecError
from opendsec.api.images import BuildEvent, BuildRequest, DirectorySource, DockerfileSource, ImageConfig, ImageInfo
from opendsec.api.references import check_dockerfile
from opendsec.edge import creating
from opendsec.edge.box import Box
from opendsec.edge.packing import layer_of
from opendsec.edge.pausing import awake
from opendsec.edge.steps import Ran, copy_into, run_command
from opendsec.images import names
from opendsec.images.build import check_config, make_layer
from opendsec.images.dockerfile import cache, plan
from opendsec.images.dockerfile.cache import StepCache
from opendsec.images.dockerfile.context import Entry, Reader
from opendsec.images.dockerfile.context import digest as content_digest
from opendsec.images.dockerfile.ignore import MAX_BYTES as MAX_IGNORE_BYTES
from opendsec.images.dockerfile.ignore import Ignore
from opendsec.images.dockerfile.parse import MAX_BYTES, parse
from opendsec.images.dockerfile.plan import Copy, MakeDir, Run, Stage, Step
from opendsec.images.process import Progress
from opendsec.images.store import MAX_LAYERS, Resolved
from opendsec.images.view import merged
from opendsec.images.waiting import in_thread, to_the_end
from opendsec.runtime.backend import Handle

if TYPE_CHECKING:
    from opendsec.edge.node import Node

GIB = 1 << 30
LABEL = "opendsec.build"  # of the sandboxes of steps: its value is the image's name
DISK_BYTES = (1 * GIB, 16 * GIB)  # of a step's sandbox: half of what is free, within these
INODES, PIDS, OPEN_FILES = 2_000_000, 4096, 65_536
SPARE_S = 600.0  # a sandbox outlives its step's time by so much at most, whatever becomes of the edge

_NO_NAME = re.compile(
    rb"name resolution|[Cc]ould not resolve|getaddrinfo|Name or service not known|EAI_AGAIN|Network is unreachable|"
    rb"No address associated with hostname|Temporary failure resolving"
)


Work = Callable[[Handle], Awaitable[bool]]
"""Done in a sandbox; says whether it made something to keep."""


class Built(NamedTuple):
    """What a stage has come to."""

    layers: tuple[str, ...]
    config: ImageConfig


async def build_dockerfile(node: Node, request: BuildRequest, *, progress: Progress, local: bool) -> ImageInfo:
    """Build the image that `request` asks for and name it. `progress` hears of steps, of lines that commands print, and of the end.

    Raises InvalidRequest (the Dockerfile's line is in `data["line"]`; a step that fails is one, with the end of its output), NotFound,
    Denied, QuotaExceeded, Unavailable, Unsupported. Failed or cancelled it leaves no sandbox and no name.
    """
    source = check(request, local=local)
    with contextlib.ExitStack() as stack:
        context = await asyncio.to_thread(_open_context, source.context)
        stack.callback(os.close, context)
        text = source.dockerfile or await asyncio.to_thread(_read, context, "Dockerfile", MAX_BYTES, "source.dockerfile")
        ignore = Ignore(await asyncio.to_thread(_read, context, ".dockerignore", MAX_IGNORE_BYTES, ""))
        dockerfile = plan.stages(parse(text), source.args)
        building = _Building(node, request, source, dockerfile, Reader(context, ignore=ignore), progress)
        built = await building.stage(plan.target(dockerfile, source.target))
    image = await in_thread(node.images.store.name_image, request.name, built.layers, built.config)
    node.images.forget()
    progress(BuildEvent(kind="done", message=image.name, image=image))
    return image


def check(request: BuildRequest, *, local: bool) -> DockerfileSource:
    """Raises InvalidRequest naming the field, Denied."""
    source = request.source
    if not isinstance(source, DockerfileSource):
        raise InvalidRequest("must be a Dockerfile", field="source")
    names.check_image_name(request.name, "name")
    if request.kind != "base":
        raise InvalidRequest("a Dockerfile makes an image: of several layers, so of kind 'base'", field="kind")
    if request.config != ImageConfig():
        raise InvalidRequest("is what the Dockerfile says", field="config")
    if request.exclude:
        raise InvalidRequest("is what the context's .dockerignore says", field="exclude")
    check_dockerfile(source, local=local)
    return source


def _open_context(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidRequest(f"cannot be read as a directory: {error.strerror}: {path!r}", field="source.context") from None


def _read(context: int, name: str, limit: int, field: str) -> str:
    """A small file of the context; empty if it is not there and `field` is empty."""
    try:
        fd = Reader(context).open(os.fsencode(name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if not field:
            return ""
        raise InvalidRequest(f"the context has no file {name!r}", field=field) from None
    except OSError as error:
        raise InvalidRequest(f"cannot read {name!r} of the context: {error.strerror}", field="source.context") from None
    with open(fd, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise InvalidRequest(f"{name!r} is larger than {limit} bytes", field="source.context")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{name!r} is not UTF-8", field="source.context") from None


class _Building:
    def __init__(
        self,
        node: Node,
        request: BuildRequest,
        source: DockerfileSource,
        dockerfile: plan.Dockerfile,
        context: Reader,
        progress: Progress,
    ) -> None:
        self.node, self.request, self.source, self.dockerfile = node, request, source, dockerfile
        self.context, self.progress = context, progress
        self.store = node.images.store
        self.cache = StepCache(self.store)
        self.built: dict[int, Built] = {}
        for note in dockerfile.notes:
            self.say(note)

    def say(self, line: str) -> None:
        self.progress(BuildEvent(kind="log", message=line))

    # --- stages --------------------------------------------------------------------------------------------------------

    async def stage(self, stage: Stage) -> Built:
        """Build it, after those it needs, unless that has been done."""
        if stage.number not in self.built:
            base = await self._base(stage)
            planned = plan.plan(stage, self.dockerfile, base.config, self.source.args)
            check_config(planned.config)
            for note in planned.notes:
                self.say(note)
            layers, name = base.layers, stage.name or f"stage {stage.number}"
            for number, step in enumerate(planned.steps, 1):
                self.progress(BuildEvent(kind="step", message=step.text, done=number, total=len(planned.steps), what=name))
                with _at_line(step):
                    if len(layers) >= MAX_LAYERS:
                        raise InvalidRequest(f"an image has at most {MAX_LAYERS} layers", field="source.dockerfile")
                    digest = await self._step(stage, step, layers)
                if digest:
                    layers = (*(one for one in layers if one != digest), digest)
            self.built[stage.number] = Built(layers, planned.config)
        return self.built[stage.number]

    async def _base(self, stage: Stage) -> Built:
        if stage.from_stage is not None:
            return await self.stage(self.dockerfile.stages[stage.from_stage])
        if stage.base == plan.SCRATCH:
            return Built((await self._nothing(),), ImageConfig())
        try:
            resolved = await self.node.images.resolve(stage.base, ())
        except CallerError as error:
            message = f"line {stage.line}: FROM {stage.base}: {error.message}"
            raise type(error)(message, field="source.dockerfile", data={**error.data, "line": stage.line}) from None
        return Built(tuple(layer.digest for layer in resolved.layers), resolved.config)

    async def _nothing(self) -> str:
        """The layer below a stage `FROM scratch`: the directories that a sandbox mounts something on."""
        step = MakeDir(path="/")
        if (digest := await asyncio.to_thread(self.cache.get, cache.key((), step))) is not None:
            return digest
        with self.store.workspace() as (work, _):
            top = work / "scratch"
            for name in ("dev", "proc", "sys", "tmp"):
                (top / name).mkdir(parents=True)
            (top / "tmp").chmod(0o1777)
            layer = await make_layer(self.store, DirectorySource(path=str(top)), "base")
        await asyncio.to_thread(self.cache.put, cache.key((), step), layer.digest)
        return layer.digest

    # --- steps ---------------------------------------------------------------------------------------------------------

    async def _step(self, stage: Stage, step: Step, layers: tuple[str, ...]) -> str:
        """The digest of the layer that the step makes; "" for none."""
        await asyncio.to_thread(self._keep, layers)
        match step.action:
            case Run() as run:
                return await self._cached(run, layers, "", partial(self._run, step, run))
            case MakeDir() as make_directory:
                return await self._cached(make_directory, layers, "", partial(self._make_directory, make_directory))
            case Copy() as copy:
                return await self._copy(stage, copy, layers)

    def _keep(self, layers: tuple[str, ...]) -> None:
        """From garbage collection: nothing names them yet."""
        for digest in {*layers, *(digest for built in self.built.values() for digest in built.layers)}:
            self.store.renew(digest)

    async def _cached(self, action: plan.Action, layers: tuple[str, ...], content: str, work: Work) -> str:
        """The layer that was made before, or that `work` makes."""
        key = cache.key(layers, action, content)
        if not self.source.no_cache and (known := await asyncio.to_thread(self.cache.get, key)) is not None:
            self.say("as before")
            return known
        digest = ""
        async with self._sandbox(layers) as (box, handle):
            if await work(handle):
                layer, _ = await layer_of(self.store, handle, layers, limits=box.template.limits, kind="base", scrub=None)
                digest = layer.digest
        await asyncio.to_thread(self.cache.put, key, digest)
        return digest

    @contextlib.asynccontextmanager
    async def _sandbox(self, layers: tuple[str, ...]) -> AsyncIterator[tuple[Box, Handle]]:
        resolved = Resolved(
            image=self.request.name,
            config=ImageConfig(),
            layers=tuple(await asyncio.to_thread(lambda: [self.store.layer_ref(digest) for digest in layers])),
        )
        wanted = spec.Container(
            image=self.request.name,
            memory=self.source.memory,
            cpu=self.source.cpu,
            disk=self._disk_bytes(),
            inodes=INODES,
            pids=min(PIDS, self.node.policy.max_pids or PIDS),
            open_files=OPEN_FILES,
            ttl_s=self.source.timeout_s + SPARE_S,
            ttl_idle_s=None,
            labels={LABEL: self.request.name},
        )
        box = await creating.create_from(self.node, wanted, resolved)
        try:
            async with awake(self.node, box.id) as (box, handle):
                yield box, handle
        finally:
            await to_the_end(self.node.kill(box.id, message="its step is over"))

    def _disk_bytes(self) -> int:
        """Of a step's sandbox."""
        free = self.node.policy.disk_bytes - self.node.promised.disk_bytes
        disk = max(DISK_BYTES[0], min(DISK_BYTES[1], free // 2)) if self.node.policy.disk_bytes else DISK_BYTES[0]
        return min(disk, self.node.policy.max_disk_bytes or disk)

    async def _run(self, step: Step, action: Run, handle: Handle) -> bool:
        ran = await run_command(handle, action, timeout_s=self.source.timeout_s, line=self.say)
        if ran.failed:
            raise InvalidRequest(_why(step, ran), field="source.dockerfile", data={"line": step.line, "exit_code": ran.code})
        return True

    async def _make_directory(self, action: MakeDir, handle: Handle) -> bool:
        path = os.fsencode(action.path)

        def make() -> bool:
            try:
                return handle.files.stat(path).kind != "directory"
            except NotFound:
                handle.files.mkdir(path, mode=0o755, user=None, parents=True)
                return True

        return await in_thread(make)

    async def _copy(self, stage: Stage, action: Copy, layers: tuple[str, ...]) -> str:
        if not action.origin:
            return await self._copy_from(self.context, action, layers, owners=False)
        other = plan.find(self.dockerfile, action.origin, stage.number)
        if other is not None:
            digests = (await self.stage(other)).layers
        else:
            digests = tuple(layer.digest for layer in (await self.node.images.resolve(action.origin, ())).layers)
        with contextlib.ExitStack() as stack:
            refs = await asyncio.to_thread(lambda: [self.store.layer_ref(digest) for digest in digests])
            root = await in_thread(stack.enter_context, merged(refs))
            return await self._copy_from(Reader(root, inside=True), action, layers, owners=True)

    async def _copy_from(self, reader: Reader, action: Copy, layers: tuple[str, ...], *, owners: bool) -> str:
        def look() -> list[Entry]:
            paths = [path for source in action.sources for path in reader.matches(source)]
            return reader.entries(paths, action.to, limit_bytes=self._disk_bytes())

        looking = asyncio.ensure_future(asyncio.to_thread(look))
        try:
            entries = await asyncio.shield(looking)
        except asyncio.CancelledError:
            reader.cancel()
            await to_the_end(asyncio.wait((looking,)))  # it uses a directory that our caller closes
            looking.exception()
            raise

        async def work(handle: Handle) -> bool:
            await copy_into(handle, reader, entries, action, owners=owners)
            return True

        return await self._cached(action, layers, content_digest(entries, owners=owners), work)


@contextlib.contextmanager
def _at_line(step: Step) -> Iterator[None]:
    """Let the errors of a step name its line."""
    try:
        yield
    except OpenDSecError as error:
        if "line" not in error.data:
            error.data["line"] = step.line
            error.message = f"line {step.line}: {step.text[:200]}: {error.message}"
            error.args = (error.message,)
        raise


def _why(step: Step, ran: Ran) -> str:
    tail = ran.tail.decode(errors="replace").strip()
    text = f"line {step.line}: {step.text[:200]}: {ran.failed}"
    if _NO_NAME.search(ran.tail):
        text += "; steps have no network: bring what they need by COPY, or build on an image that has it"
    return text + (f"; its output ends:\n{tail}" if tail else "; it said nothing")
