# SPDX-License-Identifier: Apache-2.0
"""Directories that somebody works in, held by flock: the kernel lets go of it with the last process that has the descriptor, so what
dead ones left can be told from what is being made."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from pathlib import Path


def new_directory(parent: Path) -> tuple[Path, int]:
    """A new directory and the descriptor that holds it."""
    while True:
        path = parent / f"build-{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        fd = _hold(path)
        if fd is not None:
            return path, fd
        # Another process was clearing up and took it between the two calls.


def remove_unless_held(path: Path) -> None:
    fd = _hold(path)
    if fd is not None:
        try:
            shutil.rmtree(path)
        finally:
            os.close(fd)


def _hold(path: Path) -> int | None:
    """A descriptor that holds `path` against clearing, or None if it has gone or somebody else holds it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None
