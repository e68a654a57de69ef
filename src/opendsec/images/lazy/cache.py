# SPDX-License-Identifier: Apache-2.0
"""The local, sparse copy of a layer's data: `cache/sha256-<hex>/data` and, beside it, `map`.

All mounts of the layer read this one file. The rule that everything here serves: nobody reads a chunk whose state is not HERE. A reader
is let through (`try_pass`) and a chunk is dropped (`drop`) under one lock; in between the two, a reader that was let through may not have
read yet, so it is remembered until it is seen to be elsewhere.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from opendsec.images.chunks import ChunkTable
from opendsec.images.lazy.chunkmap import ABSENT, HERE, HINTED, ChunkMap
from opendsec.images.lazy.readahead import ReadAhead
from opendsec.images.lazy.trace import Entry
from opendsec.images.origins import Origin
from opendsec.kernel import abi, fds, procfs, syscalls

DATA, MAP, OPEN = "data", "map", "open"
_MAX_READERS = 4096

Key = tuple[int, int]  # device and inode

BUSY = (b"erofs", b"fsnotify", b"fanotify", b"filemap", b"read_pages")
"""Parts of names of kernel functions that a reader is in from its question until it has the bytes."""


class CachedLayer:
    """Methods may be called from any thread unless they say otherwise."""

    def __init__(
        self,
        digest: str,
        directory: Path,
        table: ChunkTable,
        table_sha256: bytes,
        origin: Origin | None,
        *,
        boot_id: str,
        upstream: CachedLayer | Path | None = None,
        inherited: Mapping[Key, int] = MappingProxyType({}),
    ) -> None:
        """Opens or makes the files. Raises OSError.

        `upstream`: where a copy made for a trace has its content from. `inherited`: data files that a predecessor had open.
        """
        self.digest, self.directory, self.table, self.origin = digest, directory, table, origin
        self._boot_id = boot_id
        self.table_sha256, self.upstream = table_sha256, upstream
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = directory / DATA
        # Before it is marked: what this descriptor does asks nobody.
        self.fd = _open_data(self.path, inherited)
        try:
            self.map = ChunkMap(directory / MAP, count=table.count, table_sha256=table_sha256, boot_id=boot_id)
            status = os.fstat(self.fd)
            if status.st_size != table.data_bytes:
                # Never shorter, not even for a moment: somebody may have it mounted.
                os.ftruncate(self.fd, table.data_bytes)
            self.key = (status.st_dev, status.st_ino)
        except BaseException:
            os.close(self.fd)
            raise
        self.lock = threading.Lock()
        self.readahead: ReadAhead | None = ReadAhead(table.count)
        self.marked = False
        self.was_unmarked = False  # or else unwatched, with somebody having it open: nothing may be dropped under that one
        self.replayed = False  # its trace, since it was empty
        self.opens = 0  # of a FUSE file that shows this
        self.used_at = time.monotonic()
        self.trace: list[Entry] | None = None  # first touches, if they are to be recorded
        self._places: Iterator[int] = iter(())
        self._seen = bytearray()
        self._touched = array("d", [time.monotonic()]) * table.count
        self._readers: dict[int, tuple[float, int, int]] = {}  # tid → when it was let through, to which chunks
        self.here = self.map.states.count(HERE)

    # --- facts -----------------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        return self.here == self.table.count

    @property
    def local_bytes(self) -> int:
        """What it takes on the disk: all that is not known to be absent."""
        absent = self.map.states.count(ABSENT)
        if absent == 0:
            return self.table.data_bytes
        return min(self.table.data_bytes, (self.table.count - absent) * self.table.chunk_bytes)

    def missing(self, chunks: Iterable[int]) -> list[int]:
        states = self.map.states
        return [index for index in chunks if states[index] != HERE]

    def note_open(self, is_open: bool) -> None:
        """Of a FUSE file: whoever has it open loses it with the family."""
        note = self.directory / OPEN
        if is_open:
            note.write_text(self._boot_id)
        else:
            note.unlink(missing_ok=True)

    def noted_open(self) -> bool:
        """Whether a family had it open during this boot."""
        try:
            return (self.directory / OPEN).read_text() == self._boot_id
        except FileNotFoundError:
            return False

    def in_use(self) -> bool:
        """Whether it is mounted, or otherwise open by somebody."""
        return self.opens > 0 or fds.held_by_others(self.fd)

    def replaced(self) -> bool:
        """Whether the file at our path is another one, or gone: the store has collected the layer."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return True
        return (status.st_dev, status.st_ino) != self.key

    # --- traces ----------------------------------------------------------------------------------------------------

    def record_trace(self, places: Iterator[int]) -> None:
        """From now on note what is touched first, with its place in the order of the whole run. Right only if nobody has read anything
        yet: what a page cache has asks nobody."""
        self.trace, self._seen, self._places = [], bytearray(self.table.count), places
        self.readahead = None

    def note_touch(self, chunks: range) -> range:
        """Somebody is to read these: the chunks to load beforehand."""
        if self.trace is None and (self.readahead is None or self.complete):
            return range(0)
        with self.lock:
            if self.trace is not None:
                for index in chunks:
                    if not self._seen[index]:
                        self._seen[index] = 1
                        self.trace.append((index, next(self._places)))
            if self.readahead is None or not chunks or self.complete:
                return range(0)
            return self.readahead.note(chunks.start, chunks.stop - 1)

    # --- readers ---------------------------------------------------------------------------------------------------

    def try_pass(self, tid: int, chunks: range) -> bool:
        """Whether a reader of these may go on now; if so it counts as reading them. The caller answers it at once."""
        with self.lock:
            states = self.map.states
            for index in chunks:
                if states[index] != HERE:
                    return False
            self._let_through(tid, chunks)
            return True

    def _let_through(self, tid: int, chunks: range) -> None:
        now = time.monotonic()
        self.used_at = now
        for index in chunks:
            self._touched[index] = now
        if chunks:
            self._readers.pop(tid, None)
            self._readers[tid] = (now, chunks.start, chunks.stop)
            if len(self._readers) > _MAX_READERS:
                self._forget_readers()

    def _forget_readers(self) -> None:
        for tid in list(self._readers)[: _MAX_READERS // 2]:
            if not _may_be_reading(tid):
                del self._readers[tid]

    # --- content ---------------------------------------------------------------------------------------------------

    def read_chunk(self, index: int) -> bytes:
        start, length = self.table.span(index)
        return os.pread(self.fd, length, start)

    def store(self, index: int, data: bytes | memoryview) -> bool:
        """Keep chunk `index`, if these bytes are right; False if they are not. Raises OSError (ENOSPC)."""
        if not self.table.matches(index, data):
            return False
        self._write(range(index, index + 1), memoryview(data))
        return True

    def store_run(self, first: int, data: bytes | memoryview) -> list[int]:
        """Keep the chunks from `first` on of which `data` is made, as far as they are right; those that are not. Raises OSError
        (ENOSPC)."""
        view, size = memoryview(data), self.table.chunk_bytes
        count = -(-len(view) // size)
        wrong = [index for index in range(first, first + count) if not self.table.matches(index, _part(view, size, index - first))]
        start = first
        for end in [*wrong, first + count]:  # what lies between wrong ones in one piece: each call is a chance to wait for other threads
            if start < end:
                self._write(range(start, end), _part(view, size, start - first, end - start))
            start = end + 1
        return wrong

    def _write(self, chunks: range, view: memoryview) -> None:
        start, _ = self.table.span(chunks.start, len(chunks))
        while view:
            written = os.pwrite(self.fd, view, start)
            view, start = view[written:], start + written
        self._set_here(chunks)

    def confirm(self, index: int) -> bool:
        """Whether a HINTED chunk is what it should be; it is HERE then, else ABSENT."""
        if self.map.states[index] == HINTED:
            if self.table.matches(index, self.read_chunk(index)):
                self._set_here(range(index, index + 1))
            else:
                with self.lock:
                    self.map.set(index, ABSENT)
        return self.map.states[index] == HERE

    def _set_here(self, chunks: range) -> None:
        now = time.monotonic()
        with self.lock:
            for index in chunks:
                if self.map.states[index] != HERE:
                    self.map.set(index, HERE)
                    self.here += 1
                    self._touched[index] = now

    def droppable(self, quiet_s: float) -> list[int]:
        """Chunks here that nobody asked for during `quiet_s`, coldest first."""
        before = time.monotonic() - quiet_s
        with self.lock:
            found = [index for index, state in enumerate(self.map.states) if state != ABSENT and self._touched[index] <= before]
            found.sort(key=self._touched.__getitem__)
        return found

    def drop(self, chunks: Iterable[int], quiet_s: float) -> int:
        """Give the disk space of these back, as far as nobody can be reading them; how many bytes. The mark must be there, and every
        opener must have opened it marked."""
        freed = 0
        with self.lock:
            busy: set[int] = set()
            for tid, (_, start, stop) in list(self._readers.items()):
                if _may_be_reading(tid):
                    busy.update(range(start, stop))
                else:
                    del self._readers[tid]
            before = time.monotonic() - quiet_s
            for index in chunks:
                state = self.map.states[index]
                if state == ABSENT or index in busy or self._touched[index] > before:
                    continue
                start, length = self.table.span(index)
                self.map.set(index, ABSENT)  # first: a hole is never HERE
                if state == HERE:
                    self.here -= 1
                syscalls.fallocate(self.fd, abi.FALLOC_FL_PUNCH_HOLE | abi.FALLOC_FL_KEEP_SIZE, start, length)
                freed += length
        return freed

    def close(self, *, clean: bool = True) -> None:
        self.map.close(clean=clean)
        fd, self.fd = self.fd, -1
        os.close(fd)


def _part(view: memoryview, size: int, first: int, count: int = 1) -> memoryview:
    return view[first * size : (first + count) * size]


def _open_data(path: Path, inherited: Mapping[Key, int]) -> int:
    try:
        status = os.stat(path)
        if (fd := inherited.get((status.st_dev, status.st_ino), -1)) >= 0:
            return fd
    except FileNotFoundError:
        pass
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _may_be_reading(tid: int) -> bool:
    """Whether a thread that was let through may still be on its way to the bytes: stopped, frozen or slow, it may stay there for long."""
    try:
        stack = procfs.read(procfs.path_of(tid, "stack"))
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True
    return any(name in stack for name in BUSY)
