# SPDX-License-Identifier: Apache-2.0
"""The disk of an image as a file that QEMU can use.

A layer's data is stored in pieces, each once; a disk has to lie in a row. So it is copied out when it is first wanted, zeros left out, and
kept as long as a template, a sandbox or a snapshot stands on it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection
from pathlib import Path

from opendsec.api.errors import InvalidRequest
from opendsec.images.disks import DISK
from opendsec.images.layers import LayerRef
from opendsec.images.view import merged
from opendsec.runtime.vmm.locks import locked
from opendsec.runtime.vmm.store import Layer

PIECE = 64 << 10
ROW = 4 << 20


class Disks:
    """In `folder`. All methods block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, digest: str) -> Path:
        return self._folder / f"{digest.replace(':', '-')}.raw"

    def get(self, layer: Layer) -> Path:
        """The disk of an image's only layer. Takes seconds when it is first wanted. Raises InvalidRequest if it has none."""
        path = self.path(layer.digest)
        if not path.exists():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(self._folder / "lock"):
                if not path.exists():
                    self._extract(layer, path)
        return path

    def _extract(self, layer: Layer, path: Path) -> None:
        fresh = path.with_name(f".{path.name}")
        fresh.unlink(missing_ok=True)
        try:
            with merged([LayerRef(layer.digest, Path(layer.meta), Path(layer.data))]) as root:
                source = _disk_of(root)
                try:
                    facts = os.fstat(source)
                    if not stat.S_ISREG(facts.st_mode) or not facts.st_size or facts.st_size % 512:
                        raise InvalidRequest("has a disk that is no whole number of sectors", field="spec.image")
                    copy(source, fresh, facts.st_size)
                finally:
                    os.close(source)
            fresh.chmod(0o444)
            fresh.rename(path)
        finally:
            fresh.unlink(missing_ok=True)

    def collect(self, digests: Collection[str]) -> int:
        """Remove those that are not of these layers; how many."""
        kept, count = {self.path(digest).name for digest in digests}, 0
        if self._folder.is_dir():
            with locked(self._folder / "lock"):
                for path in self._folder.glob("*.raw"):
                    if path.name not in kept:
                        path.unlink(missing_ok=True)
                        count += 1
        return count


def _disk_of(root: int) -> int:
    try:
        return os.open(DISK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=root)
    except OSError:
        raise InvalidRequest("is no disk image, which is what a VM is made of", field="spec.image") from None


def copy(source: int, target: Path, size: int) -> None:
    """Without the pieces that are zero, and without keeping in memory what was read."""
    target_fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    zero = bytes(PIECE)
    try:
        os.ftruncate(target_fd, size)
        at = 0
        while at < size:
            row = os.pread(source, min(ROW, size - at), at)
            if not row:
                raise OSError("the disk became shorter while it was read")
            for start in range(0, len(row), PIECE):
                piece = row[start : start + PIECE]
                if piece != zero[: len(piece)]:
                    os.pwrite(target_fd, piece, at + start)
            at += len(row)
        os.fsync(target_fd)
        with contextlib.suppress(OSError):
            os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(target_fd)
