# SPDX-License-Identifier: Apache-2.0
"""The files that a microVM boots from: the kernel's modules, the archive, the ELF file with both; and its disks."""

from __future__ import annotations

import lzma
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from opendsec.api.errors import Unavailable
from opendsec.runtime.vmm import bootimage, disks, initramfs, kernel

MIB = 1 << 20


def test_the_newest_version_is_found() -> None:
    said = " linux-image-cloud-amd64 | 6.12.95-1~bpo12+1 | http://x bookworm-backports/main amd64 Packages\n"
    said += " linux-image-cloud-amd64 |  6.1.192-3 | http://x bookworm/main amd64 Packages\n"
    assert kernel.newest(said) == "6.12.95-1~bpo12+1"
    assert kernel.newest("") is None


@pytest.mark.parametrize("pack", [lzma.compress, zstandard.ZstdCompressor().compress])
def test_the_kernel_is_found_in_its_image(pack: Callable[[bytes], bytes]) -> None:
    elf = b"\x7fELF" + os.urandom(5000)
    decoy = b"\x28\xb5\x2f\xfd no frame " + b"\xfd7zXZ\x00 none either"
    assert kernel.payload(b"setup" * 200 + decoy + pack(elf) + b"\0" * 512) == elf
    with pytest.raises(Unavailable):
        kernel.payload(b"MZ" + decoy)


def test_modules_are_collected_with_what_they_need(tmp_path: Path) -> None:
    tree, target = tmp_path / "tree", tmp_path / "target"
    target.mkdir()
    for name, needs in (("a-b", "c_d"), ("c_d", "e"), ("e", ""), ("unused", "")):
        path = tree / "kernel/drivers" / f"{name}.ko.xz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lzma.compress(b"ELF\0license=GPL\0depends=" + needs.encode() + b"\0name=x\0"))
    (tree / "modules.builtin").write_text("kernel/fs/inside.ko\n")
    assert kernel.collect(tree, target, ["a-b", "inside"]) == ["e", "c_d", "a_b"]
    assert sorted(os.listdir(target)) == ["a_b.ko", "c_d.ko", "e.ko", "order"]
    assert (target / "order").read_text() == "e\nc_d\na_b\n"
    with pytest.raises(Unavailable, match="no module nowhere"):
        kernel.collect(tree, target, ["nowhere"])


def test_the_archive_is_one_that_others_read(tmp_path: Path) -> None:
    archive = initramfs.build(b"\x7fELF init", {"one": b"1" * 5, "two": b"22"}, ["two", "one"])
    assert archive == initramfs.build(b"\x7fELF init", {"two": b"22", "one": b"1" * 5}, ["two", "one"])
    listed = subprocess.run(["cpio", "-t", "--quiet"], input=archive, capture_output=True, check=True).stdout.decode().split()
    assert {"init", "dev/console", "modules/one.ko", "modules/order"} <= set(listed)
    content = subprocess.run(["cpio", "-i", "--quiet", "--to-stdout", "modules/order"], input=archive, capture_output=True, check=True)
    assert content.stdout == b"two\none\n"


def small_kernel() -> bytes:
    """An ELF file with one segment and a PVH note."""
    note = struct.pack("<III", 4, 4, 18) + b"Xen\0" + struct.pack("<I", 0x1000123)
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 2, 62, 1, 0x1000000, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 5, 0x1000, 0xFFFFFFFF81000000, 0x1000000, 16, 0x234567, 4096)
    notes = struct.pack("<IIQQQQQQ", 4, 4, 0x200, 0, 0, len(note), len(note), 4)
    return (head + load + notes).ljust(0x200, b"\0") + note.ljust(0xE00, b"\0") + b"K" * 16


def test_kernel_and_archive_become_one_file() -> None:
    image = bootimage.build(small_kernel(), b"ARCHIVE" * 1000)
    header = struct.unpack_from("<16sHHIQQQIHHHHHH", image)
    phoff, count = header[5], header[10]
    assert count == 3
    segments = [struct.unpack_from("<IIQQQQQQ", image, phoff + 56 * index) for index in range(count)]
    kind, _, offset, _, physical, size, memory, _ = segments[2]
    assert (kind, physical, size) == (1, 0x1400000, memory)  # above the kernel, 2 MiB aligned
    assert struct.unpack_from("<I", image, 0x200 + 16) == (physical,)  # it starts with us
    content = image[offset : offset + size]
    assert struct.unpack_from("<QQQQ", content, 0x40) == (physical + 0x1000, 7000, 0, 0)
    assert content[0x1000:] == b"ARCHIVE" * 1000
    assert struct.pack("<I", 0x1000123) + b"\xff\xe0" in content[:0x40]  # and goes on to the kernel
    for bad in (b"MZ", small_kernel()[:0x200] + bytes(0x1000)):
        with pytest.raises(Unavailable):
            bootimage.build(bad, b"")


@pytest.mark.parametrize("size", [MIB, 64 * MIB, 3 << 40])
def test_an_empty_overlay_is_one(tmp_path: Path, size: int) -> None:
    path = tmp_path / "empty.qcow2"
    disks.write_overlay(path, size)
    assert path.read_bytes() == disks.empty_overlay(size)
    assert path.stat().st_blocks * 512 <= 64 << 10
    if shutil.which("qemu-img") is None:
        pytest.skip("no qemu-img")
    said = subprocess.run(["qemu-img", "check", "-f", "qcow2", path], capture_output=True, text=True, check=True).stdout
    assert "No errors" in said


def test_the_scratch_holds_what_was_promised(tmp_path: Path) -> None:
    path = tmp_path / "scratch"
    disks.format_scratch(path, 64 * MIB, 4096)
    assert path.stat().st_blocks * 512 < 4 * MIB
    said = subprocess.run(["/sbin/dumpe2fs", "-h", path], capture_output=True, text=True, check=True).stdout
    found = {line.partition(":")[0]: line.partition(":")[2].split()[0] for line in said.splitlines() if line.partition(":")[2].split()}
    assert int(found["Free blocks"]) * 4096 >= 64 * MIB
    assert int(found["Free inodes"]) >= 4096 - 11 and "has_journal" not in said


def test_a_sparse_copy_is_equal_and_sparse(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with open(source, "wb") as file:
        file.truncate(64 * MIB + 5)
        for at in (0, 10 * MIB, 64 * MIB):
            file.seek(at)
            file.write(b"data!")
    copied = disks.copy_sparse(source, target)
    assert target.read_bytes() == source.read_bytes()
    assert 15 <= copied <= MIB and target.stat().st_blocks <= source.stat().st_blocks
    with pytest.raises(FileExistsError):
        disks.copy_sparse(source, target)
