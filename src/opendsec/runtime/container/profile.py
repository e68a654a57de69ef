# SPDX-License-Identifier: Apache-2.0
"""What a container may ask of the kernel: system calls, capabilities, masked paths, limits. Data, each part with its reason.

The filter knows every call of the tables in `kernel/syscall_table.py` by name: those below are refused, the rest allowed, and a
number that the tables do not know (a kernel newer than they are) answers ENOSYS. So a new system call is refused until somebody
has looked at it and added its name.
"""

from __future__ import annotations

import errno
from typing import NamedTuple

from opendsec.kernel import abi, capabilities, seccomp, syscall_table
from opendsec.kernel.seccomp import ALLOW, ENOSYS, EPERM, ArgCheck, Rule, errno_action


class Refusal(NamedTuple):
    names: tuple[str, ...]
    reason: str
    action: int = EPERM


NAMESPACE_FLAGS = (
    abi.CLONE_NEWUSER | abi.CLONE_NEWNS | abi.CLONE_NEWPID | abi.CLONE_NEWIPC | abi.CLONE_NEWUTS | abi.CLONE_NEWNET | abi.CLONE_NEWCGROUP
)  # CLONE_NEWTIME shares its bit with clone's exit signal, and only unshare and clone3 take it

REFUSED = (
    Refusal(
        ("io_uring_setup", "io_uring_enter", "io_uring_register"), "a second system call interface that seccomp cannot see into", ENOSYS
    ),
    Refusal(("bpf", "perf_event_open", "lookup_dcookie"), "kernel programs and tracing: large attack surface, see into other sandboxes"),
    Refusal(("userfaultfd",), "stops the kernel inside a copy for as long as an attacker likes"),
    Refusal(("keyctl", "add_key", "request_key"), "keyrings are not fully namespaced"),
    Refusal(("open_by_handle_at", "name_to_handle_at"), "reaches files by inode number, past every path rule"),
    Refusal(
        ("mount", "umount2", "pivot_root", "fsopen", "fsconfig", "fsmount", "fspick", "move_mount", "open_tree", "open_tree_attr"),
        "the mount table is the edge's",
    ),
    Refusal(("mount_setattr", "statmount", "listmount"), "the mount table is the edge's"),
    Refusal(("unshare", "setns"), "no nested namespaces: a user namespace gives its maker every capability over new kernel surface"),
    Refusal(("clone3",), "its flags lie behind a pointer where no filter sees them; C libraries fall back to clone", ENOSYS),
    Refusal(("init_module", "finit_module", "delete_module", "create_module", "query_module", "get_kernel_syms"), "kernel modules"),
    Refusal(("kexec_load", "kexec_file_load", "reboot"), "replaces or stops the kernel"),
    Refusal(("swapon", "swapoff", "acct", "quotactl", "quotactl_fd", "nfsservctl", "vhangup"), "the host's administration"),
    Refusal(("settimeofday", "clock_settime", "clock_adjtime", "adjtimex"), "the clock is the host's"),
    Refusal(("iopl", "ioperm", "modify_ldt", "uselib", "ustat", "sysfs", "_sysctl"), "obsolete, with a history of holes"),
    Refusal(("syslog",), "the kernel log names other sandboxes"),
    Refusal(("fanotify_init", "fanotify_mark"), "watches whole file systems"),
    Refusal(("mbind", "set_mempolicy", "get_mempolicy", "move_pages", "migrate_pages", "set_mempolicy_home_node"), "NUMA placement"),
    Refusal(("kcmp",), "tells kernel pointers apart"),
    Refusal(("memfd_secret",), "memory that neither the accounting nor a snapshot can see", ENOSYS),
    Refusal(("file_getattr", "file_setattr"), "as FS_IOC_FSSETXATTR below, which also reads", ENOSYS),
    Refusal(("pidfd_getfd", "process_madvise"), "reach into other processes"),
    Refusal(("sethostname", "setdomainname"), "the name is given at creation"),
    Refusal(("lsm_get_self_attr", "lsm_set_self_attr", "lsm_list_modules"), "security labels are the host's", ENOSYS),
    Refusal(("io_setup",), "counts against one limit of the whole machine, fs.aio-max-nr, so one sandbox could leave nobody any", ENOSYS),
    Refusal(
        ("afs_syscall", "getpmsg", "putpmsg", "security", "tuxcall", "vserver", "epoll_ctl_old", "epoll_wait_old", "uprobe", "uretprobe"),
        "not for programs",
        ENOSYS,
    ),
)

PERSONALITIES = (0x0, 0x0008, 0x2_0000, 0x2_0008, 0xFFFF_FFFF)  # Linux, 32-bit names, UNAME26, both, "tell me"
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16  # the other families are rare, large and old (packet, alg, vsock, bluetooth, …)
SOCK_TYPE_MASK, SOCK_PACKET = 0xF, 10
INET_PROTOCOLS = (0, 1, 6, 17, 58, 262)  # whatever suits the type, ICMP, TCP, UDP, ICMPv6, MPTCP
NETLINK_PROTOCOLS = (0, 4)  # ROUTE, SOCK_DIAG: what `ip` and `ss` speak

RLIMIT_CORE = 4
MAP_HUGETLB, MFD_HUGETLB, SHM_HUGETLB = 0x4_0000, 0x4, 0x800

_TYPE = 0xFF00  # the "magic" byte of an ioctl number
TIOCSTI, TIOCLINUX, TIOCSETD = 0x5412, 0x541C, 0x5423
FS_IOC_GETFLAGS, FS_IOC32_GETFLAGS, FS_IOC_GETVERSION = 0x8008_6601, 0x8004_6601, 0x8008_7601
FICLONE, FICLONERANGE = 0x4004_9409, 0x4020_940D


def _arguments() -> list[Rule]:
    """Calls whose answer depends on an argument. The first rule that matches decides."""
    no_family, no_protocol = errno_action(errno.EAFNOSUPPORT), errno_action(errno.EPROTONOSUPPORT)
    not_supported, no_memory, done = errno_action(errno.EOPNOTSUPP), errno_action(errno.ENOMEM), errno_action(0)
    return [
        Rule(EPERM, ("clone",), (ArgCheck(0, "!=", 0, NAMESPACE_FLAGS),)),
        *(Rule(ALLOW, ("personality",), (ArgCheck.u32(0, "==", value),)) for value in PERSONALITIES),
        Rule(EPERM, ("personality",)),
        Rule(ALLOW, ("socket", "socketpair"), (ArgCheck.u32(0, "==", AF_UNIX),)),
        Rule(no_family, ("socketpair",)),
        # Of the families allowed only the protocols in use: for any other the kernel may load a module. (AF_INET, SOCK_PACKET) is an old
        # way to say AF_PACKET.
        Rule(no_family, ("socket",), (ArgCheck.u32(0, "==", AF_INET), ArgCheck.u32(1, "==", SOCK_PACKET, SOCK_TYPE_MASK))),
        *(
            Rule(ALLOW, ("socket",), (ArgCheck.u32(0, "==", family), ArgCheck.u32(2, "==", protocol)))
            for family, protocols in ((AF_INET, INET_PROTOCOLS), (AF_INET6, INET_PROTOCOLS), (AF_NETLINK, NETLINK_PROTOCOLS))
            for protocol in protocols
        ),
        *(Rule(no_protocol, ("socket",), (ArgCheck.u32(0, "==", family),)) for family in (AF_INET, AF_INET6, AF_NETLINK)),
        Rule(no_family, ("socket",)),
        # Types typed into a terminal as if by its user; line disciplines load modules.
        *(Rule(EPERM, ("ioctl",), (ArgCheck.u32(1, "==", number),)) for number in (TIOCSTI, TIOCLINUX, TIOCSETD)),
        # File system ioctls. Reading flags and cloning one's own files is ordinary; the rest of these families (swap of extents, dedupe
        # by content, freeze, project ids, immutable files, subvolumes, defragmenting) has no use here and a record of attacks.
        *(
            Rule(ALLOW, ("ioctl",), (ArgCheck.u32(1, "==", number),))
            for number in (FS_IOC_GETFLAGS, FS_IOC32_GETFLAGS, FS_IOC_GETVERSION, FICLONE, FICLONERANGE)
        ),
        Rule(EPERM, ("ioctl",), (ArgCheck.u32(1, "==", ord("f") << 8, _TYPE),)),
        Rule(EPERM, ("ioctl",), (ArgCheck.u32(1, "==", ord("X") << 8, _TYPE),)),
        Rule(EPERM, ("ioctl",), (ArgCheck.u32(1, "==", ord("v") << 8, _TYPE),)),
        Rule(not_supported, ("ioctl",), (ArgCheck.u32(1, "==", 0x94 << 8, _TYPE),)),
        # The scratch is volatile by design, and sync(2) would wait for every file system of the host.
        Rule(done, ("sync",)),
        # Huge pages that the host has set aside are no part of the sandbox's memory. This is what a host without any says.
        Rule(no_memory, ("mmap",), (ArgCheck(3, "!=", 0, MAP_HUGETLB),)),
        Rule(no_memory, ("memfd_create",), (ArgCheck.u32(1, "!=", 0, MFD_HUGETLB),)),
        Rule(no_memory, ("shmget",), (ArgCheck.u32(2, "!=", 0, SHM_HUGETLB),)),
        # It must stay at what `plan.rlimits` sets. Making it smaller or larger has no effect; asking for it has.
        Rule(done, ("setrlimit",), (ArgCheck.u32(0, "==", RLIMIT_CORE),)),
        Rule(done, ("prlimit64",), (ArgCheck.u32(1, "==", RLIMIT_CORE), ArgCheck(2, "!=", 0), ArgCheck(3, "==", 0))),
        Rule(EPERM, ("prlimit64",), (ArgCheck.u32(1, "==", RLIMIT_CORE), ArgCheck(2, "!=", 0))),
    ]


def rules() -> list[Rule]:
    """The whole profile as seccomp rules."""
    refused = [Rule(refusal.action, refusal.names) for refusal in REFUSED]
    return [*refused, *_arguments(), Rule(ALLOW, sorted(syscall_table.ALL_NAMES))]


def program(arch: str = abi.MACHINE) -> bytes:
    """The profile as a seccomp program."""
    return seccomp.compile_filter(rules(), EPERM, arch, beyond=ENOSYS)


# Docker's default set without what a sandbox with its own network and no devices cannot use: MKNOD (devices), NET_RAW (raw sockets),
# AUDIT_WRITE (the host's log). They act on the sandbox's own user namespace alone.
CAPABILITIES = capabilities.mask(
    (
        "CAP_CHOWN",
        "CAP_DAC_OVERRIDE",
        "CAP_FOWNER",
        "CAP_FSETID",
        "CAP_KILL",
        "CAP_SETGID",
        "CAP_SETUID",
        "CAP_SETPCAP",
        "CAP_NET_BIND_SERVICE",
        "CAP_SYS_CHROOT",
        "CAP_SETFCAP",
    )
)

# Names in /proc. Masked: what anybody can read there tells of the host or of other sandboxes. Read-only: what sets things for more than
# the process itself. Files that only root may touch (kcore, sysrq-trigger, most of /proc/sys, /proc/irq, …) need neither: they belong to
# the host's root, who is nobody in here, and the sandbox's root has no more rights to them than anybody.
MASKED = (
    b"acpi",
    b"asound",
    b"interrupts",
    b"keys",
    b"latency_stats",
    b"pressure",
    b"sched_debug",
    b"schedstat",
    b"scsi",
    b"softirqs",
)
READ_ONLY = (b"sys",)

SHM_BYTES = 64 << 20
