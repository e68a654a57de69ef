# SPDX-License-Identifier: Apache-2.0
"""What this edge may still promise: a pure count. Whoever asks for more gets a refusal that says how much is there.

Promised, not used: 90 % of sandboxes use little of what they ask for, but memory that everyone uses at once cannot be taken back, so
the sum of all promises stays within what the operator's policy allows (`overcommit` above 1.0 is the operator's own risk).
"""

from __future__ import annotations

import msgspec

from opendsec.api.errors import QuotaExceeded
from opendsec.api.spec import Limits
from opendsec.api.units import format_bytes


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator lets this edge promise, in all and to one sandbox."""

    memory_bytes: int
    disk_bytes: int
    sandboxes: int
    scratch_is_memory: bool = False  # tmpfs: what is written there is memory, and counts as such
    max_memory_bytes: int | None = None  # of one sandbox; None: all there is
    max_disk_bytes: int | None = None
    max_cpu: float | None = None
    max_pids: int | None = None


class Promise(msgspec.Struct, frozen=True):
    """What one sandbox was promised."""

    memory_bytes: int
    disk_bytes: int


class Promised(msgspec.Struct, frozen=True):
    """What all living sandboxes were promised."""

    memory_bytes: int = 0
    disk_bytes: int = 0
    sandboxes: int = 0

    def plus(self, promise: Promise) -> Promised:
        return Promised(self.memory_bytes + promise.memory_bytes, self.disk_bytes + promise.disk_bytes, self.sandboxes + 1)

    def minus(self, promise: Promise) -> Promised:
        return Promised(self.memory_bytes - promise.memory_bytes, self.disk_bytes - promise.disk_bytes, self.sandboxes - 1)


def promise_for(limits: Limits, policy: Policy, *, machine: bool = False) -> Promise:
    """What a sandbox of these limits must be promised. `machine`: its disk is a file, whatever the scratch is."""
    if machine and policy.scratch_is_memory:
        return Promise(limits.memory_bytes, 0)
    memory_bytes = limits.memory_bytes + (limits.disk_bytes if policy.scratch_is_memory else 0)
    return Promise(memory_bytes, 0 if policy.scratch_is_memory else limits.disk_bytes)


def check_one(limits: Limits, policy: Policy, *, machine: bool = False) -> None:
    """Raises QuotaExceeded if no sandbox may be this large here, however empty the edge is."""
    promise = promise_for(limits, policy, machine=machine)
    for resource, asked, maximum in (
        ("memory", limits.memory_bytes, policy.max_memory_bytes),
        ("memory", promise.memory_bytes, policy.memory_bytes),
        ("disk", limits.disk_bytes, policy.max_disk_bytes),
        ("disk", promise.disk_bytes, policy.disk_bytes),
    ):
        if maximum is not None and asked > maximum:
            in_memory = policy.scratch_is_memory and resource == "memory" and not machine
            why = " (with the disk, which is memory on this edge)" if in_memory else ""
            raise _refusal(resource, asked, None, maximum, f"{format_bytes(asked)}{why}", format_bytes(maximum))
    if policy.max_cpu is not None and limits.cpu > policy.max_cpu:
        raise _refusal("cpu", limits.cpu, None, policy.max_cpu, f"{limits.cpu:g} cores", f"{policy.max_cpu:g}")
    if policy.max_pids is not None and limits.pids > policy.max_pids:
        raise _refusal("pids", limits.pids, None, policy.max_pids, str(limits.pids), str(policy.max_pids))


def admit(promised: Promised, limits: Limits, policy: Policy, *, machine: bool = False) -> Promised:
    """`promised` with one more sandbox. Raises QuotaExceeded naming the resource that is short."""
    promise = promise_for(limits, policy, machine=machine)
    after = promised.plus(promise)
    if after.sandboxes > policy.sandboxes:
        raise QuotaExceeded(
            f"this edge may hold {policy.sandboxes} sandboxes and holds {promised.sandboxes}",
            field="count",
            data={"resource": "sandboxes", "asked": 1, "promised": promised.sandboxes, "limit": policy.sandboxes},
        )
    for resource, asked, before, limit in (
        ("memory", promise.memory_bytes, promised.memory_bytes, policy.memory_bytes),
        ("disk", promise.disk_bytes, promised.disk_bytes, policy.disk_bytes),
    ):
        if asked and before + asked > limit:
            raise _refusal(resource, asked, before, limit, format_bytes(asked), format_bytes(limit))
    return after


def readmit(promised: Promised, charged: Promise, promise: Promise, policy: Policy) -> None:
    """Raises QuotaExceeded if a paused sandbox, for which `charged` is counted, cannot have its memory again."""
    asked, limit = promise.memory_bytes - charged.memory_bytes, policy.memory_bytes
    if asked > 0 and promised.memory_bytes + asked > limit:
        raise _refusal("memory", asked, promised.memory_bytes, limit, format_bytes(asked), format_bytes(limit))


def at_rest(promise: Promise, stored_bytes: int, policy: Policy) -> Promise:
    """What a paused sandbox counts for: no memory, but the disk that its memory lies on."""
    return Promise(0, promise.disk_bytes + stored(stored_bytes, policy))


def stored(stored_bytes: int, policy: Policy) -> int:
    """What counts as disk of so many bytes that are stored beside the sandboxes' own disks; where scratch is memory, no disk is counted."""
    return 0 if policy.scratch_is_memory else stored_bytes


def check_storing(promised: Promised, memory_bytes: int, policy: Policy) -> None:
    """Raises QuotaExceeded if there is no room to store that much memory."""
    asked = stored(memory_bytes, policy)
    if asked and promised.disk_bytes + asked > policy.disk_bytes:
        text = f"{format_bytes(asked)} to store its memory"
        raise _refusal("disk", asked, promised.disk_bytes, policy.disk_bytes, text, format_bytes(policy.disk_bytes))


def _refusal(resource: str, asked: float, before: int | None, limit: float, asked_text: str, limit_text: str) -> QuotaExceeded:
    if before is None:
        message = f"{asked_text} asked for, but one sandbox of this edge may have at most {limit_text}"
    else:
        message = f"{asked_text} asked for, but of the {limit_text} that this edge may promise {format_bytes(int(limit) - before)} are left"
    return QuotaExceeded(message, field=resource, data={"resource": resource, "asked": asked, "promised": before, "limit": limit})
