# SPDX-License-Identifier: Apache-2.0
"""Disk images of other kinds, friendly and hostile, through qemu-img in its confinement."""

from __future__ import annotations

import os
import struct
import subprocess
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from opendsec.api.errors import InvalidRequest
from opendsec.runtime.vm.backend import VMBackend
from opendsec.runtime.vm.convert import Format
from tests.full_vms import FullNode

MIB = 1 << 20
FORMATS: tuple[Format, ...] = ("raw", "qcow2", "vmdk", "vhdx", "vpc", "vdi")


@pytest.fixture
async def backend() -> AsyncGenerator[VMBackend, None]:
    with tempfile.TemporaryDirectory() as folder:
        async with FullNode(Path(folder)) as node:
            backend = await node.make()
            yield backend
            await backend.close()


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.write_bytes(os.urandom(MIB) + bytes(3 * MIB) + b"end".rjust(4096))
    return path


def make(disk: Path, format: str, *options: str) -> Path:
    made = disk.with_suffix(f".{format}")
    subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", format, *options, disk, made], check=True)
    return made


@pytest.mark.parametrize("format", FORMATS)
async def test_all_kinds(backend: VMBackend, disk: Path, format: Format, tmp_path: Path) -> None:
    image, before = make(disk, format), disk.read_bytes()
    image.chmod(0o600)
    size = await backend.convert(str(image), format, tmp_path, tmp_path / "raw")
    made = (tmp_path / "raw").read_bytes()
    assert len(made) == size >= len(before)
    assert made[: len(before)] == before and not any(made[len(before) :])
    assert image.stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "source").exists()


async def refused(backend: VMBackend, image: Path, format: Format, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match) as raised:
        await backend.convert(str(image), format, image.parent, image.parent / "raw")
    assert raised.value.field == "source.path"


async def test_no_other_file_is_followed(backend: VMBackend, disk: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret" * 1000)
    backed = tmp_path / "backed.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", secret, "-F", "raw", backed], check=True)
    await refused(backend, backed, "qcow2", "lies on another image")
    outside = tmp_path / "outside.qcow2"
    options = ["-o", f"data_file={tmp_path / 'data'},data_file_raw=on"]
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *options, outside, "1M"], check=True)
    await refused(backend, outside, "qcow2", "another file|is no qcow2 image")
    flat = tmp_path / "flat.vmdk"
    head = '# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType="monolithicFlat"\n'
    flat.write_text(f'{head}RW 12 FLAT "{secret}" 0\nddb.adapterType="ide"\n')
    await refused(backend, flat, "vmdk", "is no vmdk image")


async def test_sizes_and_kinds_that_cannot_be(backend: VMBackend, disk: Path, tmp_path: Path) -> None:
    await refused(backend, disk, "qcow2", "is no qcow2 image")
    await refused(backend, tmp_path / "nothing", "raw", "cannot be read")
    huge = tmp_path / "huge.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", huge, "8T"], check=True)
    await refused(backend, huge, "qcow2", "at most")
    wild = make(disk, "qcow2")
    with open(wild, "r+b") as file:
        file.seek(24)
        file.write(struct.pack(">Q", 1 << 62))
    await refused(backend, wild, "qcow2", "is no qcow2 image|at most")
