# SPDX-License-Identifier: Apache-2.0
"""Where a path in a sandbox leads, as far as links decide it. Asked of the edge part by part: no program of the sandbox is believed."""

from __future__ import annotations

import os
import posixpath

from opendsec.api.errors import Conflict, NotFound
from opendsec.client.aio import Sandbox

MAX_LINKS = 40  # as the kernel


class Places:
    """Resolves paths of one sandbox while nothing in it changes; what was asked once is not asked again."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box
        self._targets: dict[str, str | None] = {}

    async def of(self, path: str) -> str:
        """The path with every link followed, `.` and `..` resolved. What does not exist leads to itself; so does a circle of links."""
        left, here, links = path.split("/")[::-1], "/", 0
        while left:
            part = left.pop()
            if part in ("", "."):
                continue
            if part == "..":
                here = posixpath.dirname(here)
                continue
            target = await self._target(posixpath.join(here, part)) if links < MAX_LINKS else None
            if target is None:
                here = posixpath.join(here, part)
                continue
            links += 1
            left += target.split("/")[::-1]
            if target.startswith("/"):
                here = "/"
        return here

    async def _target(self, path: str) -> str | None:
        if path not in self._targets:
            try:
                target = (await self._box.files.stat(path, follow=False)).target
            except (NotFound, Conflict):
                target = None
            self._targets[path] = None if target is None else os.fsdecode(target)
        return self._targets[path]
