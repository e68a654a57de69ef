# SPDX-License-Identifier: Apache-2.0
"""Changes of one directory, from inotify on its descriptor."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Literal

from opendsec.api.errors import Unavailable
from opendsec.api.files import WatchEvent
from opendsec.kernel import abi, inotify

_MASK = inotify.CHANGES | abi.IN_ONLYDIR
_GONE = abi.IN_DELETE_SELF | abi.IN_MOVE_SELF | abi.IN_UNMOUNT | abi.IN_IGNORED
_KINDS: tuple[tuple[int, Literal["created", "modified", "deleted", "moved_from", "moved_to", "attributes"]], ...] = (
    (abi.IN_CREATE, "created"),
    (abi.IN_MODIFY | abi.IN_CLOSE_WRITE, "modified"),
    (abi.IN_DELETE, "deleted"),
    (abi.IN_MOVED_FROM, "moved_from"),
    (abi.IN_MOVED_TO, "moved_to"),
    (abi.IN_ATTRIB, "attributes"),
)


class DirectoryWatch:
    """A watched directory. Nothing is missed from the moment it exists, so its holder can tell a client `ready` then.

    After `gone` (the directory was removed, moved or unmounted) nothing more comes. After `overflow` events were lost: look
    at the directory anew.
    """

    def __init__(self, directory: int) -> None:
        """`directory`: any descriptor of it, the caller's. Raises Unavailable when the machine's limit of watches is reached."""
        self._ended = False
        try:
            self._watcher = inotify.Watcher()
        except OSError as error:
            raise _too_many(error) from error
        try:
            self._watcher.add(directory, _MASK)
        except OSError as error:
            self._watcher.close()
            if error.errno == errno.ENOSPC:
                raise _too_many(error) from error
            raise

    def fileno(self) -> int:
        return self._watcher.fileno()

    def read(self) -> Sequence[WatchEvent]:
        """What has happened so far; never waits. Repetitions of one event in a row are one."""
        events: list[WatchEvent] = []
        for event in () if self._ended else self._watcher.read():
            if event.mask & abi.IN_Q_OVERFLOW:
                events.append(WatchEvent(kind="overflow"))
                if not self._watcher.watching():  # and that was among what was lost
                    events.append(WatchEvent(kind="gone"))
                    self._ended = True
                    break
            elif event.mask & _GONE:
                events.append(WatchEvent(kind="gone"))
                self._ended = True
                break
            else:
                kinds = (kind for bits, kind in _KINDS if event.mask & bits)
                new = [WatchEvent(kind=kind, name=event.name.decode("utf-8", "replace"), raw_name=event.name) for kind in kinds]
                events += [item for item in new if not events or item != events[-1]]
        return events

    def close(self) -> None:
        self._ended = True
        self._watcher.close()


def _too_many(error: OSError) -> Unavailable:
    return Unavailable(f"no further directory can be watched on this machine: {os.strerror(error.errno or 0)}")
