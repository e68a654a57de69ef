# SPDX-License-Identifier: Apache-2.0
"""A layer of ours as a tar of OCI's: what overlay understands becomes `.wh.` names again. The same layer gives the same bytes.

Left out: what OCI has no word for (attributes of the file system, devices, which our layers have none of). Holes are written as
zeros, which pack to nothing; a pull makes holes of them again.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Callable, Iterator

from opendsec.api.errors import Unsupported
from opendsec.images.oci.nodes import OPAQUE, WHITEOUT
from opendsec.kernel import procfs

_BLOCK = 1 << 20
_OPAQUE = b"trusted.overlay.opaque"
_KINDS = {stat.S_IFREG: tarfile.REGTYPE, stat.S_IFDIR: tarfile.DIRTYPE, stat.S_IFLNK: tarfile.SYMTYPE, stat.S_IFIFO: tarfile.FIFOTYPE}


def tar(root_fd: int, write: Callable[[bytes], None]) -> None:
    """Write the tar of the tree at a directory descriptor: a mounted layer, alone. Raises OSError, Unsupported."""
    base = os.fsencode(procfs.fd_path(root_fd)) + b"/"
    links: dict[int, bytes] = {}
    for path, status in _walk(root_fd):
        kind = stat.S_IFMT(status.st_mode)
        if path.rpartition(b"/")[2].startswith(WHITEOUT):
            shown = path[:200].decode(errors="backslashreplace")
            raise Unsupported(f"cannot be written as an OCI image: what is called '.wh.…' means absence there: {shown!r}", field="name")
        if kind == stat.S_IFCHR and status.st_rdev == 0:
            folder, slash, name = path.rpartition(b"/")
            write(_header(folder + slash + WHITEOUT + name, tarfile.REGTYPE, _plain(status), 0, {}))
            continue
        if kind not in _KINDS:
            continue
        if kind != stat.S_IFDIR and status.st_nlink > 1:
            first = links.setdefault(status.st_ino, path)
            if first != path:
                write(_header(path, tarfile.LNKTYPE, status, 0, {}, link=first))
                continue
        xattrs = _xattrs(base + path)
        opaque = xattrs.pop(_OPAQUE, b"") == b"y"
        kept = {key: value for key, value in xattrs.items() if key == b"security.capability" or key.startswith(b"user.")}
        if kind == stat.S_IFDIR:
            write(_header(path + b"/" if path else b"./", tarfile.DIRTYPE, status, 0, kept))
            if opaque:
                write(_header((path + b"/" if path else b"") + OPAQUE, tarfile.REGTYPE, _plain(status), 0, {}))
        elif kind == stat.S_IFLNK:
            write(_header(path, tarfile.SYMTYPE, status, 0, kept, link=os.readlink(path, dir_fd=root_fd)))
        elif kind == stat.S_IFREG:
            write(_header(path, tarfile.REGTYPE, status, status.st_size, kept))
            _content(root_fd, path, status.st_size, write)
        else:
            write(_header(path, _KINDS[kind], status, 0, kept))
    write(bytes(1024))


def _walk(root_fd: int) -> Iterator[tuple[bytes, os.stat_result]]:
    pending = [(b"", os.fstat(root_fd))]
    while pending:
        path, status = pending.pop()
        yield path, status
        if stat.S_ISDIR(status.st_mode):
            fd = os.open(path or b".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root_fd)
            try:
                names = sorted(map(os.fsencode, os.listdir(fd)), reverse=True)
                prefix = path + b"/" if path else b""
                pending.extend((prefix + name, os.stat(name, dir_fd=fd, follow_symlinks=False)) for name in names)
            finally:
                os.close(fd)


class _plain:
    """The attributes of an entry that stands for an absence."""

    st_mode, st_uid, st_gid, st_mtime_ns = 0o600, 0, 0, 0

    def __init__(self, _: os.stat_result) -> None: ...


def _header(
    name: bytes, kind: bytes, status: os.stat_result | _plain, size: int, xattrs: dict[bytes, bytes], *, link: bytes = b""
) -> bytes:
    info = tarfile.TarInfo(name.decode("utf-8", "surrogateescape"))
    info.type, info.size, info.linkname = kind, size, link.decode("utf-8", "surrogateescape")
    info.mode, info.uid, info.gid = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
    seconds, nanoseconds = divmod(status.st_mtime_ns, 1_000_000_000)
    info.mtime = seconds
    info.pax_headers = {
        "SCHILY.xattr." + key.decode("utf-8", "surrogateescape"): value.decode("utf-8", "surrogateescape")
        for key, value in sorted(xattrs.items())
    }
    if nanoseconds:
        info.pax_headers["mtime"] = _decimal(status.st_mtime_ns)
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _decimal(nanoseconds: int) -> str:
    whole, fraction = divmod(abs(nanoseconds), 1_000_000_000)
    return f"{'-' if nanoseconds < 0 else ''}{whole}.{fraction:09}".rstrip("0")


def _xattrs(path: bytes) -> dict[bytes, bytes]:
    return {os.fsencode(name): os.getxattr(path, name, follow_symlinks=False) for name in os.listxattr(path, follow_symlinks=False)}


def _content(root_fd: int, path: bytes, size: int, write: Callable[[bytes], None]) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root_fd)
    try:
        left = size
        while left:
            data = os.read(fd, min(left, _BLOCK))
            if not data:
                raise OSError(f"a file of a layer ended early: {os.fsdecode(path)!r}")
            write(data)
            left -= len(data)
    finally:
        os.close(fd)
    write(bytes(-size % 512))
