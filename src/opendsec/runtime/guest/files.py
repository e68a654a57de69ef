# SPDX-License-Identifier: Apache-2.0
"""Files of a guest. guestd resolves and changes; rules and errors are those of `runtime.files`, and what can be refused without asking is.

What a guest says about its files is its own business: it can lie about them, to itself and to whoever asks. It is held to the shape
and the bounds of an answer.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Sequence
from typing import TypeVar

from opendsec.api.errors import Conflict, Internal, InvalidRequest, NotFound, OpenDSecError, QuotaExceeded, SandboxLost, Unavailable
from opendsec.api.files import FileInfo
from opendsec.runtime.backend import FileReader, FileWriter, Watch
from opendsec.runtime.files import tarball
from opendsec.runtime.files.access import MAX_LISTED
from opendsec.runtime.files.archive import Problem
from opendsec.runtime.files.beneath import MAX_NAME_BYTES, NOBODY, check_path, from_os_error, split, text
from opendsec.runtime.files.extract import parts_of, refused
from opendsec.runtime.guest import wire
from opendsec.runtime.guest.channel import Channel, Refused
from opendsec.runtime.guest.transfer import Closed, Incoming, Outgoing
from opendsec.runtime.guest.watch import GuestWatch
from opendsec.runtime.guest.wire import Entry, Fields, WireError

T = TypeVar("T")

MAX_LIST_BYTES = 64 << 20
COMMIT_S = 120.0  # for what is written to reach its disk
MAX_ID = 0xFFFF_FFFE
MAX_TIME_S = 1 << 33
PIECE_BYTES = 64 << 10
_RECORD_HEAD = 4 + 48 + 4  # kind, entry, length of its name
_USER_PROBLEMS = ("no user", "no group", "numbers must", "no such user", "no such group")


class GuestFiles:
    """Implements `backend.FileAccess`; blocking, for threads other than the loop's, several at a time."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    # --- asking ------------------------------------------------------------------------------------------------------

    def _ask(self, kind: int, payload: bytes, read: Callable[[Fields], T], path: bytes, field: str = "path") -> T:
        try:
            answer = self._channel.ask_from_thread(kind, payload)
        except Refused as error:
            raise failure(error, path, field) from error
        return self.read(b"".join(answer), read)

    def read(self, answer: bytes, read: Callable[[Fields], T]) -> T:
        try:
            return wire.only(answer, read)
        except WireError as error:
            said = error
            self._channel.call_soon(lambda: self._channel.break_off(said))
            raise SandboxLost(f"the sandbox has ended: the guest broke the protocol: {error}") from error

    def begin(self, kind: int, payload: bytes, owner: Incoming | Outgoing | GuestWatch, path: bytes) -> bytes:
        """A request that begins a transfer or a watch."""
        try:
            return b"".join(self._channel.ask_from_thread(kind, payload, number=owner.number, owner=owner))
        except Refused as error:
            if kind in (wire.READ, wire.WRITE) and error.errno in (errno.ENXIO, errno.EISDIR):
                what = self.stat(path).kind
                if what != "file":
                    what_it_is = what.replace("_", " ")
                    raise Conflict(f"{text(path)} is a {what_it_is}, not a regular file", field="path") from error
            raise failure(error, path) from error
        except OpenDSecError:
            if not isinstance(owner, GuestWatch):
                owner.end()
            raise

    # --- looking -----------------------------------------------------------------------------------------------------

    def stat(self, path: bytes, *, follow: bool = True) -> FileInfo:
        check_path(path)
        flags = wire.FILE_FOLLOW if follow else 0
        return named(self._ask(wire.STAT, wire.u32(flags) + wire.string(path), Fields.entry, path), path)

    def list(self, path: bytes) -> Sequence[FileInfo]:
        check_path(path)
        try:
            parts = self._channel.ask_from_thread(wire.LIST, wire.u32(MAX_LISTED) + wire.string(path), limit=MAX_LIST_BYTES)
        except Refused as error:
            if error.errno == errno.EFBIG:
                raise QuotaExceeded(
                    f"{text(path)} has more than {MAX_LISTED} entries; list it with a command, or archive it",
                    field="path",
                    data={"resource": "entries", "limit": MAX_LISTED},
                ) from error
            raise failure(error, path) from error
        entries = [entry for part in parts for entry in self.read(part, lambda fields: fields.list(_listed, limit=MAX_LISTED))]
        if len(entries) > MAX_LISTED:
            raise Conflict(f"{text(path)} has more entries than were asked for", field="path")
        return sorted((entry.info() for entry in entries), key=lambda info: info.raw_name)

    def open_read(self, path: bytes) -> FileReader:
        check_path(path)
        return GuestReader(self, self._channel, path)

    def open_watch(self, path: bytes) -> Watch:
        check_path(path)
        watch = GuestWatch(self._channel)
        try:
            self.read(self.begin(wire.WATCH, wire.string(path), watch, path), wire.nothing)
        except BaseException:
            watch.close()
            raise
        return watch

    # --- changing ----------------------------------------------------------------------------------------------------

    def open_write(
        self, path: bytes, *, mode: int | None, user: str | None, append: bool, parents: bool, default_user: str = ""
    ) -> FileWriter:
        check_path(path)
        if path.endswith((b"/", b"/.", b"/..")):
            raise InvalidRequest("names a directory", field="path")
        flags = (wire.FILE_APPEND if append else 0) | (wire.FILE_PARENTS if parents else 0)
        transfer = Outgoing(self._channel)
        payload = wire.who(flags, mode, user) + wire.string(default_user) + wire.string(path)
        existed = self.read(self.begin(wire.WRITE, payload, transfer, path), Fields.u32)
        return GuestWriter(self, self._channel, transfer, path, in_place=append and bool(existed & 1))

    def mkdir(self, path: bytes, *, mode: int, user: str | None, parents: bool) -> FileInfo:
        check_path(path)
        if not parents:
            split(path)
        payload = wire.who(wire.FILE_PARENTS if parents else 0, mode, user or "") + wire.string(path)
        return named(self._ask(wire.MKDIR, payload, Fields.entry, path), path)

    def move(self, path: bytes, to: bytes) -> FileInfo:
        check_path(path)
        check_path(to, "to")
        split(path)
        split(to, "to")
        try:
            answer = self._channel.ask_from_thread(wire.MOVE, wire.string(path) + wire.string(to))
        except Refused as error:
            if error.errno == errno.EXDEV:
                raise Conflict(
                    f"{text(path)} cannot be renamed to another file system, nor can a directory of the image; mv inside copies",
                    field="to",
                    data={"errno": "EXDEV"},
                ) from error
            self.stat(path, follow=False)  # which one it is about: raises if it is this one
            raise failure(error, to, "to") from error
        return named(self.read(b"".join(answer), Fields.entry), to)

    def remove(self, path: bytes, *, recursive: bool) -> None:
        check_path(path)
        split(path)
        flags = wire.FILE_RECURSIVE if recursive else 0
        self._ask(wire.REMOVE, wire.u32(flags) + wire.string(path), wire.nothing, path)

    def chmod(self, path: bytes, *, mode: int | None, user: str | None) -> FileInfo:
        check_path(path)
        return named(self._ask(wire.CHMOD, wire.who(0, mode, user) + wire.string(path), Fields.entry, path), path)

    # --- trees -------------------------------------------------------------------------------------------------------

    def archive(self, path: bytes, out_fd: int, *, problem: Problem | None = None) -> None:
        """Write a tar stream of `path` to `out_fd`, the caller's. `problem` is called with a member's name and what is wrong with it.

        Raises Conflict if the reader goes away.
        """
        check_path(path)
        transfer = Incoming(self._channel)
        start = self.read(self.begin(wire.WALK, wire.string(path), transfer, path), Fields.entry)
        try:
            if start.kind not in ("directory", "file"):
                what = start.kind.replace("_", " ")
                raise Conflict(f"{text(path)} is a {what}; an archive is of a directory or a file", field="path")
            write_tar(transfer, out_fd, problem or (lambda _name, _what: None))
        except Closed as closed:
            raise from_os_error(OSError(closed.code, ""), path) from closed
        except OSError as error:
            raise from_os_error(error, path) from error
        finally:
            transfer.end()

    def extract(self, path: bytes, in_fd: int, *, user: str | None) -> int:
        check_path(path)
        transfer = Outgoing(self._channel)
        payload = wire.who(wire.FILE_PARENTS, None, user) + wire.string(path)
        self.read(self.begin(wire.EXTRACT, payload, transfer, path), wire.nothing)
        last: tarball.Member | None = None
        try:
            try:
                reader = tarball.TarReader(in_fd)
                for one in reader:
                    last = one
                    if (head := record(one, given_owner=user is not None)) is None:
                        continue
                    transfer.write(head)
                    for piece in reader.content(PIECE_BYTES):
                        transfer.write(piece)
            except Closed:
                pass  # COMMIT says why
            try:
                return self.commit(transfer, path if last is None else last.name, "body")
            except OpenDSecError as error:
                raise error if last is None else at_member(error, last) from error
        except BaseException:
            self.abort(transfer)
            raise

    # --- transfers ---------------------------------------------------------------------------------------------------

    def commit(self, transfer: Outgoing, path: bytes, field: str = "path") -> int:
        """What the guest says is there now, or has been written."""
        transfer.finish()
        try:
            answer = self._channel.ask_from_thread(wire.COMMIT, wire.u64(transfer.number), timeout_s=COMMIT_S)
        except Refused as error:
            transfer.end()
            raise failure(error, path, field) from error
        transfer.end()
        return self.read(b"".join(answer), Fields.u64)

    def abort(self, transfer: Outgoing) -> None:
        """Returns when nothing is left of it, if the guest lives."""
        if transfer.over:
            return
        try:
            self._channel.ask_from_thread(wire.ABORT, wire.u64(transfer.number))
        except (OSError, OpenDSecError):
            pass  # it is gone there, or the guest is
        transfer.end()


class GuestReader:
    """Implements `backend.FileReader`: the file in one stream, as long as it is read in order."""

    def __init__(self, files: GuestFiles, channel: Channel, path: bytes) -> None:
        self._files, self._channel, self._path = files, channel, path
        self._identity: tuple[int, int] | None = None
        self._at = 0
        self._transfer: Incoming | None = None
        self._entry = self._open(0)

    def _open(self, offset: int) -> Entry:
        transfer = Incoming(self._channel)
        payload = wire.u64(offset) + wire.u64((1 << 63) - 1 - offset) + wire.string(self._path)
        entry = self._files.read(self._files.begin(wire.READ, payload, transfer, self._path), Fields.entry)
        identity = (entry.device, entry.inode)
        self._transfer, self._at = transfer, offset
        if self._identity not in (None, identity):
            self.close()
            raise Conflict(f"{text(self._path)} was replaced while it was read", field="path")
        self._identity = identity
        return entry

    def size_bytes(self) -> int:
        return self._entry.size if stat.S_ISREG(self._entry.mode) else 0

    def read(self, offset: int, count: int) -> bytes:
        if self._transfer is None or offset != self._at:
            self.close()
            self._entry = self._open(min(offset, (1 << 63) - 1))
        assert self._transfer is not None
        try:
            data = self._transfer.upto(count)
        except Closed as closed:
            raise from_os_error(OSError(closed.code, ""), self._path) from closed
        self._at = offset + len(data)
        return data

    def close(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.end()


class GuestWriter:
    """Implements `backend.FileWriter`."""

    def __init__(self, files: GuestFiles, channel: Channel, transfer: Outgoing, path: bytes, *, in_place: bool) -> None:
        self._files, self._channel, self._transfer, self._path = files, channel, transfer, path
        self._in_place = in_place
        self._written = 0

    def write(self, data: bytes) -> None:
        if self._transfer.over:
            raise Internal("written to after the end")
        try:
            self._transfer.write(data)
            self._written += len(data)
        except Closed:
            self._files.commit(self._transfer, self._path)  # says why
            raise Unavailable(f"the guest gave up writing {text(self._path)}") from None
        except BaseException:
            self.abort()
            raise

    def commit(self) -> int:
        if self._transfer.over:
            raise Internal("committed after the end")
        try:
            size = self._files.commit(self._transfer, self._path)
        except BaseException:
            self.abort()
            raise
        if not self._in_place and size != self._written:
            raise Conflict(f"{text(self._path)} was changed by something else while it was written", field="path")
        return size

    def abort(self) -> None:
        self._files.abort(self._transfer)


# --- errors and names ------------------------------------------------------------------------------------------------------


def failure(error: Refused, path: bytes, field: str = "path") -> OpenDSecError:
    """The contract's error for the guest's."""
    said = error.strerror or ""
    if error.errno == errno.EAGAIN and said.startswith("more than"):
        return Unavailable(f"the guest is at work on as many files as it can: {said}")
    if said.startswith(_USER_PROBLEMS):
        return InvalidRequest(said, field="user")
    return from_os_error(OSError(error.errno, said), path, field)


def at_member(error: OpenDSecError, member: tarball.Member) -> OpenDSecError:
    """The error of an extraction that ended at `member`, or a little before: what is under way when it fails is bounded by the credit."""
    if member.kind == "hard_link" and isinstance(error, NotFound):
        return refused(member, f"is a link to {text(member.link)}, which does not exist")
    if member.kind == "hard_link" and error.data.get("errno") == "EISDIR":
        return refused(member, "is a link to a directory")
    error.data["member"] = text(member.name)
    return error


def _listed(fields: Fields) -> Entry:
    """An entry of a directory: callers make paths of its name."""
    entry = fields.entry()
    if not 0 < len(entry.name) <= MAX_NAME_BYTES or b"/" in entry.name or entry.name in (b".", b".."):
        raise WireError("a name that none can be")
    return entry


def named(entry: Entry, path: bytes) -> FileInfo:
    """Under the name that it was asked for by."""
    return entry._replace(name=path.rstrip(b"/").rsplit(b"/", 1)[-1] or b"/").info()


# --- tar -------------------------------------------------------------------------------------------------------------------


def record(member: tarball.Member, *, given_owner: bool) -> bytes | None:
    """A member of an archive as guestd takes it; None for one that says nothing. Raises InvalidRequest."""
    parts = parts_of(member.name, member)
    if not parts:
        if member.kind != "directory":
            raise refused(member, "names no entry")
        return None
    kinds = {"file": stat.S_IFREG, "hard_link": stat.S_IFREG, "symlink": stat.S_IFLNK, "directory": stat.S_IFDIR, "fifo": stat.S_IFIFO}
    link = member.link
    if member.kind == "hard_link":
        link = b"/".join(parts_of(member.link, member))
    if member.kind in ("hard_link", "symlink") and not link:
        raise refused(member, "is a link to nothing")
    uid, gid = (number if 0 <= number <= MAX_ID else NOBODY for number in (member.uid, member.gid))
    entry = Entry(
        mode=kinds[member.kind] | (member.mode & (0o1777 if given_owner else 0o7777)),
        uid=uid,
        gid=gid,
        links=1,
        size=member.size,
        mtime_ns=max(-MAX_TIME_S, min(member.mtime, MAX_TIME_S)) * 1_000_000_000,
        device=0,
        inode=0,
        name=b"/".join(parts),
        target=link,
    )
    return wire.u32(wire.RECORD_LINK if member.kind == "hard_link" else wire.RECORD_ENTRY) + entry.packed()


def write_tar(transfer: Incoming, out: int, problem: Problem) -> None:
    """Records of a walk as a tar stream. Raises OSError of `out`, Closed, Conflict."""
    while kind := transfer.upto(4):
        if kind == wire.u32(wire.RECORD_PROBLEM):
            name, what = (_exactly(transfer, _length(transfer, wire.MAX_PAYLOAD)) for _ in range(2))
            problem(name, text(what))
            continue
        if kind not in (wire.u32(wire.RECORD_ENTRY), wire.u32(wire.RECORD_LINK)):
            raise _nonsense()
        member, size = _member(transfer, link=kind == wire.u32(wire.RECORD_LINK))
        tarball.write_all(out, tarball.header(member))
        left = size
        while left:
            data = transfer.read(min(left, PIECE_BYTES))
            if not data:
                raise Conflict(f"{text(member.name)}: its content was cut off", field="path")
            tarball.write_all(out, data)
            left -= len(data)
        tarball.write_all(out, tarball.padding(size))
    tarball.write_all(out, tarball.END_OF_ARCHIVE)


_TAR_KINDS: dict[str, tarball.MemberKind] = {"file": "file", "directory": "directory", "symlink": "symlink", "fifo": "fifo"}


def _member(transfer: Incoming, *, link: bool) -> tuple[tarball.Member, int]:
    fixed = _exactly(transfer, 48)
    name = _exactly(transfer, _length(transfer, tarball.MAX_NAME_BYTES))
    target = _exactly(transfer, _length(transfer, tarball.MAX_NAME_BYTES))
    entry = wire.only(fixed + wire.string(name) + wire.string(target), Fields.entry)
    kind = "hard_link" if link else _TAR_KINDS.get(entry.kind)
    if kind is None or entry.size >> 62:
        raise _nonsense()
    member = tarball.Member(
        name=entry.name,
        kind=kind,
        size=entry.size if kind == "file" else 0,
        mode=stat.S_IMODE(entry.mode),
        uid=entry.uid,
        gid=entry.gid,
        mtime=entry.mtime_ns // 1_000_000_000,
        link=entry.target if kind in ("hard_link", "symlink") else b"",
    )
    parts = entry.name.split(b"/")
    if not entry.name or entry.name.startswith(b"/") or b".." in parts or max(map(len, parts)) > MAX_NAME_BYTES:
        raise _nonsense()
    return member, member.size


def _length(transfer: Incoming, limit: int) -> int:
    size = int.from_bytes(_exactly(transfer, 4), "little")
    if size > limit:
        raise _nonsense()
    return size


def _exactly(transfer: Incoming, count: int) -> bytes:
    data = transfer.upto(count)
    if len(data) < count:
        raise _nonsense()
    return data


def _nonsense() -> OpenDSecError:
    return SandboxLost("the guest described its files in a way that makes no sense")
