# SPDX-License-Identifier: Apache-2.0
"""Compiled Python files hold the modification time of their source, and a layer gives all files one time.

Left alone, every import in every sandbox would compile its module again (a second of CPU for a test framework) and write it into the
scratch. So a `.pyc` that is valid for its source gets the layer's time written into its header; a stale one stays stale.
"""

from __future__ import annotations

import os
import stat
import struct

from opendsec.kernel import abi, syscalls

CACHE_DIRECTORY = b"__pycache__"

# Since Python 3.7: magic, flags (0: checked by time and size), source's time, source's size. Before, the second word was the time.
_HEADER = struct.Struct("<4sIII")


def source_name(name: bytes) -> bytes | None:
    """`os.cpython-311.opt-1.pyc` → `os.py`; None for what is no cache file."""
    stem, dot, suffix = name.rpartition(b".")
    if suffix != b"pyc" or not dot:
        return None
    parts = stem.split(b".")
    if len(parts) > 2 and parts[-1].startswith(b"opt-"):
        parts.pop()
    if len(parts) < 2:
        return None
    return b".".join(parts[:-1]) + b".py"


def normalised(root_fd: int, folder: bytes, cache_fd: int, name: bytes, *, timestamp: int) -> bytes | None:
    """The header that cache file `name` in `cache_fd` should get, or None to leave it. `folder`: the path of the directory above, where
    the source is, beneath the tree's root. The source may be a link, which Python follows, and so do we, within the tree."""
    source = source_name(name)
    if source is None:
        return None
    try:
        status = _status_in_root(root_fd, folder + b"/" + source)
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=cache_fd)
    except OSError:
        return None  # no source, or no file: Python would not use it either
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        header = os.read(fd, _HEADER.size)
    finally:
        os.close(fd)
    if len(header) != _HEADER.size:
        return None
    magic, flags, time, size = _HEADER.unpack(header)
    if flags != 0 or time == timestamp or time != int(status.st_mtime) & 0xFFFF_FFFF or size != status.st_size & 0xFFFF_FFFF:
        return None
    return _HEADER.pack(magic, flags, timestamp, size)


def _status_in_root(root_fd: int, path: bytes) -> os.stat_result:
    fd = syscalls.openat2(root_fd, path, os.O_PATH, resolve=abi.RESOLVE_IN_ROOT | abi.RESOLVE_NO_MAGICLINKS)
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)
