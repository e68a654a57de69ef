# SPDX-License-Identifier: Apache-2.0
"""A function in a process that can do nothing but read and write the descriptors it was given.

For code that chews on what strangers sent. Around it, each enough alone:

* namespaces of its own: user (one id, mapped to one that nothing else on the machine has), mount, pid, network, ipc, uts, cgroup;
* a root directory that is an empty read-only tmpfs; every descriptor but the given ones closed;
* no capabilities, no new privileges, limits on memory, file size, processes and new descriptors (none);
* a system call filter that knows reading, writing, memory and time, and kills for anything else. There is no call in it that
  takes a path, a pid or an address.

The caller must be single-threaded. What the function needs must be imported and warm (OpenSSL reads its configuration at the first
digest), since nothing can be opened later.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import signal
from collections.abc import Callable, Sequence

from opendsec.kernel import abi, capabilities, mounts, namespaces, seccomp, syscalls
from opendsec.kernel.seccomp import ArgCheck, Rule

OUTSIDE_ID = 0x7FFF_FFF0
"""Above every range that sandboxes get."""

_NAMESPACES = (
    abi.CLONE_NEWUSER | abi.CLONE_NEWNS | abi.CLONE_NEWPID | abi.CLONE_NEWNET | abi.CLONE_NEWIPC | abi.CLONE_NEWUTS | abi.CLONE_NEWCGROUP
)
_NOT_EXECUTABLE = ArgCheck.u32(2, "==", 0, mmap.PROT_EXEC)
RULES = (
    Rule(seccomp.ALLOW, ("read", "write", "lseek", "close", "exit", "exit_group", "brk", "munmap", "mremap", "madvise")),
    Rule(seccomp.ALLOW, ("mmap", "mprotect"), (_NOT_EXECUTABLE,)),
    Rule(seccomp.ALLOW, ("futex", "sched_yield", "getpid", "gettid", "getrandom", "clock_gettime", "gettimeofday", "restart_syscall")),
    Rule(seccomp.ALLOW, ("rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sigaltstack")),
)


def start(function: Callable[[], None], keep: Sequence[int], *, memory_bytes: int, file_bytes: int) -> int:
    """Run `function` in a confined child, which has the descriptors `keep` and standard error, and then ends with status 0, or 1 if it
    raised. The pid. The child dies with the caller's thread."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    program = seccomp.compile_filter(RULES, seccomp.KILL_PROCESS, beyond=seccomp.KILL_PROCESS)
    try:
        pid, _ = syscalls.clone3(_NAMESPACES)
        if pid == 0:
            _child(function, keep, reading, writing, program, memory_bytes, file_bytes)
        try:
            namespaces.write_id_maps(pid, [(0, OUTSIDE_ID, 1)])
            os.write(writing, b"m")
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        return pid
    finally:
        os.close(reading)
        os.close(writing)


def _child(
    function: Callable[[], None], keep: Sequence[int], reading: int, writing: int, program: bytes, memory_bytes: int, file_bytes: int
) -> None:
    status = 1
    try:
        syscalls.prctl(abi.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(writing)
        if os.read(reading, 1) != b"m":
            os._exit(1)  # the parent died before the call above
        _close_all_but((2, *keep))
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        syscalls.prctl(abi.PR_SET_PDEATHSIG, signal.SIGKILL)  # the change of user has cleared it
        syscalls.prctl(abi.PR_SET_DUMPABLE, 0)
        _empty_root()
        for number, limit in (
            (resource.RLIMIT_AS, memory_bytes),
            (resource.RLIMIT_FSIZE, file_bytes),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NPROC, 0),
            (resource.RLIMIT_NOFILE, 0),
        ):
            resource.setrlimit(number, (limit, limit))
        capabilities.drop_to(bounding=0)
        syscalls.prctl(abi.PR_SET_NO_NEW_PRIVS, 1)
        seccomp.install(program)
        function()
        status = 0
    except BaseException as error:  # not Exception: nothing may leave this process but by _exit
        _tell(error)
    finally:
        os._exit(status)


def _tell(error: BaseException) -> None:
    """On standard error. Not by the usual means, which would read source files: that call kills."""
    lines = [f"{type(error).__name__}: {error}"]
    trace = error.__traceback__
    while trace is not None:
        lines.append(f"  at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}")
        trace = trace.tb_next
    with contextlib.suppress(OSError):
        os.write(2, "\n".join((*lines, "")).encode(errors="replace"))


def _close_all_but(keep: Sequence[int]) -> None:
    first = 0
    for fd in sorted(set(keep)):
        if first < fd:
            syscalls.close_range(first, fd - 1)
        first = fd + 1
    syscalls.close_range(first)


def _empty_root() -> None:
    syscalls.mount(None, b"/", None, abi.MS_REC | abi.MS_PRIVATE)
    root = mounts.tmpfs(4096, 1, 0o555, attrs=mounts.QUIET | abi.MOUNT_ATTR_RDONLY)
    mounts.attach(root, abi.AT_FDCWD, b"/")
    os.fchdir(root)
    syscalls.pivot_root(b".", b".")
    syscalls.umount2(b".", abi.MNT_DETACH)
    os.chdir(b"/")
    os.close(root)


def end(pid: int) -> int:
    """Wait for a child of `start`: its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill(pid: int) -> None:
    """End a child of `start` now, whatever it does."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
