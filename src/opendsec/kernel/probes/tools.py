# SPDX-License-Identifier: Apache-2.0
"""What probes share: children that try something and end, descriptors that get closed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opendsec.kernel import syscalls


class Missing(Exception):
    """Raised by a probe: absent, for the reason given. An OSError means the same."""


def in_child(body: Callable[[], object], *, flags: int = 0, cgroup_fd: int | None = None) -> None:
    """Run `body` in a forked child; what it raises is raised here as `Missing`."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        pid, _ = syscalls.clone3(flags, cgroup_fd=cgroup_fd)
        if pid == 0:
            try:
                signal.alarm(10)  # a probe that hangs ends as "absent"
                body()
            except BaseException as error:
                os.write(writing, f"{error}"[:1000].encode("utf-8", "replace") or b"failed")
            finally:
                os._exit(0)
        os.close(writing)
        writing = -1
        text = b""
        while part := os.read(reading, 4096):
            text += part
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
    if text:
        raise Missing(text.decode("utf-8", "replace"))
    if status:
        raise Missing(f"the probe ended with {signal.Signals(status & 0x7F).name}")


@contextmanager
def waiting_child(flags: int = 0, cgroup_fd: int | None = None) -> Iterator[tuple[int, int]]:
    """(pid, pidfd) of a child that only waits; killed and reaped at the end."""
    pid, pidfd = syscalls.clone3(flags, cgroup_fd=cgroup_fd, want_pidfd=True)
    if pid == 0:
        try:
            while True:
                signal.pause()
        finally:
            os._exit(0)
    try:
        yield pid, pidfd
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pidfd)


@contextmanager
def closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def need(condition: object, reason: str) -> None:
    if not condition:
        raise Missing(reason)
