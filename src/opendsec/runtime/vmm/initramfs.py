# SPDX-License-Identifier: Apache-2.0
"""The initramfs of microVMs: guestd as /init and the modules that it loads. Pure: bytes in, bytes out, the same each time.

A cpio archive of the "newc" kind is entries one after another, each a header of hexadecimal numbers, a name and content, padded to four
bytes. It is not compressed: unpacking would take the guest longer than copying.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence

_MAGIC = b"070701"
_END = "TRAILER!!!"
DIRECTORIES = ("dev", "proc", "sys", "run", "modules", "mnt", "newroot")


def entry(name: str, mode: int, content: bytes = b"", *, device: tuple[int, int] = (0, 0), inode: int = 0) -> bytes:
    """One entry."""
    raw = name.encode() + b"\0"
    numbers = (inode, mode, 0, 0, 2 if stat.S_ISDIR(mode) else 1, 0, len(content), 0, 0, *device, len(raw), 0)
    head = _MAGIC + b"".join(b"%08x" % number for number in numbers) + raw
    return _padded(head) + _padded(content)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)


def build(init: bytes, modules: Mapping[str, bytes], order: Sequence[str]) -> bytes:
    """The archive. `order`: in which the modules are loaded."""
    parts = [entry(name, stat.S_IFDIR | 0o755, inode=number) for number, name in enumerate(DIRECTORIES, 1)]
    # Without a console process 1 would have no standard streams, and its complaints nowhere to go.
    parts.append(entry("dev/console", stat.S_IFCHR | 0o600, device=(5, 1), inode=20))
    parts.append(entry("init", stat.S_IFREG | 0o755, init, inode=21))
    parts.append(entry("modules/order", stat.S_IFREG | 0o644, "".join(f"{name}\n" for name in order).encode(), inode=22))
    parts += [entry(f"modules/{name}.ko", stat.S_IFREG | 0o644, modules[name], inode=number) for number, name in enumerate(order, 23)]
    parts.append(entry(_END, 0))
    return b"".join(parts)
