# SPDX-License-Identifier: Apache-2.0
"""fanotify(7) pre-content events: the kernel asks before a marked file is read for the first time into somebody's page cache.

Some facts, found by trying on Linux 6.18 and tested by `tests/integration/lazy/test_facts.py`:

* A reader's file asks only if the inode was marked when that file was *opened*. A mount of EROFS opens its data file once, so the mark
  has to be there before the mount. A mark that is taken away and comes back asks the old openers again.
* Every read that reaches the file asks, also of what is there already. What the reader's own page cache holds is never asked about.
* EROFS asks for up to 128 KiB at once. A denied read-ahead is asked for again, by the page; only a denial of that is an error inside.
* Killing a waiting reader works; an answer for it then is taken without an error.
* An answer names an event by the *number* its descriptor had in the reading process, whoever writes it. The number is free again once the
  descriptor is closed: answer first, then close.
* When the last descriptor of the group closes, all waiting readers go on, and nobody is ever asked again: they read holes, as zeros.
* What the group's owner writes through an event's descriptor, or through one opened before the mark, asks nobody.
"""

from __future__ import annotations

import errno
import os
import struct

from opendsec.kernel import abi, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from opendsec.kernel.syscalls import StrPath

    Buffer = bytes | bytearray | memoryview

_METADATA = struct.Struct("=IBBHQii")  # struct fanotify_event_metadata
_INFO = struct.Struct("=BBH")
_RANGE = struct.Struct("=QQ")
_RESPONSE = struct.Struct("=iI")

EVENT_BYTES = _METADATA.size + 24
"""Of one pre-content event with its range."""


class Event:
    """A reader waits. `fd` is open for reading and writing the file, asks nobody, and is closed after the answer."""

    __slots__ = ("count", "fd", "offset", "tid")

    def __init__(self, fd: int, tid: int, offset: int, count: int) -> None:
        self.fd, self.tid, self.offset, self.count = fd, tid, offset, count

    def __repr__(self) -> str:
        return f"Event(fd={self.fd}, tid={self.tid}, {self.offset}+{self.count})"


def parse_events(data: Buffer) -> Iterator[Event]:
    """The events of a buffer, which ends with it or with zeros. Raises ValueError for what the kernel never gives."""
    at, size = 0, len(data)
    while at + _METADATA.size <= size:
        length, version, _reserved, metadata_len, _mask, fd, tid = _METADATA.unpack_from(data, at)
        if length == 0:
            return
        if length < _METADATA.size or at + length > size or version != abi.FANOTIFY_METADATA_VERSION:
            raise ValueError("not a buffer of fanotify events")
        offset = count = 0
        position = at + metadata_len
        while position + _INFO.size <= at + length:
            kind, _pad, info_len = _INFO.unpack_from(data, position)
            if kind == abi.FAN_EVENT_INFO_TYPE_RANGE:
                offset, count = _RANGE.unpack_from(data, position + 8)
            if info_len < _INFO.size:
                raise ValueError("not a buffer of fanotify events")
            position += info_len
        if fd >= 0:
            yield Event(fd, tid, offset, count)
        at += length


class Group:
    """A group of pre-content events by its descriptor, non-blocking, to poll. Closing it is the caller's, and grave: see above."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls) -> Group:
        flags = (
            abi.FAN_CLASS_PRE_CONTENT
            | abi.FAN_CLOEXEC
            | abi.FAN_NONBLOCK
            | abi.FAN_UNLIMITED_QUEUE
            | abi.FAN_UNLIMITED_MARKS
            | abi.FAN_REPORT_TID
        )
        return cls(syscalls.fanotify_init(flags, os.O_RDWR | os.O_CLOEXEC))

    def fileno(self) -> int:
        return self.fd

    def mark(self, file: int) -> None:
        """Ask about the file behind a descriptor from now on; may be repeated."""
        syscalls.fanotify_mark(self.fd, abi.FAN_MARK_ADD, abi.FAN_PRE_ACCESS, file, None)

    def unmark(self, file: int) -> None:
        """Ask no more; a file that has no mark is fine."""
        try:
            syscalls.fanotify_mark(self.fd, abi.FAN_MARK_REMOVE, abi.FAN_PRE_ACCESS, file, None)
        except FileNotFoundError:
            pass

    def read(self, buffer: bytearray | memoryview) -> int:
        """Have the kernel write waiting events into `buffer`; how many bytes, 0 if nobody waits."""
        try:
            return os.readv(self.fd, [buffer])
        except BlockingIOError:
            return 0

    def allow(self, fd: int) -> bool:
        """Let the reader go that waits for event number `fd`; False if there is none."""
        return self._answer(fd, abi.FAN_ALLOW)

    def deny(self, fd: int, code: int = errno.EIO) -> bool:
        """Refuse; `code` one of EPERM, EIO, EBUSY, ETXTBSY, EAGAIN, ENOSPC, EDQUOT."""
        return self._answer(fd, abi.FAN_DENY | code << abi.FAN_ERRNO_SHIFT)

    def _answer(self, fd: int, response: int) -> bool:
        try:
            os.write(self.fd, _RESPONSE.pack(fd, response))
        except FileNotFoundError:
            return False
        return True

    def deny_all_known(self, limit: int) -> int:
        """Refuse every event that anybody has read and not answered, whose numbers are below `limit`: all a successor can do that does
        not know what they were. About 1 µs each."""
        return sum(self.deny(number) for number in range(limit))


def can_watch(directory: StrPath) -> bool:
    """Whether files in a directory can be marked: not every file system takes part (tmpfs does not)."""
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        group = Group.create()
        try:
            group.mark(fd)
        finally:
            os.close(group.fd)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
