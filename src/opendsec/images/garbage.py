# SPDX-License-Identifier: Apache-2.0
"""What in a store nobody needs any more, and getting rid of it. The caller holds the store's lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

from opendsec.images import layers, names


class Found(NamedTuple):
    digests: list[str]  # of layers
    strays: list[Path]  # what has lost its layer, and partial data


def find(folder: Path, beside: Sequence[Path], partial: Path, *, used: AbstractSet[str], horizon: float) -> Found:
    """What is not `used` and was last made or renewed before `horizon`. `beside`: folders with a directory for each layer of `folder`,
    which must not outlive it, also after a crash between the two removals."""
    digests = []
    for directory in sorted(folder.iterdir()):
        digest = layers.digest_of(directory)
        if names.is_digest(digest) and digest not in used and directory.stat().st_mtime <= horizon:
            digests.append(digest)
    strays = [
        path
        for other in beside
        for path in (sorted(other.iterdir()) if other.is_dir() else ())
        if not (folder / path.name).exists() and layers.digest_of(path) not in used and path.stat().st_mtime <= horizon
    ]
    return Found(digests, strays + [path for path in idle_files(partial) if path.stat().st_mtime <= horizon])


def idle_files(folder: Path) -> Iterator[Path]:
    """Files that nobody holds by flock."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError, BlockingIOError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield path


def disk_bytes(path: Path) -> int:
    """What removing a file or a directory would give back, about."""
    if path.is_file():
        return path.stat().st_blocks * 512
    return sum(Path(folder, name).lstat().st_blocks * 512 for folder, _, files in os.walk(path) for name in files)


def remove(path: Path, temporary: Path) -> None:
    """A file or a directory; nothing happens if there is none."""
    if path.is_file():
        path.unlink()
        return
    # Out of sight first: a removal cut short leaves half a layer in tmp/, never in layers/.
    doomed = temporary / f"gc-{secrets.token_hex(8)}"
    try:
        os.rename(path, doomed)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.EXDEV:  # the cache may be a file system of its own
            raise
        doomed = path
    shutil.rmtree(doomed)
