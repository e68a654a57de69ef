# SPDX-License-Identifier: Apache-2.0
"""The last of what QEMU or a guest wrote to a FIFO."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

KEPT_BYTES = 64 << 10


class Tail:
    """Reads the FIFO while its loop turns, and keeps the end of it. Opened for both directions, so there is never an end of file."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._kept = bytearray()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._read)
        self.heard = asyncio.Event()
        """Set with every text; whoever waits clears it."""

    def _read(self) -> bool:
        try:
            part = os.read(self._fd, KEPT_BYTES)
        except BlockingIOError:
            return False
        self._kept += part
        del self._kept[:-KEPT_BYTES]
        self.heard.set()
        return bool(part)

    def text(self) -> str:
        if self._fd >= 0:
            for _ in range(4):  # a writer may be quicker than we are
                if not self._read():
                    break
        return self._kept.decode("utf-8", "replace")

    def close(self) -> None:
        if self._fd >= 0:
            self.text()
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
