# SPDX-License-Identifier: Apache-2.0
"""Layers together, as a sandbox sees them: a detached, read-only mount. Ids are those inside. And the way down in a hostile tree."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opendsec.images.layers import LayerRef
from opendsec.kernel import abi, mounts, syscalls

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ATTRS = abi.MOUNT_ATTR_NOSUID | abi.MOUNT_ATTR_NODEV | abi.MOUNT_ATTR_NOEXEC
_OPTIONS = {"redirect_dir": "follow", "metacopy": "off", "index": "off"}


@contextmanager
def merged(layers: Sequence[LayerRef]) -> Iterator[int]:
    """A descriptor of the root directory, open for reading; `layers` lowest first. What is in there is hostile."""
    held: list[int] = []
    try:
        for layer in reversed(layers):
            held.append(mounts.mount_erofs(layer.meta, layer.data, _ATTRS))
        if len(held) > 1:  # overlay wants two if none is writable
            held.append(mounts.overlay(held, None, None, attrs=_ATTRS, options=_OPTIONS))
        held.append(os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=held[-1]))
        yield held[-1]
    finally:
        for fd in reversed(held):
            os.close(fd)


@contextmanager
def opened(root: int, path: bytes) -> Iterator[int]:
    """A directory beneath another; no part of the way may be a link. Raises OSError."""
    fd = syscalls.openat2(root, path or b".", DIRECTORY, resolve=abi.RESOLVE_NO_SYMLINKS | abi.RESOLVE_BENEATH)
    try:
        yield fd
    finally:
        os.close(fd)
