# SPDX-License-Identifier: Apache-2.0
"""Disk images of other kinds made raw ones, by qemu-img: in a process that has the two files and nothing else, for what is in such an image
was made by somebody else, and formats like qcow2 can name other files, claim any size, and have had holes in their readers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from opendsec.api.errors import Internal, InvalidRequest
from opendsec.images.waiting import in_thread
from opendsec.runtime.spawn import Spawner
from opendsec.runtime.vmm import disks, programs, tools
from opendsec.runtime.vmm.arguments import Inside
from opendsec.runtime.vmm.place import Place

Format = Literal["raw", "qcow2", "vmdk", "vhdx", "vpc", "vdi"]
QEMU_IMG = "/usr/bin/qemu-img"
MAX_BYTES = 2 << 40
LIMITS: dict[str, float | int] = {"memory_bytes": 512 << 20, "cpu_cores": 2.0, "pids": 80}
TIMEOUT_S = 3600.0


class _Specific(msgspec.Struct, frozen=True):
    type: str = ""
    data: dict[str, object] = {}


class _Info(msgspec.Struct, frozen=True, rename="kebab"):
    virtual_size: int
    format: str
    backing_filename: str = ""
    encrypted: bool = False
    format_specific: _Specific = _Specific()


def checked(told: bytes) -> int:
    """The size of the disk, from what `qemu-img info` says of its image. Raises InvalidRequest for one that is not whole in itself."""
    try:
        info = msgspec.json.decode(told, type=_Info)
    except msgspec.DecodeError as error:
        raise Internal(f"qemu-img info: {error}") from None
    data = info.format_specific.data
    if info.backing_filename:
        raise InvalidRequest("lies on another image; make it whole first, with `qemu-img convert`", field="source.path")
    if data.get("data-file") is not None or data.get("data-file-raw"):
        raise InvalidRequest("has its content in another file", field="source.path")
    if info.encrypted:
        raise InvalidRequest("is encrypted", field="source.path")
    if not 0 < info.virtual_size <= MAX_BYTES:
        raise InvalidRequest(f"is a disk of {info.virtual_size} bytes; at most {MAX_BYTES}", field="source.path")
    return -(-info.virtual_size // 512) * 512


async def to_raw(spawner: Spawner, parent: Path, place: Place, source: Path, format: Format, work: Path, target: Path) -> int:
    """Write the disk in `source` to the new file `target`, both of the host; its size. `parent`: of tools' root directories; `place`: a
    free one, which gets its limits here. Raises InvalidRequest, Unavailable."""
    tool = await in_thread(programs.prepare_tools, parent, ["qemu-img"])
    place = msgspec.structs.replace(place, root=str(tool.root), limits=LIMITS)
    copy = work / "source"
    try:
        try:
            # A copy, which nobody changes meanwhile, and whose mode is ours.
            await in_thread(disks.copy_sparse, source.resolve(), copy, mode=0o444)
        except OSError as error:
            raise InvalidRequest(f"cannot be read: {error.strerror}", field="source.path") from None
        files = [Inside(str(copy), "source")]
        ended = await tools.run(spawner, place, [QEMU_IMG, "info", "--output=json", "-f", format, "/source"], files, timeout_s=60.0)
        if ended.exit.code != 0:
            raise InvalidRequest(f"is no {format} image: {_last(ended.err)}", field="source.path")
        size = checked(ended.out)
        target.touch(mode=0o600, exist_ok=False)
        os.truncate(target, size)
        words = [QEMU_IMG, "convert", "-n", "--target-is-zero", "-f", format, "-O", "raw", "/source", "/target"]
        ended = await tools.run(spawner, place, words, [*files, Inside(str(target), "target", writable=True)], timeout_s=TIMEOUT_S)
        if ended.exit.code != 0:
            raise InvalidRequest(f"cannot be converted: {_last(ended.err)}", field="source.path")
        os.chown(target, 0, 0)
        target.chmod(0o644)
        if target.stat().st_size != size:
            raise InvalidRequest("is not of the size that it says", field="source.path")
        return size
    finally:
        copy.unlink(missing_ok=True)


def _last(said: bytes) -> str:
    lines = said.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][-300:] if lines else "it did not say why"
