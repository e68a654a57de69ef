# SPDX-License-Identifier: Apache-2.0
"""Snapshots that callers keep, and forks: a snapshot that lives only until the copies are made.

Each is written down before it is made and again once it is there, so that the next edge removes what was half made. The layers that one
stands on count as used as long as it is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Iterator
from typing import TYPE_CHECKING

import msgspec

from opendsec.api import ids, wire
from opendsec.api.errors import Conflict, InvalidRequest, NotFound, OpenDSecError, Unavailable, Unsupported
from opendsec.api.images import ImageConfig
from opendsec.api.sandboxes import CreateResponse
from opendsec.api.snapshots import ForkRequest, SnapshotInfo, SnapshotList, SnapshotRequest
from opendsec.api.spec import Limits, Machine
from opendsec.edge import admission, creating, pausing
from opendsec.edge.actions import Action, request_digest
from opendsec.edge.box import Box, Template
from opendsec.edge.tables import SnapshotRow
from opendsec.images.store import Resolved
from opendsec.images.waiting import to_the_end
from opendsec.runtime.backend import Backend, Handle, SnapshotRecord, VmOptions, VmRecord

if TYPE_CHECKING:
    from opendsec.edge.node import Node


class Snapshot:
    """One as the node holds it. `record` None: it is being made."""

    def __init__(self, row: SnapshotRow, template: Template) -> None:
        self.row, self.template = row, template
        self.record = None if row.record is None else msgspec.json.decode(row.record, type=SnapshotRecord)
        self.stored_bytes = 0 if self.record is None else self.record.stored_bytes

    def info(self) -> SnapshotInfo:
        row, template, record = self.row, self.template, self.record
        assert record is not None
        spec = template.spec
        return SnapshotInfo(
            id=row.id,
            name=row.name,
            backend=row.backend,
            sandbox_id=row.sandbox_id,
            memory=record.memory,
            image=spec.image,
            layers=record.layers,
            limits=record.limits,
            stored_bytes=record.stored_bytes,
            created_at=row.created_at,
            spec=msgspec.structs.replace(spec, snapshot=row.name) if isinstance(spec, Machine) else None,
        )


class Snapshots:
    """All of a node, those for forks left out."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._known: dict[str, Snapshot] = {}  # by name
        self._undropped: set[str] = set()  # ids of rows that are to go
        node.layer_users.append(lambda: frozenset(digest for one in self._known.values() for digest in one.template.layers))

    def load(self, rows: list[SnapshotRow], templates: dict[int, Template]) -> None:
        """At start, finished ones."""
        self._known = {row.name: Snapshot(row, templates[row.template]) for row in rows}
        for one in self._known.values():
            self._node.store(one.stored_bytes)

    def has(self, snapshot_id: str) -> bool:
        return any(one.row.id == snapshot_id for one in self._known.values())

    def list(self) -> SnapshotList:
        return SnapshotList(tuple(one.info() for one in self._known.values() if one.record is not None))

    def get(self, name: str, field: str) -> tuple[Snapshot, SnapshotRecord]:
        """By name or id. Raises NotFound, Conflict."""
        found = self._known.get(name) or next((one for one in self._known.values() if one.row.id == name), None)
        if found is None:
            raise NotFound(f"no snapshot {name[:80]!r}", field=field)
        if found.record is None:
            raise Conflict(f"the snapshot {name!r} is still being made", field=field)
        return found, found.record

    # --- keep ------------------------------------------------------------------------------------------------------------

    async def make(self, sandbox_id: str, request: SnapshotRequest) -> SnapshotInfo:
        """Raises InvalidRequest, NotFound, Conflict (the name is taken), Unsupported, SandboxLost, Unavailable."""
        request.check()
        node = self._node
        node.box(sandbox_id)

        async def work(action: Action[SnapshotInfo]) -> SnapshotInfo:
            async with pausing.awake(node, sandbox_id) as (box, handle), box.snapping:
                snapshot_id = ids.new_id(ids.SNAPSHOT)
                name = request.name or snapshot_id
                if name in self._known:
                    raise Conflict(f"there is a snapshot {name!r} already", field="name")
                if request.memory:
                    admission.check_storing(node.promised, box.template.limits.memory_bytes, node.policy)
                row = _row(snapshot_id, name, box, node.clock.time(), kept=True)
                with node.journal.transaction():
                    self._drop_rows()
                    node.journal.put_snapshot(row)
                    action.begin(name, node.clock.time())
                self._known[name] = Snapshot(row, box.template)
                try:
                    record = await to_the_end(handle.snapshot(snapshot_id, memory=request.memory))
                except BaseException:
                    del self._known[name]
                    await to_the_end(self._drop(row, None))
                    raise
                row = msgspec.structs.replace(row, record=msgspec.json.encode(record))
                made = self._known[name] = Snapshot(row, box.template)
                try:
                    node.journal.put_snapshot(row)
                except BaseException:
                    del self._known[name]
                    await to_the_end(self._drop(row, record))
                    raise
                node.store(made.stored_bytes)
                await node.settle()
                node.events.emit("sandbox.snapshot", box.id, snapshot=name, memory=record.memory, stored_bytes=record.stored_bytes)
                return made.info()

        return await node.actions.once(
            request.action_id,
            work,
            result=SnapshotInfo,
            kind="snapshot",
            digest=lambda: request_digest("snapshot", sandbox_id.encode(), wire.encode(request)),
            sandbox_id=sandbox_id,
        )

    async def remove(self, name: str) -> SnapshotList:
        """Sandboxes that were made of it stay. Raises NotFound, Conflict, Unavailable."""
        found, record = self.get(name, "name")
        await self._node.backends[found.row.backend].remove_snapshot(record)
        self._forget(found)
        self._node.events.emit("snapshot.removed", found.row.sandbox_id, snapshot=found.row.name)
        return self.list()

    def _forget(self, gone: Snapshot) -> None:
        if self._known.get(gone.row.name) is not gone:
            return  # another request was faster, and the name may mean a newer one by now
        del self._known[gone.row.name]
        self._node.store(-gone.stored_bytes)
        self._forget_row(gone.row)

    def _forget_row(self, row: SnapshotRow) -> None:
        """If the disk refuses now, later: at the latest the next edge finds that it is not there."""
        self._undropped.add(row.id)
        try:
            with self._node.journal.transaction():
                self._drop_rows()
            self._undropped.clear()
        except Unavailable as error:
            self._node.log.error("journal.not_written", snapshot_id=row.id, reason=str(error))

    def _drop_rows(self) -> None:
        """Those that could not be dropped, which would keep their names from others."""
        for snapshot_id in self._undropped:
            self._node.journal.drop_snapshot(snapshot_id)

    def forget_missing(self, backend: str, there: Collection[str]) -> None:
        """At start: those of which nothing is stored, `there` is what is."""
        for one in list(self._known.values()):
            if one.row.backend == backend and one.row.id not in there:
                self._node.log.error("reconcile.snapshot_missing", snapshot_id=one.row.id, backend=backend)
                self._forget(one)

    async def _drop(self, row: SnapshotRow, record: SnapshotRecord | None) -> None:
        """What is half made, or no longer needed. What cannot be removed now is at the next start."""
        node = self._node
        try:
            with contextlib.suppress(Unsupported):  # by a backend that has none, so there is none
                await node.backends[row.backend].remove_snapshot(record or unfinished(row.id, row.backend))
            self._forget_row(row)
        except OpenDSecError as error:
            node.log.warning("snapshot.not_removed", snapshot_id=row.id, reason=str(error))

    # --- make sandboxes of them ------------------------------------------------------------------------------------------

    async def base(self, spec: Machine, limits: Limits) -> tuple[Resolved, SnapshotRecord]:
        """What a sandbox of this spec stands on. Raises NotFound, Conflict, InvalidRequest if the two do not fit."""
        found, record = self.get(spec.snapshot, "snapshot")
        made_of = found.template.spec
        if record.backend != spec.kind:
            raise InvalidRequest(f"the snapshot is of a {record.backend}, and only of another can it be the beginning", field="snapshot")
        for field in ("image", "layers"):
            if getattr(spec, field) != getattr(made_of, field):
                raise InvalidRequest(f"must be {getattr(made_of, field)!r}, as of the sandbox that the snapshot was made of", field=field)
        for field, asked, had in _sizes(limits, record.limits):
            if asked != had:
                raise InvalidRequest(f"must be {had}, as of the sandbox that the snapshot was made of; got {asked}", field=field)
        if creating.options_of(spec) != msgspec.structs.replace(record.vm.options, hardware_required=spec.hardware_virtualization):
            raise InvalidRequest("must be as of the sandbox that the snapshot was made of", field="profile")
        return await self.resolved(found.template), record

    async def resolved(self, template: Template) -> Resolved:
        """A template's layers, by their digests: its image's name may mean something else by now."""
        store = self._node.images.store
        layers = await asyncio.to_thread(lambda: tuple(store.layer_ref(digest) for digest in template.layers))
        config = ImageConfig(env=template.env, user=template.user, workdir=template.workdir)
        return Resolved(image=template.spec.image, config=config, layers=layers)

    async def fork(self, sandbox_id: str, request: ForkRequest) -> CreateResponse:
        """Copies of a running sandbox. What is wrong with all of them, or with the only one, is raised; otherwise each slot tells."""
        request.check()
        node = self._node
        node.box(sandbox_id)

        async def work(action: Action[CreateResponse]) -> CreateResponse:
            async with pausing.awake(node, sandbox_id) as (box, handle), box.snapping:
                resolved = await self.resolved(box.template)
                creating.check_room(node, box.template.limits)
                async with self._for_a_fork(box, handle) as record:
                    return await creating.fork(node, box, resolved, record, request.count, action)

        return await node.actions.once(
            request.action_id,
            work,
            result=CreateResponse,
            kind="fork",
            digest=lambda: request_digest("fork", sandbox_id.encode(), wire.encode(request)),
            sandbox_id=sandbox_id,
            replay=lambda recorded: creating.replay(node, recorded),
        )

    @contextlib.asynccontextmanager
    async def _for_a_fork(self, box: Box, handle: Handle) -> AsyncIterator[SnapshotRecord]:
        row = _row(ids.new_id(ids.SNAPSHOT), "", box, self._node.clock.time(), kept=False)
        self._node.journal.put_snapshot(row)
        record: SnapshotRecord | None = None
        try:
            record = await to_the_end(handle.snapshot(row.id, memory=True, durable=False))
            yield record
        finally:
            await to_the_end(self._drop(row, record))


def _row(snapshot_id: str, name: str, box: Box, at: float, *, kept: bool) -> SnapshotRow:
    return SnapshotRow(
        id=snapshot_id,
        name=name or snapshot_id,
        kept=kept,
        template=box.template_id,
        backend=box.backend,
        sandbox_id=box.id,
        created_at=at,
    )


def _sizes(asked: Limits, had: Limits) -> Iterator[tuple[str, float, float]]:
    yield "cpu", asked.cpu, had.cpu
    yield "memory", asked.memory_bytes, had.memory_bytes
    yield "disk", asked.disk_bytes, had.disk_bytes
    for field in ("inodes", "pids", "open_files", "cpu_weight"):
        yield field, getattr(asked, field), getattr(had, field)


def unfinished(snapshot_id: str, backend: str) -> SnapshotRecord:
    """For removing one of which nothing but its id is known."""
    nothing = Limits(cpu=0, cpu_weight=0, memory_bytes=0, disk_bytes=0, inodes=0, pids=0, open_files=0)
    return SnapshotRecord(
        snapshot_id=snapshot_id,
        backend=backend,
        sandbox_id="",
        memory=False,
        limits=nothing,
        layers=(),
        stored_bytes=0,
        vm=VmRecord(state="paused", accelerator="", template="", options=VmOptions()),
    )


async def clear_unfinished(node: Node, rows: list[SnapshotRow]) -> None:
    """At start: remove what an earlier edge had half made, and what no record names."""
    for row in rows:
        await _clear(node, row.id, row.backend, node.backends.get(row.backend))
        node.journal.drop_snapshot(row.id)
    for name, backend in node.backends.items():
        stored = backend.snapshots()
        node.snapshots.forget_missing(name, stored)
        for snapshot_id in stored:
            if not node.snapshots.has(snapshot_id):
                node.log.warning("reconcile.leftover", snapshot_id=snapshot_id, backend=name)
                await _clear(node, snapshot_id, name, backend)


async def _clear(node: Node, snapshot_id: str, name: str, backend: Backend | None) -> None:
    try:
        if backend is not None:
            await backend.remove_snapshot(unfinished(snapshot_id, name))
    except Exception as error:
        node.log.error("reconcile.not_cleared", snapshot_id=snapshot_id, reason=str(error))
