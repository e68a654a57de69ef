# SPDX-License-Identifier: Apache-2.0
"""The process that pulls or pushes one image: `python -I -m opendsec.images.oci.worker`, started by `process`.

In two halves, as `images.worker`: the outer one waits and can be told to stop; the inner one is process 1 of a pid namespace and has a
mount namespace, so that with it go skopeo, the confined children and all that was mounted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from types import FrameType

import msgspec

from opendsec.api.errors import OpenDSecError, Unavailable
from opendsec.api.images import BuildEvent
from opendsec.images.oci.jobs import Job, Line
from opendsec.images.oci.pulling import pull
from opendsec.images.oci.pushing import push
from opendsec.kernel import abi, mounts, procfs, syscalls


def main() -> int:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    _die_with(job.parent)
    syscalls.unshare(abi.CLONE_NEWNS | abi.CLONE_NEWPID | abi.CLONE_NEWIPC)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is somebody to kill
    inner = os.fork()
    if inner == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        _inner(job)
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


def _inner(job: Job) -> None:
    status = 1
    try:
        _die_with(0)  # the parent's pid is not visible from in here: 0 as long as it lives
        os.nice(5)  # after the edge, not after everything
        os.umask(0o022)
        syscalls.mount(None, "/", None, abi.MS_REC | abi.MS_PRIVATE)
        proc = mounts.proc()  # of this pid namespace: the id maps of children are written there
        mounts.attach(proc, abi.AT_FDCWD, procfs.PROC)
        os.close(proc)
        status = _run(job)
    except BaseException:  # not Exception: nothing may leave this process but by _exit
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


def _run(job: Job) -> int:
    try:
        telling = Telling()
        with contextlib.ExitStack() as held:
            if job.verb == "pull":
                _say(Line(pulled=pull(job, telling.step, telling.bytes, held)))
            else:
                push(job, telling.step, telling.bytes, held)
                _say(Line(pushed=True))
        return 0
    except OpenDSecError as error:
        _say(Line(error=error.body()))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _say(Line(error=Unavailable("no space left for the image").body()))
    return 1


class Telling:
    """Progress to the edge, a few times a second at most."""

    def __init__(self) -> None:
        self._what, self._next = "", 0.0

    def step(self, message: str) -> None:
        _say(Line(event=BuildEvent(kind="step", message=message)))

    def bytes(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next or what != self._what or done == total:
            self._what, self._next = what, now + 0.25
            event = BuildEvent(kind="progress", message=what, what=what, done=done, total=total, done_bytes=done, total_bytes=total)
            _say(Line(event=event))


def _say(line: Line) -> None:
    data = msgspec.json.encode(line) + b"\n"
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(main())
