# SPDX-License-Identifier: Apache-2.0
"""A call on its way and a member at work, as a pool holds them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

from opendsec.api.errors import OpenDSecError
from opendsec.api.fn import FnResult
from opendsec.api.fn_check import Bounds
from opendsec.edge.fn.devices import Lease
from opendsec.runtime.fncall.interface import Job, Member

Done = Callable[["Call", "FnResult | OpenDSecError"], None]


class Call:
    """One call from its submission to its end, which `done` hears."""

    __slots__ = (
        "again",
        "bounds",
        "caller",
        "cancelled",
        "cold",
        "done",
        "fresh",
        "holder",
        "index",
        "job",
        "number",
        "once",
        "size",
        "tenant",
    )

    def __init__(
        self, job: Job, bounds: Bounds, *, caller: Hashable, tenant: str, fresh: bool, done: Done, index: int = 0, once: bool = False
    ) -> None:
        self.job, self.bounds, self.caller, self.tenant, self.fresh, self.done, self.index = job, bounds, caller, tenant, fresh, done, index
        self.once = once  # it must not run twice, whatever happens to its member
        self.again = False  # it has been tried on another member
        self.cancelled = self.cold = False
        self.number = self.size = 0
        self.holder: Holder | None = None


class Holder:
    """A member and what it occupies."""

    __slots__ = ("current", "deadline", "following", "lease", "member", "member_id", "number", "overdue", "task", "uid_base")

    def __init__(self, number: int, member_id: str, uid_base: int, lease: Lease | None) -> None:
        self.number, self.member_id, self.uid_base, self.lease = number, member_id, uid_base, lease
        self.member: Member | None = None
        self.task: asyncio.Task[None] | None = None  # serving calls
        self.current: Call | None = None  # in its hands
        self.following: Call | None = None  # what it serves next
        self.deadline, self.overdue = 0.0, False
