# SPDX-License-Identifier: Apache-2.0
"""The disk of the state directory is full: what makes room goes on, what needs room says so."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import opendsec as od
from opendsec.api.images import DirectorySource
from tests.edges import EdgeProcess

pytestmark = pytest.mark.slow


def fill(folder: Path) -> None:
    """Down to the last byte, in blocks that get smaller."""
    with open(folder / "fill", "wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                if file.write(bytes(size)) < size:
                    size //= 2
            except OSError:
                size //= 2


async def test_removing_and_collecting_make_room_on_a_full_disk(tmp_path: Path) -> None:
    edge = EdgeProcess(None, ["--scratch-driver=tmpfs"])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", edge.state_dir], check=True)
    try:
        edge.start()
        (tmp_path / "large").write_bytes(os.urandom(20_000_000))
        async with edge.client() as client:
            await client.images.build("large", DirectorySource(path=str(tmp_path)))
            fill(edge.state_dir)
            with pytest.raises(od.Unavailable, match="cannot be written"):
                await client.images.compose("another", "large", [])
            for _ in range(2):  # of the image, then of its layer
                names = await client.images.list()
                for name in [image.name for image in names.images] or [name for layer in names.layers for name in layer.names]:
                    await client.images.remove(name)
            collected = await client.images.gc(grace_s=0)
            assert collected.freed_bytes > 19_000_000
            assert (await client.images.list()).layers == ()
            fill(edge.state_dir)
            await client.shutdown(kill=True)
    finally:
        edge.stop()
        subprocess.run(["umount", edge.state_dir], check=True)
        shutil.rmtree(edge.folder)
