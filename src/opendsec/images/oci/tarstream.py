# SPDX-License-Identifier: Apache-2.0
"""Tar as image layers have it: entries from a stream that anybody may have written.

Read: pax, GNU (long names and links, base-256 numbers, old sparse files), ustar, V7, and sparse files in pax form (0.0, 0.1, 1.0).
Global pax headers are comments in practice and are skipped, as Docker and umoci do. Whoever reads content gets it in `Segment`s: a
hole is told, not read. The standard library's reader is not used on what strangers send (see `runtime.files.tarball`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from opendsec.images.oci.limits import Limits
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

CHUNK = 1 << 20
MAX_SEGMENTS = 1 << 20  # of one sparse file

Kind = Literal["file", "hard_link", "symlink", "directory", "fifo", "char", "block"]

_KINDS: dict[bytes, Kind] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",  # "contiguous"
    b"S": "file",  # sparse, GNU's old form
    b"1": "hard_link",
    b"2": "symlink",
    b"3": "char",
    b"4": "block",
    b"5": "directory",
    b"6": "fifo",
}
_XATTR = b"SCHILY.xattr."
_TIME = re.compile(rb"(-?)(\d{1,18})(?:\.(\d*))?")


class BadLayer(Exception):
    """The layer cannot be used, and why: one sentence for people."""


class Segment(NamedTuple):
    offset: int
    length: int


class Entry(NamedTuple):
    """One member. `size` is that of the file with its holes; the content lies in `segments`, in ascending order."""

    name: bytes
    kind: Kind
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    link: bytes
    xattrs: dict[bytes, bytes]
    device: tuple[int, int]
    segments: tuple[Segment, ...] | None  # None: all of it is there


def shown(name: bytes) -> str:
    """A name of a stranger's, for people."""
    text = name[:200].decode("utf-8", "replace")
    return repr(text) + ("…" if len(name) > 200 else "")


class TarStream:
    """Entries from `read(count)`, which gives up to that many bytes and b"" at the end. Raises BadLayer.

    Between two entries the content may be taken with `content`; what is left of it is skipped.
    """

    def __init__(self, read: Callable[[int], bytes], limits: Limits) -> None:
        self._read, self._limits = read, limits
        self._buffer, self._at = b"", 0
        self._left = self._pad = 0
        self._metadata = 0

    def __iter__(self) -> Iterator[Entry]:
        entries = 0
        while True:
            self._skip()
            block = self._block()
            if block is None or block == ZERO:
                break
            entry = self._entry(block)
            if entry is None:
                continue
            entries += 1
            if entries > self._limits.entries:
                raise BadLayer(f"has more than {self._limits.entries} entries")
            yield entry
        # Whatever follows the end (padding, mostly zeros) is read, since the digest is over all of it, and means nothing.
        self._buffer = b""
        while self._read(CHUNK):
            pass

    def content(self) -> Iterator[bytes]:
        """The stored content of the present entry, in pieces. Of a sparse file that is its segments, one after the other."""
        while self._left:
            data = self._some(min(self._left, CHUNK))
            if not data:
                raise BadLayer("is cut off in the content of a file")
            self._left -= len(data)
            yield data

    # The stream.

    def _some(self, count: int) -> bytes:
        if self._at >= len(self._buffer):
            self._buffer, self._at = self._read(CHUNK), 0
        data = self._buffer[self._at : self._at + count]
        self._at += len(data)
        return data

    def _exactly(self, count: int) -> bytes:
        data = self._some(count)
        while len(data) < count:
            more = self._some(count - len(data))
            if not more:
                raise BadLayer("is cut off")
            data += more
        return data

    def _block(self) -> bytes | None:
        """The next header; None at the end of the stream. Archives without end blocks exist and are taken."""
        data = self._some(BLOCK)
        if not data:
            return None
        return data if len(data) == BLOCK else data + self._exactly(BLOCK - len(data))

    def _skip(self) -> None:
        left, self._left, self._pad = self._left + self._pad, 0, 0
        while left:
            data = self._some(min(left, CHUNK))
            if not data:
                raise BadLayer("is cut off in the content of a file")
            left -= len(data)

    # Headers.

    def _entry(self, block: bytes) -> Entry | None:
        try:
            return self._read_entry(block)
        except BadHeader as error:
            raise BadLayer(f"has {error}") from None

    def _read_entry(self, block: bytes) -> Entry | None:
        name = link = None
        records: list[tuple[bytes, bytes]] = []
        while True:
            if not is_header(block):
                raise BadLayer("is no tar archive, or damaged: a header's checksum is wrong")
            kind = block[156:157]
            if kind not in EXTENSIONS:
                break
            stored = extension_bytes(block)
            self._metadata += stored
            if self._metadata > self._limits.metadata_bytes:
                raise BadLayer(f"has more than {self._limits.metadata_bytes} bytes of names and attributes")
            data = self._exactly(stored + -stored % BLOCK)[:stored]
            if kind == b"g":
                return None
            if kind == b"L":
                name = string(data)
            elif kind == b"K":
                link = string(data)
            else:
                records = list(pax_records(data))
            following = self._block()
            if following is None or following == ZERO:
                raise BadLayer("is cut off after an extension header")
            block = following
        pax = dict(records)
        if (found := pax.get(b"path")) is not None:
            name = found
        if (found := pax.get(b"linkpath")) is not None:
            link = found
        gnu = block[257:265] == b"ustar  \0"
        if name is None:
            name = name_of(block)
        if link is None:
            link = string(block[157:257])
        if kind not in _KINDS:
            raise BadLayer(f"has an entry of the unknown kind {kind!r}: {shown(name)}")
        what = _KINDS[kind]
        size = decimal(pax, b"size", number(block[124:136]))
        if what == "file" and name.endswith(b"/") and kind in (b"0", b"\0"):
            what = "directory"  # as V7 wrote them
        if size < 0:
            raise BadLayer(f"has an entry of negative size: {shown(name)}")
        # Only files have content, but some writers give links the size of what they link to and no content: as Go reads them.
        self._left, self._pad = (size, -size % BLOCK) if what == "file" else (0, 0)
        segments: tuple[Segment, ...] | None = None
        real = size
        if kind == b"S":
            real, segments = self._gnu_sparse(block, name)
        elif what == "file" and any(key.startswith(b"GNU.sparse.") for key in pax):
            name = pax.get(b"GNU.sparse.name", name)
            real, segments = self._pax_sparse(records, pax, real, name)
        if segments is not None:
            _check_segments(segments, self._left, real, name)
        if what == "file" and real > self._limits.file_bytes:
            raise BadLayer(f"has a file of {real} bytes, at most {self._limits.file_bytes}: {shown(name)}")
        if b"\0" in name or b"\0" in link:
            raise BadLayer(f"has a name with a NUL byte: {shown(name)}")
        if len(link) > self._limits.link_bytes:
            raise BadLayer(f"has a link of more than {self._limits.link_bytes} bytes: {shown(name)}")
        xattrs = {key[len(_XATTR) :]: value for key, value in pax.items() if key.startswith(_XATTR)}
        self._metadata += len(name) + len(link)
        device = (
            (number(block[329:337]), number(block[337:345]))
            if what in ("char", "block") and (gnu or block[257:262] == b"ustar")
            else (0, 0)
        )
        return Entry(
            name=name,
            kind=what,
            size=real if what == "file" else 0,
            mode=number(block[100:108]) & 0o7777,
            uid=decimal(pax, b"uid", number(block[108:116])),
            gid=decimal(pax, b"gid", number(block[116:124])),
            mtime_ns=_time(pax[b"mtime"]) if pax.get(b"mtime") else number(block[136:148]) * 1_000_000_000,
            link=link if what in ("symlink", "hard_link") else b"",
            xattrs=xattrs,
            device=device,
            segments=segments,
        )

    def _gnu_sparse(self, block: bytes, name: bytes) -> tuple[int, tuple[Segment, ...]]:
        """The old form: the map in the header, and in further blocks before the content."""
        segments: list[Segment] = []
        real, table, more = number(block[483:495]), block[386:482], block[482]
        while True:
            for at in range(0, len(table), 24):
                if table[at] == 0 and table[at + 12] == 0:
                    break
                segments.append(Segment(number(table[at : at + 12]), number(table[at + 12 : at + 24])))
            if not more:
                return real, tuple(segments)
            if len(segments) > MAX_SEGMENTS:
                raise BadLayer(f"has a sparse file of too many pieces: {shown(name)}")
            extra = self._exactly(BLOCK)
            table, more = extra[:504], extra[504]

    def _pax_sparse(
        self, records: list[tuple[bytes, bytes]], pax: dict[bytes, bytes], size: int, name: bytes
    ) -> tuple[int, tuple[Segment, ...] | None]:
        bad = BadLayer(f"has a sparse file whose map makes no sense: {shown(name)}")
        numbers: list[int] = []
        if pax.get(b"GNU.sparse.major") == b"1" and pax.get(b"GNU.sparse.minor") == b"0":
            numbers = self._sparse_1_0(bad)
            real = decimal(pax, b"GNU.sparse.realsize", -1)
        elif b"GNU.sparse.map" in pax:
            numbers = [_whole(part, bad) for part in pax[b"GNU.sparse.map"].split(b",")] if pax[b"GNU.sparse.map"] else []
            real = decimal(pax, b"GNU.sparse.size", -1)
        elif b"GNU.sparse.numblocks" in pax:
            for key, value in records:
                if key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes"):
                    if (key == b"GNU.sparse.numbytes") != bool(len(numbers) % 2):
                        raise bad
                    numbers.append(_whole(value, bad))
            real = decimal(pax, b"GNU.sparse.size", -1)
        else:
            return size, None  # a name alone, say: not sparse
        if real < 0 or len(numbers) % 2 or len(numbers) > 2 * MAX_SEGMENTS:
            raise bad
        return real, tuple(Segment(numbers[at], numbers[at + 1]) for at in range(0, len(numbers), 2))

    def _sparse_1_0(self, bad: BadLayer) -> list[int]:
        """The map is text at the beginning of the content, one number a line, padded to a block."""
        text, lines, wanted = b"", 0, -1
        while wanted < 0 or lines < wanted:
            if self._left < BLOCK or len(text) > 24 * 2 * MAX_SEGMENTS:
                raise bad
            block = self._exactly(BLOCK)
            self._left -= BLOCK
            text += block
            lines += block.count(b"\n")
            if wanted < 0 and lines:
                count = _whole(text.split(b"\n", 1)[0], bad)
                if count > MAX_SEGMENTS:
                    raise bad
                wanted = 2 * count + 1
        return [_whole(line, bad) for line in text.split(b"\n")[1:wanted]]


def _check_segments(segments: tuple[Segment, ...], stored: int, real: int, name: bytes) -> None:
    end = total = 0
    for segment in segments:
        if segment.length < 0 or segment.offset < end or segment.offset + segment.length > real:
            raise BadLayer(f"has a sparse file whose map makes no sense: {shown(name)}")
        end = segment.offset + segment.length
        total += segment.length
    if total != stored or real < 0:
        raise BadLayer(f"has a sparse file whose map does not fit its content: {shown(name)}")


def _whole(text: bytes, bad: BadLayer) -> int:
    if not text.isdigit() or len(text) > 19:
        raise bad
    return int(text)


def _time(text: bytes) -> int:
    found = _TIME.fullmatch(text)
    if found is None:
        raise BadLayer("has a pax header whose mtime is not a number")
    sign, whole, fraction = found.groups()
    nanoseconds = int(whole) * 1_000_000_000 + int(((fraction or b"") + b"000000000")[:9])
    return -nanoseconds if sign else nanoseconds
