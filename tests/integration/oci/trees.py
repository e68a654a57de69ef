# SPDX-License-Identifier: Apache-2.0
"""A tree as plain data, to compare with another."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
}

Tree = dict[str, dict[str, object]]


def look(root: Path) -> Tree:
    """Path → everything that can be seen of it. Links count by the set of paths that share an inode."""
    found: Tree = {}
    inodes: dict[tuple[int, int], list[str]] = {}
    top = os.fsencode(root)
    pending = [b""]
    while pending:
        path = pending.pop()
        full = os.path.join(top, path) if path else top
        status = os.lstat(full)
        kind = stat.S_IFMT(status.st_mode)
        name = os.fsdecode(path) or "."
        item: dict[str, object] = {
            "kind": _KINDS[kind],
            "mode": f"{stat.S_IMODE(status.st_mode):o}",
            "owner": (status.st_uid, status.st_gid),
            "mtime": status.st_mtime_ns,
            "xattrs": {
                key: os.getxattr(full, key, follow_symlinks=False)
                for key in os.listxattr(full, follow_symlinks=False)
                if key != "security.selinux" and not key.startswith("trusted.overlay.")
            },
        }
        if kind == stat.S_IFREG:
            with open(full, "rb") as file:
                item["size"], item["content"] = status.st_size, hashlib.file_digest(file, "sha256").hexdigest()
        elif kind == stat.S_IFLNK:
            item["target"] = os.readlink(full)
        elif kind in (stat.S_IFCHR, stat.S_IFBLK):
            item["device"] = (os.major(status.st_rdev), os.minor(status.st_rdev))
        elif kind == stat.S_IFDIR:
            pending.extend(os.path.join(path, child) for child in os.listdir(full))
        if kind != stat.S_IFDIR:
            inodes.setdefault((status.st_dev, status.st_ino), []).append(name)
        found[name] = item
    for names in inodes.values():
        for name in names:
            found[name]["links"] = sorted(names)
    return found


def differences(ours: Tree, theirs: Tree) -> dict[str, str]:
    """ "path: field" or "path" → what differs."""
    found = {}
    for path in sorted(ours.keys() | theirs.keys()):
        if path not in ours or path not in theirs:
            found[path] = "only ours" if path in ours else "only theirs"
            continue
        for key in sorted(ours[path].keys() | theirs[path].keys()):
            mine, other = ours[path].get(key), theirs[path].get(key)
            if mine != other:
                found[f"{path}: {key}"] = f"ours {mine!r}, theirs {other!r}"
    return found
