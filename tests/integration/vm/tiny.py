# SPDX-License-Identifier: Apache-2.0
"""The disk image of a system that is no Linux: see guest.S."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

from opendsec.api.images import BuildRequest, DirectorySource
from opendsec.api.spec import Limits
from opendsec.images.build import build
from opendsec.images.disks import DISK
from opendsec.images.layers import LayerRef
from opendsec.images.store import ImageStore
from opendsec.testing.contracts.backend import Setup
from tests.full_vms import FullNode

MIB = 1 << 20
LIMITS = Limits(cpu=1.0, cpu_weight=100, memory_bytes=128 * MIB, disk_bytes=16 * MIB, inodes=64, pids=64, open_files=64)


def assemble(folder: Path, size: int = 2 * MIB) -> Path:
    """A disk with it, in a new directory."""
    source, made, tree = Path(__file__).with_name("guest.S"), folder / "guest.o", folder / "tree"
    tree.mkdir()
    subprocess.run(["cc", "-c", "-m32", "-o", made, source], check=True)
    subprocess.run(["ld", "-m", "elf_i386", "-Ttext=0x7c00", "--oformat", "binary", "-o", tree / DISK, made], check=True)
    with open(tree / DISK, "r+b") as file:
        file.truncate(size)
    return tree


async def image(folder: Path) -> tuple[LayerRef, ...]:
    """It as the layers of an image."""
    store = ImageStore(folder / "images")
    store.prepare()
    source = DirectorySource(path=str(assemble(folder)))
    await build(store, BuildRequest(name="tiny", source=source), progress=lambda event: None, allow_host_paths=True)
    return tuple(store.resolve("tiny").layers)


@contextlib.asynccontextmanager
async def started(node: FullNode) -> AsyncIterator[Setup]:
    """A started backend of the node, and what makes sandboxes of the image on it. None may be left at the end."""
    setup = Setup(make=node.make, layers=await image(node.directory), murder=lambda _: None, limits=LIMITS)
    await setup.start()
    yield setup
    left = list(setup.backend.leftovers())
    for sandbox_id in left:
        await setup.backend.clear(sandbox_id, None)
    await setup.backend.close()
    assert left == []
