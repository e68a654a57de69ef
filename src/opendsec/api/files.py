# SPDX-License-Identifier: Apache-2.0
"""Files of a sandbox. Every path is absolute, resolved beneath the sandbox's root by descriptor."""

from __future__ import annotations

from typing import Literal

import msgspec

FileKind = Literal["file", "directory", "symlink", "fifo", "socket", "character_device", "block_device"]


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One entry. `name` is text for people (U+FFFD where the bytes are not UTF-8); `raw_name` is exact."""

    name: str
    raw_name: bytes
    kind: FileKind
    size_bytes: int
    mode: int  # permission bits, with setuid, setgid and sticky
    uid: int  # as seen inside
    gid: int
    modified_at: float  # unix seconds
    target: bytes | None = None  # of a symlink


class FileList(msgspec.Struct, frozen=True):
    entries: tuple[FileInfo, ...]


class Written(msgspec.Struct, frozen=True):
    """Answer to a write: the size of the file on disk afterwards."""

    size_bytes: int


class WatchEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One change beneath a watched directory (not recursive). The first event of a watch is `ready`."""

    kind: Literal["ready", "created", "modified", "deleted", "moved_from", "moved_to", "attributes", "overflow", "gone"]
    name: str = ""
    raw_name: bytes = b""
