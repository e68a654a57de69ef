# SPDX-License-Identifier: Apache-2.0
"""Scratch in memory: one tmpfs a sandbox. Works everywhere; limits on bytes and inodes are exact; all of it counts as memory.

Nothing is kept here: the spawner makes the tmpfs, the sandbox's mount namespace holds it, and with that it goes. So there is nothing
to list, adopt or clear up. What is used is asked of the sandbox's own root, since overlay answers statfs(2) for its upper.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from opendsec.api.errors import SandboxLost, Unavailable, Unsupported
from opendsec.api.spec import Limits
from opendsec.runtime.scratch.driver import BASE_INODES, OpenRoot, ScratchPlan, Snapshot

_BASE_INODES = BASE_INODES + 1
"""tmpfs lets extended attributes count as inodes, and overlay sets one on `upper`."""


class TmpfsScratch:
    name = "tmpfs"
    in_memory = True
    size_bytes = 0

    def __init__(self) -> None:
        self._roots: dict[str, OpenRoot] = {}

    async def start(self) -> None:
        pass

    async def take(self, sandbox_id: str, uid_base: int, limits: Limits) -> ScratchPlan:
        return self.plan(sandbox_id, limits)

    def plan(self, sandbox_id: str, limits: Limits) -> ScratchPlan:
        return ScratchPlan(kind="tmpfs", ref=sandbox_id, size_bytes=limits.disk_bytes, inodes=limits.inodes + _BASE_INODES)

    def follow(self, sandbox_id: str, limits: Limits, open_root: OpenRoot) -> None:
        self._roots[sandbox_id] = open_root

    def usage(self, sandbox_id: str) -> tuple[int, int | None]:
        """Exact."""
        stats = self._statfs(sandbox_id)
        if stats is None:
            return 0, None
        return (stats.f_blocks - stats.f_bfree) * stats.f_frsize, max(stats.f_files - stats.f_ffree - _BASE_INODES, 0)

    def full(self, sandbox_id: str) -> tuple[bool, bool]:
        """Exact: a write that was refused left no free page, a creation that was refused no free inode."""
        stats = self._statfs(sandbox_id)
        return (False, False) if stats is None else (stats.f_bfree == 0, stats.f_ffree == 0)

    def _statfs(self, sandbox_id: str) -> os.statvfs_result | None:
        open_root = self._roots.get(sandbox_id)
        if open_root is None:
            return None
        try:
            fd = open_root()
        except (SandboxLost, Unavailable):
            return None
        try:
            return os.fstatvfs(fd)
        finally:
            os.close(fd)

    async def remove(self, sandbox_id: str) -> None:
        self._roots.pop(sandbox_id, None)

    def prepare_snapshot(self, sandbox_id: str) -> None:
        raise Unsupported("what a sandbox writes is in memory here, where no other process reaches it: it takes a btrfs scratch pool")

    def snapshot(self, sandbox_id: str, uid_base: int, limits: Limits) -> Snapshot:
        raise AssertionError("refused before")

    def drop_snapshot(self, snapshot: Snapshot) -> None:
        """There is none."""

    def list(self) -> Sequence[str]:
        return ()

    async def close(self, *, remove: bool = False) -> None:
        self._roots.clear()
