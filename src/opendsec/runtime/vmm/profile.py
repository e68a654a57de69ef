# SPDX-License-Identifier: Apache-2.0
"""What QEMU may ask of the kernel: the containers' filter, and without all that an emulator never does once its files are open.

QEMU's own filter (`-sandbox`) comes on top and also ends what starts programs, which ours cannot: QEMU itself is yet to be executed.
"""

from __future__ import annotations

import errno
import resource
from weakref import WeakSet

from opendsec.kernel import abi, seccomp, syscall_table
from opendsec.kernel.seccomp import ALLOW, ENOSYS, EPERM, ArgCheck, Rule, errno_action
from opendsec.runtime.container import profile as container
from opendsec.runtime.container.plan import CORE_BYTES, hard
from opendsec.runtime.spawn import Spawner

NAME = b"machine"

REFUSED = (
    container.Refusal(("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_open"), "there is no other process to look at"),
    container.Refusal(("chroot", "mknod", "mknodat", "mkdir", "mkdirat", "symlink", "symlinkat", "link", "linkat"), "it makes no files"),
    container.Refusal(
        ("chown", "fchown", "lchown", "fchownat", "chmod", "fchmod", "fchmodat", "setxattr", "fsetxattr", "lsetxattr"), "as above"
    ),
    container.Refusal(("setuid", "setgid", "setreuid", "setregid", "setresuid", "setresgid", "setgroups", "capset"), "it is who it is"),
    container.Refusal(("bind", "connect"), "its sockets are connected or listening when it gets them", errno_action(errno.EACCES)),
    container.Refusal(("inotify_init", "inotify_init1", "shmget", "shmat", "shmctl", "semget", "msgget", "mq_open"), "not used"),
)

NO_IOCTL = errno_action(errno.ENOTTY)
TERMINAL = (container.TIOCSTI, container.TIOCLINUX, container.TIOCSETD)
FILE_SYSTEM = (ord("f"), ord("X"), ord("v"), 0x94)
"""Families of ioctl(2): flags, freezing, swapping extents, sharing blocks, subvolumes. Disks need none of them."""


def rules() -> list[Rule]:
    refused = [Rule(refusal.action, refusal.names) for refusal in (*container.REFUSED, *REFUSED)]
    return [
        *refused,
        Rule(EPERM, ("clone",), (ArgCheck(0, "!=", 0, container.NAMESPACE_FLAGS),)),
        Rule(EPERM, ("personality",)),
        *(Rule(EPERM, ("ioctl",), (ArgCheck.u32(1, "==", number),)) for number in TERMINAL),
        *(Rule(NO_IOCTL, ("ioctl",), (ArgCheck.u32(1, "==", kind << 8, 0xFF00),)) for kind in FILE_SYSTEM),
        Rule(errno_action(errno.EAFNOSUPPORT), ("socket",)),
        Rule(ALLOW, ("socketpair",), (ArgCheck.u32(0, "==", container.AF_UNIX),)),
        Rule(EPERM, ("socketpair",)),
        Rule(ALLOW, sorted(syscall_table.ALL_NAMES)),
    ]


def program(arch: str = abi.MACHINE) -> bytes:
    return seccomp.compile_filter(rules(), EPERM, arch, beyond=ENOSYS)


def rlimits(file_bytes: int | None = None) -> list[tuple[int, int, int]]:
    """`file_bytes`: of the largest file that may be written."""
    wanted = {
        **({} if file_bytes is None else {resource.RLIMIT_FSIZE: file_bytes}),
        resource.RLIMIT_CORE: CORE_BYTES,
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_NOFILE: 4096,
        resource.RLIMIT_MEMLOCK: 64 << 10,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 1024,
    }
    values = {number: min(value, hard(number)) for number, value in wanted.items()}
    return [(number, value, value) for number, value in values.items()]


_installed: WeakSet[Spawner] = WeakSet()


async def install(spawner: Spawner) -> None:
    """Give a spawner the filter, once."""
    if spawner not in _installed:
        await spawner.call("profile", {"name": NAME, "program": program()})
        _installed.add(spawner)
