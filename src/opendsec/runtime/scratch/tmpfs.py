# SPDX-License-Identifier: Apache-2.0
"""Scratch in memory: one tmpfs a sandbox. Works everywhere; limits on bytes and inodes are exact; all of it counts as memory.

The spawner makes the tmpfs, the sandbox's mount namespace holds it, and with that it goes. So there is nothing to list, adopt or clear
up. Of one that was made while this process lived there is a descriptor, and a snapshot is a copy through that. What is used is asked of
the sandbox's own root, since overlay answers statfs(2) for its upper.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from opendsec.api.errors import SandboxLost, Unavailable, Unsupported
from opendsec.api.spec import Limits
from opendsec.api.units import format_bytes
from opendsec.runtime.scratch.copying import copy_tree, remove_tree
from opendsec.runtime.scratch.driver import BASE_INODES, OpenRoot, ScratchPlan, Snapshot

MAX_COPY_BYTES, MAX_COPY_FILES, COPY_TIMEOUT_S = 512 << 20, 20_000, 3.0  # while the sandbox stands still

_BASE_INODES = BASE_INODES + 1
"""tmpfs lets extended attributes count as inodes, and overlay sets one on `upper`."""


class TmpfsScratch:
    name = "tmpfs"
    in_memory = True
    size_bytes = 0

    def __init__(self, snapshots: Path | None = None) -> None:
        """`snapshots`: a directory on disk for them, ours alone."""
        self._roots: dict[str, OpenRoot] = {}
        self._uppers: dict[str, int] = {}
        self._snapshots = snapshots

    async def start(self) -> None:
        if self._snapshots is not None:
            await asyncio.to_thread(remove_tree, self._snapshots)  # left by an edge that died

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
        upper = self._uppers.pop(sandbox_id, None)
        if upper is not None:
            os.close(upper)

    # --- snapshots -------------------------------------------------------------------------------------------------

    def keep(self, sandbox_id: str, upper: int) -> None:
        self._uppers[sandbox_id] = upper

    def prepare_snapshot(self, sandbox_id: str) -> None:
        used, inodes = self.usage(sandbox_id)
        if used > MAX_COPY_BYTES or (inodes or 0) > MAX_COPY_FILES:
            raise Unsupported(
                f"the sandbox has written {format_bytes(used)} in {inodes} files to memory, and may stand still for {MAX_COPY_FILES} files "
                f"of {format_bytes(MAX_COPY_BYTES)} at most: more takes a scratch pool on disk (btrfs)"
            )

    def snapshot(self, sandbox_id: str, uid_base: int, limits: Limits) -> Snapshot:
        """A copy in the state directory."""
        if self._snapshots is None:
            raise Unsupported("there is no directory for copies of scratch in memory")
        upper = self._uppers.get(sandbox_id)
        if upper is None:
            raise Unsupported("the edge that made this sandbox has ended, and its scratch is in memory, where no other process reaches it")
        place = self._snapshots / f"{sandbox_id}-{secrets.token_hex(8)}"
        snapshot = Snapshot(ref=str(place), upper=place / "upper", aside=place / "aside", uid_base=uid_base)
        try:
            for folder in (place, snapshot.upper, snapshot.aside):
                folder.mkdir(mode=0o700, parents=True)
            copy_tree(upper, snapshot.upper, max_bytes=MAX_COPY_BYTES, max_files=MAX_COPY_FILES, timeout_s=COPY_TIMEOUT_S)
        except BaseException as error:
            self.drop_snapshot(snapshot)
            if isinstance(error, OSError):
                raise Unavailable(f"cannot copy what the sandbox has written: {error}") from error
            raise
        return snapshot

    def drop_snapshot(self, snapshot: Snapshot) -> None:
        remove_tree(Path(snapshot.ref))

    def list(self) -> Sequence[str]:
        return ()

    async def close(self, *, remove: bool = False) -> None:
        self._roots.clear()
        while self._uppers:
            os.close(self._uppers.popitem()[1])
