# SPDX-License-Identifier: Apache-2.0
"""Bringing an OCI image here."""

from __future__ import annotations

import contextlib
import os

from opendsec.api.errors import InvalidRequest
from opendsec.api.images import ImageInfo, PullRequest
from opendsec.api.references import check_pull
from opendsec.images import process
from opendsec.images.oci.jobs import Job, Line
from opendsec.images.oci.limits import Limits
from opendsec.images.process import Progress
from opendsec.images.store import ImageStore
from opendsec.images.waiting import in_thread


async def pull(
    store: ImageStore,
    request: PullRequest,
    *,
    progress: Progress,
    allow_host_paths: bool,
    limits: Limits | None = None,
    stall_s: float = 60.0,
    retries: int = 2,
) -> ImageInfo:
    """Fetch the image that `request` names from a registry, an OCI layout or a docker-archive, convert what is not here yet, and name it.

    `progress` is called on the event loop with steps and counts as they happen; `done` is the caller's to say, as is `failed`. Raises
    InvalidRequest (also for an image that is damaged, lies or is too large), Denied, NotFound (no such image, or none for the platform),
    Unauthorized (the registry), Unsupported, Unavailable (registry unreachable or broken, no space, no skopeo), Internal. A name that
    was there before keeps its meaning unless all went well. Cancelling kills all that was started and waits for its end.
    """
    reference = check_pull(request, local=allow_host_paths)
    if reference.transport == "store":
        raise InvalidRequest("a store holds our own layers, not those of OCI", field="reference")
    workspace = contextlib.ExitStack()
    try:
        place, held = workspace.enter_context(store.workspace())
        job = Job(
            verb="pull",
            reference=reference,
            work=os.fspath(place),
            store=os.fspath(store.root),
            parent=os.getpid(),
            platform=request.platform,
            tls_verify=request.tls_verify,
            token=request.token,
            stall_s=stall_s,
            retries=retries,
            limits=limits or Limits(),
        )
        line = await process.run("opendsec.images.oci.worker", job, Line, held, progress, home=job.work)
        assert line.pulled is not None
        pulled = line.pulled
        name = request.name or reference.image_name
        return await in_thread(store.name_image, name, pulled.digests, pulled.config, notes=pulled.notes, source=pulled.source)
    finally:
        await in_thread(workspace.close)
