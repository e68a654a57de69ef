# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from opendsec.images.store import ImageStore
from opendsec.kernel import abi, mounts, syscalls
from tests.registry import registry

__all__ = ["registry"]


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    made = ImageStore(tmp_path / "store")
    made.prepare()
    return made


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory with room for 2 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    fd = mounts.tmpfs(2 << 20, 1000)
    try:
        mounts.attach(fd, abi.AT_FDCWD, place)
    finally:
        os.close(fd)
    yield place
    syscalls.umount2(place, 0)


@contextlib.contextmanager
def mounted(store: ImageStore, image: str, at: Path, layers: Sequence[str] = ()) -> Iterator[Path]:
    """An image as a sandbox sees it: EROFS layers under an overlay, on the real kernel."""
    at.mkdir(exist_ok=True)
    upper, work = at.with_name(at.name + "-upper"), at.with_name(at.name + "-work")
    upper.mkdir()
    work.mkdir()
    lowers = [mounts.mount_erofs(layer.meta, layer.data) for layer in reversed(store.resolve(image, layers).layers)]
    try:
        root = os.stat(".", dir_fd=lowers[0])
        upper.chmod(root.st_mode & 0o7777)
        os.chown(upper, root.st_uid, root.st_gid)
        os.utime(upper, ns=(0, root.st_mtime_ns))
        top = mounts.overlay(lowers, upper, work)
    finally:
        for fd in lowers:
            os.close(fd)
    try:
        mounts.attach(top, abi.AT_FDCWD, at)
    finally:
        os.close(top)
    try:
        yield at
    finally:
        syscalls.umount2(at, 0)
