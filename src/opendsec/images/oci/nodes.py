# SPDX-License-Identifier: Apache-2.0
"""A layer's tree in memory, and OCI's rules for what an entry of a layer does to it. Pure: no file is ever made.

One tree takes one OCI layer, or several neighbours one after the other. What it says about the layers below it are whiteouts (a name
below is gone) and opaque directories (all names below are gone), which overlay understands.

Rules, as umoci and Docker apply them where those agree:

* A whiteout hides what lies below, never what its own layer has, whatever the order of the two in the archive. So a name that is
  hidden and made again in one layer is new: a directory made so is opaque.
* A later entry replaces an earlier one of its name. A directory replaces a directory by changing its attributes alone; one that takes
  the place of anything else is opaque, since what took its place before has hidden what was below.
* The way to an entry goes through links as it would in the unpacked image, never out of it. Links of lower layers count as well, but
  are not known yet: see `questions`.
* A hard link names an inode of the same tree. One into a lower layer is refused: overlay could show a copy at best.
* Devices are left out, with a note; what they would have hidden is hidden.
"""

from __future__ import annotations

import stat
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from opendsec.images.erofs import TIMESTAMP
from opendsec.images.layers import MAX_ID
from opendsec.images.oci.limits import Limits
from opendsec.images.oci.tarstream import BadLayer, Entry, shown

MAX_LINKS = 255
MAX_NOTES = 100
WHITEOUT, META, OPAQUE = b".wh.", b".wh..wh.", b".wh..wh..opq"
_CAPABILITY = b"security.capability"
_MAX_SECONDS = 1 << 36  # later than any file system keeps

_MODES = {"file": stat.S_IFREG, "symlink": stat.S_IFLNK, "directory": stat.S_IFDIR, "fifo": stat.S_IFIFO}


class Slot(NamedTuple):
    """A name in a directory: what it is, and when it came: the number of the entry that put it there."""

    inode: Inode
    since: int


class Inode:
    __slots__ = (
        "children", "chunk_bits", "chunks", "dropped", "fresh", "gid", "implicit", "links", "mode", "mtime_ns", "nid", "opaque", "place",
        "size", "target", "uid", "xattrs",
    )  # fmt: skip

    def __init__(self, mode: int, uid: int = 0, gid: int = 0, mtime_ns: int = TIMESTAMP * 1_000_000_000) -> None:
        self.mode, self.uid, self.gid, self.mtime_ns = mode, uid, gid, mtime_ns
        self.xattrs: dict[bytes, bytes] = {}
        self.target = b""  # of a symlink
        self.size = 0  # of a file
        self.chunk_bits = 0
        self.chunks: array[int] | None = None
        self.children: dict[bytes, Slot] = {}  # of a directory
        self.opaque = False  # nothing shows through from below
        self.fresh = False  # not the directory that is below, so it takes nothing from that
        self.implicit = False  # on the way to an entry, but no entry itself: its attributes are those below, if there are any
        self.dropped = False  # a whiteout in the place of a device
        self.links = self.nid = self.place = 0  # of the writer

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_whiteout(self) -> bool:
        return stat.S_ISCHR(self.mode)


def _whiteout(*, dropped: bool = False) -> Inode:
    inode = Inode(stat.S_IFCHR)
    inode.dropped = dropped
    return inode


def _implicit() -> Inode:
    inode = Inode(stat.S_IFDIR | 0o755)
    inode.implicit = True
    return inode


class Below(NamedTuple):
    """What the lower layers have at a path: a directory with its attributes, or a link and where it leads in the end."""

    link: bytes | None = None
    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    xattrs: tuple[tuple[bytes, bytes], ...] = ()


class Question(NamedTuple):
    """Something that only the layers below can tell: whether there is a directory at `path`; if `attributes`, how it looks."""

    path: bytes
    attributes: bool


Answers = Callable[[Sequence[Question]], list[Below | None]]


class LayerTree:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.root = _implicit()
        self.notes: list[str] = []
        self._unsaid = 0
        self._count = 1
        self._start = 1  # the first entry of the present OCI layer
        self._recent: tuple[list[bytes], Inode] | None = None
        self._answered: dict[bytes, Below | None] = {}
        self._memory = 0

    def next_layer(self) -> None:
        """What comes now is another OCI layer, above what came before."""
        self._start = self._count + 1
        self._recent = None

    def note(self, text: str) -> None:
        if len(self.notes) < MAX_NOTES:
            self.notes.append(text)
        else:
            self._unsaid += 1

    def all_notes(self) -> list[str]:
        return self.notes + ([f"and {self._unsaid} more of such"] if self._unsaid else [])

    # --- entries -----------------------------------------------------------------------------------------------------

    def add(self, entry: Entry) -> Inode | None:
        """Take an entry in. For a file with content its inode, which wants `size` and `chunks`. Raises BadLayer."""
        self._count += 1
        self._recall(len(entry.name) + len(entry.link) + 200)
        parts = self._parts(entry.name, "an entry")
        if not parts:
            if entry.kind != "directory":
                raise BadLayer(f"has an entry for the root that is no directory: {shown(entry.name)}")
            self._describe(self.root, entry)
            self.root.implicit = False
            return None
        if any(part.startswith(META) and part != OPAQUE for part in parts):
            self.note(f"left out {shown(entry.name)}: aufs's own")
            return None
        if any(part.startswith(WHITEOUT) for part in parts[:-1]):
            raise BadLayer(f"has an entry inside a whiteout: {shown(entry.name)}")
        parent, name = self._directory(parts[:-1], entry.name), parts[-1]
        if name == OPAQUE:
            self._purge(parent)
            parent.opaque = True
        elif name.startswith(WHITEOUT):
            hidden = name[len(WHITEOUT) :]
            if hidden in (b"", b".", b".."):
                raise BadLayer(f"has a whiteout of nothing: {shown(entry.name)}")
            self._hide(parent, hidden)
        elif entry.kind == "hard_link":
            self._link(parent, name, entry)
        elif entry.kind == "directory":
            self._make_directory(parent, name, entry)
        elif entry.kind in ("char", "block"):
            self.note(f"left out the device {shown(entry.name)}")
            self._put(parent, name, _whiteout(dropped=True))
        else:
            if entry.kind == "symlink" and not entry.link:
                raise BadLayer(f"has a link to nothing: {shown(entry.name)}")
            inode = Inode(_MODES[entry.kind])
            inode.target, inode.size = entry.link, entry.size
            self._describe(inode, entry)
            self._put(parent, name, inode)
            return inode if entry.kind == "file" else None
        return None

    def _put(self, parent: Inode, name: bytes, inode: Inode) -> None:
        slot = parent.children.get(name)
        if slot is not None and slot.inode.is_directory:
            self._recent = None  # it may have been in there
        parent.children[name] = Slot(inode, self._count)

    def _recall(self, size: int) -> None:
        self._memory += size
        if self._memory > 8 * self._limits.metadata_bytes:
            raise BadLayer("has too many entries and names")

    def _parts(self, name: bytes, what: str) -> list[bytes]:
        """The components of a path. Absolute ones and such with ".." are refused, whether or not they would lead out."""
        if name.startswith(b"/"):
            raise BadLayer(f"has {what} with an absolute path: {shown(name)}")
        if len(name) > self._limits.path_bytes:
            raise BadLayer(f"has {what} with a path of more than {self._limits.path_bytes} bytes: {shown(name)}")
        parts = [part for part in name.split(b"/") if part not in (b"", b".")]
        if b".." in parts:
            raise BadLayer(f"has {what} whose path leads upwards ('..'): {shown(name)}")
        if max(map(len, parts), default=0) > self._limits.name_bytes:
            raise BadLayer(f"has {what} with a name of more than {self._limits.name_bytes} bytes: {shown(name)}")
        return parts

    def _describe(self, inode: Inode, entry: Entry) -> None:
        for number in (entry.uid, entry.gid):
            if not 0 <= number <= MAX_ID:
                raise BadLayer(f"has a file that belongs to {entry.uid}:{entry.gid}; ids go up to {MAX_ID} here: {shown(entry.name)}")
        limit = _MAX_SECONDS * 1_000_000_000
        inode.mode = stat.S_IFMT(inode.mode) | (0o777 if entry.kind == "symlink" else entry.mode)
        inode.uid, inode.gid, inode.mtime_ns = entry.uid, entry.gid, max(-limit, min(entry.mtime_ns, limit))
        inode.xattrs = {}
        for key, value in entry.xattrs.items():
            if not self._keeps(entry, key, value):
                self.note(f"left out the attribute {shown(key)} of {shown(entry.name)}")
            else:
                inode.xattrs[key] = value
        if sum(len(key) + len(value) for key, value in inode.xattrs.items()) > self._limits.xattr_bytes:
            raise BadLayer(f"has a file with more than {self._limits.xattr_bytes} bytes of attributes: {shown(entry.name)}")

    def _keeps(self, entry: Entry, key: bytes, value: bytes) -> bool:
        if b"\0" in key or len(key) > 255:
            return False
        if key == _CAPABILITY:
            return entry.kind == "file" and (value[:4], len(value)) in _CAPABILITY_FORMS
        return key.startswith(b"user.") and len(key) > 5 and entry.kind in ("file", "directory")  # the kernel has them on no others

    def _make_directory(self, parent: Inode, name: bytes, entry: Entry) -> None:
        slot = parent.children.get(name)
        if slot is not None and slot.inode.is_directory:
            inode = slot.inode
        else:
            inode = Inode(stat.S_IFDIR)
            inode.opaque = inode.fresh = slot is not None
        self._describe(inode, entry)
        inode.implicit = False
        parent.children[name] = Slot(inode, self._count)

    def _hide(self, parent: Inode, name: bytes) -> None:
        slot = parent.children.get(name)
        if slot is None or slot.since < self._start:
            parent.children[name] = Slot(_whiteout(), self._count)
        elif slot.inode.is_directory:
            self._purge(slot.inode)
            slot.inode.opaque = slot.inode.fresh = True

    def _purge(self, directory: Inode) -> None:
        """Forget what earlier OCI layers put into a directory."""
        self._recent = None
        pending = [directory]
        while pending:
            folder = pending.pop()
            for name, slot in list(folder.children.items()):
                if slot.since < self._start:
                    del folder.children[name]
                elif slot.inode.is_directory:
                    pending.append(slot.inode)

    def _link(self, parent: Inode, name: bytes, entry: Entry) -> None:
        target = self._parts(entry.link, "a hard link to something")
        inode = self._find(target)
        if inode is None or (inode.is_whiteout and not inode.dropped):
            raise BadLayer(f"has a hard link to what is not in the layer: {shown(entry.name)} to {shown(entry.link)}")
        if inode.is_directory:
            raise BadLayer(f"has a hard link to a directory: {shown(entry.name)} to {shown(entry.link)}")
        if inode.dropped:
            self.note(f"left out the device {shown(entry.name)}")
            inode = _whiteout(dropped=True)  # an absence has one name
        self._put(parent, name, inode)

    # --- the way to an entry -----------------------------------------------------------------------------------------

    def _directory(self, parts: list[bytes], name: bytes) -> Inode:
        if self._recent is not None and self._recent[0] == parts:
            return self._recent[1]
        found = self._walk(parts, make=True)
        if found is None:
            raise BadLayer(f"has an entry whose path goes through a file: {shown(name)}")
        self._recent = (parts, found) if self._steady(parts, found) else None
        return found

    def _steady(self, parts: list[bytes], found: Inode) -> bool:
        """Whether the way had no links: then only removing a directory can change it."""
        at = self.root
        for part in parts:
            slot = at.children.get(part)
            if slot is None or not slot.inode.is_directory:
                return False
            at = slot.inode
        return at is found

    def _find(self, parts: list[bytes]) -> Inode | None:
        """The inode of a path; links on the way are followed, a last one is not."""
        if not parts:
            return self.root
        folder = self._walk(parts[:-1], make=False)
        slot = None if folder is None else folder.children.get(parts[-1])
        return None if slot is None else slot.inode

    def _walk(self, parts: list[bytes], *, make: bool) -> Inode | None:
        """The directory at a path, links followed as within the image's root. None: something on the way is no directory."""
        stack = [self.root]
        pending = parts[::-1]
        links = 0
        while pending:
            part = pending.pop()
            if part in (b"", b"."):
                continue
            if part == b"..":  # of a link's target
                if len(stack) > 1:
                    stack.pop()
                continue
            folder = stack[-1]
            slot = folder.children.get(part)
            if slot is None or slot.inode.is_whiteout:
                if not make:
                    return None
                inode = _implicit()
                inode.opaque = inode.fresh = slot is not None
                self._recall(200)
                folder.children[part] = Slot(inode, self._count)
                stack.append(inode)
            elif slot.inode.is_directory:
                if make and slot.since < self._start:
                    folder.children[part] = Slot(slot.inode, self._count)  # this layer has it too, by what it puts inside
                stack.append(slot.inode)
            elif slot.inode.target:
                links += 1
                if links > MAX_LINKS:
                    return None
                if slot.inode.target.startswith(b"/"):
                    stack = [self.root]
                pending.extend(slot.inode.target.split(b"/")[::-1])
                if len(pending) > 10_000:
                    return None
            else:
                return None
        return stack[-1]

    # --- what the layers below decide ----------------------------------------------------------------------------------

    def questions(self) -> list[Question]:
        """What has to be known of the layers below before the tree is complete. Give it to `answer`, until there are none left."""
        return [
            Question(path, inode.implicit and not inode.fresh)
            for path, inode in self._over_below()
            if path not in self._answered and (inode.implicit or any(slot.inode.is_whiteout for slot in inode.children.values()))
        ]

    def _over_below(self) -> Iterator[tuple[bytes, Inode]]:
        """Directories that may lie over one of a lower layer."""
        pending = [(b"", self.root)]
        while pending:
            path, inode = pending.pop()
            if not inode.fresh:
                yield path, inode
            if not inode.opaque:
                prefix = path + b"/" if path else b""
                pending.extend((prefix + name, slot.inode) for name, slot in inode.children.items() if slot.inode.is_directory)

    def answer(self, answers: dict[bytes, Below | None]) -> None:
        """`None`: no directory there. What a link of a lower layer has in its place goes to where the link leads. Raises BadLayer."""
        self._answered.update(answers)
        for path in sorted(answers, key=lambda path: path.count(b"/")):
            below = answers[path]
            inode = self._plain(path)
            if below is None or inode is None or not inode.implicit or inode.fresh:
                continue
            if below.link is None:
                inode.mode = stat.S_IFDIR | below.mode
                inode.uid, inode.gid, inode.mtime_ns, inode.xattrs = below.uid, below.gid, below.mtime_ns, dict(below.xattrs)
            elif path:  # the root is no link
                self._rehome(path, inode, below.link)
        self._recent = None

    def _plain(self, path: bytes) -> Inode | None:
        at = self.root
        for part in path.split(b"/") if path else ():
            slot = at.children.get(part)
            if slot is None or not slot.inode.is_directory:
                return None
            at = slot.inode
        return at

    def _rehome(self, path: bytes, inode: Inode, target: bytes) -> None:
        folder, _, name = path.rpartition(b"/")
        parent = self._plain(folder)
        assert parent is not None
        del parent.children[name]
        into = self._walk([part for part in target.split(b"/") if part], make=True)
        if into is None:
            raise BadLayer(f"has an entry below {shown(path)}, a link of a lower layer to {shown(target)}, which is no directory")
        _merge(inode, into)

    def finish(self) -> None:
        """Leave out what means nothing: whiteouts where nothing is below. Overlay would list them where a directory is in one layer
        alone."""
        below = {path for path, answer in self._answered.items() if answer is not None and answer.link is None}
        hidden = {id(inode) for path, inode in self._over_below() if path in below and not inode.opaque}
        pending = [self.root]
        while pending:
            inode = pending.pop()
            for name, slot in list(inode.children.items()):
                if slot.inode.is_whiteout:
                    if id(inode) not in hidden:
                        del inode.children[name]
                elif slot.inode.is_directory:
                    pending.append(slot.inode)


_CAPABILITY_FORMS = {(bytes((flag, 0, 0, version)), size) for flag in (0, 1) for version, size in ((2, 20), (3, 24))}


def _merge(source: Inode, into: Inode) -> None:
    pending = [(source, into)]
    while pending:
        source, into = pending.pop()
        if into.implicit and not source.implicit:
            into.mode, into.uid, into.gid, into.mtime_ns, into.xattrs = source.mode, source.uid, source.gid, source.mtime_ns, source.xattrs
            into.implicit = False
        into.opaque = into.opaque or source.opaque
        for name, slot in source.children.items():
            there = into.children.get(name)
            if there is not None and there.inode.is_directory and slot.inode.is_directory:
                pending.append((slot.inode, there.inode))
            elif there is None or there.since < slot.since:
                into.children[name] = slot
