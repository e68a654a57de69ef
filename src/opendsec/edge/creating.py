# SPDX-License-Identifier: Apache-2.0
"""Making sandboxes: admission, uid ranges and intents in one step, then the backend, then what became of each.

A batch is one request. What is wrong with all of its slots, or with the only one, is raised; otherwise each slot tells for itself.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from opendsec.api import ids, wire
from opendsec.api.errors import Internal, OpenDSecError, QuotaExceeded, Unavailable, Unsupported
from opendsec.api.sandboxes import CreateResponse, Slot
from opendsec.api.spec import BATCH, VM, AnySpec, CreateRequest, Limits, Machine, Spec, check_integer
from opendsec.edge import admission, lifecycle
from opendsec.edge.actions import Action, request_digest
from opendsec.edge.box import Box, Template
from opendsec.edge.shortage import shortage
from opendsec.images.store import Resolved
from opendsec.runtime.backend import Backend, Handle, Placement, SnapshotRecord, VmOptions

if TYPE_CHECKING:
    from opendsec.edge.node import Node

REFUSED = "-"  # in the place of an id, in what the journal keeps of a batch
CHUNK = 32  # slots of a batch that are handed to the backend and journaled together
CHUNKS = 8  # of one batch at the same time, so that the backend is never without work and never flooded


async def create(node: Node, request: CreateRequest) -> CreateResponse:
    """Create `request.count` sandboxes. What is wrong with all of them, or with the only one, is raised; otherwise each slot tells."""
    limits = request.spec.check()
    check_integer(request.count, "count", BATCH)
    if request.action_id is not None:
        ids.check_action_id(request.action_id)

    async def work(action: Action[CreateResponse]) -> CreateResponse:
        return await _create(node, request.spec, limits, request.count, action)

    return await node.actions.once(
        request.action_id,
        work,
        result=CreateResponse,
        kind="create",
        digest=lambda: request_digest("create", wire.encode(request)),
        replay=lambda recorded: replay(node, recorded),
    )


async def _create(node: Node, spec: AnySpec, limits: Limits, count: int, action: Action[CreateResponse]) -> CreateResponse:
    _check_ready(node)
    backend = node.backends.get(spec.kind)
    if backend is None:
        raise Unsupported(f"this edge has no backend {spec.kind!r}", field="spec.backend")
    admission.check_one(limits, node.policy, machine=isinstance(spec, Machine))
    base: SnapshotRecord | None = None
    if isinstance(spec, Machine) and spec.snapshot:
        resolved, base = await node.snapshots.base(spec, limits)
    else:
        resolved = await node.images.resolve(spec.image, spec.layers)
    _check_ready(node)  # again: nothing must begin after the last look before a shutdown
    slots = _intend(node, _template(spec, limits, resolved), count, action, origin="" if base is None else base.snapshot_id)
    await _make(node, backend, resolved, slots, action, base=base)
    if count == 1 and isinstance(slots[0], OpenDSecError):
        raise slots[0]
    return _response(slots)


def check_room(node: Node, limits: Limits) -> None:
    """Raises Unavailable, QuotaExceeded if not even one machine of these limits can be made now."""
    _check_ready(node)
    admission.admit(node.promised, limits, node.policy, machine=True)


async def fork(
    node: Node, source: Box, resolved: Resolved, base: SnapshotRecord, count: int, action: Action[CreateResponse]
) -> CreateResponse:
    """Create copies of `source`, of a snapshot that was made for them. As `create`."""
    _check_ready(node)
    slots = _intend(node, source.template, count, action, origin=source.id)
    await _make(node, node.backends[source.backend], resolved, slots, action, base=base)
    if count == 1 and isinstance(slots[0], OpenDSecError):
        raise slots[0]
    return _response(slots)


async def create_from(node: Node, spec: AnySpec, resolved: Resolved) -> Box:
    """Create one sandbox of layers that need no name, for work of the edge's own, which it does not outlive. Raises as `create`."""
    limits = spec.check()
    _check_ready(node)
    backend = node.backends.get(spec.kind)
    if backend is None:
        raise Unsupported(f"this edge has no backend {spec.kind!r}", field="spec.backend")
    admission.check_one(limits, node.policy, machine=isinstance(spec, Machine))
    action: Action[CreateResponse] = Action(node.actions, None, None, "create", b"")
    slots = _intend(node, _template(spec, limits, resolved, own=True), 1, action)
    if isinstance(slots[0], Box):
        await _make(node, backend, resolved, slots, action)
    if isinstance(slots[0], OpenDSecError):
        raise slots[0]
    return slots[0]


def _check_ready(node: Node) -> None:
    if node.phase != "ready":
        raise Unavailable(f"this edge is {node.phase} and takes no new sandboxes")


def _template(spec: AnySpec, limits: Limits, resolved: Resolved, *, own: bool = False) -> Template:
    config = resolved.config
    return Template(
        spec=spec,
        layers=tuple(layer.digest for layer in resolved.layers),
        limits=limits,
        env={**config.env, **spec.env},
        user=spec.user or config.user,
        workdir=spec.workdir or config.workdir,
        own=own,
    )


def _intend(node: Node, template: Template, count: int, action: Action[CreateResponse], *, origin: str = "") -> list[Box | OpenDSecError]:
    """Admit as many as there is room for and write the intents, in one step."""
    spec, limits = template.spec, template.limits
    machine = isinstance(spec, Machine)
    promise = admission.promise_for(limits, node.policy, machine=machine)
    now, promised = node.clock.time(), node.promised
    slots: list[Box | OpenDSecError] = []
    boxes: list[Box] = []
    try:
        body = msgspec.json.encode(template)
        with node.journal.transaction():
            template_id = node.journal.template(hashlib.sha256(body).digest(), body)
            for _ in range(count):
                try:
                    after = admission.admit(promised, limits, node.policy, machine=machine)
                    uid_base = node.uids.take()
                except QuotaExceeded as refusal:
                    slots.append(refusal)
                    continue
                promised = after
                state, _ = lifecycle.requested(now, ttl_s=spec.ttl_s, ttl_idle_s=spec.ttl_idle_s)
                box = Box(
                    id=ids.new_id(ids.SANDBOX),
                    state=state,
                    template=template,
                    template_id=template_id,
                    backend=spec.kind,
                    uid_base=uid_base,
                    promise=promise,
                    origin=origin,
                )
                boxes.append(box)
                slots.append(box)
                node.journal.insert_sandbox(box.row())
            if boxes:
                action.begin(" ".join(slot.id if isinstance(slot, Box) else REFUSED for slot in slots), now)
    except BaseException:
        for box in boxes:
            node.uids.give_back(box.uid_base)
        raise
    node.promised = promised
    node.boxes.update((box.id, box) for box in boxes)
    return slots


async def _make(
    node: Node,
    backend: Backend,
    resolved: Resolved,
    slots: list[Box | OpenDSecError],
    action: Action[CreateResponse],
    *,
    base: SnapshotRecord | None = None,
) -> None:
    """Have the backend make all that was admitted. What became of each is journaled as it comes, the action's result with the last."""
    boxes = [slot for slot in slots if isinstance(slot, Box)]
    place = {box.id: index for index, box in enumerate(slots) if isinstance(box, Box)}
    chunks = [boxes[start : start + CHUNK] for start in range(0, len(boxes), CHUNK)]
    left, limit = len(chunks), asyncio.Semaphore(CHUNKS)

    async def make(chunk: list[Box]) -> None:
        nonlocal left
        placements = [_placement(box, resolved, base) for box in chunk]
        made: Sequence[Handle | BaseException]
        async with limit:
            try:
                made = [await backend.create(placements[0])] if len(chunk) == 1 else await backend.create_many(placements)
            except BaseException as error:
                made = [error] * len(chunk)
        now = node.clock.time()
        left -= 1
        with node.transaction():
            for box, handle in zip(chunk, made, strict=True):
                if isinstance(handle, BaseException):
                    blame = slots[place[box.id]] = _blame(node, box, handle)
                    node.apply(box, lifecycle.CreateFailed(now, str(blame)))
                else:
                    node.hold(box, handle)
                    node.apply(box, lifecycle.Created(now))
            if not left and not (len(slots) == 1 and isinstance(slots[0], OpenDSecError)):
                action.end(_response(slots), now)
        for handle in made:
            if isinstance(handle, BaseException) and not isinstance(handle, Exception):
                raise handle  # cancelled: the outcome is journaled, the backend has released what it had

    if len(chunks) == 1:
        await make(chunks[0])
    else:
        await asyncio.gather(*(make(chunk) for chunk in chunks))


def _blame(node: Node, box: Box, error: BaseException) -> OpenDSecError:
    if isinstance(error, OpenDSecError):
        return error
    node.log.error("sandbox.create_failed", sandbox_id=box.id, kind=type(error).__name__, reason=str(error))
    if (want := shortage(error)) is not None:
        return want
    return Internal(f"creating a sandbox failed: {type(error).__name__}; the edge's log tells more", data={"sandbox_id": box.id})


def replay(node: Node, recorded: CreateResponse) -> CreateResponse:
    """The recorded slots, each sandbox as it is now."""
    slots = []
    for slot in recorded.slots:
        box = node.boxes.get(slot.sandbox.id) if slot.sandbox is not None else None
        slots.append(slot if box is None else Slot(sandbox=box.info(full=len(recorded.slots) == 1)))
    return CreateResponse(tuple(slots))


def options_of(spec: Spec) -> VmOptions | None:
    """What only a machine can be asked for; None for a container."""
    if not isinstance(spec, Machine):
        return None
    if not isinstance(spec, VM):
        return VmOptions(hardware_required=spec.hardware_virtualization)
    width, height = spec.pixels() or (0, 0)
    return VmOptions(hardware_required=spec.hardware_virtualization, profile=spec.profile, width=width, height=height)


def _placement(box: Box, resolved: Resolved, base: SnapshotRecord | None) -> Placement:
    template = box.template
    return Placement(
        sandbox_id=box.id,
        uid_base=box.uid_base,
        limits=template.limits,
        layers=resolved.layers,
        config=resolved.config,
        env=template.env,
        user=template.user,
        workdir=template.workdir,
        hostname=template.spec.hostname or box.id.replace("_", "-"),
        vm=options_of(template.spec),
        snapshot=base,
    )


def _response(slots: Sequence[Box | OpenDSecError]) -> CreateResponse:
    """Of a batch without the spec: it may be large, and whoever asked has it."""
    full = len(slots) == 1
    return CreateResponse(tuple(Slot(sandbox=slot.info(full=full)) if isinstance(slot, Box) else Slot(error=slot.body()) for slot in slots))
