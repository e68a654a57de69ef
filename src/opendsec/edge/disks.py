# SPDX-License-Identifier: Apache-2.0
"""Disk images from elsewhere become images of the store: one layer that holds the disk."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import msgspec

from opendsec.api import spec
from opendsec.api.errors import Denied, InvalidRequest, Unsupported
from opendsec.api.images import BuildEvent, BuildRequest, DirectorySource, DiskSource, ImageInfo, LayerInfo
from opendsec.images import build as building
from opendsec.images.disks import DISK
from opendsec.images.process import Progress
from opendsec.images.waiting import in_thread
from opendsec.runtime.vm.backend import VMBackend

if TYPE_CHECKING:
    from opendsec.edge.node import Node


def check(request: BuildRequest, *, local: bool) -> None:
    """Raises InvalidRequest, Denied."""
    assert isinstance(request.source, DiskSource)
    if not local:
        raise Denied("a file of the edge's machine may be a source only over the unix socket", field="source.path")
    spec.check_path(request.source.path, "source.path")
    if request.kind != "base":
        raise InvalidRequest("a disk is a whole image, not a layer on one", field="kind")
    plain = msgspec.structs.replace(request, source=DirectorySource(path=request.source.path))
    building.check(plain, allow_host_paths=True)


async def import_disk(node: Node, request: BuildRequest, *, progress: Progress, local: bool) -> ImageInfo | LayerInfo:
    """As `images.build.build`."""
    check(request, local=local)
    assert isinstance(request.source, DiskSource)
    backend = node.backends.get("vm")
    if not isinstance(backend, VMBackend):
        raise Unsupported("this edge has no full VMs", field="source")
    store, workspace = node.images.store, contextlib.ExitStack()
    try:
        work, _ = workspace.enter_context(store.workspace())
        tree = work / "tree"
        await in_thread(os.mkdir, tree, 0o755)
        progress(BuildEvent(kind="step", message="reading the disk"))
        await backend.convert(request.source.path, request.source.format, work, tree / DISK)
        plain = msgspec.structs.replace(request, source=DirectorySource(path=str(tree)))
        return await building.build(store, plain, progress=progress, allow_host_paths=True)
    finally:
        await in_thread(workspace.close)
