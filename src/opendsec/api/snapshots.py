# SPDX-License-Identifier: Apache-2.0
"""Snapshots, and copies of running sandboxes.

A snapshot with memory is of one moment: disk and memory always pair, and what is made of it goes on where the sandbox was, with an identity
of its own. One without is what was on the disk then; what is made of it boots.
"""

from __future__ import annotations

import msgspec

from opendsec.api.ids import check_action_id
from opendsec.api.spec import BATCH, AnySpec, Limits, check_integer, check_snapshot_name


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copies of a running sandbox, `count` of them: each succeeds or fails by itself, and has the source's spec and a life of its own."""

    count: int = 1
    action_id: str | None = None

    def check(self) -> None:
        """Raises InvalidRequest naming the field and the rule."""
        check_integer(self.count, "count", BATCH)
        if self.action_id is not None:
            check_action_id(self.action_id)


class SnapshotRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keep what a sandbox is now. `name`: new; "" = the snapshot's id."""

    name: str = ""
    memory: bool = True
    action_id: str | None = None

    def check(self) -> None:
        """Raises InvalidRequest naming the field and the rule."""
        if self.name:
            check_snapshot_name(self.name, "name")
        if self.action_id is not None:
            check_action_id(self.action_id)


class SnapshotInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One snapshot. `spec`: of a sandbox made of it, as it may be given to create."""

    id: str
    name: str
    backend: str
    sandbox_id: str  # whose it is
    memory: bool
    image: str
    layers: tuple[str, ...]  # sha256 digests, lowest first
    limits: Limits
    stored_bytes: int
    created_at: float  # unix seconds
    spec: AnySpec | None = None


class SnapshotList(msgspec.Struct, frozen=True):
    snapshots: tuple[SnapshotInfo, ...]
