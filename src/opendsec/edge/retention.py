# SPDX-License-Identifier: Apache-2.0
"""How long ended commands are kept for whoever asks again: bounded in number and in bytes, per sandbox and for the whole edge.

When there are too many bytes the oldest output is given up first and the result stays, marked as truncated; when there are too many
commands the oldest is forgotten. Neither happens to a command whose result somebody is waiting for at this moment.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol


class Kept(Protocol):
    """An ended command."""

    @property
    def id(self) -> str: ...
    @property
    def held_bytes(self) -> int:
        """What its output may occupy. Does not grow once it has ended."""

    @property
    def pinned(self) -> bool:
        """Somebody is about to read its result."""

    @property
    def forgettable(self) -> bool:
        """Not pinned, and none of its children holds its output open."""

    @property
    def shelf(self) -> Shelf: ...
    def drop_output(self) -> None: ...
    def forget(self) -> None: ...


class Shelf:
    """Ended commands, oldest first."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.max_count, self.max_bytes = max_count, max_bytes
        self.ended: OrderedDict[str, Kept] = OrderedDict()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # of those that have output
        self.bytes = 0

    def add(self, process: Kept) -> None:
        self.ended[process.id] = process
        if size := process.held_bytes:
            self._sizes[process.id] = size
            self.bytes += size

    def emptied(self, process: Kept) -> None:
        self.bytes -= self._sizes.pop(process.id, 0)

    def discard(self, process: Kept) -> None:
        self.emptied(process)
        self.ended.pop(process.id, None)

    def next_to_empty(self) -> Kept | None:
        if self.bytes <= self.max_bytes:
            return None
        return next((process for name in self._sizes if not (process := self.ended[name]).pinned), None)

    def next_to_forget(self) -> Kept | None:
        if len(self.ended) <= self.max_count:
            return None
        return next((process for process in self.ended.values() if process.forgettable), None)


class Retention:
    """The edge's shelf, and the rules for each sandbox's."""

    def __init__(self, *, count: int = 16_384, bytes: int = 1 << 30, box_count: int = 256, box_bytes: int = 64 << 20) -> None:
        self.edge = Shelf(count, bytes)
        self._box_count, self._box_bytes = box_count, box_bytes

    def shelf(self) -> Shelf:
        """For one sandbox."""
        return Shelf(self._box_count, self._box_bytes)

    def keep(self, process: Kept) -> None:
        """It has ended."""
        for shelf in (process.shelf, self.edge):
            shelf.add(process)
        self.trim(process.shelf)

    def trim(self, box: Shelf) -> None:
        """To be called again when a command is no longer pinned."""
        for shelf in (box, self.edge):
            while process := shelf.next_to_empty():
                process.drop_output()
                process.shelf.emptied(process)
                self.edge.emptied(process)
            while process := shelf.next_to_forget():
                process.forget()
                self.discard(process)

    def discard(self, process: Kept) -> None:
        process.shelf.discard(process)
        self.edge.discard(process)
