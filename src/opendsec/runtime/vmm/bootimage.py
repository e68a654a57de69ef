# SPDX-License-Identifier: Apache-2.0
"""A kernel and its initramfs as one ELF file that boots by PVH. Pure: bytes in, bytes out.

QEMU's microvm puts an initramfs given by `-initrd` at the very end of memory, over the ACPI tables that the firmware has just put there:
whether the kernel finds its devices after that, or hangs, depends on the size of the archive. Here the archive is a further segment of
the kernel's own file instead, above the kernel. PVH has a list of modules for it, which only a loader can fill; so the entry is a few
instructions of ours, at the start of that segment, which name the archive in the list and go on to the kernel's entry.

    segment, at a physical address above the kernel, 2 MiB aligned:
        0x00    code: start_info->nr_modules = 1; start_info->modlist = segment + 0x40; jump to the kernel's entry
        0x40    the list: address and size of the archive
        0x1000  the archive
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from opendsec.api.errors import Unavailable

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_LOAD, _NOTE = 1, 4
_READABLE_AND_EXECUTABLE = 5
_PHYS32_ENTRY = 18  # XEN_ELFNOTE_PHYS32_ENTRY
_ALIGNMENT = 2 << 20
_LIST, _ARCHIVE = 0x40, 0x1000


class _Segment(NamedTuple):
    kind: int
    flags: int
    offset: int
    virtual: int
    physical: int
    file_bytes: int
    memory_bytes: int
    align: int


def build(vmlinux: bytes, archive: bytes) -> bytes:
    """The file. Raises Unavailable for a kernel that is none, or has no PVH entry."""
    if not vmlinux.startswith(b"\x7fELF\x02\x01"):
        raise Unavailable("the guest kernel is no 64-bit ELF file")
    header = list(_HEADER.unpack_from(vmlinux))
    phoff, count = header[5], header[10]
    segments = [_Segment(*_PROGRAM.unpack_from(vmlinux, phoff + index * _PROGRAM.size)) for index in range(count)]
    at = _find_entry(vmlinux, segments)
    (entry,) = struct.unpack_from("<I", vmlinux, at)
    end = max(segment.physical + segment.memory_bytes for segment in segments if segment.kind == _LOAD)
    base = -(-end // _ALIGNMENT) * _ALIGNMENT
    content = _code(base, entry).ljust(_LIST, b"\x90") + struct.pack("<QQQQ", base + _ARCHIVE, len(archive), 0, 0)
    content = content.ljust(_ARCHIVE, b"\0") + archive

    image = bytearray(vmlinux)
    struct.pack_into("<I", image, at, base)
    image += b"\0" * (-len(image) % 4096)
    ours = _Segment(_LOAD, _READABLE_AND_EXECUTABLE, len(image), base, base, len(content), len(content), 4096)
    image += content
    image += b"\0" * (-len(image) % 8)
    header[5], header[10] = len(image), count + 1
    header[6], header[11:] = 0, [0, 0, 0]  # no sections: nothing that boots looks at them
    struct.pack_into(_HEADER.format, image, 0, *header)
    return bytes(image) + b"".join(_PROGRAM.pack(*segment) for segment in (*segments, ours))


def _code(base: int, entry: int) -> bytes:
    """32-bit code, no stack, no paging; EBX has the address of hvm_start_info."""
    return b"".join(
        (
            b"\xc7\x43\x0c" + struct.pack("<I", 1),  # movl $1, 12(%ebx)         nr_modules
            b"\xc7\x43\x10" + struct.pack("<I", base + _LIST),  # movl $list, 16(%ebx)      modlist_paddr
            b"\xc7\x43\x14" + struct.pack("<I", 0),  # movl $0, 20(%ebx)
            b"\xb8" + struct.pack("<I", entry),  # movl $entry, %eax
            b"\xff\xe0",  # jmp *%eax
        )
    )


def _find_entry(image: bytes, segments: list[_Segment]) -> int:
    """Where in the file the note with the PVH entry has its value."""
    for segment in segments:
        if segment.kind != _NOTE:
            continue
        at, end = segment.offset, segment.offset + segment.file_bytes
        while at + 12 <= end:
            name_bytes, value_bytes, kind = struct.unpack_from("<III", image, at)
            value: int = at + 12 + (name_bytes + 3 & ~3)
            if kind == _PHYS32_ENTRY and image[at + 12 : at + 16] == b"Xen\0":
                return value
            at = value + (value_bytes + 3 & ~3)
    raise Unavailable("the guest kernel has no PVH entry")
