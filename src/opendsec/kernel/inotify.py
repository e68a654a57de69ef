# SPDX-License-Identifier: Apache-2.0
"""inotify(7): which files beneath watched directories changed. Names are bytes, as the file system has them."""

from __future__ import annotations

import errno
import os
import struct

from opendsec.kernel import abi, procfs, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opendsec.kernel.syscalls import StrPath

_EVENT = struct.Struct("=iIII")

NAMES: dict[int, str] = {
    abi.IN_MODIFY: "modify",
    abi.IN_ATTRIB: "attrib",
    abi.IN_CLOSE_WRITE: "close_write",
    abi.IN_MOVED_FROM: "moved_from",
    abi.IN_MOVED_TO: "moved_to",
    abi.IN_CREATE: "create",
    abi.IN_DELETE: "delete",
    abi.IN_DELETE_SELF: "delete_self",
    abi.IN_MOVE_SELF: "move_self",
    abi.IN_UNMOUNT: "unmount",
    abi.IN_Q_OVERFLOW: "overflow",
    abi.IN_IGNORED: "ignored",
}
CHANGES = (
    abi.IN_MODIFY
    | abi.IN_ATTRIB
    | abi.IN_CLOSE_WRITE
    | abi.IN_MOVED_FROM
    | abi.IN_MOVED_TO
    | abi.IN_CREATE
    | abi.IN_DELETE
    | abi.IN_DELETE_SELF
    | abi.IN_MOVE_SELF
)
"""Everything that changes something; reads go unseen."""


class Event:
    """`watch` as `add` gave it (-1: the queue overflowed and events were lost); `name` is empty for the watched thing itself;
    `cookie` pairs moved_from with moved_to."""

    __slots__ = ("cookie", "mask", "name", "watch")

    def __init__(self, watch: int, mask: int, cookie: int, name: bytes) -> None:
        self.watch, self.mask, self.cookie, self.name = watch, mask, cookie, name

    @property
    def kinds(self) -> list[str]:
        return [name for bit, name in NAMES.items() if self.mask & bit]

    @property
    def is_directory(self) -> bool:
        return bool(self.mask & abi.IN_ISDIR)

    def __repr__(self) -> str:
        return f"Event({self.watch}, {'|'.join(self.kinds)}, {self.name!r})"


def parse_events(data: bytes) -> list[Event]:
    """The events of one read. Raises ValueError for a buffer that ends inside one, which the kernel never gives."""
    events = []
    at = 0
    while at < len(data):
        if at + _EVENT.size > len(data):
            raise ValueError("a cut inotify event")
        watch, mask, cookie, length = _EVENT.unpack_from(data, at)
        at += _EVENT.size
        if at + length > len(data):
            raise ValueError("a cut inotify event")
        events.append(Event(watch, mask, cookie, data[at : at + length].split(b"\0", 1)[0]))
        at += length
    return events


class Watcher:
    """An inotify instance with a non-blocking descriptor to poll. Close it, or use it as a context."""

    __slots__ = ("fd",)

    def __init__(self) -> None:
        self.fd = syscalls.inotify_init1(abi.IN_CLOEXEC | abi.IN_NONBLOCK)

    def fileno(self) -> int:
        return self.fd

    def add(self, path: StrPath | int, mask: int = CHANGES) -> int:
        """Watch a path (final symlink not followed) or what a descriptor names; O_PATH will do, so that a caller can resolve a
        hostile path by `fds.beneath` first. Returns the watch's number; ENOSPC: the user's limit of watches is reached."""
        if isinstance(path, int):
            return syscalls.inotify_add_watch(self.fd, procfs.fd_path(path), mask)
        return syscalls.inotify_add_watch(self.fd, path, mask | abi.IN_DONT_FOLLOW)

    def remove(self, watch: int) -> None:
        """Stop a watch; one that the kernel dropped already is fine."""
        try:
            syscalls.inotify_rm_watch(self.fd, watch)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise

    def watching(self) -> bool:
        """Whether any watch is left; the event that one ended may have been among those that the kernel dropped."""
        return any(key.startswith("inotify") for key in procfs.fd_info("self", self.fd))

    def read(self) -> list[Event]:
        """What has come so far, at once; an empty list if nothing has."""
        try:
            return parse_events(os.read(self.fd, 65536))
        except BlockingIOError:
            return []

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
