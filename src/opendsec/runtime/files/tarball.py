# SPDX-License-Identifier: Apache-2.0
"""Tar members to and from descriptors: one header in memory at a time, file content from descriptor to descriptor.

Written: POSIX pax with whole seconds, so a plain 512-byte header unless a name is long or not ASCII, an id or a size is large.
Names are bytes: those that are not UTF-8 go into pax records as they are, with hdrcharset=BINARY, as pax prescribes.

Read: pax, GNU (long names and links, base-256 numbers), ustar, V7. The standard library's reader is not used on what strangers
send: it keeps extension headers of any size in memory, and loops for ever on some (CVE-2025-8194). Its header writer is.
"""

from __future__ import annotations

import errno
import os
import select
import tarfile
from collections.abc import Iterator
from typing import Literal, NamedTuple

from opendsec.api.errors import InvalidRequest
from opendsec.images.tarheader import (
    BLOCK,
    EXTENSIONS,
    ZERO,
    BadHeader,
    decimal,
    extension_bytes,
    is_header,
    name_of,
    number,
    pax_records,
    string,
)
from opendsec.runtime.files.beneath import text

CHUNK = 1 << 20
MAX_NAME_BYTES = 1 << 16  # of a member, as written and as read: deep trees have names longer than PATH_MAX
END_OF_ARCHIVE = bytes(2 * BLOCK)

MemberKind = Literal["file", "hard_link", "symlink", "directory", "fifo"]

_TYPES: dict[bytes, MemberKind] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",  # "contiguous"
    b"1": "hard_link",
    b"2": "symlink",
    b"5": "directory",
    b"6": "fifo",
}
_REFUSED = {
    b"3": "a character device",
    b"4": "a block device",
    b"S": "a sparse file in GNU's own format (make the archive without --sparse)",
    b"M": "part of a multi-volume archive",
    b"V": "the label of a tape",
}
_TYPE_OF: dict[MemberKind, bytes] = {
    "file": tarfile.REGTYPE,
    "hard_link": tarfile.LNKTYPE,
    "symlink": tarfile.SYMTYPE,
    "directory": tarfile.DIRTYPE,
    "fifo": tarfile.FIFOTYPE,
}


class Member(NamedTuple):
    """One entry of an archive. `size` bytes of content follow it; `link` is what a symlink holds or a hard link names."""

    name: bytes
    kind: MemberKind
    size: int
    mode: int
    uid: int
    gid: int
    mtime: int  # unix seconds
    link: bytes = b""


# --- descriptors ---------------------------------------------------------------------------------------------------


def write_all(fd: int, data: bytes) -> None:
    """All of `data`, waiting where a non-blocking descriptor is full."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            _wait(fd, select.POLLOUT)


def _wait(fd: int, events: int) -> None:
    poll = select.poll()
    poll.register(fd, events)
    poll.poll()


def copy(source: int, target: int, count: int) -> int:
    """Up to `count` bytes from a file to a descriptor; fewer only at the end of the file. Zero-copy where the kernel can."""
    left = count
    try:
        while left:
            try:
                sent = os.sendfile(target, source, None, min(left, CHUNK))  # None: from its position on
            except BlockingIOError:
                _wait(target, select.POLLOUT)
                continue
            if sent == 0:
                return count - left
            left -= sent
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
        while left and (data := os.read(source, min(left, CHUNK))):
            write_all(target, data)
            left -= len(data)
    return count - left


# --- writing -------------------------------------------------------------------------------------------------------


def header(member: Member) -> bytes:
    """The header blocks of a member. Content comes next, then `padding(member.size)`."""
    info = tarfile.TarInfo(member.name.decode("utf-8", "surrogateescape"))
    info.type = _TYPE_OF[member.kind]
    info.size, info.mode, info.uid, info.gid, info.mtime = member.size, member.mode, member.uid, member.gid, member.mtime
    info.linkname = member.link.decode("utf-8", "surrogateescape")
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def padding(size: int) -> bytes:
    return bytes(-size % BLOCK)


# --- reading -------------------------------------------------------------------------------------------------------


class TarReader:
    """Members from a descriptor that anybody may have filled. Raises InvalidRequest for what is no archive, or a refused member.

    Between two members `content_to` must be called for the content, or it is skipped.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._left = 0  # content of the current member still in the stream
        self._pad = 0
        self._splice = True

    def __iter__(self) -> Iterator[Member]:
        first = True
        while True:
            self._skip()
            block = self._block(at_end=first)
            if block is None:
                raise InvalidRequest("the archive is empty", field="body")
            if block == ZERO:
                self._drain()
                return
            member = self._member(block, first)
            first = False
            yield member

    def content(self, most: int) -> Iterator[bytes]:
        """The rest of the current member's content, in pieces of at most `most` bytes."""
        while self._left:
            data = self._read(min(self._left, most))
            if not data:
                raise InvalidRequest("the archive is cut off in the content of a file", field="body")
            self._left -= len(data)
            yield data

    def content_to(self, target: int) -> int:
        """Copy the rest of the current member's content to a descriptor; how much. OSError is the target's."""
        count = self._left
        while self._left:
            self._left -= self._move(target, min(self._left, CHUNK))
        return count

    # The stream.

    def _read(self, count: int) -> bytes:
        while True:
            try:
                return os.read(self._fd, count)
            except BlockingIOError:
                _wait(self._fd, select.POLLIN)

    def _exactly(self, count: int) -> bytes:
        data = self._read(count)
        while len(data) < count:
            more = self._read(count - len(data))
            if not more:
                raise InvalidRequest("the archive is cut off", field="body")
            data += more
        return data

    def _block(self, *, at_end: bool = False) -> bytes | None:
        """The next block; with `at_end` the stream may end before it. Archives without end blocks exist and are taken."""
        data = self._read(BLOCK)
        if not data:
            return None if at_end else ZERO
        return data if len(data) == BLOCK else data + self._exactly(BLOCK - len(data))

    def _move(self, target: int, count: int) -> int:
        """Some of the content to `target`, at most `count` bytes."""
        if self._splice:
            try:
                moved = os.splice(self._fd, target, count)
            except BlockingIOError:
                _wait(self._fd, select.POLLIN)
                return 0
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOSYS):
                    raise
                self._splice = False  # not a pipe, or a file system that cannot
                return 0
        else:
            data = self._read(count)
            write_all(target, data)
            moved = len(data)
        if not moved:
            raise InvalidRequest("the archive is cut off in the content of a file", field="body")
        return moved

    def _skip(self) -> None:
        left = self._left + self._pad
        self._left = self._pad = 0
        while left:
            data = self._read(min(left, CHUNK))
            if not data:
                raise InvalidRequest("the archive is cut off in the content of a file", field="body")
            left -= len(data)

    def _drain(self) -> None:
        """Take what fills the last record, so that the writer is not cut off; more than that is an error."""
        left = CHUNK
        while data := self._read(left):
            left -= len(data)
            if data.strip(b"\0") or not left:
                raise InvalidRequest("something follows the end of the archive", field="body")

    # Headers.

    def _member(self, block: bytes, first: bool) -> Member:
        try:
            return self._read_member(block, first)
        except BadHeader as error:
            raise InvalidRequest(f"the archive has {error}", field="body") from None

    def _read_member(self, block: bytes, first: bool) -> Member:
        name = link = None
        numbers: dict[bytes, bytes] = {}
        while True:
            _check(block, first)
            kind = block[156:157]
            if kind not in EXTENSIONS:
                break
            stored = extension_bytes(block)
            data = self._exactly(stored + -stored % BLOCK)[:stored]
            if kind == b"L":
                name = string(data)
            elif kind == b"K":
                link = string(data)
            elif kind != b"g":  # global records are comments in practice (git archive); names cannot be global
                records = dict(pax_records(data))
                name, link = records.get(b"path", name), records.get(b"linkpath", link)
                numbers |= {key: value for key, value in records.items() if value}
                if any(key.startswith(b"GNU.sparse.") for key in records):
                    raise InvalidRequest(f"{text(name or b'a member')} is {_REFUSED[b'S']}", field="body")
            following = self._block(at_end=True)
            if following is None or following == ZERO:
                raise InvalidRequest("the archive is cut off after an extension header", field="body")
            block, first = following, False
        if name is None:
            name = name_of(block)
        if kind in _REFUSED:
            raise InvalidRequest(f"{text(name)} is {_REFUSED[kind]}", field="body", data={"member": text(name)})
        if kind not in _TYPES:
            raise InvalidRequest(f"{text(name)} is of the unknown kind {kind!r}", field="body", data={"member": text(name)})
        what = _TYPES[kind]
        if what == "file" and name.endswith(b"/"):
            what = "directory"  # as V7 wrote them
        if what == "directory":
            name = name.rstrip(b"/") or name
        size, mtime, uid, gid = (
            decimal(numbers, key, 0, fraction=True) if key in numbers else number(block[start:end])
            for key, start, end in ((b"size", 124, 136), (b"mtime", 136, 148), (b"uid", 108, 116), (b"gid", 116, 124))
        )
        link = string(block[157:257]) if link is None else link
        member = Member(
            name=name,
            kind=what,
            size=size if what == "file" else 0,
            mode=number(block[100:108]) & 0o7777,
            uid=uid,
            gid=gid,
            mtime=mtime,
            link=link if what in ("symlink", "hard_link") else b"",
        )
        if member.size < 0 or len(name) > MAX_NAME_BYTES or len(link) > MAX_NAME_BYTES or b"\0" in name + link:
            raise InvalidRequest(f"{text(name)}: the header makes no sense", field="body", data={"member": text(name)})
        self._left, self._pad = member.size, -member.size % BLOCK
        return member


def _check(block: bytes, first: bool) -> None:
    if is_header(block):
        return
    if not first:
        raise InvalidRequest("the archive is damaged: a header's checksum is wrong", field="body")
    packed = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"(\xb5": "zstd", b"PK": "zip"}.get(block[:2])
    raise InvalidRequest(f"not a tar stream but {packed}; send tar uncompressed" if packed else "not a tar stream", field="body")
