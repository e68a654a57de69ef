# SPDX-License-Identifier: Apache-2.0
"""Namespaces, pidfds, system call filters, security modules, path resolution, KVM."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import signal
import struct

from opendsec.kernel import abi, fds, landlock, namespaces, netlink, procfs, seccomp, syscall_table, syscalls
from opendsec.kernel.probes.tools import Missing, closing, in_child, need, waiting_child

IDS = [(0, 1_000_000, 65_536)]


def user_namespaces(scratch: str) -> str:
    os.close(namespaces.user_namespace(IDS))
    return ""


def sandbox_namespaces(scratch: str) -> str:
    flags = abi.CLONE_NEW_MASK & ~(abi.CLONE_NEWUSER | abi.CLONE_NEWTIME)
    in_child(netlink.loopback_up, flags=flags)
    return ""


def pidfd(scratch: str) -> str:
    with waiting_child(abi.CLONE_NEWUTS | abi.CLONE_NEWNS) as (_, pidfd):
        in_child(lambda: syscalls.setns(pidfd, abi.CLONE_NEWUTS | abi.CLONE_NEWNS))
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        need(not poller.poll(0), "a pidfd of a living process polls readable")
        syscalls.pidfd_send_signal(pidfd, signal.SIGKILL)
        need(poller.poll(5000), "a pidfd does not report the end of its process")
    return ""


def seccomp_filter(scratch: str) -> str:
    def body() -> None:
        syscalls.prctl(abi.PR_SET_NO_NEW_PRIVS, 1)
        rule = seccomp.Rule(seccomp.errno_action(errno.EXFULL), ["unshare"])
        seccomp.install(seccomp.compile_filter([rule], seccomp.ALLOW))
        try:
            syscalls.unshare(0)
        except OSError as error:
            need(error.errno == errno.EXFULL, "the filter answers wrongly")
        else:
            raise Missing("the filter does not hold")

    need(abi.MACHINE in seccomp.ARCHES, f"no system call table for {abi.MACHINE}")
    in_child(body)
    return ""


_NOTIF_RECV, _NOTIF_SEND = 0xC050_2100, 0xC018_2101


def seccomp_notify(scratch: str) -> str:
    def body() -> None:
        syscalls.prctl(abi.PR_SET_NO_NEW_PRIVS, 1)
        rule = seccomp.Rule(seccomp.NOTIFY, ["setdomainname"])
        listener = seccomp.install(seccomp.compile_filter([rule], seccomp.ALLOW), abi.SECCOMP_FILTER_FLAG_NEW_LISTENER)
        pid, _ = syscalls.clone3(0)
        if pid == 0:
            libc = ctypes.CDLL(None)
            os._exit(libc.syscall(syscall_table.BY_ARCH[abi.MACHINE]["setdomainname"], None, 0))
        notification = bytearray(80)
        fcntl.ioctl(listener, _NOTIF_RECV, notification)
        (number,) = struct.unpack_from("=Q", notification)
        fcntl.ioctl(listener, _NOTIF_SEND, bytearray(struct.pack("=QqiI", number, 42, 0, 0)))
        need(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42, "the answer did not arrive")

    in_child(body)
    return ""


def landlock_rules(scratch: str) -> str:
    def body() -> None:
        syscalls.prctl(abi.PR_SET_NO_NEW_PRIVS, 1)
        landlock.restrict([])
        try:
            os.listdir("/")
        except PermissionError:
            return
        raise Missing("a restricted process still reads")

    version = landlock.abi_version()
    need(version, "the kernel has no Landlock, or was booted without")
    in_child(body)
    return f"ABI {version}"


def openat2(scratch: str) -> str:
    os.symlink("/etc", f"{scratch}/link")
    os.mkdir(f"{scratch}/etc")
    with closing(fds.open_path(scratch, directory=True)) as root, closing(fds.beneath(root, "link/../../etc", os.O_PATH)) as found:
        need(os.path.samestat(os.fstat(found), os.stat(f"{scratch}/etc")), "a path left its root")
    return ""


def _security_modules() -> list[str]:
    """Active LSMs by the system call (Linux 6.8), else by securityfs where that is mounted."""
    known = {101: "selinux", 102: "smack", 104: "apparmor", 105: "yama", 109: "bpf", 110: "landlock"}
    buffer, size = (ctypes.c_uint64 * 64)(), ctypes.c_uint32(512)
    number = syscall_table.BY_ARCH.get(abi.MACHINE, {}).get("lsm_list_modules", -1)
    count = ctypes.CDLL(None).syscall(number, buffer, ctypes.byref(size), 0)
    if count >= 0:
        return [known.get(buffer[index], str(buffer[index])) for index in range(count)]
    return procfs.read("/sys/kernel/security/lsm").decode("ascii", "replace").strip().split(",")


def apparmor(scratch: str) -> str:
    need("apparmor" in _security_modules(), "not among the kernel's active security modules")
    return ""


def bpf_lsm(scratch: str) -> str:
    need("bpf" in _security_modules(), "not among the kernel's active security modules")
    return ""


# exit(0), as the least ELF program: header, one loadable segment, two or three instructions.
_EXIT_CODE = {
    "x86_64": (62, b"\xb8\x3c\0\0\0\x31\xff\x0f\x05"),
    "aarch64": (183, struct.pack("<3I", 0xD280_0BA8, 0xD280_0000, 0xD400_0001)),
}


def _exit_program() -> bytes:
    machine, code = _EXIT_CODE[abi.MACHINE]
    base = 0x40_0000
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 2, machine, 1, base + 120, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, 120 + len(code), 120 + len(code), 0x1000)
    return header + segment + code


def memfd_exec(scratch: str) -> str:
    need(abi.MACHINE in _EXIT_CODE, f"no test program for {abi.MACHINE}")
    with closing(fds.sealed_memfd("probe", _exit_program(), executable=True)) as fd:
        in_child(lambda: syscalls.execveat(fd, "", ["probe"], [], abi.AT_EMPTY_PATH))
    return ""
