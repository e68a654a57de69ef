# SPDX-License-Identifier: Apache-2.0
"""What the edge and its worker say to each other: see `images.job`."""

from __future__ import annotations

import msgspec

from opendsec.api.images import ImageConfig
from opendsec.api.references import Reference
from opendsec.images import job
from opendsec.images.oci.limits import Limits


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """A layer to be pushed, and its files, as the edge's source of data names them."""

    digest: str
    meta: str
    data: str


class Job(job.Job, frozen=True, kw_only=True):
    verb: str  # "pull", "push"
    reference: Reference
    platform: str = ""
    tls_verify: bool = True
    token: str = ""
    stall_s: float = 60.0  # a registry that sends nothing for so long is given up
    retries: int = 2
    limits: Limits = Limits()
    # of a push
    layers: tuple[Exported, ...] = ()  # lowest first
    config: ImageConfig = ImageConfig()
    name: str = ""


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    digests: tuple[str, ...]
    config: ImageConfig
    notes: tuple[str, ...]
    source: str


class Line(job.Line, frozen=True, kw_only=True, omit_defaults=True):
    pulled: Pulled | None = None
    pushed: bool = False
