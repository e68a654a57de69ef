# SPDX-License-Identifier: Apache-2.0
"""One sandbox as the node holds it: the lifecycle's state, what it was made from, and the backend's handle."""

from __future__ import annotations

import asyncio

import msgspec

from opendsec.api.errors import OpenDSecError
from opendsec.api.exec import ProcessInfo
from opendsec.api.sandboxes import SandboxInfo, Usage
from opendsec.api.spec import AnySpec, Limits
from opendsec.edge import lifecycle
from opendsec.edge.admission import Promise
from opendsec.edge.clock import Timer
from opendsec.edge.processes import ProcessTable
from opendsec.edge.sessions import SessionTable
from opendsec.edge.tables import SandboxRow
from opendsec.runtime.backend import Handle, Record


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """What all sandboxes of one request share; kept in the journal once. `env`, `user`, `workdir`: image and spec merged."""

    spec: AnySpec
    layers: tuple[str, ...]  # digests, lowest first
    limits: Limits
    env: dict[str, str]
    user: str
    workdir: str
    own: bool = False  # for work of the edge's own, such as a build's step: the next edge clears it away


class Box:
    """One sandbox."""

    __slots__ = (
        "adopted",
        "backend",
        "charged",
        "commands",
        "earlier",
        "ended",
        "ended_at",
        "handle",
        "id",
        "origin",
        "promise",
        "quiet",
        "record",
        "record_data",
        "sessions",
        "snapping",
        "state",
        "talking",
        "template",
        "template_id",
        "timer",
        "turn",
        "uid_base",
        "used",
    )

    def __init__(
        self,
        *,
        id: str,
        state: lifecycle.State,
        template: Template,
        template_id: int,
        backend: str,
        uid_base: int,
        promise: Promise,
        origin: str = "",
    ) -> None:
        self.id, self.state, self.template, self.template_id = id, state, template, template_id
        self.backend, self.uid_base, self.promise = backend, uid_base, promise
        self.origin = origin  # the id of the snapshot or sandbox that it is a copy of
        self.charged = promise  # what of it is counted now: of a paused one, see `admission.at_rest`
        self.record: Record | None = None
        self.record_data: bytes | None = None  # as journaled
        self.handle: Handle | None = None
        self.timer: Timer | None = None
        self.ended_at: float | None = None
        self.commands: ProcessTable | None = None  # made with the first command
        self.sessions: SessionTable | None = None  # made with the first session
        self.adopted = False  # made by an earlier edge
        self.earlier: dict[str, ProcessInfo] | None = None  # commands that it ran, once somebody asks
        self.ended: asyncio.Future[None] | None = None  # made when somebody waits
        self.turn: asyncio.Task[OpenDSecError | None] | None = None  # pausing or resuming it, see `pausing`
        self.talking = 0  # requests that need it to answer now
        self.quiet: asyncio.Future[None] | None = None  # made when somebody waits for the end of those
        self.snapping = asyncio.Lock()  # one snapshot or fork at a time
        self.used: Usage | None = None  # before it was paused

    def hold(self, handle: Handle) -> None:
        """The backend has made or found it."""
        self.handle = handle
        self.remember(handle.record)

    def remember(self, record: Record) -> None:
        self.record = record
        self.record_data = msgspec.json.encode(record)

    async def wait_ended(self) -> None:
        """Until nothing of it is left, or an attempt to destroy it has failed."""
        if self.state.held:
            if self.ended is None:
                self.ended = asyncio.get_running_loop().create_future()
            await asyncio.shield(self.ended)

    def tell_ended(self) -> None:
        if self.ended is not None:
            self.ended.set_result(None)
            self.ended = None

    def tell_quiet(self) -> None:
        if self.quiet is not None and not self.quiet.done():
            self.quiet.set_result(None)

    def row(self) -> SandboxRow:
        state = self.state
        return SandboxRow(
            id=self.id,
            state=state.phase,
            held=state.held,
            template=self.template_id,
            backend=self.backend,
            uid_base=self.uid_base,
            memory_bytes=self.promise.memory_bytes,
            disk_bytes=self.promise.disk_bytes,
            created_at=state.created_at,
            expires_at=state.expires_at,
            ttl_idle_s=state.ttl_idle_s,
            used_at=state.used_at,
            busy=state.busy > 0,
            ended_at=self.ended_at,
            message=state.message,
            record=self.record_data,
            turning=state.turning,
            origin=self.origin,
        )

    @classmethod
    def from_row(cls, row: SandboxRow, template: Template) -> Box:
        state = lifecycle.State(
            phase=row.state,
            created_at=row.created_at,
            expires_at=row.expires_at,
            ttl_idle_s=row.ttl_idle_s,
            used_at=row.used_at,
            busy=int(row.busy),
            held=row.held,
            pending=row.turning,
            message=row.message,
        )
        box = cls(
            id=row.id,
            state=state,
            template=template,
            template_id=row.template,
            backend=row.backend,
            uid_base=row.uid_base,
            promise=Promise(row.memory_bytes, row.disk_bytes),
            origin=row.origin,
        )
        box.ended_at = row.ended_at
        box.record_data = row.record
        box.record = None if row.record is None else msgspec.json.decode(row.record, type=Record)
        return box

    def info(self, *, full: bool = True) -> SandboxInfo:
        """As the caller sees it; `full`: with the spec."""
        state, template = self.state, self.template
        return SandboxInfo(
            id=self.id,
            backend=self.backend,
            state=state.phase,
            image=template.spec.image,
            layers=template.layers,
            limits=template.limits,
            labels=template.spec.labels,
            created_at=state.created_at,
            expires_at=state.expires_at,
            idle_expires_at=state.idle_expires_at,
            message=state.message,
            accelerator=self.record.vm.accelerator if self.record is not None and self.record.vm is not None else "",
            origin=self.origin,
            spec=template.spec if full else None,
        )
