# SPDX-License-Identifier: Apache-2.0
"""Memory of devices is read from a file that a QEMU had open which its guest may have taken over."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import msgspec
import pytest

from opendsec.api.errors import Internal
from opendsec.runtime.vmm import blocks

BLOCK = blocks.Block("vram", 1 << 16, 2 * blocks.PIECE)  # nothing is mapped there


def trailer(state: int, length: int) -> bytes:
    return struct.pack("<8sQQ", b"DSECBLK\n", state, length)


def head(*ranges: tuple[int, int], size: int = BLOCK.size) -> bytes:
    text = msgspec.json.encode([blocks.Saved(BLOCK.name, size, ranges)])
    return text + trailer(0, len(text))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        trailer(0, 1 << 40),
        trailer(1 << 63, 1 << 63),
        trailer(0, 0),
        b"no json" + trailer(0, 7),
        head(size=blocks.PIECE),
        head((0, 1 << 40)),
        head((0, -1)),
        head((-blocks.PIECE, blocks.PIECE)),
        head((BLOCK.size, blocks.PIECE)),
    ],
)
def test_what_was_not_written_by_us_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "devices"
    path.write_bytes(content)
    with pytest.raises(Internal):
        blocks.restore(os.getpid(), [BLOCK], path)


def test_one_that_grew_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "devices"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(trailer(0, 1 << 39))
    with pytest.raises(Internal):
        blocks.restore(os.getpid(), [BLOCK], path)
