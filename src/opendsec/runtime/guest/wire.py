# SPDX-License-Identifier: Apache-2.0
"""Frames and payloads of the guest protocol: docs/guest-protocol.md says what they mean, native/guest_protocol.h has the same numbers.

Pure. What comes from a guest is hostile: every reader here is total, bounded by what it is given, and raises WireError alone.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from opendsec.api.files import FileInfo, FileKind, WatchEvent
from opendsec.runtime.backend import Counters

T = TypeVar("T")

MAGIC, VERSION = 0x31475344, 1
HEADER_BYTES = 24
MAX_PAYLOAD, MAX_REQUEST = 65_536, 3 << 20
INITIAL_CREDIT = 131_072
MAX_STREAMS = 16
NONCE_BYTES, SEED_BYTES, FRESH_BYTES, MAX_PING, MAX_NAME = 16, 64, 32, 64, 64

MORE = 1
ANSWER = 0x8000
ERROR = 0xFFFF

HELLO, PING, PARK, UNPARK = 0x0001, 0x0002, 0x0003, 0x0004
DATA, CREDIT, EOF, CLOSE = 0x0010, 0x0011, 0x0012, 0x0013
EXEC, SIGNAL, MARK, MEMBERS, RESIZE, RELEASE, COMMANDS, CUT = range(0x0020, 0x0028)
EXIT, TREE_EMPTY = 0x0030, 0x0031
STAT, LIST, READ, WRITE, COMMIT, ABORT, MKDIR, MOVE, REMOVE, CHMOD, WALK, EXTRACT, WATCH, UNWATCH = range(0x0040, 0x004E)
WATCHED = 0x0050
IDENTITY, CLOCK, NETWORK, USAGE, SYNC, FREEZE, THAW, MOUNT, SHUTDOWN, LIMITS = range(0x0060, 0x006A)

STREAM_TYPES = frozenset((DATA, CREDIT, EOF, CLOSE))
EVENT_TYPES = frozenset((EXIT, TREE_EMPTY, WATCHED))

FEATURE_CGROUPS, FEATURE_INIT, FEATURE_PTY, FEATURE_FREEZE = 1, 2, 4, 8
EXEC_PTY = 1
KIND_NULL, KIND_IN, KIND_OUT, MIN_KINDS = 0, 1, 2, 3
SIGNAL_TREE, SIGNAL_SINCE_MARK = 1, 2
COMMAND_RUNS, COMMAND_TREE, COMMAND_RELEASED = 1, 2, 4
EXIT_CODE, EXIT_SIGNAL = 0, 1
FILE_APPEND, FILE_PARENTS, FILE_MODE, FILE_USER, FILE_RECURSIVE, FILE_FOLLOW = 1, 2, 4, 8, 16, 32
RECORD_ENTRY, RECORD_LINK, RECORD_PROBLEM = 1, 2, 3
DONE_SEED, DONE_HOSTNAME, DONE_MACHINE_ID, DONE_BOOT_ID, DONE_CLOCK = 1, 2, 4, 8, 16
SHUTDOWN_OFF, SHUTDOWN_REBOOT = 0, 1
MOUNT_READ_ONLY = 1

MAX_PATH_BYTES = 4095
MAX_TEXT_BYTES = 1024  # of what a guest says to people
MAX_SIGNAL = 64

_HEADER = struct.Struct("<IIHHIQ")
_U16, _U32, _U64 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
_ENTRY = struct.Struct("<IIIIQqQQ")
_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character_device",
    stat.S_IFBLK: "block_device",
}
_CHANGES = ("created", "modified", "deleted", "moved_from", "moved_to", "attributes", "overflow", "gone")


class WireError(Exception):
    """The guest said what no guestd says."""


# --- frames ----------------------------------------------------------------------------------------------------------------


class Header(NamedTuple):
    length: int
    type: int
    flags: int
    id: int


def header(kind: int, number: int, length: int, flags: int = 0) -> bytes:
    return _HEADER.pack(MAGIC, length, kind, flags, 0, number)


def parse_header(data: bytes | bytearray | memoryview, at: int = 0) -> Header:
    """Of HEADER_BYTES at `at`. Raises WireError."""
    magic, length, kind, flags, zero, number = _HEADER.unpack_from(data, at)
    if magic != MAGIC or length > MAX_PAYLOAD or zero:
        raise WireError("not a frame")
    return Header(length, kind, flags, number)


def frames(kind: int, number: int, payload: bytes) -> bytes:
    """A request, in as many frames as it takes. Raises ValueError if it is longer than any may be."""
    if len(payload) <= MAX_PAYLOAD:
        return _HEADER.pack(MAGIC, len(payload), kind, 0, 0, number) + payload
    if len(payload) > MAX_REQUEST:
        raise ValueError(f"a request of {len(payload)} bytes; at most {MAX_REQUEST}")
    parts = []
    for at in range(0, len(payload), MAX_PAYLOAD):
        part = payload[at : at + MAX_PAYLOAD]
        parts.append(_HEADER.pack(MAGIC, len(part), kind, MORE if at + MAX_PAYLOAD < len(payload) else 0, 0, number) + part)
    return b"".join(parts)


def credit(number: int, stream: int, count: int) -> bytes:
    return _HEADER.pack(MAGIC, 4, CREDIT, stream, 0, number) + _U32.pack(count)


def eof(number: int, stream: int) -> bytes:
    return _HEADER.pack(MAGIC, 0, EOF, stream, 0, number)


def close(number: int, stream: int, code: int = 0) -> bytes:
    return _HEADER.pack(MAGIC, 4, CLOSE, stream, 0, number) + _U32.pack(code)


# --- payloads, written -----------------------------------------------------------------------------------------------------


def u16(value: int) -> bytes:
    return _U16.pack(value)


def u32(value: int) -> bytes:
    return _U32.pack(value)


def u64(value: int) -> bytes:
    return _U64.pack(value)


def string(data: bytes | str) -> bytes:
    """Raises ValueError for what cannot be one."""
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogateescape")
    if b"\0" in data:
        raise ValueError("a zero byte")
    return _U32.pack(len(data)) + data


def strings(items: Iterable[bytes | str]) -> bytes:
    parts = [string(item) for item in items]
    return _U32.pack(len(parts)) + b"".join(parts)


def who(flags: int, mode: int | None, user: str | None) -> bytes:
    """`flags` without those for mode and user."""
    flags |= (0 if mode is None else FILE_MODE) | (0 if user is None else FILE_USER)
    return _U32.pack(flags) + _U32.pack(mode or 0) + string(user or "")


# --- payloads, read --------------------------------------------------------------------------------------------------------


class Fields:
    """Reads a payload from its beginning."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def _take(self, layout: struct.Struct) -> int:
        if self.left < layout.size:
            raise WireError("a payload is too short")
        (value,) = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return int(value)

    def u16(self) -> int:
        return self._take(_U16)

    def u32(self) -> int:
        return self._take(_U32)

    def u64(self) -> int:
        return self._take(_U64)

    def raw(self, count: int) -> bytes:
        if self.left < count:
            raise WireError("a payload is too short")
        data = self._data[self._at : self._at + count]
        self._at += count
        return data

    def string(self, limit: int = MAX_PATH_BYTES) -> bytes:
        size = self.u32()
        if size > limit:
            raise WireError("a string is too long")
        data = self.raw(size)
        if b"\0" in data:
            raise WireError("a string with a zero byte")
        return data

    def text(self) -> str:
        """For people."""
        return "".join(c if c.isprintable() else "�" for c in self.string(MAX_PAYLOAD)[:MAX_TEXT_BYTES].decode("utf-8", "replace"))

    def list(self, item: Callable[[Fields], T], *, limit: int) -> list[T]:
        count = self.u32()
        if count > limit or count > self.left:  # each item takes a byte at least
            raise WireError("a list is too long")
        return [item(self) for _ in range(count)]

    def entry(self) -> Entry:
        if self.left < _ENTRY.size:
            raise WireError("a payload is too short")
        fixed = _ENTRY.unpack_from(self._data, self._at)
        self._at += _ENTRY.size
        mode, uid, gid, links, size, mtime_ns, device, inode = fixed
        name, target = self.string(MAX_PAYLOAD), self.string(MAX_PAYLOAD)
        return Entry(mode, uid, gid, links, size, mtime_ns, device, inode, name, target)

    def counters(self) -> Counters:
        return Counters(oom_kills=self.u64(), pids_denied=self.u64(), disk_full=bool(self.u32()), inodes_full=bool(self.u32()))

    def end(self) -> None:
        if self.left:
            raise WireError("a payload is too long")


def only(payload: bytes, read: Callable[[Fields], T]) -> T:
    """What `read` finds in a payload that holds nothing else."""
    fields = Fields(payload)
    value = read(fields)
    fields.end()
    return value


def nothing(fields: Fields) -> None:
    """An empty payload."""


class Entry(NamedTuple):
    """A file as the guest describes it."""

    mode: int  # with the kind
    uid: int
    gid: int
    links: int
    size: int
    mtime_ns: int
    device: int
    inode: int
    name: bytes
    target: bytes  # of a symlink

    @property
    def kind(self) -> FileKind:
        return _kind(self.mode)

    def info(self) -> FileInfo:
        kind = self.kind
        return FileInfo(
            name=self.name.decode("utf-8", "replace"),
            raw_name=self.name,
            kind=kind,
            size_bytes=self.size,
            mode=stat.S_IMODE(self.mode),
            uid=self.uid,
            gid=self.gid,
            modified_at=self.mtime_ns / 1e9,
            target=self.target if kind == "symlink" else None,
        )

    def packed(self) -> bytes:
        return _ENTRY.pack(*self[:8]) + string(self.name) + string(self.target)


def _kind(mode: int) -> FileKind:
    return _KINDS.get(stat.S_IFMT(mode), "file")  # type: ignore[return-value]


class Ended(NamedTuple):
    """EXIT of a command."""

    code: int | None
    signal: int | None
    cpu_us: int
    max_rss_bytes: int
    tree_alive: bool
    counters: Counters
    ends: tuple[int, ...]  # of each stream, how much had been written by then


def ended(fields: Fields) -> Ended:
    kind, number = fields.u32(), fields.u32()
    if kind > EXIT_SIGNAL or number > (MAX_SIGNAL if kind else 255):
        raise WireError("no way to end")
    return Ended(
        None if kind else number,
        number if kind else None,
        fields.u64(),
        fields.u64(),
        bool(fields.u32()),
        fields.counters(),
        tuple(fields.list(Fields.u64, limit=MAX_STREAMS)),
    )


class Welcome(NamedTuple):
    """Answer to HELLO."""

    version: int
    features: int
    nonce: bytes
    boottime_ns: int
    program: str


def welcome(fields: Fields) -> Welcome:
    return Welcome(fields.u32(), fields.u32(), fields.raw(NONCE_BYTES), fields.u64(), fields.text())


class GuestUsage(NamedTuple):
    """What the whole guest uses."""

    memory_bytes: int
    memory_peak_bytes: int
    memory_total_bytes: int
    cpu_us: int
    processes: int
    disk_bytes: int
    disk_total_bytes: int
    inodes: int
    counters: Counters


def usage(fields: Fields) -> GuestUsage:
    return GuestUsage(
        fields.u64(),
        fields.u64(),
        fields.u64(),
        fields.u64(),
        fields.u64(),
        fields.u64(),
        fields.u64(),
        fields.u64(),
        fields.counters(),
    )


class Renewed(NamedTuple):
    """Answer to IDENTITY: bits of `DONE_…`, and the first random bytes after it."""

    done: int
    fresh: bytes


def renewed(fields: Fields) -> Renewed:
    done, _ = fields.u32(), fields.u32()
    return Renewed(done, fields.raw(FRESH_BYTES))


class CommandRow(NamedTuple):
    """One of COMMANDS."""

    name: str
    id: int
    flags: int


def command_row(fields: Fields) -> CommandRow:
    return CommandRow(fields.string().decode("ascii", "replace"), fields.u64(), fields.u32())


def failure(fields: Fields) -> tuple[int, str]:
    """ERROR: (errno, text)."""
    return fields.u32(), fields.text()


def watched(payload: bytes) -> list[WatchEvent]:
    return only(payload, lambda fields: fields.list(_change, limit=MAX_PAYLOAD))


def _change(fields: Fields) -> WatchEvent:
    kind, name = fields.u32(), fields.string()
    if not 1 <= kind <= len(_CHANGES):
        raise WireError("no kind of change")
    return WatchEvent(kind=_CHANGES[kind - 1], name=name.decode("utf-8", "replace"), raw_name=name)  # type: ignore[arg-type]
