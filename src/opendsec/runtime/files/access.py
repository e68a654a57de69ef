# SPDX-License-Identifier: Apache-2.0
"""SandboxFiles: the file operations of a living sandbox. The rules they follow are in this package's docstring."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from opendsec.api.errors import Conflict, QuotaExceeded
from opendsec.api.files import FileInfo
from opendsec.kernel import fsuser, syscalls
from opendsec.runtime.backend import FileReader, FileWriter, Watch
from opendsec.runtime.files import accounts, writer
from opendsec.runtime.files.archive import Problem, write_archive
from opendsec.runtime.files.beneath import Owner, Tree, check_path, closing, make_directory, open_entry, read_link, split, text, translated
from opendsec.runtime.files.extract import read_archive
from opendsec.runtime.files.walk import remove_tree
from opendsec.runtime.files.watch import DirectoryWatch

MAX_LISTED = 100_000
MAX_PSEUDO_BYTES = 16 << 20  # read at most of files that do not know their size
CHUNK_BYTES = 1 << 20


class SandboxFiles:
    """Implements `backend.FileAccess`; blocking, for worker threads, several at a time.

    `open_root` gives an O_PATH descriptor of the sandbox's root directory, which is closed here, and raises SandboxLost.
    `uid_base`: the host id of the sandbox's id 0; it has `ids` of them.
    """

    def __init__(self, open_root: Callable[[], int], uid_base: int, *, ids: int = 65_536) -> None:
        self._open_root = open_root
        self._uid_base = uid_base
        self._ids = ids

    # Looking.

    def stat(self, path: bytes, *, follow: bool = True) -> FileInfo:
        """`follow`: of what a final symlink leads to. Raises NotFound, Conflict."""
        with self._tree(path) as tree, closing(tree.open(path, follow=follow)) as fd:
            return tree.info(_name_of(path), fd)

    def list(self, path: bytes) -> Sequence[FileInfo]:
        """The entries of a directory, sorted by name; symlinks as such. Raises QuotaExceeded for more than `MAX_LISTED`."""
        found: list[FileInfo] = []
        with (
            self._tree(path) as tree,
            closing(tree.open(path, os.O_DIRECTORY)) as fd,
            closing(tree.open_directory(fd)) as directory,
            os.scandir(directory) as entries,
        ):
            for entry in entries:
                if len(found) >= MAX_LISTED:
                    raise QuotaExceeded(
                        f"{text(path)} has more than {MAX_LISTED} entries; list it with a command, or archive it",
                        field="path",
                        data={"resource": "entries", "limit": MAX_LISTED},
                    )
                try:
                    st = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # removed since it was listed
                name = os.fsencode(entry.name)
                found.append(tree.describe(name, st, read_link(name, directory) if stat.S_ISLNK(st.st_mode) else None))
        return sorted(found, key=lambda info: info.raw_name)

    def open_read(self, path: bytes) -> OpenFile:
        """A regular file, opened for reading; the caller closes it. `chunks` reads from it.

        Files of /proc are opened with the bare rights of the sandbox's root, without any capability.
        """
        with self._tree(path) as tree, closing(tree.open(path)) as fd:
            return OpenFile(path, tree.open_regular(fd, path))

    def open_watch(self, path: bytes) -> Watch:
        """Raises Unavailable when the machine's limit of watches is reached, Denied outside the sandbox's own file systems."""
        with self._tree(path) as tree, closing(tree.directory(path)) as fd:
            return DirectoryWatch(fd)

    # Changing.

    def open_write(
        self, path: bytes, *, mode: int | None, user: str | None, append: bool, parents: bool, default_user: str = ""
    ) -> FileWriter:
        """`mode` and `user` None: as the existing file has them; 0644 and `default_user` for a new one. See `writer` for links.

        `parents` makes missing directories: 0755, with the file's owner.
        """
        with self._tree(path) as tree:
            given = None if user is None else accounts.resolve(tree, user)
            fresh = given or accounts.resolve(tree, default_user)
            target = writer.find_target(tree, path, parents=parents, owner=fresh)
            if append and target.existing is not None:
                with closing(target.directory), closing(open_entry(target.directory, target.name)) as entry:
                    fd = tree.open_regular(entry, path, os.O_WRONLY | os.O_APPEND)
                return writer.Appending(self, path, fd, owner=self._host(given), mode=mode)
            owner = fresh if target.existing is None else given or tree.owner_of(target.existing)
            if mode is None:
                mode = writer.NEW_FILE_MODE if target.existing is None else target.existing.st_mode & 0o1777
            return writer.NewFile(self, tree, path, target, owner=owner, mode=mode, exclusive=append)

    def mkdir(self, path: bytes, *, mode: int, user: str | None, parents: bool) -> FileInfo:
        """`parents`: also what is missing above (0755, same owner), and a directory that exists will do, as it is."""
        with self._tree(path) as tree:
            owner = accounts.resolve(tree, user or "")
            if parents:
                try:
                    with closing(tree.open(path, os.O_DIRECTORY)) as fd:
                        return tree.info(_name_of(path), fd)
                except FileNotFoundError:
                    pass
            folder, name = split(path)
            with closing(tree.make_directories(folder, owner) if parents else tree.directory(folder)) as directory:
                tree.become(owner)
                fd, made = make_directory(directory, name, mode)
                with closing(fd):
                    if made:
                        tree.give_path(fd, owner)
                    elif not parents:
                        raise Conflict(f"{text(path)} exists already", field="path")
                    return tree.info(name, fd)

    def move(self, path: bytes, to: bytes) -> FileInfo:
        """rename(2): an entry itself, also a symlink; a file at `to` is replaced, an empty directory by a directory."""
        check_path(to, "to")
        with self._tree(path) as tree:
            folder, name = split(path)
            to_folder, to_name = split(to, "to")
            with closing(tree.directory(folder)) as source:
                os.close(open_entry(source, name))  # so that what is missing is told from where it is missing
                with translated(to, "to"), closing(tree.directory(to_folder)) as target:
                    try:
                        syscalls.renameat2(source, name, target, to_name)
                    except OSError as error:
                        if error.errno != errno.EXDEV:
                            raise
                        raise Conflict(
                            f"{text(path)} cannot be renamed to another file system, nor can a directory of the image; mv inside copies",
                            field="to",
                            data={"errno": "EXDEV"},
                        ) from error
                    with closing(open_entry(target, to_name)) as fd:
                        return tree.info(to_name, fd)

    def remove(self, path: bytes, *, recursive: bool) -> None:
        """An entry itself, also a symlink; a directory if it is empty, or `recursive`: all of it, but never what is mounted in it."""
        with self._tree(path) as tree:
            folder, name = split(path)
            with closing(tree.directory(folder)) as directory:
                with closing(open_entry(directory, name)) as fd:
                    is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
                if not is_directory:
                    os.unlink(name, dir_fd=directory)
                elif recursive:
                    remove_tree(directory, name, self._alive(tree))
                else:
                    os.rmdir(name, dir_fd=directory)

    def chmod(self, path: bytes, *, mode: int | None, user: str | None) -> FileInfo:
        """Mode, owner or both of what `path` leads to. A change of owner takes setuid and setgid away unless `mode` gives them."""
        with self._tree(path) as tree, closing(tree.open(path)) as fd:
            tree.require_own(fd, path)
            if user is not None:
                tree.give_path(fd, accounts.resolve(tree, user))
            if mode is not None:
                fsuser.chmod_path(fd, mode)
            return tree.info(_name_of(path), fd)

    # Many at once.

    def archive(self, path: bytes, out_fd: int, *, problem: Problem | None = None) -> None:
        """Write a tar stream of `path` to `out_fd`, the caller's. `problem` is called with a member's name and what is wrong with it.

        Raises Conflict if the reader goes away.
        """
        with self._tree(path) as tree, closing(tree.open(path)) as fd:
            tree.require_own(fd, path)
            write_archive(tree, fd, path, out_fd, self._alive(tree), problem or (lambda _name, _what: None))

    def extract(self, path: bytes, in_fd: int, *, user: str | None) -> int:
        """Unpack a tar stream from `in_fd`, the caller's, into directory `path`, which is made if it is missing.

        `user` None: owners as the archive says. Returns the bytes of file content written.
        """
        with self._tree(path) as tree:
            owner = None if user is None else accounts.resolve(tree, user)
            with closing(tree.make_directories(path, owner or accounts.ROOT)) as target:
                return read_archive(tree, target, in_fd, owner=owner, alive=self._alive(tree))

    # Within.

    @contextmanager
    def _tree(self, path: bytes) -> Iterator[Tree]:
        """Root descriptor and credentials for one operation on `path`; the kernel's errors become the contract's."""
        check_path(path)
        # The root is opened as the host's root: that takes rights over the sandbox's process, which the rest does without.
        with closing(self._open_root()) as root, translated(path, where=root), self.acting() as user:
            yield Tree(root, user, self._uid_base, self._ids)

    def acting(self) -> fsuser.FsUser:
        """For writers: see `writer.Sandbox`."""
        return fsuser.FsUser(self._uid_base, self._uid_base)

    def check_alive(self) -> None:
        """For writers: see `writer.Sandbox`."""
        os.close(self._open_root())

    def _host(self, owner: Owner | None) -> tuple[int, int] | None:
        return None if owner is None else (self._uid_base + owner.uid, self._uid_base + owner.gid)

    def _alive(self, tree: Tree) -> Callable[[], None]:
        def check() -> None:
            """Raises SandboxLost."""
            with tree.user.suspended():
                self.check_alive()

        return check


class OpenFile:
    """Implements `backend.FileReader`."""

    def __init__(self, path: bytes, fd: int) -> None:
        self._path, self._fd = path, fd

    def fileno(self) -> int:
        return self._fd

    def size_bytes(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self, offset: int, count: int) -> bytes:
        parts, got = [], 0
        with translated(self._path):
            while got < count and (part := os.pread(self._fd, min(count - got, CHUNK_BYTES), offset + got)):
                parts.append(part)
                got += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def chunks(reader: FileReader, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
    """Content of a file that may be changing, in pieces of at most 1 MiB, from `offset` on; at most `length` bytes.

    Ends at the size that the file has now, so that one that grows faster than it is read has an end too. Files that say size 0
    and are not empty (/proc) are read to their end, at most 16 MiB. Raises OSError.
    """
    size = reader.size_bytes()
    end = size if size else MAX_PSEUDO_BYTES
    if length is not None:
        end = min(end, offset + length)
    while offset < end and (data := reader.read(offset, min(CHUNK_BYTES, end - offset))):
        offset += len(data)
        yield data


def _name_of(path: bytes) -> bytes:
    return path.rstrip(b"/").rsplit(b"/", 1)[-1] or b"/"
