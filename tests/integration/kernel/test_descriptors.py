# SPDX-License-Identifier: Apache-2.0
"""Paths beneath a hostile root, terminals, watches, and what /proc says of it."""

from __future__ import annotations

import errno
import os
import select
import signal
import stat
import threading
from pathlib import Path

import pytest

from opendsec.kernel import abi, fds, inotify, mounts, procfs, syscalls, tty
from tests.integration.kernel.children import close_all, in_child, private_mounts, waiting_child
from tests.support import requires


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a trap at every corner; what must never be reached lies beside it."""
    (tmp_path / "secret").write_text("secret")
    root = tmp_path / "root"
    (root / "etc/deep").mkdir(parents=True)
    (root / "etc/secret").write_text("inside")
    (root / "secret").write_text("inside root")
    (root / "absolute").symlink_to("/etc")
    (root / "up").symlink_to("../../../../secret")
    (root / "host").symlink_to(tmp_path / "secret")
    (root / "loop").symlink_to("loop")
    (root / "magic").symlink_to("/proc/self/root")
    os.mkfifo(root / "fifo")
    return root


def read_beneath(root: Path, path: str | bytes) -> str:
    root_fd = fds.open_path(root, directory=True)
    try:
        fd = fds.beneath(root_fd, path, os.O_RDONLY)
        try:
            return os.read(fd, 100).decode()
        finally:
            os.close(fd)
    finally:
        os.close(root_fd)


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("etc/secret", "inside"),
        ("/etc/secret", "inside"),
        ("absolute/secret", "inside"),
        ("../../../etc/secret", "inside"),
        ("etc/deep/../../../../secret", "inside root"),
        ("up", "inside root"),
        (b"/secret", "inside root"),
    ],
)
def test_beneath_stays_inside(root: Path, path: str | bytes, content: str) -> None:
    assert read_beneath(root, path) == content


@pytest.mark.parametrize(
    ("path", "code"), [("host", errno.ENOENT), ("loop", errno.ELOOP), ("etc/none", errno.ENOENT), ("secret/x", errno.ENOTDIR)]
)
def test_beneath_errors_name_the_path(root: Path, path: str, code: int) -> None:
    with pytest.raises(OSError, match="openat2") as raised:
        read_beneath(root, path)
    assert (raised.value.errno, raised.value.filename) == (code, path)


def test_beneath_refuses_magic_links(root: Path) -> None:
    """A real /proc inside the root, as every sandbox has."""
    (root / "proc").mkdir()

    def body() -> None:
        private_mounts()
        mounts.attach(mounts.proc(), abi.AT_FDCWD, root / "proc")
        for path in ("magic/etc/passwd", "proc/self/root/etc/passwd", f"proc/{os.getpid()}/cwd/x", "proc/self/fd/0"):
            with pytest.raises(OSError, match="Too many levels"):
                read_beneath(root, path)

    in_child(body)


def test_beneath_while_directories_move(root: Path) -> None:
    """Renames race with "..": the kernel answers EAGAIN, and the walk is tried again; it never ends outside."""
    stop = threading.Event()
    (root / "a/b/c").mkdir(parents=True)

    def shuffle() -> None:
        while not stop.is_set():
            os.rename(root / "a/b", root / "moved")
            os.rename(root / "moved", root / "a/b")

    thread = threading.Thread(target=shuffle)
    thread.start()
    root_fd = fds.open_path(root, directory=True)
    try:
        for _ in range(300):
            try:
                fd = fds.beneath(root_fd, "a/b/c/../../../../secret", os.O_RDONLY)
            except FileNotFoundError:
                continue
            assert os.read(fd, 100) == b"inside root"
            os.close(fd)
    finally:
        stop.set()
        thread.join()
        os.close(root_fd)


def test_beneath_gives_up_after_many_races(monkeypatch: pytest.MonkeyPatch) -> None:
    def always_again(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "again")

    monkeypatch.setattr(syscalls, "openat2", always_again)
    with pytest.raises(BlockingIOError) as raised:
        fds.beneath(0, "x", os.O_RDONLY)
    assert raised.value.filename == "x"


def test_open_path_wakes_nobody_and_reopen_opens(root: Path) -> None:
    fifo = fds.open_path(root / "fifo")
    assert stat.S_ISFIFO(os.fstat(fifo).st_mode)
    link = fds.open_path(root / "up")
    assert stat.S_ISLNK(os.fstat(link).st_mode)
    directory = fds.open_path(root, directory=True)
    file = fds.open_path("secret", dir_fd=directory)
    opened = fds.reopen(file, os.O_RDONLY)
    assert os.read(opened, 100) == b"inside root"
    close_all(fifo, link, directory, file, opened)
    with pytest.raises(NotADirectoryError):
        fds.open_path(root / "secret", directory=True)


def test_sealed_memfd() -> None:
    fd = fds.sealed_memfd("name", b"data" * 1000)
    assert os.read(fd, 4) == b"data"
    for change in (lambda: os.pwrite(fd, b"x", 0), lambda: os.truncate(fd, 0), lambda: os.truncate(fd, 1 << 20)):
        with pytest.raises(PermissionError):
            change()
    os.close(fd)


@requires("memfd_exec")
def test_sealed_memfd_executes_only_if_asked() -> None:
    program = Path("/bin/true").read_bytes()
    for executable, expected in ((True, 0), (False, 13)):
        fd = fds.sealed_memfd("true", program, executable=executable)
        pid = os.fork()
        if pid == 0:
            try:
                syscalls.execveat(fd, "", ["true"], [], abi.AT_EMPTY_PATH)
            except OSError as error:
                os._exit(error.errno or 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == expected
        os.close(fd)


# --- terminals


def test_terminal_pair() -> None:
    master, slave = tty.open_pair("/dev/pts/ptmx" if os.access("/dev/pts/ptmx", os.W_OK) else "/dev/ptmx", rows=33, columns=101)
    assert tty.get_size(slave) == (33, 101)
    assert os.ttyname(slave) == f"/dev/pts/{tty.number(master)}"
    assert not os.get_inheritable(master)
    assert not os.get_inheritable(slave)
    tty.set_size(master, 10, 20)
    assert tty.get_size(slave) == (10, 20)
    for size in ((-1, 0), (0, 65_536)):
        with pytest.raises(ValueError, match="terminal size"):
            tty.set_size(master, *size)
    close_all(master, slave)
    with pytest.raises(FileNotFoundError):
        tty.open_pair("/nowhere/ptmx")


def test_controlling_terminal_gets_the_signals() -> None:
    master, slave = tty.open_pair("/dev/ptmx")

    def body() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH, signal.SIGINT])
        os.setsid()
        tty.make_controlling(slave)
        assert os.tcgetpgrp(slave) == os.getpgrp()
        tty.set_size(master, 5, 6)
        assert signal.sigwait([signal.SIGWINCH, signal.SIGINT]) == signal.SIGWINCH
        os.write(master, b"\x03")
        assert signal.sigwait([signal.SIGINT]) == signal.SIGINT

    in_child(body)
    close_all(master, slave)


# --- watches


def kinds(watcher: inotify.Watcher) -> list[tuple[str, bytes]]:
    poller = select.poll()
    poller.register(watcher, select.POLLIN)
    assert poller.poll(10_000)
    return [(kind, event.name) for event in watcher.read() for kind in event.kinds]


def test_watch(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff"
    with inotify.Watcher() as watcher:
        assert watcher.read() == []
        directory = fds.open_path(tmp_path, directory=True)
        number = watcher.add(directory)
        os.close(directory)
        with open(name, "wb") as file:
            file.write(b"x")
        assert kinds(watcher) == [("create", b"\xff"), ("modify", b"\xff"), ("close_write", b"\xff")]
        os.rename(name, tmp_path / "new")
        assert kinds(watcher) == [("moved_from", b"\xff"), ("moved_to", b"new")]
        (tmp_path / "dir").mkdir()
        (event,) = watcher.read()
        assert event.is_directory
        watcher.remove(number)
        assert kinds(watcher) == [("ignored", b"")]
        watcher.remove(number)  # again is fine
        with pytest.raises(FileNotFoundError) as raised:
            watcher.add(tmp_path / "missing")
        assert raised.value.filename == str(tmp_path / "missing")
    watcher.close()


def test_watch_does_not_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc")
    with inotify.Watcher() as watcher, pytest.raises(NotADirectoryError):
        watcher.add(tmp_path / "link", inotify.CHANGES | abi.IN_ONLYDIR)


# --- what /proc says


def test_proc_of_a_process() -> None:
    with waiting_child() as (pid, _):
        found = procfs.stat(pid)
        assert (found.pid, found.ppid, found.threads) == (pid, os.getpid(), 1)
        assert procfs.pid_start_time(pid) == found.start_time > procfs.pid_start_time(1)
        assert pid in procfs.children(os.getpid())
        assert pid in list(procfs.pids())
        assert procfs.status(pid)["Pid"] == str(pid)
        assert procfs.cmdline(pid) == procfs.cmdline("self")
        assert b"PATH" in {item.split(b"=", 1)[0] for item in procfs.environ(pid)}
        assert procfs.limits(pid)["Max open files"][0]
        assert procfs.cgroup(pid) == procfs.cgroup()
    for read in (procfs.stat, procfs.status, procfs.cmdline, procfs.fds, procfs.mountinfo):
        with pytest.raises((FileNotFoundError, ProcessLookupError)) as raised:
            read(1 << 22)
        assert str(1 << 22) in str(raised.value)


def test_open_descriptors() -> None:
    before = procfs.fds()
    fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    assert procfs.fds() == {**before, fd: b"/dev/null"}
    assert int(procfs.fd_info("self", fd)["flags"], 8) & os.O_CLOEXEC
    os.close(fd)


def test_the_machine() -> None:
    assert procfs.meminfo()["MemTotal"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert len(procfs.boot_id()) == 36
    assert "tmpfs" in procfs.filesystems()
    assert b"/" in [mount.mount_point for mount in procfs.mountinfo()]
    with pytest.raises(FileNotFoundError):
        procfs.sysctl("kernel.no_such_thing")


def test_errors_of_the_transfer_itself_name_the_file() -> None:
    with pytest.raises(OSError, match="Invalid argument") as raised:
        procfs.write("/proc/self/oom_score_adj", "nonsense")
    assert raised.value.filename == "/proc/self/oom_score_adj"
    with pytest.raises(OSError, match="Is a directory") as raised:
        procfs.read("/proc/self")
    assert raised.value.filename == "/proc/self"
