# SPDX-License-Identifier: Apache-2.0
"""How the trees of two images or layers differ.

Images are compared as a sandbox would see them. Layers below that both have at the same place are known to be equal, but not what the
layers above make of them, so both trees are walked; content is compared only where size, and everything else, is equal. Of a single
layer its whiteouts are entries of kind "other". Times are none of a layer's, so they are not compared.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Literal

from opendsec.api.images import DiffEntry, DiffReport
from opendsec.images.store import ImageStore
from opendsec.images.view import merged, opened
from opendsec.kernel import procfs

MAX_ENTRIES = 10_000  # of a report
MAX_PATH = 3800
_BLOCK = 1 << 20
_IGNORED = frozenset(("security.selinux",))

Kind = Literal["file", "dir", "link", "other"]


def diff(store: ImageStore, a: str, b: str) -> DiffReport:
    """From `a` to `b`, each the name of an image or of a layer, or a digest. Blocking, for a thread. A removed or added directory is one
    entry, with nothing of what is in it. Raises NotFound (`field`: which one), Internal."""
    digests = store.digests_of(a, "a"), store.digests_of(b, "b")
    if digests[0] == digests[1]:
        return DiffReport(entries=())
    with contextlib.ExitStack() as stack:
        roots = [stack.enter_context(merged([store.layer_ref(digest) for digest in one])) for one in digests]
        entries: list[DiffEntry] = []
        for entry in _Comparison(*roots).entries():
            if len(entries) == MAX_ENTRIES:
                return DiffReport(entries=tuple(entries), truncated=True)
            entries.append(entry)
        return DiffReport(entries=tuple(entries))


class _Comparison:
    def __init__(self, a: int, b: int) -> None:
        self.a, self.b = a, b

    def entries(self) -> Iterator[DiffEntry]:
        what = self._attributes(self.a, self.b, b".", os.fstat(self.a), os.fstat(self.b))
        if what:
            yield DiffEntry(change="changed", path="/", kind="dir", what=", ".join(what))
        pending = [b""]
        while pending:
            folder = pending.pop()
            with contextlib.ExitStack() as stack:
                a = stack.enter_context(opened(self.a, folder))
                b = stack.enter_context(opened(self.b, folder))
                names_a, names_b = (set(map(os.fsencode, os.listdir(fd))) for fd in (a, b))
                below: list[bytes] = []
                for name in sorted(names_a | names_b):
                    path = folder + b"/" + name if folder else name
                    if name not in names_b:
                        yield _entry("removed", path, _status(a, name))
                    elif name not in names_a:
                        yield _entry("added", path, _status(b, name))
                    else:
                        before, after = _status(a, name), _status(b, name)
                        what = self._changes(a, b, name, before, after)
                        if what:
                            yield _entry("changed", path, after, ", ".join(what))
                        if stat.S_ISDIR(before.st_mode) and stat.S_ISDIR(after.st_mode) and len(path) <= MAX_PATH:
                            below.append(path)
                pending += reversed(below)

    def _changes(self, a: int, b: int, name: bytes, before: os.stat_result, after: os.stat_result) -> list[str]:
        kind = stat.S_IFMT(before.st_mode)
        if kind != stat.S_IFMT(after.st_mode):
            return ["kind"]
        what = self._attributes(a, b, name, before, after)
        if kind == stat.S_IFLNK and os.readlink(name, dir_fd=a) != os.readlink(name, dir_fd=b):
            what.insert(0, "target")
        elif kind in (stat.S_IFCHR, stat.S_IFBLK) and before.st_rdev != after.st_rdev:
            what.insert(0, "device")
        elif kind == stat.S_IFREG and (before.st_size != after.st_size or not _same_content(a, b, name)):
            what.insert(0, "content")
        return what

    def _attributes(self, a: int, b: int, name: bytes, before: os.stat_result, after: os.stat_result) -> list[str]:
        what = []
        if stat.S_IMODE(before.st_mode) != stat.S_IMODE(after.st_mode):
            what.append("mode")
        if (before.st_uid, before.st_gid) != (after.st_uid, after.st_gid):
            what.append("owner")
        if _xattrs(a, name) != _xattrs(b, name):
            what.append("xattrs")
        return what


def _status(fd: int, name: bytes) -> os.stat_result:
    return os.stat(name, dir_fd=fd, follow_symlinks=False)


def _same_content(a: int, b: int, name: bytes) -> bool:
    with contextlib.ExitStack() as stack:
        files = [os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd) for fd in (a, b)]
        for file in files:
            stack.callback(os.close, file)
        if os.path.samestat(*map(os.fstat, files)):
            return True
        while True:
            blocks = [os.read(file, _BLOCK) for file in files]
            if blocks[0] != blocks[1]:
                return False
            if not blocks[0]:
                return True


def _xattrs(fd: int, name: bytes) -> dict[str, bytes]:
    path = os.fsencode(procfs.fd_path(fd)) + b"/" + name
    found = {}
    try:
        for key in os.listxattr(path, follow_symlinks=False):
            if key not in _IGNORED:
                found[key] = os.getxattr(path, key, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENODATA):
            raise
    return found


def _kind(mode: int) -> Kind:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "dir"
    return "link" if stat.S_ISLNK(mode) else "other"


def _entry(change: Literal["added", "removed", "changed"], path: bytes, status: os.stat_result, what: str = "") -> DiffEntry:
    kind = _kind(status.st_mode)
    shown = "/" + path.decode(errors="backslashreplace")
    return DiffEntry(change=change, path=shown, kind=kind, size_bytes=status.st_size if kind == "file" else 0, what=what)
