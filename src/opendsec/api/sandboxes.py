# SPDX-License-Identifier: Apache-2.0
"""What the edge says of sandboxes, of itself, and of what happened."""

from __future__ import annotations

from typing import Literal

import msgspec

from opendsec.api.errors import ErrorBody
from opendsec.api.spec import AnySpec, Limits

SandboxState = Literal["creating", "running", "paused", "stopping", "stopped", "lost"]
EdgeState = Literal["starting", "ready", "draining"]


class SandboxInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox as the edge sees it. Times are unix seconds."""

    id: str
    backend: str
    state: SandboxState
    image: str
    layers: tuple[str, ...]  # sha256 digests, lowest first
    limits: Limits
    labels: dict[str, str] = {}
    created_at: float
    expires_at: float | None = None  # the absolute TTL
    idle_expires_at: float | None = None  # moves with use
    message: str = ""  # why it stopped or was lost
    accelerator: str = ""  # of a machine: kvm, or tcg where the processor is emulated
    origin: str = ""  # the id of the snapshot, or of the running sandbox, that it was made of
    spec: AnySpec | None = None  # given for a single sandbox, left out in listings


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One slot of a batch: a sandbox or an error."""

    sandbox: SandboxInfo | None = None
    error: ErrorBody | None = None


class CreateResponse(msgspec.Struct, frozen=True):
    """Answer to `POST /v1/sandboxes`, one slot for each sandbox asked for, in order."""

    slots: tuple[Slot, ...]


class SandboxList(msgspec.Struct, frozen=True):
    sandboxes: tuple[SandboxInfo, ...]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox uses now."""

    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    cpu_ms: float = 0.0
    pids: int = 0
    disk_bytes: int = 0
    inodes: int | None = None
    oom_kills: int = 0
    pids_denied: int = 0


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened. `kind` is dotted lower case (`sandbox.created`, `exec.ended`, `limit.memory`)."""

    seq: int
    at: float
    kind: str
    sandbox_id: str | None = None
    data: dict[str, str | int | float | bool | None] = {}


class Feature(msgspec.Struct, frozen=True, kw_only=True):
    """One feature of the machine: whether it is there, why not, what needs it, what happens without it."""

    name: str
    present: bool
    reason: str = ""
    needed_for: str = ""
    without_it: str = ""


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    """One thing a backend of this edge can or cannot do, and why not."""

    name: str
    available: bool
    reason: str = ""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    backends: dict[str, tuple[Capability, ...]]
    features: tuple[Feature, ...] = ()


class EdgeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The edge itself: what it promised, and what it may promise."""

    edge_id: str
    version: str
    api: int  # the generation of this contract
    state: EdgeState
    pid: int
    started_at: float
    sandboxes: int
    memory_promised_bytes: int
    memory_limit_bytes: int
    disk_promised_bytes: int
    disk_limit_bytes: int
    scratch_driver: str
