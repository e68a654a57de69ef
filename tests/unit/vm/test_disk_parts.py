# SPDX-License-Identifier: Apache-2.0
"""What full VMs have that is pure: partition tables, keys, what QEMU says of its memory and of images, profiles."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import uuid
import zlib
from pathlib import Path

import msgspec
import pytest

from opendsec.api.errors import Internal, InvalidRequest
from opendsec.api.spec import PROFILES as NAMES
from opendsec.images.disks import gpt
from opendsec.runtime.vm.convert import checked
from opendsec.runtime.vm.profiles import PROFILES
from opendsec.runtime.vmm import blocks, keys
from opendsec.runtime.vmm.screen import size_of

SECTORS = 1 << 16


def test_a_partition_table_is_what_the_specification_says() -> None:
    disk, guid = uuid.uuid4(), uuid.uuid4()
    part = gpt.Partition(gpt.ESP, guid, 2048, 4096, "boot", gpt.LEGACY_BOOT)
    begin, end = gpt.tables(disk, SECTORS, [part], b"\xeb\xfe")
    assert begin[:2] == b"\xeb\xfe" and begin[510:512] == b"\x55\xaa" and begin[450] == 0xEE
    for data, own, other, table in ((begin[512:], 1, SECTORS - 1, 2), (end[-512:], SECTORS - 1, 1, SECTORS - 33)):
        fields = struct.unpack_from("<8sIIIIQQQQ16sQIII", data)
        assert fields[0] == b"EFI PART" and fields[5:7] == (own, other) and fields[10] == table
        assert fields[9] == disk.bytes_le
        assert fields[3] == zlib.crc32(data[:16] + bytes(4) + data[20:92])
        assert fields[13] == zlib.crc32(begin[1024:])
    entry = struct.unpack_from("<16s16sQQQ72s", begin, 1024)
    assert entry[:5] == (gpt.ESP.bytes_le, guid.bytes_le, 2048, 6143, 4)
    assert entry[5].decode("utf-16-le").rstrip("\0") == "boot"
    assert end[:-512] == begin[1024:]


def test_partitions_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="overlap"):
        gpt.tables(
            uuid.uuid4(),
            SECTORS,
            [gpt.Partition(gpt.ESP, uuid.uuid4(), 2048, 4096, "a"), gpt.Partition(gpt.ESP, uuid.uuid4(), 4096, 1, "b")],
        )
    with pytest.raises(ValueError, match="fit"):
        gpt.tables(uuid.uuid4(), SECTORS, [gpt.Partition(gpt.ESP, uuid.uuid4(), 2048, SECTORS, "a")])


def test_what_is_pressed() -> None:
    assert keys.typed("a") == ("a",)
    assert keys.typed("A") == ("shift", "a")
    assert keys.typed("\n") == ("ret",)
    assert keys.pressed("ctrl+s") == ("ctrl", "s")
    assert keys.pressed("Ctrl+Alt+Del") == ("ctrl", "alt", "delete")
    assert keys.pressed("+") == ("shift", "equal")
    assert keys.pressed("ctrl+plus") == ("ctrl", "shift", "equal")
    assert keys.pressed("F12") == ("f12",)
    assert keys.pressed("Page_Up") == ("pgup",)
    for wrong in ("", "hyper", "ctrl++", "ctrl+é"):
        with pytest.raises(InvalidRequest):
            keys.pressed(wrong)
    printable = "".join(map(chr, range(32, 127)))
    assert len({keys.typed(character) for character in printable}) == len(printable)


TOLD = """              Block Name    PSize              Offset               Used              Total                HVA  RO\r
                     ram    4 KiB  0x0000000000000000 0x0000000004000000 0x0000000004000000 0x00007fce17e00000  rw\r
   0000:00:02.0/vga.vram    4 KiB  0x00000000048c0000 0x0000000001000000 0x0000000001000000 0x00007fce16c00000  rw\r
            system.flash1    4 KiB  0x0000000005100000 0x0000000000084000 0x0000000000084000 0x00007fce68000000  rw
    /rom@etc/acpi/tables    4 KiB  0x0000000005900000 0x0000000000020000 0x0000000000200000 0x00007fce68a00000  ro\r
"""


def test_memory_of_devices() -> None:
    assert blocks.parse(TOLD) == [
        blocks.Block("0000:00:02.0/vga.vram", 0x7FCE16C00000, 1 << 24),
        blocks.Block("system.flash1", 0x7FCE68000000, 0x84000),
    ]
    with pytest.raises(Internal):
        blocks.parse(TOLD.replace("0x0000000001000000 0x0000000001000000", "0x0000000041000000 0x0000000041000000"))


def test_memory_of_devices_there_and_back(tmp_path: Path) -> None:
    size = 0x84000  # the last piece is a short one
    path = tmp_path / "devices"
    path.write_bytes(b"state")
    with mmap.mmap(-1, size) as memory:
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        block = blocks.Block("system.flash1", at, size)
        memory[5:9], memory[size - 4 :] = b"here", b"last"
        before = bytes(memory)
        blocks.append(os.getpid(), [block], path)
        memory[:] = bytes(size)
        blocks.restore(os.getpid(), [block], path)
        assert bytes(memory) == before and path.read_bytes()[:5] == b"state"
        with pytest.raises(Internal, match="another machine"):
            blocks.restore(os.getpid(), [blocks.Block("vga.vram", at, size)], path)
        with pytest.raises(Internal, match="without"):
            path.write_bytes(b"short")
            blocks.restore(os.getpid(), [block], path)


def info(**fields: object) -> bytes:
    return msgspec.json.encode({"virtual-size": 1 << 20, "format": "qcow2", **fields})


def test_images_that_are_not_whole_are_refused() -> None:
    assert checked(info()) == 1 << 20
    assert checked(info(**{"virtual-size": 1000})) == 1024
    for wrong in (
        {"backing-filename": "/etc/shadow"},
        {"encrypted": True},
        {"virtual-size": 0},
        {"virtual-size": 1 << 50},
        {"format-specific": {"type": "qcow2", "data": {"data-file": "/etc/shadow"}}},
    ):
        with pytest.raises(InvalidRequest):
            checked(info(**wrong))
    with pytest.raises(Internal):
        checked(b"no json")


def test_profiles_are_those_of_the_spec() -> None:
    assert tuple(PROFILES) == NAMES
    assert all(name == one.name and one.about for name, one in PROFILES.items())


def test_the_size_of_a_picture() -> None:
    assert size_of(b"\x89PNG\r\n\x1a\n" + bytes(8) + struct.pack(">II", 720, 400), (1, 1)) == (720, 400)
    assert size_of(b"no picture", (1, 1)) == (1, 1)
