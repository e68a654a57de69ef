# SPDX-License-Identifier: Apache-2.0
"""Descriptors: opening beneath a root that cannot be trusted, and files that are nothing but a descriptor."""

from __future__ import annotations

import errno
import fcntl
import os
import signal

from opendsec.kernel import abi, procfs, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opendsec.kernel.syscalls import StrPath

BENEATH = abi.RESOLVE_IN_ROOT | abi.RESOLVE_NO_MAGICLINKS
MAX_RACES = 1000
MFD_NOEXEC_SEAL, MFD_EXEC = 0x8, 0x10


def beneath(root_fd: int, path: StrPath, flags: int, mode: int = 0, *, resolve: int = 0) -> int:
    """Open `path` as a process whose root directory is `root_fd` would see it: absolute symlinks and ".." end at that root.

    /proc's magic links are refused (ELOOP), so a symlink planted inside reaches neither the host nor another sandbox. More
    limits may come as `resolve` (RESOLVE_NO_SYMLINKS, ...). Without O_NONBLOCK in `flags`, opening a planted FIFO can block.
    """
    # The kernel cannot prove that a walk with ".." stayed inside while anything on the machine is renamed or mounted: EAGAIN.
    for _ in range(MAX_RACES):
        try:
            return syscalls.openat2(root_fd, path, flags, mode, BENEATH | resolve)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
    raise OSError(errno.EAGAIN, f"openat2: {os.strerror(errno.EAGAIN)}", os.fsdecode(path))


def open_path(path: StrPath, *, dir_fd: int | None = None, follow: bool = False, directory: bool = False) -> int:
    """An O_PATH descriptor: names a file without opening it, so neither FIFOs nor devices notice."""
    flags = os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW) | (os.O_DIRECTORY if directory else 0)
    return os.open(path, flags, dir_fd=dir_fd)


def reopen(fd: int, flags: int) -> int:
    """Open for good what an O_PATH descriptor names. O_NOFOLLOW cannot be given: the way leads over a magic link."""
    return os.open(procfs.fd_path(fd), flags | os.O_CLOEXEC)


def written_to(path: StrPath) -> bool:
    """Whether a file is open for writing anywhere, whoever has it open and wherever the descriptor is: this is the kernel's own count.
    False where the file system cannot tell."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # which does nothing; whoever wants to write now would have us killed by SIGIO
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False
    except OSError as error:
        return error.errno == errno.EAGAIN
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """All of it, to a descriptor that blocks."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sealed_memfd(name: str, data: bytes, *, executable: bool = False) -> int:
    """An anonymous file that holds `data` and can no longer be changed by anybody. Not `executable`: nor executed."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(name, flags | (MFD_EXEC if executable else MFD_NOEXEC_SEAL))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create(name, flags)  # before 6.3 every memfd is executable
    try:
        write_all(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def fork_sharing() -> tuple[int, int]:
    """Fork a child that has the *same* descriptor table, not a copy of it: what one opens the other has, and nothing is closed before both
    are gone. Returns (pid, pidfd), in the child (0, -1).

    As for `os.fork` the caller has one thread; the child ends by `os._exit` alone, since closing files is closing them for all. An exec
    gives the child a table of its own.
    """
    import ctypes

    ctypes.pythonapi.PyOS_BeforeFork()
    pid = -1
    try:
        pid, pidfd = syscalls.clone3(abi.CLONE_FILES, want_pidfd=True)
    finally:
        if pid == 0:
            ctypes.pythonapi.PyOS_AfterFork_Child()
        else:
            ctypes.pythonapi.PyOS_AfterFork_Parent()
    return pid, pidfd


def held_by_others(fd: int) -> bool:
    """Whether anybody but this descriptor has the file open: another descriptor, a process, a mount. Found by trying to lease it, which
    the kernel grants to a sole opener alone; where it grants none, the answer is yes. The caller ignores SIGIO."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return True
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
