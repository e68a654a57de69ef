# SPDX-License-Identifier: Apache-2.0
"""Descriptors: opening beneath a root that cannot be trusted, passing them over sockets, pipes of a chosen size."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct

from opendsec.kernel import abi, procfs, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from opendsec.kernel.syscalls import StrPath

BENEATH = abi.RESOLVE_IN_ROOT | abi.RESOLVE_NO_MAGICLINKS
MAX_RACES = 1000
MFD_NOEXEC_SEAL, MFD_EXEC = 0x8, 0x10
SCM_MAX_FD = 253
"""Most descriptors the kernel carries in one message."""


def beneath(root_fd: int, path: StrPath, flags: int, mode: int = 0, *, resolve: int = 0) -> int:
    """Open `path` as a process whose root directory is `root_fd` would see it: absolute symlinks and ".." end at that root.

    /proc's magic links are refused (ELOOP), so a symlink planted inside reaches neither the host nor another sandbox. More
    limits may come as `resolve` (RESOLVE_NO_SYMLINKS, ...). Without O_NONBLOCK in `flags`, opening a planted FIFO can block.
    """
    # The kernel cannot prove that a walk with ".." stayed inside while anything on the machine is renamed or mounted: EAGAIN.
    for _ in range(MAX_RACES):
        try:
            return syscalls.openat2(root_fd, path, flags, mode, BENEATH | resolve)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
    raise OSError(errno.EAGAIN, f"openat2: {os.strerror(errno.EAGAIN)}", os.fsdecode(path))


def open_path(path: StrPath, *, dir_fd: int | None = None, follow: bool = False, directory: bool = False) -> int:
    """An O_PATH descriptor: names a file without opening it, so neither FIFOs nor devices notice."""
    flags = os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW) | (os.O_DIRECTORY if directory else 0)
    return os.open(path, flags, dir_fd=dir_fd)


def reopen(fd: int, flags: int) -> int:
    """Open for good what an O_PATH descriptor names. O_NOFOLLOW cannot be given: the way leads over a magic link."""
    return os.open(procfs.fd_path(fd), flags | os.O_CLOEXEC)


def path_of(fd: int) -> bytes:
    """What the kernel calls the file now: for messages, never to open it again."""
    return os.fsencode(os.readlink(procfs.fd_path(fd)))


def send_with_fds(channel: socket.socket, data: bytes, fds: Sequence[int], flags: int = 0) -> int:
    """Send one message with descriptors (at most `SCM_MAX_FD`). On stream sockets `data` must not be empty."""
    if len(fds) > SCM_MAX_FD:
        raise ValueError(f"at most {SCM_MAX_FD} descriptors go with a message")
    rights = struct.pack(f"={len(fds)}i", *fds)
    return channel.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if fds else [], flags)


def recv_with_fds(channel: socket.socket, size: int, max_fds: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """One message of at most `size` bytes and its descriptors, close-on-exec, which the caller owns. b"" is the end.

    A message or a set of descriptors that was cut raises OSError(EMSGSIZE), and what did arrive is closed.
    """
    data, ancillary, message_flags, _ = channel.recvmsg(size, socket.CMSG_SPACE(4 * max_fds), flags | socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(payload) // 4
            fds += struct.unpack(f"={count}i", payload[: 4 * count])
    # CMSG_SPACE is rounded up, so one descriptor more than asked for may have come through.
    if message_flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) > max_fds:
        for fd in fds:
            os.close(fd)
        raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
    return data, fds


def pipe(size_bytes: int | None = None, *, nonblocking_read: bool = False) -> tuple[int, int]:
    """(read end, write end), close-on-exec. The size is a wish: over the user's quota the kernel gives what it gives.

    `nonblocking_read` sets O_NONBLOCK on the read end alone; the flag belongs to the open file, and the two ends are two.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        if size_bytes is not None:
            try:
                fcntl.fcntl(reading, abi.F_SETPIPE_SZ, size_bytes)
            except PermissionError:
                pass
        if nonblocking_read:
            os.set_blocking(reading, False)
    except BaseException:
        os.close(reading)
        os.close(writing)
        raise
    return reading, writing


def pipe_size(fd: int) -> int:
    return fcntl.fcntl(fd, abi.F_GETPIPE_SZ)


def sealed_memfd(name: str, data: bytes, *, executable: bool = False) -> int:
    """An anonymous file that holds `data` and can no longer be changed by anybody. Not `executable`: nor executed."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(name, flags | (MFD_EXEC if executable else MFD_NOEXEC_SEAL))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create(name, flags)  # before 6.3 every memfd is executable
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    except BaseException:
        os.close(fd)
        raise
    return fd
