# SPDX-License-Identifier: Apache-2.0
"""Building a layer: check the request, let `worker` make it, publish it, name it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

from opendsec.api import spec
from opendsec.api.errors import Denied, InvalidRequest, Unsupported
from opendsec.api.images import (
    BuildEvent,
    BuildRequest,
    DebianDiskSource,
    DebianSource,
    DirectorySource,
    Finding,
    ImageConfig,
    ImageInfo,
    LayerInfo,
    LayerKind,
)
from opendsec.images import debian, names, process
from opendsec.images.names import LayerName
from opendsec.images.process import Progress
from opendsec.images.store import ImageStore
from opendsec.images.upper import UpperSource
from opendsec.images.waiting import in_thread
from opendsec.images.worker import OUT, Job, Line

Source = DirectorySource | DebianSource | DebianDiskSource | UpperSource


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
    if isinstance(request.source, DebianDiskSource):
        debian.check(DebianSource(suite=request.source.suite, packages=request.source.packages))
        spec.check_integer(request.source.size_bytes, "source.size_bytes", (0, spec.VM_DISK_BYTES[1]))
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
    assert isinstance(request.source, DirectorySource | DebianSource | DebianDiskSource)
    made = await make_layer(store, request.source, request.kind, exclude=request.exclude, progress=progress)
    result = await in_thread(_name, store, request, name, made.digest)
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
        job = Job(
            source=source,
            exclude=tuple(exclude),
            kind=kind,
            work=os.fspath(work),
            store=os.fspath(store.root),
            parent=os.getpid(),
        )

        def heard(line: Line) -> None:
            if line.found is not None:
                found(line.found)

        line = await process.run("opendsec.images.worker", job, Line, held, progress, home="/root", heard=heard)
        assert line.made is not None
        progress(BuildEvent(kind="step", message="publishing"))
        return await in_thread(store.publish, work / OUT, line.made)
    finally:
        await in_thread(workspace.close)
