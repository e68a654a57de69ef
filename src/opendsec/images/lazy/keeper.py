# SPDX-License-Identifier: Apache-2.0
"""The family, started by `client`.

    senior keeper ──── junior keeper        each sleeps until another one ends
          └─────── loader                   does all the work

All three have the *same* descriptor table (`fds.fork_sharing`) and the same `board`. So with any one of them killed nothing is closed:
not the fanotify group, whose end would let every waiting reader read holes; not the descriptors of the events that the loader had read
and not answered; not the socket that the edge connects to. The senior replaces a loader or a junior that ended; the junior becomes the
senior when that ends. Nothing here but the loader may crash by a bug in loading, and a loader that keeps crashing is not started again
at once: meanwhile the senior refuses all readers, who get EIO and not a wait without end.

The edge holds the group too. If it outlives the whole family it starts the next one with it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import sys
import time
import traceback
from typing import NoReturn

import msgspec

from opendsec.images.lazy import loader  # here, so that a successor is a fork away
from opendsec.images.lazy.board import MAX_FDS, Board
from opendsec.images.lazy.loader import Family, Job
from opendsec.kernel import fds, fuse, procfs
from opendsec.kernel.fanotify import Group
from opendsec.kernel.fuse import Request

CRASHES, CRASHES_WITHIN_S, REFUSE_S = 5, 20.0, 5.0


def main() -> NoReturn:
    job = msgspec.json.decode(sys.argv[1], type=Job)
    # SIGIO: a lease of a file that somebody opens (`fds.held_by_others`). The others: the family ends when nobody needs it.
    for number in (signal.SIGIO, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FDS, MAX_FDS))
    with contextlib.suppress(OSError):
        procfs.write(procfs.path_of("self", "oom_score_adj"), "-1000")
    os.chdir("/")
    board = Board()
    group = None
    if job.mechanism == "fanotify":
        group = Group(job.group) if job.group >= 0 else Group.create()
        if job.group >= 0:
            # Who waits is not known any more. Most ask again, and get the right bytes then.
            group.deny_all_known(MAX_FDS)
            board.set("adopted", 1)
    _be_senior(Family(job=job, board=board, group=group, listener=job.listener, lock=job.lock))


def _be_senior(family: Family) -> NoReturn:
    board = family.board
    board.set("senior_pidfd", os.pidfd_open(os.getpid()))
    crashes: list[float] = []
    while True:
        if not _alive(board.get("junior_pidfd")):
            _replace(board, "junior_pidfd", _fork_junior(family))
        if not _alive(board.get("loader_pidfd")):
            if board.get("ending"):
                os._exit(0)
            now = time.monotonic()
            crashes = [at for at in crashes if at > now - CRASHES_WITHIN_S]
            if len(crashes) >= CRASHES:
                _refuse(family, REFUSE_S)
            crashes.append(now)
            pid, pidfd = _fork_loader(family)
            _replace(board, "loader_pidfd", pidfd)
            board.set("loader_pid", pid)
        poll = select.poll()
        for field in ("junior_pidfd", "loader_pidfd"):
            poll.register(board.get(field), select.POLLIN)
        poll.poll()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _be_junior(family: Family) -> NoReturn:
    poll = select.poll()
    poll.register(family.board.get("senior_pidfd"), select.POLLIN)
    poll.poll()
    if family.board.get("ending") and not _alive(family.board.get("loader_pidfd")):
        os._exit(0)
    _close(family.board.get("senior_pidfd"))
    family.board.set("junior_pidfd", -1)
    _be_senior(family)


def _fork_junior(family: Family) -> int:
    pid, pidfd = fds.fork_sharing()
    if pid == 0:
        try:
            _be_junior(family)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pidfd


def _fork_loader(family: Family) -> tuple[int, int]:
    senior = os.getpid()
    pid, pidfd = fds.fork_sharing()
    if pid == 0:
        status = 1
        try:
            # Not before it is on the board: should the senior die now, its successor would start another one, and there must not be two.
            while family.board.get("loader_pid") != os.getpid():
                if os.getppid() != senior:
                    os._exit(1)
                time.sleep(0.0005)
            status = loader.run(family)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid, pidfd


def _replace(board: Board, field: str, pidfd: int) -> None:
    old = board.get(field)
    board.set(field, pidfd)
    _close(old)


def _alive(pidfd: int) -> bool:
    if pidfd < 0:
        return False
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return not poll.poll(0)


def _close(fd: int) -> None:
    if fd >= 0:
        with contextlib.suppress(OSError):
            os.close(fd)


def _refuse(family: Family, seconds: float) -> None:
    """Answer every reader with EIO for a while."""
    if family.group is None:
        _refuse_fuse(family.board, seconds)
        return
    for event in family.board.recover():
        family.group.deny(event.fd, errno.EIO)
        family.board.forget(event.fd)
        _close(event.fd)
    end = time.monotonic() + seconds
    poll = select.poll()
    poll.register(family.group.fd, select.POLLIN)
    while (left := end - time.monotonic()) > 0:
        if poll.poll(left * 1000):
            for event in family.board.after_read(family.group.read(family.board.before_read())):
                family.group.deny(event.fd, errno.EIO)
                family.board.forget(event.fd)
                _close(event.fd)


def _refuse_fuse(board: Board, seconds: float) -> None:
    if board.get("fuse") < 0:
        time.sleep(seconds)
        return
    device = board.fuse()[0]
    for number, unique, *_ in board.asked():
        fuse.refuse(device, unique, errno.EIO)
        board.forget_asked(number)
    if board.unsettled():
        _refuse_request(device, Request(board.raw))
    board.settled()
    end = time.monotonic() + seconds
    poll = select.poll()
    poll.register(device, select.POLLIN)
    while (left := end - time.monotonic()) > 0:
        if poll.poll(left * 1000) and fuse.receive(device, board.before_read()):
            _refuse_request(device, Request(board.raw))
        board.settled()


def _refuse_request(device: int, request: Request) -> None:
    if request.opcode == fuse.INIT:
        fuse.reply(device, request.unique, fuse.init_answer(request))
    elif request.opcode not in fuse.SILENT:
        fuse.refuse(device, request.unique, errno.EIO)
