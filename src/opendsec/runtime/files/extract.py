# SPDX-License-Identifier: Apache-2.0
"""A tar stream into a directory. Neither the archive nor the directory can be trusted.

* A member's name leads nowhere but beneath the target: absolute names and ".." are refused; a symlink on the way is followed
  only if it stays beneath (so that "lib/x" works where lib is a link to usr/lib). Whatever has the member's name, a
  symlink first of all, is replaced and never written through; a directory in the place of a file is refused. The same for the
  target of a hard link.
* Directories that exist keep owner and mode; so the archive of a tree, unpacked over "/", does not close /tmp.
* Owners are the archive's ids, or all `owner`'s; ids that have no meaning inside become nobody's (65534). setuid and setgid stay
  with the archive's owners (they mean nothing outside, and no_new_privs makes them harmless inside) and go with `owner`.
* Devices are refused, sparse files too; FIFOs are made. File times are kept, to the second; those of directories are not.
* Size is bounded by the sandbox's disk alone. A member that does not fit is removed; earlier ones stay.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import TypeVar

from opendsec.api.errors import Conflict, InvalidRequest
from opendsec.kernel import abi, fds, fsuser, syscalls
from opendsec.runtime.files import tarball
from opendsec.runtime.files.beneath import MAX_NAME_BYTES, NOBODY, Owner, Tree, closing, from_os_error, make_directory, open_entry, text
from opendsec.runtime.files.walk import Ticker

T = TypeVar("T")

MAX_RACES = 64
_STRICT = abi.RESOLVE_BENEATH | abi.RESOLVE_NO_XDEV | abi.RESOLVE_NO_MAGICLINKS
_STEP_BYTES = 2048  # a path is walked in parts that the kernel takes at once
_MAX_TIME = 1 << 36  # seconds; what file systems can keep is their own affair


def read_archive(tree: Tree, target: int, source: int, *, owner: Owner | None, alive: Callable[[], None]) -> int:
    """Unpack the stream `source` beneath directory `target`; the bytes of file content written. Raises errors of the contract."""
    return _Extractor(tree, target, owner, Ticker(alive)).run(source)


class _Extractor:
    def __init__(self, tree: Tree, target: int, owner: Owner | None, ticker: Ticker) -> None:
        self._tree = tree
        self._target = target
        self._all_owner = owner
        self._ticker = ticker
        # Beneath the sandbox's own root, absolute symlinks stay beneath the target as well.
        at_root = os.path.samestat(os.fstat(target), os.fstat(tree.root))
        self._resolve = abi.RESOLVE_IN_ROOT | abi.RESOLVE_NO_XDEV | abi.RESOLVE_NO_MAGICLINKS if at_root else _STRICT
        # The directory of the last member: archives list a directory's entries in a row.
        self._parent = -1
        self._parent_parts: list[bytes] = []

    def run(self, source: int) -> int:
        total = 0
        reader = tarball.TarReader(source)
        try:
            for member in reader:
                self._ticker.step()
                try:
                    total += self._member(member, reader)
                except OSError as error:
                    failure = from_os_error(error, member.name, "body", self._target)
                    failure.data["member"] = text(member.name)
                    raise failure from error
            return total
        finally:
            self._forget_parent()

    def _member(self, member: tarball.Member, reader: tarball.TarReader) -> int:
        parts = parts_of(member.name, member)
        if not parts:
            if member.kind != "directory":
                raise refused(member, "names no entry")
            return 0  # the target itself, which exists and keeps what it has
        owner = self._all_owner or Owner(self._id(member.uid), self._id(member.gid))
        directory = self._directory(parts[:-1], owner)
        self._tree.become(owner)
        name = parts[-1]
        if member.kind == "file":
            return self._make_file(directory, name, member, reader, owner)
        if member.kind == "directory":
            self._make_directory(directory, parts, member, owner)
        elif member.kind == "symlink":
            if not member.link:
                raise refused(member, "is a link to nothing")
            _replace(directory, name, lambda: os.symlink(member.link, name, dir_fd=directory))
        elif member.kind == "fifo":
            self._make_fifo(directory, name, member, owner)
        else:
            self._make_link(directory, name, member)
        return 0

    # Kinds.

    def _make_directory(self, parent: int, parts: list[bytes], member: tarball.Member, owner: Owner) -> None:
        name = parts[-1]
        try:
            fd, made = make_directory(parent, name, self._mode(member))
        except OSError as error:
            if error.errno == errno.EXDEV:
                return  # a mount point is a directory that exists
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            if self._leads_to_directory(parts):
                return  # a link to a directory beneath the target, kept like a directory
            os.unlink(name, dir_fd=parent)
            fd, made = make_directory(parent, name, self._mode(member))
        with closing(fd):
            if made:
                self._tree.give_path(fd, owner)

    def _leads_to_directory(self, parts: list[bytes]) -> bool:
        try:
            os.close(self._walk(parts))
        except OSError:
            return False
        return True

    def _make_file(self, directory: int, name: bytes, member: tarball.Member, reader: tarball.TarReader, owner: Owner) -> int:
        flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC
        with closing(_replace(directory, name, lambda: os.open(name, flags, 0o600, dir_fd=directory))) as fd:
            try:
                count = reader.content_to(fd)
                self._tree.give(fd, owner)
                os.fchmod(fd, self._mode(member))
                seconds = max(-_MAX_TIME, min(member.mtime, _MAX_TIME))
                os.utime(fd, (seconds, seconds))
                if os.fstat(fd).st_size != member.size:
                    raise Conflict(f"{text(member.name)} was changed by something else while it was written", field="body")
            except BaseException:
                # Only what is still ours under that name; the sandbox may have put something else there.
                try:
                    if os.path.samestat(os.fstat(fd), os.stat(name, dir_fd=directory, follow_symlinks=False)):
                        os.unlink(name, dir_fd=directory)
                except OSError:
                    pass
                raise
        return count

    def _make_fifo(self, directory: int, name: bytes, member: tarball.Member, owner: Owner) -> None:
        _replace(directory, name, lambda: os.mkfifo(name, 0o600, dir_fd=directory))
        with closing(open_entry(directory, name)) as fd:
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                self._tree.give_path(fd, owner)
                fsuser.chmod_path(fd, self._mode(member))

    def _make_link(self, directory: int, name: bytes, member: tarball.Member) -> None:
        source = parts_of(member.link, member)
        if not source:
            raise refused(member, "is a link to nothing")
        try:
            there = self._walk(source[:-1])
        except FileNotFoundError:
            raise refused(member, f"is a link to {text(member.link)}, which does not exist") from None
        with closing(there):
            try:
                with closing(open_entry(there, source[-1])) as entry:
                    st = os.fstat(entry)
            except FileNotFoundError:
                raise refused(member, f"is a link to {text(member.link)}, which does not exist") from None
            if stat.S_ISDIR(st.st_mode):
                raise refused(member, "is a link to a directory")
            try:
                if os.path.samestat(st, os.stat(name, dir_fd=directory, follow_symlinks=False)):
                    return
            except FileNotFoundError:
                pass
            _replace(directory, name, lambda: syscalls.linkat(there, source[-1], directory, name))

    def _mode(self, member: tarball.Member) -> int:
        return member.mode if self._all_owner is None else member.mode & 0o1777

    def _id(self, number: int) -> int:
        return number if 0 <= number < min(self._tree.ids, NOBODY) else min(self._tree.ids - 1, NOBODY)

    # Directories.

    def _directory(self, parts: list[bytes], owner: Owner) -> int:
        """The directory of a member, held until another is asked for; what is missing of it is made with mode 0755."""
        known = self._parent_parts
        if self._parent >= 0 and parts == known:
            return self._parent
        found = -1
        if self._parent >= 0 and parts[: len(known)] == known:
            try:
                found = self._walk(parts[len(known) :], self._parent)  # most often one level down
            except OSError as error:
                # EXDEV: a link leads out of the held directory, perhaps not out of the target.
                if error.errno not in (errno.EXDEV, errno.ENOENT):
                    raise
        if found < 0:
            try:
                found = self._walk(parts)
            except FileNotFoundError:
                found = self._make_parents(parts, owner)
        self._forget_parent()
        self._parent, self._parent_parts = found, parts
        return found

    def _walk(self, parts: list[bytes], start: int | None = None) -> int:
        """An O_PATH descriptor of an existing directory beneath the target, or beneath a directory of it. ENOENT, EXDEV: it leads out."""
        fd = os.dup(self._target if start is None else start)
        resolve = self._resolve if start is None else _STRICT
        try:
            for step in _steps(parts):
                below = _open_directory(fd, step, resolve)
                os.close(fd)
                fd, resolve = below, _STRICT
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _make_parents(self, parts: list[bytes], owner: Owner) -> int:
        """Make what is missing of a directory whose path ends in something missing."""
        existing, missing = 0, len(parts)
        while missing - existing > 1:
            middle = (existing + missing) // 2
            try:
                os.close(self._walk(parts[:middle]))
                existing = middle
            except FileNotFoundError:
                missing = middle
        fd = self._walk(parts[:existing])
        try:
            self._tree.become(owner)
            for part in parts[existing:]:
                below, made = make_directory(fd, part, 0o755)
                os.close(fd)
                fd = below
                if made:
                    self._tree.give_path(fd, owner)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _forget_parent(self) -> None:
        fd, self._parent, self._parent_parts = self._parent, -1, []
        if fd >= 0:
            os.close(fd)


def _replace(directory: int, name: bytes, make: Callable[[], T]) -> T:
    """`make` the entry, after removing what has its name. EISDIR: a directory has it. EEXIST: something keeps making it."""
    for _ in range(MAX_RACES):
        try:
            return make()
        except FileExistsError:
            pass
        try:
            os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            pass
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))


def _open_directory(fd: int, path: bytes, resolve: int) -> int:
    for _ in range(fds.MAX_RACES):
        try:
            return syscalls.openat2(fd, path, os.O_PATH | os.O_DIRECTORY, 0, resolve)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def _steps(parts: list[bytes]) -> Iterator[bytes]:
    """The path in pieces that the kernel takes at once."""
    piece: list[bytes] = []
    size = 0
    for part in parts:
        if size + len(part) > _STEP_BYTES:
            yield b"/".join(piece)
            piece, size = [], 0
        piece.append(part)
        size += len(part) + 1
    if piece:
        yield b"/".join(piece)


def parts_of(name: bytes, member: tarball.Member) -> list[bytes]:
    if name.startswith(b"/"):
        raise refused(member, f"leads outside: {text(name)} is absolute")
    parts = name.split(b"/")
    if b"" in parts or b"." in parts:  # names may have ten thousand components: no loop in Python where none is needed
        parts = [part for part in parts if part not in (b"", b".")]
    if b".." in parts:
        raise refused(member, f"leads outside: {text(name)} has a component '..'")
    if max(map(len, parts), default=0) > MAX_NAME_BYTES:
        raise refused(member, f"has a name of more than {MAX_NAME_BYTES} bytes")
    return parts


def refused(member: tarball.Member, why: str) -> InvalidRequest:
    return InvalidRequest(f"{text(member.name)} {why}", field="body", data={"member": text(member.name)})
