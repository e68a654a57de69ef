# SPDX-License-Identifier: Apache-2.0
"""A tree as a tar stream, while the sandbox may be changing it.

* Names are relative to the directory asked for, which is itself the first member, "."; a single file is one member under its own
  name. Of what `path` names a final symlink is followed; inside the tree no symlink is.
* The size in a header is the size when the file was opened. Later growth is left out; what is missing after a cut is
  filled with zeros, and `problem` is told.
* Hard links stay links, also of symlinks. Sockets and devices are left out. Directories on which something is mounted are there, empty.
* Entries of a directory are sorted (of each 100,000), directories after the rest, so that one tree gives one stream.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from itertools import islice

from opendsec.api.errors import Conflict
from opendsec.images.tarheader import BLOCK
from opendsec.kernel import fds
from opendsec.runtime.files import tarball
from opendsec.runtime.files.beneath import Tree, closing, kind_of, open_entry, text
from opendsec.runtime.files.walk import Cursor, Ticker

BATCH = 100_000  # entries of a directory in memory at a time
MAX_PENDING = 200_000  # directories noted on the way down, all levels together
MAX_LINKS = 200_000  # inodes remembered for their further hard links; later ones become files of their own
MAX_BUFFER = 256 << 10
SMALL = 64 << 10  # files up to this size go through the buffer, larger ones from descriptor to descriptor

Problem = Callable[[bytes, str], None]


def write_archive(tree: Tree, start: int, path: bytes, out: int, alive: Callable[[], None], problem: Problem) -> None:
    """Write what the O_PATH descriptor `start` names. OSError from `out`: EPIPE; otherwise it names the member. Raises Conflict."""
    _Archiver(tree, out, Ticker(alive), problem).run(start, path)


class _Archiver:
    def __init__(self, tree: Tree, out: int, ticker: Ticker, problem: Problem) -> None:
        self._tree = tree
        self._out = out
        self._buffer = bytearray()
        self._ticker = ticker
        self._problem = problem
        self._links: dict[tuple[int, int], bytes] = {}

    def run(self, start: int, path: bytes) -> None:
        st = os.fstat(start)
        if stat.S_ISDIR(st.st_mode):
            self._put(b".", st)
            with Cursor(start) as cursor:
                self._walk(cursor)
        else:
            if not stat.S_ISREG(st.st_mode):
                raise Conflict(
                    f"{text(path)} is a {kind_of(st.st_mode).replace('_', ' ')}; an archive is of a directory or a file", field="path"
                )
            self._file(start, path.rstrip(b"/").rsplit(b"/", 1)[-1])
        self._write(tarball.END_OF_ARCHIVE)
        self._flush()

    def _walk(self, cursor: Cursor) -> None:
        levels = [(b"", self._entries(cursor.fd, b"", 0))]  # (prefix of names, subdirectories still to do, last first)
        pending = len(levels[0][1])
        while levels:
            prefix, subdirectories = levels[-1]
            if not subdirectories:
                levels.pop()
                if levels:
                    cursor.leave()
                continue
            name = subdirectories.pop()
            pending -= 1
            try:
                cursor.enter(name)
            except OSError as error:
                if error.errno == errno.EXDEV:
                    self._mount_point(cursor.fd, name, prefix)
                elif error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    self._problem(prefix + name, "disappeared")
                else:
                    raise
                continue
            self._put(prefix + name, os.fstat(cursor.fd))
            below = self._entries(cursor.fd, prefix + name + b"/", pending)
            pending += len(below)
            levels.append((prefix + name + b"/", below))

    def _entries(self, directory: int, prefix: bytes, pending: int) -> list[bytes]:
        """Write all entries of a directory that are none themselves; the others, in reverse order."""
        subdirectories: list[bytes] = []
        for name, is_directory in _listed(directory):
            self._ticker.step()
            if is_directory:
                subdirectories.append(name)
                if pending + len(subdirectories) > MAX_PENDING:
                    raise Conflict(f"more than {MAX_PENDING} directories side by side; archive a part of the tree", field="path")
                continue
            try:
                entry = open_entry(directory, name)
            except OSError as error:
                if error.errno == errno.EXDEV:
                    self._problem(prefix + name, "something is mounted there")
                elif error.errno == errno.ENOENT:
                    self._problem(prefix + name, "disappeared")
                else:
                    raise
                continue
            with closing(entry):
                self._entry(entry, prefix + name)
        subdirectories.sort(reverse=True)
        return subdirectories

    def _entry(self, entry: int, name: bytes) -> None:
        st = os.fstat(entry)
        kind = stat.S_IFMT(st.st_mode)
        if kind in (stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK):
            self._problem(name, f"a {kind_of(st.st_mode).replace('_', ' ')} is left out")
            return
        if kind == stat.S_IFDIR:
            self._problem(name, "became a directory meanwhile")
            return
        if st.st_nlink > 1:
            identity = (st.st_dev, st.st_ino)
            if (earlier := self._links.get(identity)) is not None:
                self._put(name, st, kind="hard_link", link=earlier)
                return
            if len(self._links) < MAX_LINKS:
                self._links[identity] = name
        if kind == stat.S_IFREG:
            self._file(entry, name)
        elif kind == stat.S_IFLNK:
            self._put(name, st, kind="symlink", link=os.readlink(b"", dir_fd=entry))
        else:
            self._put(name, st, kind="fifo")

    def _file(self, entry: int, name: bytes) -> None:
        try:
            file = fds.reopen(entry, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), name) from None
        with closing(file):
            st = os.fstat(file)
            self._put(name, st, kind="file", size=st.st_size)
            got = 0
            if st.st_size <= SMALL:
                while got < st.st_size and (data := os.read(file, st.st_size - got)):
                    self._write(data)
                    got += len(data)
            else:
                self._flush()
                got = tarball.copy(file, self._out, st.st_size)
        if got < st.st_size:
            self._problem(name, f"became shorter while it was read: {st.st_size - got} bytes are zeros")
        missing = st.st_size - got + -st.st_size % BLOCK
        while missing > 0:
            part = min(missing, MAX_BUFFER)
            self._write(bytes(part))
            missing -= part

    def _mount_point(self, directory: int, name: bytes, prefix: bytes) -> None:
        try:
            st = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return
        if stat.S_ISDIR(st.st_mode):
            self._put(prefix + name, st)

    def _put(self, name: bytes, st: os.stat_result, *, kind: tarball.MemberKind = "directory", size: int = 0, link: bytes = b"") -> None:
        if len(name) > tarball.MAX_NAME_BYTES:
            raise Conflict(f"{text(name)} is deeper than an archive can name ({tarball.MAX_NAME_BYTES} bytes)", field="path")
        owner = self._tree.owner_of(st)
        self._write(
            tarball.header(tarball.Member(name, kind, size, stat.S_IMODE(st.st_mode), owner.uid, owner.gid, int(st.st_mtime), link))
        )

    def _write(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) >= MAX_BUFFER:
            self._flush()

    def _flush(self) -> None:
        tarball.write_all(self._out, bytes(self._buffer))
        self._buffer.clear()


def _listed(directory: int) -> Iterator[tuple[bytes, bool]]:
    """(name, whether it is a directory), sorted within each batch."""
    with os.scandir(directory) as entries:
        while batch := [(os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in islice(entries, BATCH)]:
            batch.sort()
            yield from batch
