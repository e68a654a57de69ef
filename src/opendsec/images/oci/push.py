# SPDX-License-Identifier: Apache-2.0
"""Sending an image elsewhere as one of OCI's, so that others can run it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from opendsec.api.errors import InvalidRequest
from opendsec.api.images import BuildEvent, PushRequest
from opendsec.api.references import check_push
from opendsec.images.oci.jobs import Exported, Job
from opendsec.images.oci.process import to_the_end, work
from opendsec.images.store import ImageStore


async def push(
    store: ImageStore,
    request: PushRequest,
    *,
    progress: Callable[[BuildEvent], None],
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
        await work(job, held, progress)
    finally:
        await to_the_end(asyncio.to_thread(workspace.close))
