# SPDX-License-Identifier: Apache-2.0
"""A job that a process of its own does for the edge: what the two say to each other, and the process's own side. The edge's: `process`.

A process of its own, because such a job walks, hashes and waits for minutes, and because everything it starts and mounts must be gone
when it is cancelled, when it crashes and when the edge is killed. So it has two halves:

    outer    the edge's child; SIGTERM makes it kill the inner half, wait until that is gone, and exit
    inner    process 1 of a pid namespace, in a mount namespace: with it go all that it started and all that it mounted

Each half dies with its parent (PR_SET_PDEATHSIG). In comes one `Job` as JSON on standard input; out go `Line`s, one JSON object a
line: progress, and last what was made, or an error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

import msgspec

from opendsec.api.errors import ErrorBody, OpenDSecError, Unavailable
from opendsec.api.images import BuildEvent
from opendsec.kernel import abi, fds, mounts, procfs, syscalls

_TELL_S = 0.25  # between two events about how far something is


class Job(msgspec.Struct, frozen=True, kw_only=True):
    work: str  # an empty directory; the store it belongs to lies above
    store: str
    parent: int  # the edge's pid


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    event: BuildEvent | None = None
    error: ErrorBody | None = None


J = TypeVar("J", bound=Job)


def main(kind: type[J], work: Callable[[J], None]) -> int:
    """Read a job and have `work` do it, which says what it made. Its status for the end of the process."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=kind)
    _die_with(job.parent)
    syscalls.unshare(abi.CLONE_NEWNS | abi.CLONE_NEWPID | abi.CLONE_NEWIPC)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is somebody to kill
    inner = os.fork()
    if inner == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        _inner(job, work)
    pidfd = os.pidfd_open(inner)

    def stop(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    # The wait for process 1 of a pid namespace ends only when all others in it are gone.
    _, status = os.waitpid(inner, 0)
    return os.waitstatus_to_exitcode(status) & 0xFF


def _die_with(parent: int) -> None:
    syscalls.prctl(abi.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before the call


def _inner(job: J, work: Callable[[J], None]) -> None:
    status = 1
    try:
        _die_with(0)  # the parent's pid is not visible from in here: 0 as long as it lives
        os.nice(5)  # after the edge, not after everything
        os.umask(0o022)
        syscalls.mount(None, "/", None, abi.MS_REC | abi.MS_PRIVATE)
        _own_proc()
        status = _done(job, work)
    except BaseException:  # not Exception: nothing may leave this process but by _exit
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


def _own_proc() -> None:
    """In place of the parent's, in which the processes of this pid namespace have other numbers: id maps are written there."""
    proc = mounts.proc()
    try:
        mounts.attach(proc, abi.AT_FDCWD, procfs.PROC)
    finally:
        os.close(proc)


def _done(job: J, work: Callable[[J], None]) -> int:
    try:
        work(job)
        return 0
    except OpenDSecError as error:
        say(Line(error=error.body()))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        say(Line(error=Unavailable("no space left for the image").body()))
    return 1


def say(line: Line) -> None:
    fds.write_all(1, msgspec.json.encode(line) + b"\n")


class Telling:
    """Progress to the edge; of how far something is, a few times a second at most."""

    def __init__(self) -> None:
        self._what, self._next = "", 0.0

    def step(self, message: str) -> None:
        say(Line(event=BuildEvent(kind="step", message=message)))

    def log(self, message: str) -> None:
        say(Line(event=BuildEvent(kind="log", message=message)))

    def bytes(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next or what != self._what or done == total:
            self._what, self._next = what, now + _TELL_S
            event = BuildEvent(kind="progress", message=what, what=what, done=done, total=total, done_bytes=done, total_bytes=total)
            say(Line(event=event))
