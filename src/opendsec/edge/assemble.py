# SPDX-License-Identifier: Apache-2.0
"""The parts of a real edge: which backends, which images, which scratch. The one place that names implementations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import msgspec

from opendsec.api.sandboxes import Feature
from opendsec.edge.admission import Policy
from opendsec.edge.config import Settings
from opendsec.edge.log import Log
from opendsec.images.store import ImageStore
from opendsec.runtime.backend import Backend


async def _nothing() -> None:
    pass


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What an edge is made of."""

    backends: Mapping[str, Backend]
    images: ImageStore
    boot_id: str
    scratch_driver: str
    scratch_bytes: int  # of the pool; of memory, if scratch_is_memory
    scratch_is_memory: bool
    features: tuple[Feature, ...] = ()
    close: Callable[[], Awaitable[None]] = _nothing

    def policy(self, settings: Settings) -> Policy:
        """What may be promised here."""
        memory_bytes = settings.memory_bytes()
        return Policy(
            memory_bytes=memory_bytes,
            disk_bytes=0 if self.scratch_is_memory else int(self.scratch_bytes * settings.disk_overcommit),
            sandboxes=settings.max_sandboxes,
            scratch_is_memory=self.scratch_is_memory,
            max_memory_bytes=settings.max_memory,
            max_disk_bytes=settings.max_disk,
            max_cpu=settings.max_cpu,
            max_pids=settings.max_pids,
        )


async def assemble(settings: Settings, edge_id: str, log: Log) -> Parts:
    """Build them; nothing is started yet."""
    raise NotImplementedError
