# SPDX-License-Identifier: Apache-2.0
"""Memory that all of the family share, so that whoever is killed at whatever instruction leaves what its successor needs.

    0       header: who is what, as pids and as numbers in the shared descriptor table
    4096    what the kernel last wrote of waiting readers, raw
    20480   a record for each descriptor number: nothing, a reader that waits, or a file that is kept. Requests of FUSE, which have no
            descriptor, take numbers from the upper half.

The kernel writes an event into the raw part and then expects an answer; `parsed` says whether its events have got their records yet. So
at no moment is there a waiting reader that is in neither, and one in both is harmless: a second answer finds nobody.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator

from opendsec.kernel.fanotify import Event, parse_events

MAX_FDS = 16_384
FIRST_ASKED = MAX_FDS // 2
MAX_ASKED = MAX_FDS // 2
RAW_BYTES = 16_384
_RAW_AT = 4096
_RECORDS_AT = _RAW_AT + RAW_BYTES
_RECORD = struct.Struct("=IiQQQ")
_FIRST = struct.Struct("=I")
_WORD = struct.Struct("=q")

NOTHING, WAITING, KEPT, ASKED = 0, 1, 2, 3

_FIELDS = ("ending", "parsed", "loader_pid", "loader_pidfd", "senior_pidfd", "junior_pidfd", "raw_used", "adopted", "started", "fuse")


class Board:
    def __init__(self) -> None:
        self._map = mmap.mmap(-1, _RECORDS_AT + MAX_FDS * _RECORD.size)
        self._view = memoryview(self._map)
        self.raw = self._view[_RAW_AT : _RAW_AT + RAW_BYTES]
        for field in ("loader_pidfd", "senior_pidfd", "junior_pidfd", "fuse"):
            self.set(field, -1)
        self.set("parsed", 1)

    def get(self, field: str) -> int:
        value: int = _WORD.unpack_from(self._map, _FIELDS.index(field) * _WORD.size)[0]
        return value

    def set(self, field: str, value: int) -> None:
        _WORD.pack_into(self._map, _FIELDS.index(field) * _WORD.size, value)

    # --- readers that wait -----------------------------------------------------------------------------------------

    def before_read(self) -> memoryview:
        """Where the kernel is to write; cleared, so that what it has written ends with zeros."""
        used = self.get("raw_used")
        self.raw[:used] = bytes(used)
        self.set("raw_used", RAW_BYTES)  # until it is known better
        self.set("parsed", 0)
        return self.raw

    def after_read(self, used: int) -> list[Event]:
        """The events just read, recorded."""
        events = list(parse_events(self.raw[:used]))
        for event in events:
            self._put(event.fd, WAITING, event.tid, event.offset, event.count)
        self.set("raw_used", used)
        self.set("parsed", 1)
        return events

    def recover(self) -> list[Event]:
        """All who wait: for a successor, before it reads. An event may have been answered; it may not be closed."""
        if not self.get("parsed"):
            self.after_read(RAW_BYTES)
        return [Event(fd, tid, offset, count) for fd, kind, tid, offset, count, _ in self._all() if kind == WAITING]

    # --- requests of FUSE ------------------------------------------------------------------------------------------

    def fuse(self) -> tuple[int, int]:
        """The device and the mount, if "fuse" is set."""
        both = self.get("fuse")
        return both & 0xFFFF, both >> 16

    def received(self, used: int) -> None:
        """A request was read into `raw`; it counts as there until `settled`."""
        self.set("raw_used", used)

    def settled(self) -> None:
        """The request in `raw` was answered, or has a record."""
        self.set("parsed", 1)

    def unsettled(self) -> bool:
        return not self.get("parsed") and bool(_FIRST.unpack_from(self._map, _RAW_AT)[0])

    def put_asked(self, number: int, unique: int, node: int, offset: int, size: int) -> None:
        self._put(FIRST_ASKED + number, ASKED, size, offset, node, unique)

    def forget_asked(self, number: int) -> None:
        self.forget(FIRST_ASKED + number)

    def asked(self) -> list[tuple[int, int, int, int, int]]:
        """(number, unique, node, offset, size) of requests that were not answered."""
        return [(fd - FIRST_ASKED, unique, node, offset, size) for fd, kind, size, offset, node, unique in self._all() if kind == ASKED]

    # --- descriptors -----------------------------------------------------------------------------------------------

    def keep(self, fd: int) -> None:
        """A successor is to have this descriptor too."""
        self._put(fd, KEPT, 0, 0, 0)

    def forget(self, fd: int) -> None:
        """Before `fd` is closed."""
        self._put(fd, NOTHING, 0, 0, 0)

    def kept(self) -> list[int]:
        return [fd for fd, kind, *_ in self._all() if kind == KEPT]

    def _put(self, fd: int, kind: int, tid: int, offset: int, count: int, extra: int = 0) -> None:
        if fd >= MAX_FDS:
            raise ValueError(f"descriptor {fd} is beyond the board")
        at = _RECORDS_AT + fd * _RECORD.size
        # The kind last: a record is seen whole or not at all.
        _RECORD.pack_into(self._map, at, NOTHING, tid, offset, count, extra)
        struct.pack_into("=I", self._map, at, kind)

    def _all(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        for fd, record in enumerate(_RECORD.iter_unpack(self._view[_RECORDS_AT:])):
            if record[0] != NOTHING:
                yield (fd, *record)
