# SPDX-License-Identifier: Apache-2.0
"""Each wrapper does its real thing, and its error names the call and the path."""

from __future__ import annotations

import errno
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from opendsec.kernel import abi, procfs, syscalls
from tests.integration.kernel.children import close_all, in_child, private_mounts, waiting_child

ODD = b"not-utf8-\xff\xfe name"


def read_comm() -> bytes:
    return procfs.read("/proc/self/comm").strip()


# --- processes


def test_clone3_gives_pid_and_pidfd() -> None:
    with waiting_child() as (pid, pidfd):
        assert procfs.stat(pid).ppid == os.getpid()
        assert procfs.fd_info("self", pidfd)["Pid"] == str(pid)
        assert not os.get_inheritable(pidfd)
    pid, none = syscalls.clone3(0)
    if pid == 0:
        os._exit(7)
    assert none == -1
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_clone3_into_namespaces() -> None:
    def body() -> None:
        assert os.getpid() == 1
        syscalls.sethostname(b"inside-\xff")
        assert os.fsencode(os.uname().nodename) == b"inside-\xff"

    before = os.uname().nodename
    in_child(body, flags=abi.CLONE_NEWPID | abi.CLONE_NEWUTS)
    assert os.uname().nodename == before


def test_clone3_refuses_what_python_cannot_do() -> None:
    for flag in (abi.CLONE_VM, abi.CLONE_THREAD):
        with pytest.raises(ValueError, match="clone3"):
            syscalls.clone3(flag)
    with pytest.raises(OSError, match="clone3: Invalid argument"):
        syscalls.clone3(1 << 60)
    with pytest.raises(OSError, match="clone3") as raised, open("/dev/null") as file:
        syscalls.clone3(0, cgroup_fd=file.fileno())
    assert raised.value.errno == errno.EBADF


def test_setns_by_pidfd() -> None:
    with waiting_child(flags=abi.CLONE_NEWUTS | abi.CLONE_NEWIPC) as (pid, pidfd):

        def body() -> None:
            syscalls.setns(pidfd, abi.CLONE_NEWUTS | abi.CLONE_NEWIPC)
            for name in ("uts", "ipc"):
                assert os.stat(f"/proc/self/ns/{name}").st_ino == os.stat(f"/proc/{pid}/ns/{name}").st_ino

        in_child(body)
    with pytest.raises(OSError, match="setns"):
        syscalls.setns(-1, 0)


def test_unshare_error() -> None:
    with pytest.raises(OSError, match="unshare: Invalid argument"):
        syscalls.unshare(1)


def test_pidfd_calls() -> None:
    with waiting_child() as (pid, _):
        pidfd = syscalls.pidfd_open(pid)
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        assert not poller.poll(0)
        copy = syscalls.pidfd_getfd(pidfd, 1)
        assert os.path.samestat(os.fstat(copy), os.stat(f"/proc/{pid}/fd/1"))
        syscalls.pidfd_send_signal(pidfd, 0)
        syscalls.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert poller.poll(10_000)
        with pytest.raises(OSError, match="pidfd_getfd"):
            syscalls.pidfd_getfd(pidfd, 999)
        close_all(pidfd, copy)
    with pytest.raises(ProcessLookupError, match="pidfd_open"):
        syscalls.pidfd_open(1 << 22)
    with pytest.raises(OSError, match="pidfd_send_signal"):
        syscalls.pidfd_send_signal(0, 0)


def test_execveat_carries_bytes() -> None:
    reading, writing = os.pipe2(os.O_CLOEXEC)
    with open("/bin/sh", "rb") as program:
        fd = os.dup(program.fileno())
    pid, _ = syscalls.clone3(0)
    if pid == 0:
        try:
            os.dup2(writing, 1, inheritable=True)
            syscalls.execveat(fd, "", ["sh", "-c", 'printf %s "$1$V"', "sh", ODD], ["PATH=/bin", b"V=\xfe"], abi.AT_EMPTY_PATH)
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert pipe.read() == ODD + b"\xfe"
    assert os.waitpid(pid, 0)[1] == 0
    os.close(fd)
    with pytest.raises(FileNotFoundError, match="execveat") as raised:
        syscalls.execveat(abi.AT_FDCWD, b"/nowhere/\xff", ["x"], [])
    assert os.fsencode(raised.value.filename) == b"/nowhere/\xff"
    with pytest.raises(ValueError, match="null byte"):
        syscalls.execveat(abi.AT_FDCWD, "/bin/true", ["a\0b"], [])


def test_prctl() -> None:
    def body() -> None:
        syscalls.prctl(abi.PR_SET_NAME, b"renamed")
        assert read_comm() == b"renamed"
        assert syscalls.prctl(abi.PR_GET_NO_NEW_PRIVS) == 0
        syscalls.prctl(abi.PR_SET_NO_NEW_PRIVS, 1)
        assert syscalls.prctl(abi.PR_GET_NO_NEW_PRIVS) == 1

    in_child(body)
    with pytest.raises(OSError, match="prctl"):
        syscalls.prctl(99999)


def test_sethostname_error() -> None:
    with pytest.raises(OSError, match="sethostname"):
        syscalls.sethostname(b"x" * 100)


def test_capget_and_capset() -> None:
    fields = procfs.status("self")
    effective, permitted, inheritable = syscalls.capget()
    assert [effective, permitted, inheritable] == [int(fields[name], 16) for name in ("CapEff", "CapPrm", "CapInh")]

    def body() -> None:
        syscalls.capset(1 << 40, 1 << 40 | 1 << 0, 0)
        assert syscalls.capget() == (1 << 40, 1 << 40 | 1, 0)
        with pytest.raises(PermissionError, match="capset"):
            syscalls.capset(1 << 5, 1 << 5, 0)

    in_child(body)
    with pytest.raises(ProcessLookupError, match="capget"):
        syscalls.capget(1 << 22)


# --- mounts


def test_mount_and_umount2(tmp_path: Path) -> None:
    where = os.fsencode(tmp_path) + b"/" + ODD
    os.mkdir(where)

    def body() -> None:
        private_mounts()
        syscalls.mount("none", where, "tmpfs", abi.MS_NOSUID, "size=64k")
        (mount,) = [m for m in procfs.mountinfo() if m.mount_point == where]
        assert (mount.fstype, "nosuid" in mount.options, "size=64k" in mount.super_options) == ("tmpfs", True, True)
        syscalls.umount2(where)
        assert where not in [m.mount_point for m in procfs.mountinfo()]
        with pytest.raises(OSError, match="umount2") as raised:
            syscalls.umount2(where)
        assert os.fsencode(raised.value.filename) == where

    in_child(body)
    missing = tmp_path / "missing"
    with pytest.raises(FileNotFoundError, match="mount") as raised:
        syscalls.mount("none", missing, "tmpfs")
    assert raised.value.filename == str(missing)


def test_pivot_root(tmp_path: Path) -> None:
    def body() -> None:
        private_mounts()
        syscalls.mount("none", tmp_path, "tmpfs")
        os.chdir(tmp_path)
        (tmp_path / "here").touch()
        syscalls.pivot_root(".", ".")
        syscalls.umount2(".", abi.MNT_DETACH)
        assert os.listdir("/") == ["here"]

    in_child(body)
    with pytest.raises(OSError, match="pivot_root") as raised:
        syscalls.pivot_root(tmp_path / "a", tmp_path / "b")
    assert raised.value.filename == str(tmp_path / "a")


def test_file_system_contexts() -> None:
    context = syscalls.fsopen("tmpfs")
    syscalls.fsconfig_set_string(context, "size", "64k")
    syscalls.fsconfig_set_flag(context, "ro")
    syscalls.fsconfig_create(context)
    mount = syscalls.fsmount(context, abi.MOUNT_ATTR_NOEXEC)
    assert syscalls.fstatfs_type(mount) == abi.TMPFS_MAGIC
    flags = os.fstatvfs(mount).f_flag
    assert flags & os.ST_NOEXEC
    assert flags & os.ST_RDONLY
    assert not os.get_inheritable(mount)
    close_all(context, mount)


def test_file_system_context_errors_say_what_the_file_system_said() -> None:
    with pytest.raises(OSError, match="fsopen: No such device") as raised:
        syscalls.fsopen("nonesuch")
    assert raised.value.filename == "nonesuch"
    context = syscalls.fsopen("overlay")
    with pytest.raises(OSError, match=r"fsconfig: Invalid argument \(overlay: Unknown parameter 'bogus'\)"):
        syscalls.fsconfig_set_string(context, "bogus", "1")
    with pytest.raises(OSError, match="fsconfig"):
        syscalls.fsconfig_set_fd(context, "lowerdir+", 9999)
    with pytest.raises(OSError, match="fsconfig"):
        syscalls.fsconfig_set_flag(context, "bogus")
    with pytest.raises(OSError, match="fsconfig"):
        syscalls.fsconfig_create(context)
    with pytest.raises(OSError, match="fsmount"):
        syscalls.fsmount(context)
    os.close(context)


def test_trees_move_and_change(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/file").touch()
    (tmp_path / "b").mkdir()

    def body() -> None:
        private_mounts()
        tree = syscalls.open_tree(abi.AT_FDCWD, tmp_path / "a", abi.OPEN_TREE_CLONE)
        syscalls.mount_setattr(tree, "", abi.AT_EMPTY_PATH, set=abi.MOUNT_ATTR_RDONLY)
        syscalls.move_mount(tree, "", abi.AT_FDCWD, tmp_path / "b", abi.MOVE_MOUNT_F_EMPTY_PATH)
        assert os.listdir(tmp_path / "b") == ["file"]
        with pytest.raises(OSError, match="Read-only"):
            (tmp_path / "b/other").touch()
        syscalls.mount_setattr(abi.AT_FDCWD, tmp_path / "b", 0, clear=abi.MOUNT_ATTR_RDONLY)
        (tmp_path / "b/other").touch()

    in_child(body)
    missing = str(tmp_path / "missing")
    errors: list[Callable[[], object]] = [
        lambda: syscalls.open_tree(abi.AT_FDCWD, missing, 0),
        lambda: syscalls.move_mount(abi.AT_FDCWD, "/", abi.AT_FDCWD, missing),
        lambda: syscalls.mount_setattr(abi.AT_FDCWD, missing, 0, set=abi.MOUNT_ATTR_RDONLY),
    ]
    for call in errors:
        with pytest.raises(FileNotFoundError) as raised:
            call()
        assert raised.value.filename == missing


# --- files


def test_openat2(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    fd = syscalls.openat2(abi.AT_FDCWD, os.fsencode(tmp_path) + b"/" + ODD, os.O_CREAT | os.O_WRONLY, 0o640)
    assert os.fstat(fd).st_mode & 0o777 == 0o640
    assert not os.get_inheritable(fd)
    os.close(fd)
    with pytest.raises(OSError, match="openat2: Too many levels") as raised:
        syscalls.openat2(abi.AT_FDCWD, tmp_path / "link", os.O_RDONLY, 0, abi.RESOLVE_NO_SYMLINKS)
    assert raised.value.filename == str(tmp_path / "link")
    with pytest.raises(ValueError, match="null byte"):
        syscalls.openat2(abi.AT_FDCWD, "a\0b", os.O_RDONLY)


def test_close_range() -> None:
    def body() -> None:
        fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
        syscalls.close_range(min(fds))
        for fd in fds:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)

    in_child(body)
    with pytest.raises(OSError, match="close_range"):
        syscalls.close_range(5, 4)


def test_renameat2(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    with pytest.raises(FileExistsError, match="renameat2") as raised:
        syscalls.renameat2(abi.AT_FDCWD, tmp_path / "a", abi.AT_FDCWD, tmp_path / "b", abi.RENAME_NOREPLACE)
    assert raised.value.filename == str(tmp_path / "a")
    syscalls.renameat2(abi.AT_FDCWD, tmp_path / "a", abi.AT_FDCWD, tmp_path / "b", abi.RENAME_EXCHANGE)
    assert (tmp_path / "a").read_text() == "b"


def test_linkat_gives_a_name_to_a_nameless_file(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    os.write(fd, b"whole")
    syscalls.linkat(fd, "", abi.AT_FDCWD, tmp_path / "named", abi.AT_EMPTY_PATH)
    assert (tmp_path / "named").read_text() == "whole"
    with pytest.raises(FileExistsError, match="linkat") as raised:
        syscalls.linkat(fd, "", abi.AT_FDCWD, tmp_path / "named", abi.AT_EMPTY_PATH)
    assert raised.value.filename == str(tmp_path / "named")
    os.close(fd)


def test_fallocate(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        file.write(bytes(1 << 16))
        file.flush()
        os.fsync(file.fileno())
        before = os.fstat(file.fileno()).st_blocks
        syscalls.fallocate(file.fileno(), abi.FALLOC_FL_PUNCH_HOLE | abi.FALLOC_FL_KEEP_SIZE, 0, 1 << 16)
        assert os.fstat(file.fileno()).st_blocks < before
        assert os.fstat(file.fileno()).st_size == 1 << 16
        with pytest.raises(OSError, match="fallocate"):
            syscalls.fallocate(file.fileno(), 0, -1, 1)


def test_fstatfs_type() -> None:
    fd = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
    assert syscalls.fstatfs_type(fd) == abi.PROC_SUPER_MAGIC
    os.close(fd)
    with pytest.raises(OSError, match="fstatfs"):
        syscalls.fstatfs_type(-1)


def test_seccomp_refuses_what_is_no_program() -> None:
    for program in (b"", b"1234567"):
        with pytest.raises(OSError, match="8 bytes"):
            syscalls.seccomp(abi.SECCOMP_SET_MODE_FILTER, 0, program)
    assert syscalls.seccomp(abi.SECCOMP_GET_ACTION_AVAIL, 0, abi.SECCOMP_RET_USER_NOTIF.to_bytes(4, "little")) == 0
    with pytest.raises(OSError, match="seccomp: Operation not supported"):
        syscalls.seccomp(abi.SECCOMP_GET_ACTION_AVAIL, 0, b"\1\0\0\0")


def test_notification_errors(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    fd = syscalls.inotify_init1()
    with pytest.raises(FileNotFoundError) as raised:
        syscalls.inotify_add_watch(fd, missing, abi.IN_CREATE)
    assert raised.value.filename == str(missing)
    with pytest.raises(OSError, match="inotify_rm_watch"):
        syscalls.inotify_rm_watch(fd, 7)
    os.close(fd)
    group = syscalls.fanotify_init(abi.FAN_CLASS_NOTIF | abi.FAN_CLOEXEC, os.O_RDONLY)
    with pytest.raises(FileNotFoundError) as raised:
        syscalls.fanotify_mark(group, abi.FAN_MARK_ADD, 1, abi.AT_FDCWD, missing)
    assert raised.value.filename == str(missing)
    os.close(group)
    for call in (syscalls.inotify_init1, lambda flags: syscalls.fanotify_init(flags, 0)):
        with pytest.raises(OSError, match="notify_init"):
            call(1 << 30)
