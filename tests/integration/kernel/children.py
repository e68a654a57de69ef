# SPDX-License-Identifier: Apache-2.0
"""Forked children for tests of what a process can do to itself only once."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opendsec.kernel import abi, syscalls


def in_child(body: Callable[[], object], *, flags: int = 0, cgroup_fd: int | None = None) -> None:
    """Run `body` in a child; what it raises fails the test, with the child's traceback."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid, _ = syscalls.clone3(flags, cgroup_fd=cgroup_fd)
    if pid == 0:
        try:
            body()
        except BaseException:
            os.write(writing, traceback.format_exc().encode("utf-8", "backslashreplace"))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    assert not text, f"in the child:\n{text}"
    assert status == 0, f"the child ended with wait status {status}"


@contextmanager
def waiting_child(*, flags: int = 0, cgroup_fd: int | None = None, join: Callable[[], None] | None = None) -> Iterator[tuple[int, int]]:
    """(pid, pidfd) of a child that does `join` and then waits; it is gone at the end."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid, pidfd = syscalls.clone3(flags, cgroup_fd=cgroup_fd, want_pidfd=True)
    if pid == 0:
        try:
            if join is not None:
                join()
            os.write(writing, b"x")
            while True:
                signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        ready = os.read(reading, 1)
        assert ready, "the child did not get ready"
        yield pid, pidfd
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pidfd)


def private_mounts() -> None:
    """For a child: a mount namespace of its own, from which nothing gets out."""
    syscalls.unshare(abi.CLONE_NEWNS)
    syscalls.mount(None, "/", None, abi.MS_REC | abi.MS_PRIVATE)


def close_all(*fds: int) -> None:
    for fd in fds:
        os.close(fd)
