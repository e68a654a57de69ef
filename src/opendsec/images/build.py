# SPDX-License-Identifier: Apache-2.0
"""Building a layer: check the request, let `worker` make it, publish it, name it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from opendsec.api import spec
from opendsec.api.errors import Denied, Internal, InvalidRequest, OpenDSecError, Unsupported, from_body
from opendsec.api.images import (
    BuildEvent,
    BuildRequest,
    DebianSource,
    DirectorySource,
    Finding,
    ImageConfig,
    ImageInfo,
    LayerInfo,
    LayerKind,
)
from opendsec.images import debian, names
from opendsec.images.layers import LayerRecord
from opendsec.images.names import LayerName
from opendsec.images.store import ImageStore
from opendsec.images.upper import UpperSource
from opendsec.images.worker import OUT, Job, Line, Made

Source = DirectorySource | DebianSource | UpperSource
Progress = Callable[[BuildEvent], None]
T = TypeVar("T")

_LINE_BYTES = 1 << 20
_PASSED_ON = ("LANG", "http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def check(request: BuildRequest, *, allow_host_paths: bool) -> LayerName:
    """The complete name of the layer that `request` asks for. Raises InvalidRequest naming the field, or Denied."""
    name = names.complete_layer_name(request.kind, request.name, request.version)
    if request.kind == "base":
        check_config(request.config)
    elif request.config != ImageConfig():
        raise InvalidRequest("only a base has a config; a layer on top of one takes the base's", field="config")
    for index, pattern in enumerate(request.exclude):
        field = f"exclude[{index}]"
        if not spec.check_text(pattern, field, limit=4096).strip("/"):
            raise InvalidRequest("must not be empty", field=field)
    if isinstance(request.source, DebianSource):
        debian.check(request.source)
        return name
    if not isinstance(request.source, DirectorySource):
        raise Unsupported("a Dockerfile makes several layers, not one", field="source")  # what runs its steps calls us for each
    if not allow_host_paths:
        raise Denied("a directory of the edge's machine may be a source only over the unix socket", field="source.path")
    _check_source(request.source)
    return name


def _check_source(source: DirectorySource) -> None:
    spec.check_path(source.path, "source.path")
    spec.check_path(source.prefix, "source.prefix")
    if ".." in source.prefix.split("/"):
        raise InvalidRequest("must not contain '..'", field="source.prefix")


def check_config(config: ImageConfig) -> None:
    """Raises InvalidRequest naming the field."""
    spec.check_env(config.env, "config.env")
    spec.check_user(config.user, "config.user")
    spec.check_path(config.workdir, "config.workdir")
    for index, argument in enumerate(config.entrypoint):
        spec.check_text(argument, f"config.entrypoint[{index}]", limit=131_000)
    for index, argument in enumerate(config.cmd):
        spec.check_text(argument, f"config.cmd[{index}]", limit=131_000)


async def build(store: ImageStore, request: BuildRequest, *, progress: Progress, allow_host_paths: bool) -> ImageInfo | LayerInfo:
    """Make the layer that `request` asks for, publish and name it. A base becomes an image; the others become named layers.

    `progress` is called on the event loop with steps, counts and log lines as they happen, and with `done` at the end; when this
    raises, `failed` is the caller's to say. Raises InvalidRequest, Denied, Unavailable (archives unreachable, a program or space
    missing), Internal. Cancelling kills all that was started, waits for its end and removes what was made; then it goes on.
    """
    name = check(request, allow_host_paths=allow_host_paths)
    assert isinstance(request.source, DirectorySource | DebianSource)
    made = await make_layer(store, request.source, request.kind, exclude=request.exclude, progress=progress)
    result = await to_the_end(asyncio.to_thread(_name, store, request, name, made.digest))
    if isinstance(result, ImageInfo):
        progress(BuildEvent(kind="done", message=result.name, image=result))
    else:
        progress(BuildEvent(kind="done", message=str(name), layer=result))
    return result


def _name(store: ImageStore, request: BuildRequest, name: LayerName, digest: str) -> ImageInfo | LayerInfo:
    layer = store.name_layer(name, digest)
    return store.name_image(request.name, [digest], request.config) if request.kind == "base" else layer


async def make_layer(
    store: ImageStore,
    source: Source,
    kind: LayerKind,
    *,
    exclude: Sequence[str] = (),
    progress: Progress = lambda event: None,
    found: Callable[[Finding], None] = lambda finding: None,
) -> LayerInfo:
    """Make and publish a layer, without a name: within the store's grace period somebody has to give it one. Raises and may be cancelled
    as `build`. `found` hears what was scrubbed."""
    workspace = contextlib.ExitStack()
    try:
        work, held = workspace.enter_context(store.workspace())
        job = Job(source=source, exclude=tuple(exclude), work=os.fspath(work), store=os.fspath(store.root), parent=os.getpid())
        made = await _work(job, held, progress, found)
        progress(BuildEvent(kind="step", message="publishing"))
        return await to_the_end(asyncio.to_thread(_publish, store, kind, work / OUT, made))
    finally:
        await to_the_end(asyncio.to_thread(workspace.close))


def _publish(store: ImageStore, kind: LayerKind, out: Path, made: Made) -> LayerInfo:
    record = LayerRecord(
        digest=made.digest,
        kind=kind,
        meta_bytes=made.meta_bytes,
        data_bytes=made.data_bytes,
        meta_sha256=made.meta_sha256,
        data_sha256=made.data_sha256,
        created_at=time.time(),
        chunk_bytes=made.chunk_bytes,
        chunks_sha256=made.chunks_sha256,
    )
    return store.publish(out, record)


async def _work(job: Job, held: int, progress: Progress, found: Callable[[Finding], None]) -> Made:
    """Run the worker to its end, whatever that is; nothing of it runs when this returns or raises."""
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-I", "-m", "opendsec.images.worker"),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        # mmdebstrap and what it runs live in the sbin directories too, which a user's PATH need not have.
        env={
            **environment,
            "PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin:/usr/bin:/bin",
            "TMPDIR": job.work,
            "HOME": "/root",
        },
        pass_fds=(held,),  # holds the workspace as long as anything of the worker lives
        start_new_session=True,  # a terminal's Ctrl-C is for the edge to handle
        limit=_LINE_BYTES,
    )
    said = asyncio.ensure_future(_tail(process))
    made: Made | None = None
    error: OpenDSecError | None = None
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(job))
        process.stdin.close()
        async for raw in process.stdout:
            line = msgspec.json.decode(raw, type=Line)
            if line.event is not None:
                progress(line.event)
            if line.found is not None:
                found(line.found)
            made = line.made or made
            if line.error is not None:
                error = from_body(line.error)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        raise
    finally:
        await to_the_end(_gone(process))
        stderr = await to_the_end(said)
    if error is not None:
        raise error
    if made is None or process.returncode != 0:
        raise Internal(f"the build ended with status {process.returncode}: {stderr.decode(errors='replace').strip() or 'it said nothing'}")
    return made


async def _gone(process: Process) -> None:
    """Wait until all of the worker has ended and its output is empty."""
    assert process.stdout is not None
    while await process.stdout.read(_LINE_BYTES):
        pass
    await process.wait()


async def _tail(process: Process, limit: int = 4000) -> bytes:
    assert process.stderr is not None
    kept = b""
    while block := await process.stderr.read(65536):
        kept = (kept + block)[-limit:]
    return kept


async def to_the_end(awaitable: Awaitable[T]) -> T:
    """The result of `awaitable`, which runs to its end even if we are cancelled meanwhile; the cancellation is raised after that."""
    future = asyncio.ensure_future(awaitable)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:
            break
    if cancelled is not None:
        raise cancelled
    return future.result()
