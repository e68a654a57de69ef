# SPDX-License-Identifier: Apache-2.0
"""Sending an image elsewhere as one of OCI's, so that others can run it."""

from __future__ import annotations

import asyncio
import contextlib
import os

from opendsec.api.errors import InvalidRequest
from opendsec.api.images import PushRequest
from opendsec.api.references import check_push
from opendsec.images import process
from opendsec.images.oci.jobs import Exported, Job, Line
from opendsec.images.process import Progress
from opendsec.images.store import ImageStore
from opendsec.images.waiting import in_thread


async def push(
    store: ImageStore,
    request: PushRequest,
    *,
    progress: Progress,
    allow_host_paths: bool,
    stall_s: float = 60.0,
    retries: int = 2,
) -> None:
    """Send the image that `request` names, whatever it was made of, to a registry, into an OCI layout or into a docker-archive.

    `progress` is called on the event loop as by `pull`. Content that is not here is loaded on the way. Raises InvalidRequest, Denied,
    NotFound, Conflict (a docker-archive that is there already), Unauthorized (the registry), Unavailable, Internal.
    """
    reference = check_push(request, local=allow_host_paths)
    if reference.transport == "store":
        raise InvalidRequest("a store takes our own layers, not those of OCI", field="reference")
    workspace = contextlib.ExitStack()
    try:
        resolved = await asyncio.to_thread(store.resolve, request.name)
        place, held = workspace.enter_context(store.workspace())
        job = Job(
            verb="push",
            reference=reference,
            work=os.fspath(place),
            store=os.fspath(store.root),
            parent=os.getpid(),
            tls_verify=request.tls_verify,
            token=request.token,
            stall_s=stall_s,
            retries=retries,
            layers=tuple(
                Exported(digest=layer.digest, meta=os.fspath(layer.meta), data=os.fspath(layer.data)) for layer in resolved.layers
            ),
            config=resolved.config,
            name=request.name,
        )
        await process.run("opendsec.images.oci.worker", job, Line, held, progress, home=job.work)
    finally:
        await in_thread(workspace.close)
