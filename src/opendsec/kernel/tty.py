# SPDX-License-Identifier: Apache-2.0
"""Terminals: a PTY pair, its size, and making one the controlling terminal."""

from __future__ import annotations

import fcntl
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opendsec.kernel.syscalls import StrPath

TIOCSCTTY = 0x540E
TIOCGWINSZ = 0x5413
TIOCSWINSZ = 0x5414
TIOCGPTN = 0x8004_5430
TIOCSPTLCK = 0x4004_5431
TIOCGPTPEER = 0x5441

MAX_SIZE = 0xFFFF

_WINSIZE = struct.Struct("=4H")


def get_size(fd: int) -> tuple[int, int]:
    """(rows, columns)."""
    rows, columns, _, _ = _WINSIZE.unpack(fcntl.ioctl(fd, TIOCGWINSZ, bytes(_WINSIZE.size)))
    return rows, columns


def set_size(fd: int, rows: int, columns: int) -> None:
    """Set the size; the foreground processes get SIGWINCH if it changed. Raises ValueError outside 0 to 65,535."""
    if not (0 <= rows <= MAX_SIZE and 0 <= columns <= MAX_SIZE):
        raise ValueError(f"not a terminal size: {rows} x {columns}")
    fcntl.ioctl(fd, TIOCSWINSZ, _WINSIZE.pack(rows, columns, 0, 0))


def open_pair(ptmx: StrPath, *, dir_fd: int | None = None, rows: int = 24, columns: int = 80) -> tuple[int, int]:
    """(master, slave) from a devpts instance's ptmx, such as a sandbox's /dev/pts/ptmx; close-on-exec, not controlling.

    The slave is opened through the master (TIOCGPTPEER): no name is looked up, so nothing inside can put another file there.
    """
    master = os.open(ptmx, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        fcntl.ioctl(master, TIOCSPTLCK, struct.pack("=i", 0))
        set_size(master, rows, columns)
        slave = fcntl.ioctl(master, TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except BaseException:
        os.close(master)
        raise
    return master, slave


def number(master: int) -> int:
    """N of /dev/pts/N that belongs to a master."""
    (value,) = struct.unpack("=I", fcntl.ioctl(master, TIOCGPTN, bytes(4)))
    return int(value)


def make_controlling(fd: int) -> None:
    """Make a terminal the controlling one of this session, whose leader without a terminal the caller is (after setsid)."""
    fcntl.ioctl(fd, TIOCSCTTY, 0)
