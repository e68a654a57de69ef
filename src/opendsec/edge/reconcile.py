# SPDX-License-Identifier: Apache-2.0
"""At start: what the journal says, what the machine still has, and how the two become one again.

running in the journal, alive          adopted; its timers are set anew, an elapsed one ends it at once; commands that were under way
                                       are ended, what ended ones left running lives on
running in the journal, gone           lost (all of them after a reboot); remains cleared
paused in the journal                  stays so; its commands are ended when it is resumed
being paused or resumed                running, as far as it can be
half made, half destroyed              cleared
on the machine, not in the journal     cleared
snapshot half made, or for a fork      removed
action pending                         settled: a create tells which of its sandboxes live, everything else is `unknown`
"""

from __future__ import annotations

import asyncio

import msgspec

from opendsec.api.errors import QuotaExceeded, Unavailable
from opendsec.api.exec import ExecResult, ProcessInfo
from opendsec.api.sandboxes import CreateResponse, Slot
from opendsec.edge import lifecycle, pausing
from opendsec.edge.actions import COMMANDS
from opendsec.edge.box import Box, Template
from opendsec.edge.commands import UNKNOWN
from opendsec.edge.creating import REFUSED
from opendsec.edge.node import Node
from opendsec.edge.shortage import shortage
from opendsec.edge.snapshots import clear_unfinished
from opendsec.edge.tables import ActionRow, SnapshotRow

AT_ONCE = 32  # sandboxes adopted or cleared side by side


async def reconcile(node: Node, boot_id: str) -> None:
    """Bring the node and the machine together. Raises only what makes starting impossible: an unreadable journal."""
    rebooted = node.journal.meta("boot_id") not in (None, boot_id)
    half_made = _load(node)
    node.journal.set_meta("boot_id", boot_id)
    slots = asyncio.Semaphore(AT_ONCE)
    held = [box for box in node.boxes.values() if box.state.held]
    cut = node.journal.commands_under_way()
    await asyncio.gather(*(_resume(node, box, slots, rebooted, cut) for box in held))
    for name, backend in node.backends.items():
        for sandbox_id in backend.leftovers():
            if sandbox_id not in node.boxes or not node.boxes[sandbox_id].state.held:
                node.log.warning("reconcile.leftover", sandbox_id=sandbox_id, backend=name)
                try:
                    await backend.clear(sandbox_id, None)
                except Exception as error:
                    node.log.error("reconcile.not_cleared", sandbox_id=sandbox_id, reason=str(error))
    await clear_unfinished(node, half_made)
    _settle(node)
    await node.actions.clear_orphans()


def _load(node: Node) -> list[SnapshotRow]:
    """All that the journal has; snapshots that are to be removed."""
    templates = {key: msgspec.json.decode(body, type=Template) for key, body in node.journal.templates().items()}
    for row in node.journal.sandboxes():
        box = Box.from_row(row, templates[row.template])
        node.boxes[box.id] = box
        if box.state.held:
            node.uids.reserve(box.uid_base)
            if box.state.phase == "paused" and not box.state.turning:
                box.charged = pausing.at_rest(node, box)
            node.promised = node.promised.plus(box.charged)
    snapshots = node.journal.snapshots()
    node.snapshots.load([row for row in snapshots if row.kept and row.record is not None], templates)
    return [row for row in snapshots if not row.kept or row.record is None]


async def _resume(node: Node, box: Box, slots: asyncio.Semaphore, rebooted: bool, cut: frozenset[str]) -> None:
    async with slots:
        turning = box.state.turning
        box.state, instructions = lifecycle.handle(box.state, lifecycle.Restarted(node.clock.time()))
        box.adopted = True
        if instructions == [lifecycle.Adopt()]:
            await _adopt(node, box, rebooted, cut, turning)
        else:
            node.execute(box, instructions)
        if box.state.phase not in ("running", "paused"):
            await box.wait_ended()


async def _adopt(node: Node, box: Box, rebooted: bool, cut: frozenset[str], turning: lifecycle.Turning) -> None:
    backend = node.backends.get(box.backend)
    try:
        if rebooted and not turning:
            raise Unavailable("the machine was restarted")
        if box.template.own:
            raise Unavailable("the edge ended, and what it was made for with it")
        if backend is None or box.record is None:
            raise Unavailable("the edge no longer has what is needed to find it")
        if turning == "resume":
            handle = await backend.resume(box.record, cut=cut)
        else:
            handle = await backend.adopt(box.record, cut=cut)
    except Exception as error:
        if turning and (isinstance(error, Unavailable) or shortage(error) is not None):  # not now: what is stored stays
            node.log.warning("reconcile.paused", sandbox_id=box.id, reason=f"{type(error).__name__}: {error}")
            node.charge(box, pausing.at_rest(node, box))
            node.apply(box, lifecycle.FoundPaused(node.clock.time()))
        else:
            _lose(node, box, error)
        return
    node.hold(box, handle)
    node.apply(box, lifecycle.Adopted(node.clock.time()))


def _lose(node: Node, box: Box, error: Exception) -> None:
    node.log.warning("reconcile.lost", sandbox_id=box.id, reason=f"{type(error).__name__}: {error}")
    node.apply(box, lifecycle.Died(node.clock.time(), str(error)))


def _settle(node: Node) -> None:
    """No action stays pending: what nobody can know is recorded as unknown, so that a repetition is told so and nothing runs twice."""
    now = node.clock.time()
    with node.journal.transaction():
        node.journal.end_all_commands(now)
        for row in node.journal.pending_actions():
            node.journal.end_action(row.action_id, at=now, state="unknown", result=_outcome(node, row))


def _outcome(node: Node, row: ActionRow) -> bytes:
    if row.kind in ("create", "fork"):
        return msgspec.json.encode(CreateResponse(tuple(_slot(node, sandbox_id) for sandbox_id in row.detail.split())))
    lost = ExecResult(outcome="unknown", process_id=row.detail, action_id=row.action_id, message=UNKNOWN)
    if row.kind in COMMANDS:
        return msgspec.json.encode(lost)
    if row.kind == "start":
        return msgspec.json.encode(
            ProcessInfo(
                id=row.detail,
                sandbox_id=row.sandbox_id or "",
                state="ended",
                command="",
                started_at=row.started_at,
                action_id=row.action_id,
                result=lost,
            )
        )
    error = Unavailable(f"the edge ended during this action ({row.kind}): its outcome is unknown", data={"outcome": "unknown"})
    return msgspec.json.encode({"error": error.body()})


def _slot(node: Node, sandbox_id: str) -> Slot:
    if sandbox_id == REFUSED:
        return Slot(error=QuotaExceeded("there was no room for this one when it was asked for").body())
    box = node.boxes.get(sandbox_id)
    if box is not None and box.state.phase == "running":
        return Slot(sandbox=box.info())
    error = Unavailable(
        "the edge ended while this sandbox was being created; nothing of it is left",
        data={"outcome": "unknown", "sandbox_id": sandbox_id},
    )
    return Slot(error=error.body())
