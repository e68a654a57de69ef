# SPDX-License-Identifier: Apache-2.0
"""What a scratch driver is, and what it hands to the container plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from opendsec.api.spec import Limits

BASE_INODES = 7
"""What is there before the sandbox makes anything: the root, `upper`, `work`, and four that overlay makes below `work`. No part of
a sandbox's limit."""

OpenRoot = Callable[[], int]
"""An O_PATH descriptor of a living sandbox's root, for the caller to close. Raises SandboxLost."""


class ScratchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox's scratch, as plain data for the spawner.

    "dir": `upper` and `work` exist and belong to the sandbox's root. "tmpfs": the spawner makes one, of `size_bytes` and `inodes`,
    and makes upper and work in it, since a mount that is attached nowhere belongs to who holds its descriptor.
    """

    kind: Literal["dir", "tmpfs"]
    ref: str
    upper: Path = Path()
    work: Path = Path()
    size_bytes: int = 0
    inodes: int = 0

    def wire(self) -> list[object]:
        if self.kind == "tmpfs":
            return ["tmpfs", self.size_bytes, self.inodes]
        return ["dir", os.fsencode(self.upper), os.fsencode(self.work)]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of what a sandbox has written: the overlay's upper directory as it was at one moment, ours to change, and an empty directory
    `aside` of the same file system. `uid_base`: the host's id that is root inside (0: the copy is not shifted)."""

    ref: str
    upper: Path
    aside: Path
    uid_base: int


class ScratchDriver(Protocol):
    """`take`, then `follow` once the sandbox lives (or lives still, for another edge process), then `remove`. The reference is the
    sandbox's id. Methods that are not async never block for longer than a file system call."""

    @property
    def name(self) -> str: ...
    @property
    def in_memory(self) -> bool:
        """Whether what is written counts as memory."""

    @property
    def size_bytes(self) -> int:
        """How much there is for all sandboxes together; 0 if it is memory."""

    async def start(self) -> None:
        """Acquire what all sandboxes share, or take over what an earlier edge process left. Raises Unsupported, Unavailable."""

    def plan(self, sandbox_id: str, limits: Limits) -> ScratchPlan:
        """What `take` with the same arguments will have made."""

    async def take(self, sandbox_id: str, uid_base: int, limits: Limits) -> ScratchPlan:
        """An empty scratch with these limits from the start. Raises Unavailable (no space), Conflict (it has one)."""

    def keep(self, sandbox_id: str, upper: int) -> None:
        """A descriptor of the upper directory, for scratch that the spawner makes; it is the driver's from now on."""

    def follow(self, sandbox_id: str, limits: Limits, open_root: OpenRoot) -> None:
        """From now on `usage` and `full` can tell about it, and limits that need watching are watched. Raises SandboxLost if an
        adopted sandbox's scratch is not there."""

    def usage(self, sandbox_id: str) -> tuple[int, int | None]:
        """(bytes, inodes or None). See the driver for how exact they are. (0, None) if it is not followed."""

    def full(self, sandbox_id: str) -> tuple[bool, bool]:
        """(no bytes left, no inodes left): whether the sandbox is at its limits now."""

    async def remove(self, sandbox_id: str) -> None:
        """Give it back, with all in it; may be repeated. The sandbox's processes have ended."""

    def prepare_snapshot(self, sandbox_id: str) -> None:
        """Do beforehand what `snapshot` would have to wait for, while the sandbox runs. Blocks, perhaps for seconds."""

    def snapshot(self, sandbox_id: str, uid_base: int, limits: Limits) -> Snapshot:
        """Copy what the sandbox has written. It stands still, so this is quick or refuses. Blocks. Raises Unsupported, Unavailable,
        SandboxLost."""

    def drop_snapshot(self, snapshot: Snapshot) -> None:
        """Remove it; may be repeated. Those that a dead edge left are removed by `start`. Blocks."""

    def list(self) -> Sequence[str]:
        """Sandboxes that have scratch here, half-made ones too, whoever took it."""

    async def close(self, *, remove: bool = False) -> None:
        """Let go. What living sandboxes use stays, unless `remove`: then nothing stays."""
