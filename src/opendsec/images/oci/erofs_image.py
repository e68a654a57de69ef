# SPDX-License-Identifier: Apache-2.0
"""An EROFS image written from a tree in memory, metadata apart from data, as `mkfs.erofs --chunksize --blobdev` would.

Why not mkfs.erofs: it packs a tree that lies on a file system, so a stranger's archive would have to be unpacked there first, with his
owners, links, devices and attributes; and from within a user namespace `trusted.overlay.opaque` can be neither set nor seen. So the
child that reads the archive needs no file system at all: it has two descriptors to write to.

    0       super block at 1024, the slot of the data device at 1152
    4096    inodes, the root's first: each with its attributes and then a file's chunk indexes, or what a small directory or a link holds
    …       blocks of larger directories

    data    blocks of 4 KiB, equal ones once, blocks of zeros not at all

The format: fs/erofs/erofs_fs.h and Documentation/filesystems/erofs.rst of Linux. All of what is used here is in Linux 5.16.
"""

from __future__ import annotations

import hashlib
import stat
import struct
from array import array
from collections.abc import Iterable

from opendsec.images.erofs import TIMESTAMP
from opendsec.images.oci.nodes import Inode
from opendsec.images.oci.tarstream import Segment
from opendsec.kernel.fds import write_all

BLOCK = 4096
_SUPER_AT = 1024
_MAGIC = 0xE0F5E1E2
_COMPAT_CHECKSUM, _COMPAT_MTIME = 0x1, 0x2
_INCOMPAT_CHUNKED, _INCOMPAT_DEVICES = 0x4, 0x8
_PLAIN, _INLINE, _CHUNKED = 0, 2, 4
_CHUNK_INDEXES = 0x20
_NULL = 0xFFFF_FFFF  # the address of a hole
_MAX_CHUNKS = 1 << 20  # of one file with chunks of one block; larger files get larger chunks, or holes would cost memory
_MAX_SEEN = 1 << 23  # blocks that later ones are compared with: 32 GiB of them
_SUPER = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQB23x")
_DEVICE = struct.Struct("<64sII56x")
_INODE = struct.Struct("<HHHHQIIIIQII16x")
_DIRENT = struct.Struct("<QHBB")
_XATTR_HEADER = struct.Struct("<IB7x")
_XATTR_ENTRY = struct.Struct("<BBH")
_CHUNK_INDEX = struct.Struct("<HHI")

_PREFIXES = ((b"user.", 1), (b"trusted.", 4), (b"security.", 6))
_DIRENT_TYPES = {stat.S_IFREG: 1, stat.S_IFDIR: 2, stat.S_IFCHR: 3, stat.S_IFBLK: 4, stat.S_IFIFO: 5, stat.S_IFSOCK: 6, stat.S_IFLNK: 7}


class Blob:
    """The data file: gives each file's content the addresses of its chunks."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.blocks = 0
        self._seen: dict[bytes, int] = {}
        self._buffer = bytearray()

    def store(self, inode: Inode, segments: tuple[Segment, ...] | None, content: Iterable[bytes]) -> None:
        """Write the content of a file of `inode.size` bytes; `segments` say where in it the content belongs."""
        bits = 0
        while inode.size > _MAX_CHUNKS << (12 + bits):
            bits += 1
        unit = BLOCK << bits
        zeros = bytes(unit)
        chunks = array("I", (_NULL,)) * -(-inode.size // unit)
        pending, pending_index = bytearray(), -1
        for offset, piece in _placed(segments, content):
            view = memoryview(piece)
            while view:
                index, within = divmod(offset, unit)
                if pending_index not in (-1, index):
                    chunks[pending_index] = self._put(bytes(pending), zeros)
                    pending_index = -1
                if within == 0 and pending_index < 0 and len(view) >= unit:
                    count = unit
                    chunks[index] = self._put(bytes(view[:unit]), zeros)
                else:
                    if pending_index < 0:
                        pending, pending_index = bytearray(unit), index
                    count = min(unit - within, len(view))
                    pending[within : within + count] = view[:count]
                offset, view = offset + count, view[count:]
        if pending_index >= 0:
            chunks[pending_index] = self._put(bytes(pending), zeros)
        inode.chunk_bits, inode.chunks = bits, chunks

    def _put(self, data: bytes, zeros: bytes) -> int:
        if data == zeros:
            return _NULL
        key = hashlib.sha256(data).digest()
        at = self._seen.get(key)
        if at is None:
            at = self.blocks
            self.blocks += len(data) // BLOCK
            if len(self._seen) < _MAX_SEEN:
                self._seen[key] = at
            self._buffer += data
            if len(self._buffer) >= 1 << 20:
                self.flush()
        return at

    def flush(self) -> None:
        write_all(self._fd, self._buffer)
        self._buffer.clear()


def _placed(segments: tuple[Segment, ...] | None, content: Iterable[bytes]) -> Iterable[tuple[int, bytes]]:
    if segments is None:
        offset = 0
        for piece in content:
            yield offset, piece
            offset += len(piece)
        return
    remaining = iter(segments)
    offset = left = 0
    for piece in content:
        while piece:
            while not left:
                offset, left = next(remaining)  # there are as many bytes as the segments say: the reader has checked it
            yield offset, piece[:left]
            taken = min(left, len(piece))
            offset, left, piece = offset + taken, left - taken, piece[taken:]


class _Placed:
    """An inode and what is written behind it."""

    __slots__ = ("blocks", "inode", "layout", "parent", "position", "tail_bytes", "xattrs")

    def __init__(self, inode: Inode, parent: Inode) -> None:
        self.inode, self.parent = inode, parent
        self.xattrs = _xattrs(inode)
        self.layout = self.position = self.tail_bytes = 0
        self.blocks = -1  # the first of its own, of a directory that has some


def write_metadata(root: Inode, fd: int, data_blocks: int) -> int:
    """Write the metadata file of the tree; how many inodes it has."""
    inodes = _collect(root)
    at = BLOCK
    outside: list[_Placed] = []
    for placed in inodes:
        at = _place(placed, at)
        if placed.blocks == 0:
            outside.append(placed)
        placed.inode.nid = placed.position // 32
    block = -(-at // BLOCK)
    for placed in outside:
        placed.blocks = block
        block += -(-placed.tail_bytes // BLOCK)
    write_all(fd, _first_block(len(inodes), block, root.nid, data_blocks))
    out, written = bytearray(), BLOCK

    def pad_to(position: int) -> None:
        nonlocal out, written
        out += bytes(position - written - len(out))
        if len(out) >= 1 << 20:
            write_all(fd, out)
            written += len(out)
            out.clear()

    for placed in inodes:
        pad_to(placed.position)
        out += _record(placed)
    for placed in outside:
        pad_to(placed.blocks * BLOCK)
        out += _directory(placed)
    pad_to(block * BLOCK)
    write_all(fd, out)
    return len(inodes)


def _collect(root: Inode) -> list[_Placed]:
    """All inodes, each once, the root first and those of a directory together; link counts are set on the way."""
    found = [_Placed(root, root)]
    root.links = 2
    seen: set[int] = set()
    pending = [root]
    while pending:
        folder = pending.pop()
        for _, slot in sorted(folder.children.items(), key=lambda item: item[0]):
            inode = slot.inode
            if inode.is_directory:
                inode.links = 2
                folder.links += 1
                pending.append(inode)
                found.append(_Placed(inode, folder))
            elif id(inode) in seen:
                inode.links += 1
            else:
                seen.add(id(inode))
                inode.links = 1
                found.append(_Placed(inode, folder))
    return found


def _place(placed: _Placed, at: int) -> int:
    """Decide where an inode begins, not before `at`; where the next one may."""
    inode = placed.inode
    at = -(-at // 32) * 32
    head = _INODE.size + len(placed.xattrs)
    if inode.chunks:
        placed.layout = _CHUNKED
        placed.position = at
        return -(-(at + head) // 8) * 8 + len(inode.chunks) * _CHUNK_INDEX.size
    placed.tail_bytes = _directory_bytes(placed) if inode.is_directory else len(inode.target)
    tail = at + head
    placed.layout = _INLINE if placed.tail_bytes else _PLAIN
    if placed.tail_bytes and tail // BLOCK != (tail + placed.tail_bytes - 1) // BLOCK:
        # What is inline may not cross a block.
        if head + placed.tail_bytes <= BLOCK:
            at = -(-at // BLOCK) * BLOCK
        else:
            placed.layout, placed.blocks = _PLAIN, 0
            placed.position = at
            return at + head
    placed.position = at
    return at + head + placed.tail_bytes


def _record(placed: _Placed) -> bytes:
    inode = placed.inode
    union = 0
    size = placed.tail_bytes
    if stat.S_ISREG(inode.mode):
        size = inode.size
        if inode.chunks:
            union = _CHUNK_INDEXES | inode.chunk_bits
    elif placed.blocks >= 0:
        union = placed.blocks
    seconds, nanoseconds = divmod(inode.mtime_ns, 1_000_000_000)
    icount = 0 if not placed.xattrs else (len(placed.xattrs) - _XATTR_HEADER.size) // 4 + 1
    head = _INODE.pack(
        1 | placed.layout << 1,
        icount,
        inode.mode,
        0,
        size,
        union,
        inode.nid & 0xFFFF_FFFF,
        inode.uid,
        inode.gid,
        seconds & 0xFFFF_FFFF_FFFF_FFFF,
        nanoseconds,
        inode.links,
    )
    head += placed.xattrs
    if inode.chunks:
        head += bytes(-(placed.position + len(head)) % 8)
        return head + b"".join(_CHUNK_INDEX.pack(0, 0 if block == _NULL else 1, block) for block in inode.chunks)
    if placed.layout != _INLINE:
        return head
    return head + (_directory(placed) if inode.is_directory else inode.target)


def _xattrs(inode: Inode) -> bytes:
    attributes = dict(inode.xattrs)
    if inode.is_directory and inode.opaque:
        attributes[b"trusted.overlay.opaque"] = b"y"
    if not attributes:
        return b""
    out = bytearray(_XATTR_HEADER.pack(0, 0))
    for key in sorted(attributes):
        prefix, index = next((prefix, index) for prefix, index in _PREFIXES if key.startswith(prefix))
        name, value = key[len(prefix) :], attributes[key]
        out += _XATTR_ENTRY.pack(len(name), index, len(value)) + name + value
        out += bytes(-len(out) % 4)
    return bytes(out)


def _directory_blocks(placed: _Placed) -> list[list[tuple[bytes, Inode]]]:
    entries = [(b".", placed.inode), (b"..", placed.parent)]
    entries += [(name, slot.inode) for name, slot in placed.inode.children.items()]
    entries.sort(key=lambda entry: entry[0])
    blocks: list[list[tuple[bytes, Inode]]] = [[]]
    used = 0
    for entry in entries:
        need = _DIRENT.size + len(entry[0])
        if used + need > BLOCK:
            blocks.append([])
            used = 0
        blocks[-1].append(entry)
        used += need
    return blocks


def _directory_bytes(placed: _Placed) -> int:
    blocks = _directory_blocks(placed)
    return (len(blocks) - 1) * BLOCK + sum(_DIRENT.size + len(name) for name, _ in blocks[-1])


def _directory(placed: _Placed) -> bytes:
    out = bytearray()
    for block in _directory_blocks(placed):
        out += bytes(-len(out) % BLOCK)
        offset = _DIRENT.size * len(block)
        names = bytearray()
        for name, inode in block:
            out += _DIRENT.pack(inode.nid, offset + len(names), _DIRENT_TYPES[stat.S_IFMT(inode.mode)], 0)
            names += name
        out += names
    return bytes(out)


def _first_block(inodes: int, blocks: int, root_nid: int, data_blocks: int) -> bytes:
    device = _DEVICE.pack(b"", data_blocks, 0)
    checksum = 0
    while True:
        head = _SUPER.pack(
            _MAGIC,
            checksum,
            _COMPAT_CHECKSUM | _COMPAT_MTIME,
            12,  # bits of a block
            0,
            root_nid,
            inodes,
            TIMESTAMP,
            0,
            blocks,
            0,  # inode numbers count from the beginning of the file
            0,
            bytes(16),  # UUID
            b"",  # name
            _INCOMPAT_CHUNKED | _INCOMPAT_DEVICES,
            0,
            1,  # devices besides this one
            (_SUPER_AT + _SUPER.size) // _DEVICE.size,
            *(0, 0, 0, 0, 0),
        )
        block = (bytes(_SUPER_AT) + head + device).ljust(BLOCK, b"\0")
        if checksum:
            return block
        checksum = crc32c(block[_SUPER_AT:])


def crc32c(data: bytes) -> int:
    """As the kernel sums super blocks: seed of all ones, no final inversion."""
    value = 0xFFFF_FFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F6_3B78 if value & 1 else 0)
    return value
