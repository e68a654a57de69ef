# SPDX-License-Identifier: Apache-2.0
"""A git directory read without git: which commits it holds, what names them, and which of them HEAD does not lead to.

The directory was written by somebody hostile, and git runs what a config says: so nothing of it is run or believed. All is bounded:
files read, objects looked at, bytes inflated, depth of deltas. What does not fit is told as a `problem`, never guessed.

Loose objects, packs with version 2 indexes, SHA-1 and SHA-256 names. Of objects only commits are read: their parents and their time.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from opendsec.kernel import abi, syscalls

MAX_OBJECTS = 1_000_000
MAX_REFS = 100_000
MAX_TEXT = 16 << 20  # of packed-refs and of each reflog
MAX_COMMIT = 1 << 20
MAX_INDEX = 128 << 20
MAX_DEPTH = 64  # of a delta
MAX_PACKS = 2000

SPECIAL = ("ORIG_HEAD", "FETCH_HEAD", "MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "BISECT_HEAD", "AUTO_MERGE", "REBASE_HEAD")
_HEX = re.compile(rb"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_COMMIT, _TAG, _OFS_DELTA, _REF_DELTA = 1, 4, 6, 7
_BLOCK = 256 << 10


class Commit(NamedTuple):
    parents: tuple[bytes, ...]
    time: int  # of the committer, unix seconds


class Ref(NamedTuple):
    name: str
    target: bytes  # hex


class Repository:
    """`fd`: the git directory. Reading is done by `read`; `problems` says what could not be."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.commits: dict[bytes, Commit] = {}
        self.refs: list[Ref] = []
        self.reflogs: list[Ref] = []  # what entries went to, by the log's name
        self.special: list[Ref] = []
        self.tags: dict[bytes, bytes] = {}  # tag object → what it tags
        self.head: bytes | None = None
        self.alternates = False
        self.worktrees: list[str] = []
        self.problems: list[str] = []
        self._objects = 0
        self._name_bytes = 32 if re.search(rb"objectformat\s*=\s*sha256", self._read("config", 1 << 20), re.IGNORECASE) else 20

    def read(self) -> Repository:
        self._read_refs()
        self._read_logs()
        self._read_objects()
        self.alternates = bool(self._read("objects/info/alternates", 4096).strip())
        self.worktrees = [os.fsdecode(name) for name in self._names("worktrees")]
        return self

    def ancestors(self, *tips: bytes) -> set[bytes]:
        """All commits that these lead to, themselves too, as far as they are there."""
        seen: set[bytes] = set()
        pending = [self.peeled(tip) for tip in tips]
        while pending:
            name = pending.pop()
            commit = self.commits.get(name)
            if commit is not None and name not in seen:
                seen.add(name)
                pending += commit.parents
        return seen

    def peeled(self, name: bytes) -> bytes:
        for _ in range(10):
            if name not in self.tags:
                break
            name = self.tags[name]
        return name

    # --- files ---------------------------------------------------------------------------------------------------------

    def _open(self, path: str | bytes, flags: int = os.O_RDONLY | os.O_NONBLOCK) -> int:
        return syscalls.openat2(self.fd, path, flags | os.O_CLOEXEC, resolve=abi.RESOLVE_BENEATH | abi.RESOLVE_NO_SYMLINKS)

    def _read(self, path: str | bytes, limit: int) -> bytes:
        """A small regular file; empty if there is none."""
        try:
            fd = self._open(path)
        except OSError:
            return b""
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return b""
            if status.st_size > limit:
                self.problems.append(f"{os.fsdecode(path)} is too large to be read")
            data = b""
            while len(data) < limit and (block := os.read(fd, min(limit - len(data), 1 << 20))):
                data += block
            return data
        except OSError as error:
            self.problems.append(f"{os.fsdecode(path)}: {error.strerror}")
            return b""
        finally:
            os.close(fd)

    def _names(self, path: str | bytes) -> list[bytes]:
        try:
            fd = self._open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return []
        try:
            return sorted(map(os.fsencode, os.listdir(fd)))
        except OSError:
            return []
        finally:
            os.close(fd)

    def _files(self, top: bytes) -> Iterator[bytes]:
        """Regular files below a directory, a bounded number."""
        pending, count = [top], 0
        while pending:
            folder = pending.pop()
            for name in self._names(folder):
                count += 1
                if count > MAX_REFS or len(folder) > 2000:
                    self.problems.append(f"{os.fsdecode(top)} holds too many files")
                    return
                path = folder + b"/" + name
                try:
                    mode = os.stat(path, dir_fd=self.fd, follow_symlinks=False).st_mode
                except OSError:
                    continue
                if stat.S_ISDIR(mode):
                    pending.append(path)
                elif stat.S_ISREG(mode):
                    yield path

    # --- names ---------------------------------------------------------------------------------------------------------

    def _read_refs(self) -> None:
        found: dict[bytes, bytes] = {}
        for line in self._read("packed-refs", MAX_TEXT).split(b"\n")[:MAX_REFS]:
            name, _, ref = line.partition(b" ")
            if _HEX.fullmatch(name):
                found[ref.strip()] = name
        for path in self._files(b"refs"):
            name = self._read(path, 4096).split(b"\n")[0].strip()
            if _HEX.fullmatch(name):
                found[path] = name
        self.refs = [Ref(_text(ref), name) for ref, name in sorted(found.items())]
        head = self._read("HEAD", 4096).strip()
        for _ in range(5):
            if not head.startswith(b"ref:"):
                break
            ref = head[4:].strip()
            head = found.get(ref) or (self._read(ref, 4096).strip() if ref.startswith(b"refs/") and b".." not in ref else b"")
        self.head = head if _HEX.fullmatch(head) else None
        for special in SPECIAL:
            for match in _HEX.finditer(self._read(special, 1 << 20)):
                self.special.append(Ref(special, match.group()))

    def _read_logs(self) -> None:
        for path in self._files(b"logs"):
            name = _text(path.removeprefix(b"logs/"))
            for line in self._read(path, MAX_TEXT).split(b"\n"):
                words = line.split(b" ", 2)
                for word in words[:2]:
                    if _HEX.fullmatch(word) and word.strip(b"0"):
                        self.reflogs.append(Ref(name, word))
            if len(self.reflogs) > MAX_REFS:
                self.problems.append("its reflogs are too long")
                return

    # --- objects -------------------------------------------------------------------------------------------------------

    def _counted(self) -> bool:
        self._objects += 1
        if self._objects == MAX_OBJECTS:
            self.problems.append(f"more than {MAX_OBJECTS} objects: the others were not looked at")
        return self._objects < MAX_OBJECTS

    def _read_objects(self) -> None:
        for folder in self._names("objects"):
            if re.fullmatch(rb"[0-9a-f]{2}", folder):
                for name in self._names(b"objects/" + folder):
                    if not self._counted():
                        return
                    if _HEX.fullmatch(folder + name):
                        self._loose(folder + name)
        there = self._names("objects/pack")
        packs = [name for name in there if name.endswith(b".idx")]
        if lonely := [name for name in there if name.endswith(b".pack") and name[:-5] + b".idx" not in packs]:
            self.problems.append(f"{len(lonely)} packs have no index")
        if len(packs) > MAX_PACKS:
            self.problems.append("too many packs")
        for name in packs[:MAX_PACKS]:
            try:
                self._pack(b"objects/pack/" + name[:-4])
            except (OSError, ValueError, IndexError, struct.error, zlib.error) as error:
                self.problems.append(f"the pack {_text(name)} cannot be read: {type(error).__name__}")

    def _loose(self, name: bytes) -> None:
        try:
            fd = self._open(b"objects/" + name[:2] + b"/" + name[2:])
        except OSError:
            return
        try:
            inflate = zlib.decompressobj()
            begin = inflate.decompress(os.read(fd, 4096), 64)
            if not begin.startswith((b"commit ", b"tag ")):
                return
            os.lseek(fd, 0, os.SEEK_SET)
            data = zlib.decompressobj().decompress(os.read(fd, MAX_COMMIT), MAX_COMMIT)
            header, _, body = data.partition(b"\0")
            self._add(name, _COMMIT if header.startswith(b"commit") else _TAG, body)
        except (OSError, zlib.error):
            self.problems.append(f"the object {name.decode()} cannot be read")
        finally:
            os.close(fd)

    def _add(self, name: bytes, kind: int, body: bytes) -> None:
        header = body.partition(b"\n\n")[0]
        if kind == _TAG:
            match = re.match(rb"object ([0-9a-f]+)\n", header)
            if match and _HEX.fullmatch(match[1]):
                self.tags[name] = match[1]
            return
        parents = tuple(line[7:] for line in header.split(b"\n") if line.startswith(b"parent ") and _HEX.fullmatch(line[7:]))
        when = re.search(rb"^committer .*> (\d{1,12}) [+-]\d{4}$", header, re.MULTILINE)
        self.commits[name] = Commit(parents, int(when[1]) if when else 0)

    def _pack(self, path: bytes) -> None:
        index = self._read(path + b".idx", MAX_INDEX)
        size = self._name_bytes
        if index[:8] != b"\xfftOc\0\0\0\x02":
            raise ValueError("not an index of version 2")
        count = struct.unpack_from(">I", index, 8 + 255 * 4)[0]
        names_at = 8 + 1024
        offsets_at = names_at + count * (size + 4)
        if offsets_at + count * 4 > len(index):
            raise ValueError("the index is cut")
        names = [index[names_at + number * size : names_at + (number + 1) * size] for number in range(min(count, MAX_OBJECTS))]
        large_at = offsets_at + count * 4
        offsets = []
        for number in range(len(names)):
            offset = struct.unpack_from(">I", index, offsets_at + number * 4)[0]
            if offset & 0x8000_0000:
                offset = struct.unpack_from(">Q", index, large_at + (offset & 0x7FFF_FFFF) * 8)[0]
            offsets.append(offset)
        fd = self._open(path + b".pack")
        try:
            pack = _Pack(fd, dict(zip(names, offsets, strict=True)), size)
            for name, offset in sorted(zip(names, offsets, strict=True), key=lambda pair: pair[1]):
                if not self._counted():
                    return
                kind = pack.kind(offset)
                if kind in (_COMMIT, _TAG):
                    self._add(name.hex().encode(), kind, pack.content(offset))
        finally:
            os.close(fd)


class _Pack:
    def __init__(self, fd: int, offsets: dict[bytes, int], name_bytes: int) -> None:
        self._fd, self._offsets, self._name_bytes = fd, offsets, name_bytes
        self._kinds: dict[int, int] = {}
        self._block, self._block_at = b"", 0

    def _at(self, offset: int, size: int) -> bytes:
        begin = offset - self._block_at
        if begin < 0 or begin + size > len(self._block):
            self._block, self._block_at = os.pread(self._fd, _BLOCK, offset), offset
            begin = 0
        return self._block[begin : begin + size]

    def _header(self, offset: int) -> tuple[int, int, int, int]:
        """(kind, size, offset of what follows, offset of the base or -1)."""
        data = self._at(offset, 64)
        kind, size, shift, at = data[0] >> 4 & 7, data[0] & 15, 4, 1
        while data[at - 1] & 0x80:
            size |= (data[at] & 0x7F) << shift
            shift, at = shift + 7, at + 1
        base = -1
        if kind == _OFS_DELTA:
            distance = data[at] & 0x7F
            while data[at] & 0x80:
                at += 1
                distance = (distance + 1) << 7 | data[at] & 0x7F
            at += 1
            base = offset - distance
            if distance <= 0 or base < 0:
                raise ValueError("a delta without a base")
        elif kind == _REF_DELTA:
            base = self._offsets.get(data[at : at + self._name_bytes], -2)  # not in this pack: a thin one
            at += self._name_bytes
        return kind, size, offset + at, base

    def kind(self, offset: int) -> int:
        """That of the object which deltas come to."""
        chain = []
        kind = 0
        for _ in range(MAX_DEPTH):
            known = self._kinds.get(offset)
            if known is not None:
                kind = known
                break
            chain.append(offset)
            kind, _, _, base = self._header(offset)
            if kind not in (_OFS_DELTA, _REF_DELTA):
                break
            kind = 0
            if base < 0:
                break
            offset = base
        self._kinds.update(dict.fromkeys(chain, kind))
        return kind

    def content(self, offset: int, depth: int = 0) -> bytes:
        kind, size, at, base = self._header(offset)
        if size > MAX_COMMIT or depth > MAX_DEPTH:
            raise ValueError("a commit that is too large")
        inflate = zlib.decompressobj()
        data = b""
        while len(data) < size and not inflate.eof:
            piece = os.pread(self._fd, 4096, at)
            if not piece:
                raise ValueError("the pack is cut")
            at += len(piece)
            data += inflate.decompress(piece, size - len(data) + 1)
        if kind in (_OFS_DELTA, _REF_DELTA):
            return _applied(self.content(base, depth + 1), data)
        return data


def _applied(base: bytes, delta: bytes) -> bytes:
    """A delta's result, no larger than a commit may be."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = delta[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value

    if number() != len(base):
        raise ValueError("a delta of something else")
    size = number()
    out = b""
    while at < len(delta):
        operation = delta[at]
        at += 1
        if operation & 0x80:
            begin = count = 0
            for bit in range(4):
                if operation & 1 << bit:
                    begin |= delta[at] << 8 * bit
                    at += 1
            for bit in range(3):
                if operation & 0x10 << bit:
                    count |= delta[at] << 8 * bit
                    at += 1
            out += base[begin : begin + (count or 0x10000)]
        elif operation:
            out += delta[at : at + operation]
            at += operation
        else:
            raise ValueError("a delta that git does not know")
        if len(out) > MAX_COMMIT:
            raise ValueError("a commit that is too large")
    if len(out) != size:
        raise ValueError("a damaged delta")
    return out


def _text(name: bytes) -> str:
    return name[:300].decode(errors="backslashreplace")
