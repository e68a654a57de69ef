# SPDX-License-Identifier: Apache-2.0
"""Ranges of host uids, one for each living sandbox, never the same for two. The journal's unique index guards the same rule."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from opendsec.api.errors import QuotaExceeded
from opendsec.edge.config import UIDS_EACH


class UidRanges:
    """`count` ranges from `base` on, given out from the top (see config.UID_BASE for why), the longest unused one first.

    `excluded`: spans (first uid, count) that belong to somebody else.
    """

    def __init__(self, base: int, count: int, *, excluded: Iterable[tuple[int, int]] = ()) -> None:
        spans = [span for span in excluded if span[1] > 0]
        starts = range(base + (count - 1) * UIDS_EACH, base - 1, -UIDS_EACH)
        if spans:
            usable = [start for start in starts if not any(start < first + size and first < start + UIDS_EACH for first, size in spans)]
        else:
            usable = list(starts)
        self.total = len(usable)
        self._free = deque(usable)
        self._all = frozenset(usable)
        self._used: set[int] = set()

    def take(self) -> int:
        """The first uid of a free range. Raises QuotaExceeded."""
        if not self._free:
            raise QuotaExceeded(
                f"all {self.total} uid ranges of this edge are in use",
                field="count",
                data={"resource": "uid_ranges", "asked": 1, "promised": len(self._used), "limit": self.total},
            )
        start = self._free.popleft()
        self._used.add(start)
        return start

    def reserve(self, start: int) -> None:
        """Mark a range of the journal as used; it may lie outside the present settings. Raises ValueError if it is used already."""
        if start in self._used:
            raise ValueError(f"uid range {start} is used twice")
        self._used.add(start)
        if start in self._all:
            self._free.remove(start)

    def give_back(self, start: int) -> None:
        """Nothing runs or lies about under these uids any more."""
        self._used.remove(start)
        if start in self._all:
            self._free.append(start)


def parse_subids(text: str) -> list[tuple[int, int]]:
    """Spans in the text of /etc/subuid or /etc/subgid; lines that are none are passed over."""
    spans = []
    for line in text.splitlines():
        parts = line.split(":")
        if len(parts) == 3 and parts[1].strip().isdecimal() and parts[2].strip().isdecimal():
            spans.append((int(parts[1]), int(parts[2])))
    return spans
