# SPDX-License-Identifier: Apache-2.0
"""What a COPY copies: the files of a directory that its sources name, under the names that they get.

The directory is read by descriptor, so nothing outside can be had: a link on the way of a source is followed if it stays within (absolute
links of a context lead outside, those of another stage's file system begin at its own root). Links among what is copied stay links.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from opendsec.api.errors import InvalidRequest
from opendsec.images.dockerfile.ignore import Ignore, translate
from opendsec.images.view import DIRECTORY
from opendsec.kernel import abi, syscalls

MAX_ENTRIES = 1_000_000
_BLOCK = 1 << 20
FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC

Kind = Literal["file", "directory", "symlink"]


class Entry(NamedTuple):
    """`source`: relative to the directory; `name`: relative to the sandbox's root. `digest` is of a file's content."""

    source: bytes
    name: bytes
    kind: Kind
    mode: int
    uid: int
    gid: int
    size: int = 0
    link: bytes = b""
    digest: bytes = b""


class Reader:
    """A directory to copy from. `inside`: it is a file system of its own, so absolute links begin at it."""

    def __init__(self, fd: int, *, inside: bool = False, ignore: Ignore | None = None) -> None:
        self.fd, self.ignore = fd, ignore or Ignore()
        self._cancelled = False
        self._left = self._limit = 0
        self._resolve = abi.RESOLVE_IN_ROOT | abi.RESOLVE_NO_MAGICLINKS if inside else abi.RESOLVE_BENEATH | abi.RESOLVE_NO_MAGICLINKS

    def cancel(self) -> None:
        """From another thread: `entries`, which may read for minutes, ends soon, by an error."""
        self._cancelled = True

    def open(self, path: bytes, flags: int) -> int:
        return syscalls.openat2(self.fd, path or b".", flags, resolve=self._resolve)

    # --- which --------------------------------------------------------------------------------------------------------

    def matches(self, source: str) -> list[bytes]:
        """The paths that a source means, sorted. Raises InvalidRequest if it means nothing, or what lies outside."""
        parts = [part for part in source.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise InvalidRequest(f"{source!r} leads outside", field="source.dockerfile")
        found = [b""]
        for part in parts:
            found = [below for path in found for below in self._step(path, part)]
        found = [path for path in found if not path or not self._excluded(path)]
        if not found:
            raise InvalidRequest(f"{source!r} is not there, leads outside, or is left out by .dockerignore", field="source.dockerfile")
        return found

    def _step(self, path: bytes, part: str) -> Iterator[bytes]:
        prefix = path + b"/" if path else b""
        if not any(char in part for char in "*?[\\"):
            name = os.fsencode(part)
            try:
                os.close(self.open(prefix + name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC))
            except OSError:
                return
            yield prefix + name
            return
        try:
            pattern = re.compile(translate(part), re.DOTALL)
            fd = self.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # perhaps by a link
        except (re.error, ValueError) as error:
            raise InvalidRequest(f"the pattern {part!r}: {error}", field="source.dockerfile") from None
        except OSError:
            return
        try:
            names = sorted(os.listdir(fd))
        finally:
            os.close(fd)
        yield from (prefix + os.fsencode(name) for name in names if pattern.fullmatch(name))

    def _excluded(self, path: bytes) -> bool:
        return self.ignore.excludes(os.fsdecode(path))

    # --- what ---------------------------------------------------------------------------------------------------------

    def entries(self, paths: Sequence[bytes], to: str, *, limit_bytes: int = 1 << 62) -> list[Entry]:
        """All that is to be copied, directories before what is in them. Of a directory its content is copied, not itself. `paths`: from
        `matches`; `to` as in `plan.Copy`; `limit_bytes`: of all files. Raises InvalidRequest, OSError."""
        self._left, self._limit = limit_bytes, limit_bytes
        target, into = os.fsencode(to).strip(b"/"), to.endswith("/")
        if len(paths) > 1 and not into:
            raise InvalidRequest("the source means several files, so the destination must end in '/'", field="source.dockerfile")
        entries: list[Entry] = []
        for path in paths:
            status, fd = self.look(path)
            if fd is not None:
                try:
                    entries += self._tree(path, target, fd)
                finally:
                    os.close(fd)
            else:
                name = _join(target, path.rpartition(b"/")[2]) if into else target
                entries.append(self._entry(path, name, status))
            if len(entries) > MAX_ENTRIES:
                raise InvalidRequest(f"more than {MAX_ENTRIES} files", field="source.dockerfile")
        return entries

    def look(self, path: bytes) -> tuple[os.stat_result, int | None]:
        """A source itself, or what it links to: a directory is opened, for the caller to close."""
        with contextlib.suppress(OSError):
            fd = self.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            return os.fstat(fd), fd
        try:
            fd = self.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidRequest(f"{os.fsdecode(path)!r} leads nowhere, or outside: {error.strerror}", field="source.dockerfile") from None
        try:
            return os.fstat(fd), None
        finally:
            os.close(fd)

    def _tree(self, top: bytes, target: bytes, top_fd: int) -> Iterator[Entry]:
        if target:
            status = os.fstat(top_fd)
            yield Entry(top, target, "directory", stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
        pending = [b""]
        while pending:
            folder = pending.pop()
            fd = syscalls.openat2(top_fd, folder or b".", DIRECTORY, resolve=abi.RESOLVE_BENEATH | abi.RESOLVE_NO_SYMLINKS)
            try:
                for name in sorted(map(os.fsencode, os.listdir(fd)), reverse=True):
                    below = _join(folder, name)
                    source = _join(top, below)
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    excluded = self._excluded(source)
                    if stat.S_ISDIR(status.st_mode) and (not excluded or self.ignore.takes_back):
                        pending.append(below)
                    if not excluded:  # (of what is taken back in an excluded directory, that one is made on the way)
                        yield self._entry(source, _join(target, below), status)
            finally:
                os.close(fd)

    def _entry(self, source: bytes, name: bytes, status: os.stat_result) -> Entry:
        mode, uid, gid = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFDIR:
            return Entry(source, name, "directory", mode, uid, gid)
        if kind == stat.S_IFLNK:
            fd = self.open(source, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return Entry(source, name, "symlink", 0o777, uid, gid, link=os.fsencode(os.readlink(b"", dir_fd=fd)))
            finally:
                os.close(fd)
        if kind == stat.S_IFREG:
            # Before it is read: of a file that will not fit that could take minutes.
            self._left -= status.st_size
            if self._left < 0:
                raise InvalidRequest(f"has more than the {self._limit} bytes that a step's disk holds", field="source.context")
            size, digest = self._digest(source)
            return Entry(source, name, "file", mode, uid, gid, size=size, digest=digest)
        raise InvalidRequest(f"{os.fsdecode(source)!r} is neither a file, a directory nor a link", field="source.context")

    def _digest(self, source: bytes) -> tuple[int, bytes]:
        content, size = hashlib.sha256(), 0
        fd = self.open(source, FILE)
        try:
            while not self._cancelled and (block := os.read(fd, _BLOCK)):
                content.update(block)
                size += len(block)
        finally:
            os.close(fd)
        if self._cancelled:
            raise InvalidRequest("reading was cancelled", field="source.context")
        return size, content.digest()


def _join(folder: bytes, name: bytes) -> bytes:
    return b"/".join(part for part in (folder, name) if part)


def digest(entries: Sequence[Entry], *, owners: bool) -> str:
    """What makes two copies the same. `owners`: they are kept."""
    total = hashlib.sha256()
    for entry in entries:
        owner = b"%d:%d" % (entry.uid, entry.gid) if owners else b""
        fields = (entry.name, entry.kind.encode(), b"%o" % entry.mode, entry.link, entry.digest, owner)
        for field in fields:
            total.update(b"%d:" % len(field) + field)
    return total.hexdigest()
