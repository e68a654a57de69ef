# SPDX-License-Identifier: Apache-2.0
"""Credentials of one thread: what it may do inside, and that it is itself again afterwards."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from opendsec.kernel import capabilities, fds, fsuser, syscalls
from opendsec.kernel.fsuser import FILE_CAPABILITIES, FsUser


def mine() -> tuple[int, list[str]]:
    """Effective capabilities, and all the ids of this thread."""
    status = Path("/proc/thread-self/status").read_text().splitlines()
    return syscalls.capget()[0], [line for line in status if line.startswith(("Uid", "Gid"))]


def test_new_files_belong_to_the_user(tmp_path: Path) -> None:
    before = mine()
    with FsUser(3_000_001, 3_000_002) as user:
        (tmp_path / "one").touch()
        user.become(3_000_003, 3_000_004)
        (tmp_path / "two").touch()
        with user.suspended():
            (tmp_path / "three").touch()
            assert mine() == before
        (tmp_path / "four").touch()
    assert mine() == before
    owners = [(s.st_uid, s.st_gid) for s in ((tmp_path / name).stat() for name in ("one", "two", "three", "four"))]
    assert owners == [(3_000_001, 3_000_002), (3_000_003, 3_000_004), (0, 0), (3_000_003, 3_000_004)]


def test_capabilities(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    secret.chmod(0o600)
    tmp_path.chmod(0o755)
    fd = fds.open_path(secret)
    try:
        with FsUser(3_000_000, 3_000_000) as user:
            assert syscalls.capget()[0] == FILE_CAPABILITIES
            assert not set(capabilities.names(FILE_CAPABILITIES)) & {"CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_SYS_RAWIO", "CAP_SYSLOG"}
            os.close(fds.reopen(fd, os.O_RDONLY))
            with user.bare():
                assert syscalls.capget()[0] == 0
                with pytest.raises(PermissionError):
                    fds.reopen(fd, os.O_RDONLY)
            assert syscalls.capget()[0] == FILE_CAPABILITIES
    finally:
        os.close(fd)


def test_an_exception_anywhere_inside() -> None:
    before = mine()
    for context in ("bare", "suspended"):
        with pytest.raises(ZeroDivisionError), FsUser(3_000_000, 3_000_000) as user, getattr(user, context)():
            raise ZeroDivisionError
        assert mine() == before


def test_a_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the three it is, going in: the thread is what it was."""
    before = mine()
    for name in ("setfsgid", "setfsuid"):
        real = getattr(syscalls, name)

        def fail(number: int, real: object = real) -> None:
            if number == 3_000_000:
                raise OSError(1, "Operation not permitted")
            assert callable(real)
            real(number)

        with monkeypatch.context() as patch:
            patch.setattr(syscalls, name, fail)
            with pytest.raises(PermissionError):
                FsUser(3_000_000, 3_000_000).__enter__()
        assert mine() == before


def test_other_threads_are_left_alone() -> None:
    seen: list[tuple[int, list[str]]] = []
    before = mine()
    with FsUser(3_000_000, 3_000_000):
        thread = threading.Thread(target=lambda: seen.append(mine()))
        with_thread_born_inside = mine()
        thread.start()
        thread.join()
    # A new thread starts with its parent's credentials, as ever; one that was there before keeps its own.
    assert seen == [with_thread_born_inside]
    go, done = threading.Event(), threading.Event()

    def wait() -> None:
        go.wait()
        seen.append(mine())
        done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    with FsUser(3_000_000, 3_000_000):
        go.set()
        done.wait()
    thread.join()
    assert seen[1] == before


def test_by_descriptor(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        fd = fds.open_path(tmp_path / name)
        fsuser.chown_path(fd, 5, 6)
        s = os.fstat(fd)
        assert (s.st_uid, s.st_gid) == (5, 6)
        if name == "file":
            fsuser.chmod_path(fd, 0o4711)
            assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o4711
        os.close(fd)


def test_mounts_have_numbers(tmp_path: Path) -> None:
    numbers = []
    for path in (tmp_path, tmp_path.parent, Path("/proc"), Path("/dev/shm")):
        fd = fds.open_path(path)
        numbers.append(fsuser.statx_mnt_id(fd))
        os.close(fd)
    assert numbers[0] == numbers[1]
    assert len(set(numbers)) == 3
