# SPDX-License-Identifier: Apache-2.0
"""What the lower layers of an image have at a path: the answers to `nodes.Question`s.

Our own layers, mounted read-only for the purpose in no mount namespace at all; only their metadata is looked at.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from opendsec.images.layers import DATA, META
from opendsec.images.oci.nodes import Below, Question
from opendsec.kernel import abi, mounts, procfs, syscalls

_MAX_LINKS = 255
_RESOLVE = abi.RESOLVE_BENEATH | abi.RESOLVE_NO_SYMLINKS


class Lowers:
    """The view of some layers, lowest first, put together when it is first needed. Close it, or use it as a context."""

    def __init__(self, directories: Sequence[Path], work: Path) -> None:
        self._directories, self._work = directories, work
        self._root: int | None = None

    def __enter__(self) -> Lowers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._root is not None:
            os.close(self._root)
            self._root = None

    def answers(self, questions: Sequence[Question]) -> list[Below | None]:
        if not self._directories:
            return [None] * len(questions)
        return [self._answer(question) for question in questions]

    @property
    def root(self) -> int:
        """A descriptor of the view's root directory."""
        if self._root is None:
            self._root = merged(self._directories, self._work)
        return self._root

    def _answer(self, question: Question) -> Below | None:
        # No link on the way is followed: one that is absolute would lead to the host's files. (Where a link stands in the way, the child
        # asks about that as well, and then about where it leads.)
        try:
            fd = syscalls.openat2(self.root, question.path or b".", os.O_PATH | os.O_NOFOLLOW, resolve=_RESOLVE)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENAMETOOLONG):
                return None
            raise
        try:
            status = os.fstat(fd)
            if stat.S_ISLNK(status.st_mode):
                link = self._resolved(question.path)
                return None if link is None else Below(link=link)
            if not stat.S_ISDIR(status.st_mode):
                return None
            if not question.attributes:
                return Below()
            path = procfs.fd_path(fd)
            names = sorted(name for name in os.listxattr(path) if name.startswith("user."))
            xattrs = tuple((os.fsencode(name), os.getxattr(path, name)) for name in names)
            return Below(
                mode=stat.S_IMODE(status.st_mode), uid=status.st_uid, gid=status.st_gid, mtime_ns=status.st_mtime_ns, xattrs=xattrs
            )
        finally:
            os.close(fd)

    def _resolved(self, path: bytes) -> bytes | None:
        """Where a path leads, links followed within the root; what does not exist stays as it is. None: round in a circle."""
        done: list[bytes] = []
        pending = path.split(b"/")[::-1]
        links = 0
        while pending:
            part = pending.pop()
            if part in (b"", b"."):
                continue
            if part == b"..":
                del done[-1:]
                continue
            here = b"/".join([*done, part])
            try:
                target = os.readlink(here, dir_fd=self.root)
            except OSError:
                done.append(part)
                continue
            links += 1
            if links > _MAX_LINKS or len(pending) > 10_000:
                return None
            if target.startswith(b"/"):
                done = []
            pending.extend(target.split(b"/")[::-1])
        return b"/".join(done)


def merged(directories: Sequence[Path], work: Path) -> int:
    """A descriptor of the root of some layers put together, lowest first."""
    with contextlib.ExitStack() as held:
        layers = []
        for directory in reversed(directories):
            data = directory / DATA
            if not data.exists():  # it is elsewhere; nothing here reads content
                data = work / "no-data"
                data.touch()
            layers.append(mounts.mount_erofs(directory / META, data))
            held.callback(os.close, layers[-1])
        if len(layers) == 1:
            empty = mounts.tmpfs(4096, 1)  # overlay wants two, and shows a lowest layer's whiteouts as such if there is but one
            layers.append(empty)
            held.callback(os.close, empty)
        top = mounts.overlay(layers, None, None)
        held.callback(os.close, top)
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=top)
