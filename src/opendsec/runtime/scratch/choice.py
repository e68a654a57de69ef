# SPDX-License-Identifier: Apache-2.0
"""Which driver an edge gets."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from opendsec.api.errors import OpenDSecError
from opendsec.runtime.scratch.btrfs import BtrfsScratch
from opendsec.runtime.scratch.driver import ScratchDriver
from opendsec.runtime.scratch.tmpfs import TmpfsScratch


class ScratchSettings(msgspec.Struct, frozen=True, kw_only=True):
    driver: Literal["auto", "btrfs", "tmpfs"] = "auto"
    size_bytes: int | None = None  # of a pool that has to be made; None: half of what is free, at most 64 GiB


class Choice(NamedTuple):
    driver: ScratchDriver  # started
    reason: str  # one sentence for `doctor`


async def choose(state_dir: Path, settings: ScratchSettings) -> Choice:
    """The driver that `settings` ask for, started; with "auto" the pool on disk, or memory where there can be none.
    Raises Unsupported, Unavailable (never with "auto" or "tmpfs")."""
    if settings.driver != "tmpfs":
        pool = BtrfsScratch(state_dir, size_bytes=settings.size_bytes)
        try:
            await pool.start()
            return Choice(pool, "a btrfs pool on disk" + ("" if settings.driver == "auto" else ", as configured"))
        except OpenDSecError as error:
            await pool.close()
            if settings.driver == "btrfs":
                raise
            reason = f"memory, since there can be no btrfs pool: {error}"
    else:
        reason = "memory, as configured"
    driver = TmpfsScratch(state_dir / "snapshots")
    await driver.start()
    return Choice(driver, reason)
