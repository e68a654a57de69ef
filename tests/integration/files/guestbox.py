# SPDX-License-Identifier: Apache-2.0
"""The same box, whose files are reached through guestd and its channel. guestd has the box's ids and root, and this machine's /dev."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import threading
from collections.abc import Coroutine
from typing import TypeVar

from opendsec.runtime.guest import Channel
from tests.hostguest import GUESTD
from tests.integration.files.box import Box

T = TypeVar("T")

DEVIATIONS = {
    "test_without_unnamed_files": "guestd writes where files without a name can be made",
    "test_an_aborted_append_leaves_what_others_wrote": "what is written is under way for a moment",
    "test_a_file_cut_while_it_is_appended_to": "what is written is under way for a moment",
    "test_a_file_that_is_cut_while_it_is_read": "what is read is under way for a moment",
    "test_a_mount_point_is_not_removed": "the box's mounts are none of the mount namespace that guestd is in here",
    "test_a_missing_directory": "a name '..' below what is missing is malformed, not missing",
    "test_owners_and_modes": "in a machine all ids are there",
    "test_others_private_files": "guestd is not confined to the rights of root over its own files",
    "test_mounts_are_left_out": "the box's mounts are none of the mount namespace that guestd is in here",
    "test_more_levels_than_a_path_can_have": "guestd names what is as deep as a path can be",
    "test_member_names_longer_than_a_path": "guestd names what is as deep as a path can be",
    "test_what_cannot_be_watched": "whatever is in a machine may be watched: it is its own",
    "test_too_many_watches": "the limit is the guest's",
    "test_more_events_than_the_kernel_keeps": "there are other bounds on the way",
    "test_a_directory_that_goes_among_more_events_than_the_kernel_keeps": "there are other bounds on the way",
}


class GuestBox(Box):
    """`files` through the channel."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._guest: Channel | None = None
        super().__init__("host")
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        root, program = self.open_root(), os.open(GUESTD, os.O_RDONLY)
        with theirs:
            held = (root, program, theirs.fileno())
            enter = ("nsenter", f"--target={self.pid}", "--user", "--", f"/proc/self/fd/{program}")
            self._guestd = subprocess.Popen(
                [*enter, "--fd", str(theirs.fileno()), "--root", f"/proc/self/fd/{root}"], pass_fds=held, stdin=subprocess.DEVNULL
            )
        os.close(root)
        os.close(program)
        self._guest = self._do(Channel.open(ours))
        self.files = self._guest.files  # type: ignore[assignment]

    def _do(self, work: Coroutine[None, None, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _close_channel(self) -> None:
        if self._guest is not None:
            self._guest.close()

    def close(self) -> None:
        if self._guest is not None:
            self._do(self._close_channel())
            self._guestd.wait(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        super().close()
