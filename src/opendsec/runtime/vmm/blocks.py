# SPDX-License-Identifier: Apache-2.0
"""Memory of a machine that is not the guest's: of its screen adapter, of its firmware's variables. A device state lacks it as it lacks all
memory, so it is written behind the state, in the same file; QEMU stops reading where its own part ends.

    the device state · JSON: blocks with their ranges that are not zero · their content · trailer: magic, length of each of the first two
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from pathlib import Path

import msgspec

from opendsec.api.errors import Internal
from opendsec.kernel import process_memory
from opendsec.runtime.vmm.memory import write_at

MAIN = "ram"
BIOS = "pc.bios"  # QEMU fills it when a machine begins, but not where one is loaded; a guest that resets that needs it
MAX_BLOCKS, MAX_BYTES = 16, 64 << 20
PIECE = 1 << 16  # of zeros nothing is written, in pieces of this size
MAX_HEAD_BYTES = 1 << 20
_TRAILER = struct.Struct("<8sQQ")
_MAGIC = b"DSECBLK\n"
_LINE = re.compile(
    r"^\s*(?P<name>\S+)\s+\d+ [KMG]iB\s+0x[0-9a-f]+\s+0x(?P<used>[0-9a-f]+)\s+0x[0-9a-f]+\s+0x(?P<at>[0-9a-f]+)"
    r"\s+(?P<mode>rw|ro)\s*$",
    re.MULTILINE,
)


class Block(msgspec.Struct, frozen=True):
    """Where it is mapped in QEMU."""

    name: str
    address: int
    size: int


class Saved(msgspec.Struct, frozen=True):
    name: str
    size: int
    ranges: tuple[tuple[int, int], ...]  # offset, length


def parse(told: str) -> list[Block]:
    """Of the monitor's `info ramblock`: what the machine can write to and is not the guest's main memory, and its BIOS. Raises Internal."""
    found = [
        Block(line["name"], int(line["at"], 16), int(line["used"], 16))
        for line in _LINE.finditer(told)
        if (line["mode"] == "rw" and line["name"] != MAIN) or line["name"] == BIOS
    ]
    if len(found) > MAX_BLOCKS or any(not 0 < block.size <= MAX_BYTES or block.size % process_memory.PAGE for block in found):
        raise Internal("QEMU has more memory of its own than a machine of ours can have")
    return found


def append(pid: int, blocks: list[Block], path: Path) -> None:
    """Write their content behind the device state in `path`. The machine stands still. Blocks."""
    saved: list[Saved] = []
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        state = os.fstat(fd).st_size
        contents: list[bytes] = []
        for block in blocks:
            with mmap.mmap(-1, block.size) as buffer:
                process_memory.read_ranges(pid, [(block.address, block.address + block.size)], buffer)
                ranges: list[tuple[int, int]] = []
                for at in range(0, block.size, PIECE):
                    if any(piece := buffer[at : at + PIECE]):
                        ranges.append((at, len(piece)))
                        contents.append(piece)
                saved.append(Saved(block.name, block.size, tuple(ranges)))
        head = msgspec.json.encode(saved)
        write_at(fd, memoryview(head + b"".join(contents) + _TRAILER.pack(_MAGIC, state, len(head))), state)
    finally:
        os.close(fd)


def restore(pid: int, blocks: list[Block], path: Path) -> None:
    """The reverse, before the device state is loaded. The QEMU that wrote the state may have been taken over, and had the file open: every
    number is checked. Raises Internal if the machine is another."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        trailer = os.pread(fd, _TRAILER.size, max(size - _TRAILER.size, 0))
        magic, state, length = _TRAILER.unpack(trailer) if len(trailer) == _TRAILER.size else (b"", 0, 0)
        if magic != _MAGIC or length > MAX_HEAD_BYTES or state + length > size:
            raise Internal("a device state without the memory of its devices")
        try:
            saved = msgspec.json.decode(os.pread(fd, length, state), type=list[Saved])
        except msgspec.DecodeError as error:
            raise Internal("the memory of devices is damaged") from error
        names = {one.name for one in saved}
        blocks = [block for block in blocks if block.name != BIOS or BIOS in names]  # earlier versions did not save it
        if [(one.name, one.size) for one in saved] != [(block.name, block.size) for block in blocks]:
            raise Internal("the device state is one of another machine")
        if any(not 0 < count <= PIECE or not 0 <= offset <= one.size - count for one in saved for offset, count in one.ranges):
            raise Internal("the memory of devices is damaged")
        at = state + length
        for one, block in zip(saved, blocks, strict=True):
            for offset, count in one.ranges:
                with mmap.mmap(-1, count) as buffer:
                    buffer[:] = os.pread(fd, count, at).ljust(count, b"\0")
                    process_memory.write_ranges(pid, [(block.address + offset, block.address + offset + count)], buffer)
                at += count
    finally:
        os.close(fd)
