# SPDX-License-Identifier: Apache-2.0
"""What is the same of every machine monitor, whichever program it is."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Protocol


class Monitor(Protocol):
    """A living machine. Methods raise SandboxLost once it is dead, Internal when it refuses, Unavailable when it does not answer."""

    @property
    def pid(self) -> int: ...
    @property
    def died(self) -> asyncio.Future[str]:
        """Done once the process is gone, with what is known of the reason."""

    def alive(self) -> bool: ...
    async def stop(self) -> None:
        """All virtual CPUs stand still when this returns; may be repeated."""

    async def cont(self) -> None: ...
    async def save_devices(self, path: Path) -> None:
        """The state of CPUs and devices to a new file. The machine stands still."""

    async def dump_memory(self, to: Path) -> int:
        """The guest's memory to a new file, as it was when the devices were saved; the machine still stands still."""

    async def load(self, path: Path) -> None:
        """Take a state of devices over the memory the machine was started with. It stands still until `cont`."""

    async def channel(self) -> socket.socket:
        """A connection to the guest's agent."""

    def console(self) -> str:
        """The last of what the guest wrote to its serial port."""

    async def let_go(self) -> None:
        """Close what this edge holds of it; it runs on."""

    async def kill(self) -> None:
        """End it and remove what it had; may be repeated."""
