# SPDX-License-Identifier: Apache-2.0
"""A sandbox that stands still for a moment, and the copy of its disk that is made meanwhile.

Freezing, copying and thawing are one blocking call in one thread: nothing of the event loop's work comes between, and a caller that is
cancelled leaves nothing frozen. An edge that is killed in between leaves the sandbox frozen until the next edge adopts it.

The freezer stops a process where it returns to its program, so no system call is half done when all stand still. Data that
programs have written and the kernel has not is part of a snapshot too, but writing it out takes as long as the disk takes: so most of it
is written out before (`ScratchDriver.prepare_snapshot`). A process that used up its share of CPU stands still only when it gets some
again, up to a tenth of a second later: so the limit on CPU is lifted while they stop.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from opendsec.api.errors import SandboxLost, Unavailable
from opendsec.api.spec import Limits
from opendsec.images.waiting import in_thread
from opendsec.kernel import cgroups
from opendsec.runtime.backend import Record
from opendsec.runtime.scratch import ScratchDriver, Snapshot

FREEZE_TIMEOUT_S = 5.0


class DiskSnapshotHeld:
    """See `runtime.backend.DiskSnapshot`."""

    def __init__(self, scratch: ScratchDriver, snapshot: Snapshot, frozen_ms: float) -> None:
        self._scratch, self._snapshot, self.frozen_ms = scratch, snapshot, frozen_ms

    @property
    def upper(self) -> Path:
        return self._snapshot.upper

    @property
    def aside(self) -> Path:
        return self._snapshot.aside

    @property
    def uid_base(self) -> int:
        return self._snapshot.uid_base

    async def release(self) -> None:
        await in_thread(self._scratch.drop_snapshot, self._snapshot)


def freeze(group: cgroups.Group, limits: Limits) -> None:
    """Blocks until all stand still; if that fails they run."""
    try:
        group.update({"cpu_cores": None})
        group.freeze(FREEZE_TIMEOUT_S)
    except BaseException as error:
        thaw(group, limits)
        if isinstance(error, TimeoutError):
            raise Unavailable("the processes of the sandbox do not stop: one of them waits in the kernel") from None
        if isinstance(error, OSError):
            raise SandboxLost("the sandbox has ended") from error
        raise


def thaw(group: cgroups.Group, limits: Limits) -> None:
    with contextlib.suppress(FileNotFoundError):  # it has ended
        try:
            group.update({"cpu_cores": limits.cpu})
        finally:
            group.thaw()


def snapshot_disk(group: cgroups.Group, scratch: ScratchDriver, record: Record) -> DiskSnapshotHeld:
    """Blocks. The group runs again when this returns or raises."""
    scratch.prepare_snapshot(record.sandbox_id)
    begun = time.perf_counter()
    try:
        freeze(group, record.limits)
        snapshot = scratch.snapshot(record.sandbox_id, record.uid_base, record.limits)
    finally:
        thaw(group, record.limits)
    return DiskSnapshotHeld(scratch, snapshot, (time.perf_counter() - begun) * 1000)
