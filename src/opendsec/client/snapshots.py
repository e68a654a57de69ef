# SPDX-License-Identifier: Apache-2.0
"""Snapshots of an edge. `Sandbox.snapshot` makes them; `MicroVM(snapshot=NAME, …)` is a sandbox made of one, `info.spec` such a spec."""

from __future__ import annotations

from collections.abc import Sequence

from opendsec.api import routes
from opendsec.api.errors import NotFound
from opendsec.api.snapshots import SnapshotInfo, SnapshotList
from opendsec.client.link import Link


class Snapshots:
    """Of one edge, as `client.snapshots`."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def list(self) -> Sequence[SnapshotInfo]:
        """All that are kept, the oldest first."""
        return (await self._link.call(routes.SNAPSHOTS, SnapshotList)).snapshots

    async def get(self, name: str) -> SnapshotInfo:
        """By its name or id. Raises NotFound."""
        for snapshot in await self.list():
            if name in (snapshot.name, snapshot.id):
                return snapshot
        raise NotFound(f"no snapshot {name[:80]!r}", field="name")

    async def remove(self, name: str, *, action_id: str | None = None) -> Sequence[SnapshotInfo]:
        """Forget one, by its name or id; those that are left. Sandboxes that were made of it stay. Raises NotFound."""
        answer = await self._link.call(routes.SNAPSHOT_REMOVE, SnapshotList, {"name": name}, query={"action_id": action_id})
        return answer.snapshots
