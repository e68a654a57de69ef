# SPDX-License-Identifier: Apache-2.0
"""Walking a hostile tree of any depth with one descriptor, and removing one.

Neither the call stack nor the table of descriptors grows with depth. Going down is an ordinary open of one entry. Going up is
"..", and that is the dangerous half: the directory may have been moved, and then its parent is another. So the walker notes
device and inode of every directory it went through, and a parent that is not the noted one ends the walk (Conflict). While a
directory is held its ancestors stay in memory, so an inode number cannot have been given to another file meanwhile.

The sandbox can add entries as fast as we remove them. It gains nothing but its own time: work is bounded by `MAX_ENTRIES`, and
`alive` is asked every so often, so that a walk ends when the sandbox does.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from opendsec.api.errors import Conflict
from opendsec.kernel import abi, syscalls
from opendsec.runtime.files.beneath import ENTRY, text

MAX_ENTRIES = 20_000_000
ALIVE_EVERY = 4096
MAX_SUBDIRECTORIES = 16_384  # names of subdirectories kept of one directory at a time
MAX_PENDING = 200_000  # … and of all directories on the way down together

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class Cursor:
    """A position in a tree. `fd` is an open directory, changed by `enter` and `leave`; the walker owns it."""

    __slots__ = ("_trail", "fd")

    def __init__(self, start: int) -> None:
        """`start` (any descriptor of a directory) stays the caller's."""
        self.fd = syscalls.openat2(start, b".", _DIRECTORY, 0, ENTRY)
        self._trail: list[tuple[int, int]] = []

    @property
    def depth(self) -> int:
        return len(self._trail)

    def enter(self, name: bytes) -> None:
        """Go down. Raises OSError (ENOENT, ENOTDIR, ELOOP, EXDEV for a mount point) and stays."""
        child = syscalls.openat2(self.fd, name, _DIRECTORY, 0, ENTRY)
        st = os.fstat(self.fd)
        os.close(self.fd)
        self.fd = child
        self._trail.append((st.st_dev, st.st_ino))

    def leave(self) -> None:
        """Go back up. Raises Conflict if the directory was moved meanwhile, and stays."""
        parent = syscalls.openat2(self.fd, b"..", _DIRECTORY, 0, abi.RESOLVE_NO_XDEV | abi.RESOLVE_NO_SYMLINKS | abi.RESOLVE_NO_MAGICLINKS)
        st = os.fstat(parent)
        if (st.st_dev, st.st_ino) != self._trail[-1]:
            os.close(parent)
            raise Conflict("a directory was moved while its tree was worked on")
        self._trail.pop()
        os.close(self.fd)
        self.fd = parent

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def __enter__(self) -> Cursor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Ticker:
    """Counts steps; asks now and then whether the sandbox lives; ends what never ends."""

    __slots__ = ("_alive", "count")

    def __init__(self, alive: Callable[[], None]) -> None:
        self._alive = alive
        self.count = 0

    def step(self) -> None:
        self.count += 1
        if self.count % ALIVE_EVERY == 0:
            self._alive()
            if self.count > MAX_ENTRIES:
                raise Conflict(f"gave up after {MAX_ENTRIES} entries: something inside keeps making new ones")


class _Level:
    """A directory on the way down: its name in its parent, and subdirectories still to be removed."""

    __slots__ = ("name", "subdirectories")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.subdirectories: list[bytes] = []


def remove_tree(parent: int, name: bytes, alive: Callable[[], None]) -> None:
    """Remove directory `name` of `parent` with all that is in it, never over a symlink, never into another mount.

    Raises OSError (EXDEV, EBUSY: a mount point inside; ENOENT: `name` is gone) and Conflict; what was removed stays removed.
    """
    ticker = Ticker(alive)
    with Cursor(parent) as cursor:
        cursor.enter(name)
        levels = [_Level(name)]
        pending = _sweep(cursor, levels[0], ticker, 0)
        while levels:
            level = levels[-1]
            if level.subdirectories:
                child = level.subdirectories.pop()
                pending -= 1
                try:
                    cursor.enter(child)
                except OSError as error:
                    if error.errno in (errno.ENOTDIR, errno.ELOOP):
                        _unlink(cursor.fd, child)
                    elif error.errno != errno.ENOENT:
                        raise
                    continue
                levels.append(_Level(child))
                pending += _sweep(cursor, levels[-1], ticker, pending)
                continue
            cursor.leave()
            ticker.step()
            try:
                os.rmdir(level.name, dir_fd=cursor.fd)
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
                # More subdirectories than one sweep notes, or somebody makes new entries: once more.
                cursor.enter(level.name)
                pending += _sweep(cursor, level, ticker, pending)
                continue
            levels.pop()


def _sweep(cursor: Cursor, level: _Level, ticker: Ticker, pending: int) -> int:
    """Unlink all that is no directory, note subdirectories for later; how many. Always at least one, if there is any."""
    room = max(1, min(MAX_SUBDIRECTORIES, MAX_PENDING - pending))
    with os.scandir(cursor.fd) as entries:
        for entry in entries:
            ticker.step()
            name = os.fsencode(entry.name)
            if entry.is_dir(follow_symlinks=False) or not _unlink(cursor.fd, name):
                level.subdirectories.append(name)
            if len(level.subdirectories) >= room:
                break  # the rest is still there for the next sweep
    return len(level.subdirectories)


def _unlink(directory: int, name: bytes) -> bool:
    """Whether `name` is gone; False if it is a directory by now."""
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        return False
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), text(name)) from None
    return True
