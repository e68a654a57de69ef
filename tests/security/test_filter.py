# SPDX-License-Identifier: Apache-2.0
"""The system call filter as a program inside meets it: each refusal with its errno, and everything ordinary untouched.

Whose refusal it was is shown twice: calls are tried that the kernel itself would answer otherwise, and once more under the same rules with
an errno that no kernel gives.
"""

from __future__ import annotations

import errno
import json
import os
import signal

import pytest

from opendsec.kernel import abi, seccomp, syscall_table
from opendsec.kernel.seccomp import ALLOW, Rule
from opendsec.runtime.container import plan as plans
from opendsec.runtime.container import profile
from tests.boxes import Box, Node

TABLE = syscall_table.BY_ARCH[abi.MACHINE]
RARE = 3_999  # an errno that nothing else returns; the kernel's own end at 4095, programs' knowledge at 133

# Makes the calls given as JSON [[number, arguments…], …]; an argument may be ["bytes", size]. Prints each result: 0, or the errno.
CALLER = """
import ctypes, json, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
results = []
for number, *arguments in json.load(sys.stdin):
    given = [ctypes.create_string_buffer(a[1]) if isinstance(a, list) else ctypes.c_ulong(a & 0xFFFFFFFFFFFFFFFF) for a in arguments]
    ctypes.set_errno(0)
    value = libc.syscall(ctypes.c_long(number), *given)
    results.append(ctypes.get_errno() if value == -1 else 0)
print(json.dumps(results))
"""

Call = tuple[object, ...]


def answers(box: Box, calls: list[Call], *, user: str = "root") -> list[int]:
    """What each call gives: 0 or the errno."""
    result = box.python(CALLER, user=user, input=json.dumps(calls).encode()).json
    assert isinstance(result, list) and len(result) == len(calls)
    return result


def with_buffers(number: int) -> Call:
    """A call whose pointers are valid and whose numbers are small, so that nothing but the filter stands in its way."""
    return (number, ["bytes", 256], ["bytes", 256], 0, 0, 0, 0)


# --- refused whole -------------------------------------------------------------------------------------------------

# The kernel's own trampolines make these two, and it lets them pass every filter. From anywhere else they are a SIGILL.
UNFILTERED = {"uprobe", "uretprobe"}
REFUSED = [
    (name, TABLE[name], refusal.action & 0xFFFF)
    for refusal in profile.REFUSED
    for name in refusal.names
    if name in TABLE and name not in UNFILTERED
]  # (name, number, errno)


@pytest.mark.parametrize("user", ["root", "nobody"])
def test_t07_every_refused_call(box: Box, user: str) -> None:
    found = answers(box, [with_buffers(number) for _, number, _ in REFUSED], user=user)
    wrong = {name: os.strerror(got) for (name, _, expected), got in zip(REFUSED, found, strict=True) if got != expected}
    assert wrong == {}


@pytest.fixture
def rare(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rules, each refusal with the errno that nobody else gives, for commands from here on."""
    kept = (ALLOW, seccomp.errno_action(0))
    rules = [Rule(rule.action if rule.action in kept else seccomp.errno_action(RARE), rule.names, rule.args) for rule in profile.rules()]
    program = seccomp.compile_filter(rules, seccomp.errno_action(RARE), beyond=seccomp.errno_action(RARE))
    node.wait(node.spawner.call("profile", {"name": b"rare", "program": program}))
    monkeypatch.setattr(plans, "PROFILE_NAME", b"rare")


@pytest.mark.usefixtures("rare")
def test_t07_it_is_the_filter_that_refuses(box: Box) -> None:
    numbers = [number for _, number, _ in REFUSED] + [max(TABLE.values()) + 1, 5_000]
    assert set(answers(box, [with_buffers(number) for number in numbers])) == {RARE}


def test_a_call_that_the_tables_do_not_know(box: Box) -> None:
    beyond = max(TABLE.values()) + 1
    assert answers(box, [(beyond,), (beyond + 100,), (0x3FFF_FFFF,)]) == [errno.ENOSYS] * 3


def test_every_call_is_decided_on_purpose() -> None:
    """Either refused with a reason, or allowed because its name is in the tables."""
    names = [name for refusal in profile.REFUSED for name in refusal.names]
    assert len(names) == len(set(names))
    assert set(names) <= syscall_table.ALL_NAMES
    assert all(refusal.reason for refusal in profile.REFUSED)


# --- beside Docker's default ---------------------------------------------------------------------------------------

# The calls of our tables that Docker's default profile denies to a container with the default capabilities (moby/profiles,
# seccomp/default_linux.go, 2025), and the reason where we allow one.
DOCKER_DENIES = frozenset(
    """
    _sysctl acct add_key afs_syscall bpf clock_settime clone3 create_module delete_module fanotify_init file_getattr file_setattr
    finit_module fsconfig fsmount fsopen fspick get_kernel_syms get_mempolicy getpmsg init_module io_uring_enter io_uring_register
    io_uring_setup ioperm iopl kcmp kexec_file_load kexec_load keyctl lookup_dcookie lsm_get_self_attr lsm_list_modules
    lsm_set_self_attr mbind migrate_pages mount mount_setattr move_mount move_pages nfsservctl open_by_handle_at open_tree
    open_tree_attr perf_event_open pidfd_getfd pivot_root process_madvise putpmsg query_module quotactl quotactl_fd reboot request_key
    security set_mempolicy set_mempolicy_home_node setdomainname sethostname setns settimeofday swapoff swapon sysfs syslog tuxcall
    umount2 unshare uprobe uselib userfaultfd ustat vhangup vserver
    """.split()  # noqa: SIM905
)
WE_ALLOW: dict[str, str] = {}  # name → reason


def test_t07_nothing_is_allowed_that_docker_denies() -> None:
    refused = {name for refusal in profile.REFUSED for name in refusal.names}
    assert DOCKER_DENIES - refused == WE_ALLOW.keys()


# What we refuse and Docker's default allows. Programs meet these refusals nowhere else, so each has to have a way out.
WE_REFUSE = {
    "adjtimex": "reads only for programs without CAP_SYS_TIME; clock_gettime tells the time",
    "clock_adjtime": "as adjtimex",
    "epoll_ctl_old": "never implemented",
    "epoll_wait_old": "never implemented",
    "fanotify_mark": "useless without fanotify_init",
    "io_setup": "libraries fall back to threads when there is no native aio",
    "listmount": "libmount falls back to mountinfo",
    "memfd_secret": "off by default in most kernels",
    "modify_ldt": "16-bit code alone",
    "name_to_handle_at": "tools that compare mounts fall back to st_dev",
    "statmount": "as listmount",
    "uretprobe": "the kernel's own trampoline, not for programs",
}


def test_what_is_refused_beyond_docker_is_written_down() -> None:
    refused = {name for refusal in profile.REFUSED for name in refusal.names}
    assert refused - DOCKER_DENIES == WE_REFUSE.keys()


# --- refused by argument -------------------------------------------------------------------------------------------

CLONE_FLAGS = {
    "CLONE_NEWNS": 0x0002_0000,
    "CLONE_NEWCGROUP": 0x0200_0000,
    "CLONE_NEWUTS": 0x0400_0000,
    "CLONE_NEWIPC": 0x0800_0000,
    "CLONE_NEWUSER": 0x1000_0000,
    "CLONE_NEWPID": 0x2000_0000,
    "CLONE_NEWNET": 0x4000_0000,
}
HIGH = 0xABCD_0000_0000  # in the upper half of a register, which the kernel ignores for 32-bit arguments

FAMILIES_REFUSED = {
    "AF_UNSPEC": 0,
    "AF_AX25": 3,
    "AF_IPX": 4,
    "AF_APPLETALK": 5,
    "AF_X25": 9,
    "AF_KEY": 15,
    "AF_PACKET": 17,
    "AF_RDS": 21,
    "AF_PPPOX": 24,
    "AF_LLC": 26,
    "AF_IB": 27,
    "AF_MPLS": 28,
    "AF_CAN": 29,
    "AF_TIPC": 30,
    "AF_BLUETOOTH": 31,
    "AF_RXRPC": 33,
    "AF_PHONET": 35,
    "AF_IEEE802154": 36,
    "AF_CAIF": 37,
    "AF_ALG": 38,
    "AF_NFC": 39,
    "AF_VSOCK": 40,
    "AF_KCM": 41,
    "AF_QIPCRTR": 42,
    "AF_SMC": 43,
    "AF_XDP": 44,
    "AF_MCTP": 45,
    "the highest": 0xFFFF_FFFF,
}

IOCTLS_REFUSED = {
    # name: (number, errno)
    "TIOCSTI": (0x5412, errno.EPERM),
    "TIOCLINUX": (0x541C, errno.EPERM),
    "TIOCSETD": (0x5423, errno.EPERM),
    "FS_IOC_SETFLAGS": (0x4008_6602, errno.EPERM),
    "FS_IOC32_SETFLAGS": (0x4004_6602, errno.EPERM),
    "FS_IOC_FIEMAP": (0xC020_660B, errno.EPERM),
    "FS_IOC_ENABLE_VERITY": (0x4080_6685, errno.EPERM),
    "FS_IOC_SET_ENCRYPTION_POLICY": (0x800C_6613, errno.EPERM),
    "EXT4_IOC_MOVE_EXT": (0xC028_660F, errno.EPERM),
    "EXT4_IOC_SWAP_BOOT": (0x6611, errno.EPERM),
    "FS_IOC_SETVERSION": (0x4008_7602, errno.EPERM),
    "FS_IOC_FSGETXATTR": (0x801C_581F, errno.EPERM),
    "FS_IOC_FSSETXATTR": (0x401C_5820, errno.EPERM),
    "FIFREEZE": (0xC004_5877, errno.EPERM),
    "FITHAW": (0xC004_5878, errno.EPERM),
    "FITRIM": (0xC018_5879, errno.EPERM),
    "XFS_IOC_ALLOCSP": (0x4030_580A, errno.EPERM),
    "XFS_IOC_SWAPEXT": (0xC0C0_586D, errno.EPERM),
    "XFS_IOC_OPEN_BY_HANDLE": (0x8038_586B, errno.EPERM),
    "XFS_IOC_GOINGDOWN": (0x8004_587D, errno.EPERM),
    "FIDEDUPERANGE": (0xC018_9436, errno.EOPNOTSUPP),
    "BTRFS_IOC_SNAP_CREATE": (0x5000_9401, errno.EOPNOTSUPP),
    "BTRFS_IOC_SUBVOL_CREATE": (0x5000_940E, errno.EOPNOTSUPP),
    "BTRFS_IOC_SNAP_DESTROY": (0x5000_940F, errno.EOPNOTSUPP),
    "BTRFS_IOC_DEFRAG": (0x5000_9402, errno.EOPNOTSUPP),
    "BTRFS_IOC_TREE_SEARCH": (0xD000_9411, errno.EOPNOTSUPP),
    "BTRFS_IOC_INO_LOOKUP": (0xD000_9412, errno.EOPNOTSUPP),
    "BTRFS_IOC_QGROUP_LIMIT": (0x8030_942B, errno.EOPNOTSUPP),
    "BTRFS_IOC_SET_RECEIVED_SUBVOL": (0xC0C8_9425, errno.EOPNOTSUPP),
}

PERSONALITIES_REFUSED = {
    "ADDR_NO_RANDOMIZE": 0x004_0000,
    "MMAP_PAGE_ZERO": 0x010_0000,
    "ADDR_COMPAT_LAYOUT": 0x020_0000,
    "READ_IMPLIES_EXEC": 0x040_0000,
    "PER_SVR4": 0x1,
    "PER_HPUX": 0x10,
}


def refused_by_argument() -> dict[str, tuple[Call, int]]:
    calls: dict[str, tuple[Call, int]] = {}
    number = TABLE
    for name, flag in CLONE_FLAGS.items():
        calls[f"clone({name})"] = (number["clone"], flag | signal.SIGCHLD, 0, 0, 0, 0), errno.EPERM
        calls[f"unshare({name})"] = (number["unshare"], flag), errno.EPERM
        calls[f"setns({name})"] = (number["setns"], 0, flag), errno.EPERM
    calls["clone(all)"] = (number["clone"], sum(CLONE_FLAGS.values()) | signal.SIGCHLD, 0, 0, 0, 0), errno.EPERM
    calls["unshare(CLONE_NEWTIME)"] = (number["unshare"], abi.CLONE_NEWTIME), errno.EPERM
    calls["clone3"] = (number["clone3"], ["bytes", 88], 88), errno.ENOSYS
    for name, family in FAMILIES_REFUSED.items():
        for extra, what in ((0, ""), (HIGH, ", upper half set")):
            calls[f"socket({name}{what})"] = (number["socket"], family | extra, 2, 0), errno.EAFNOSUPPORT
            calls[f"socketpair({name}{what})"] = (number["socketpair"], family | extra, 2, 0, ["bytes", 8]), errno.EAFNOSUPPORT
    calls["socketpair(AF_INET)"] = (number["socketpair"], 2, 1, 0, ["bytes", 8]), errno.EAFNOSUPPORT
    for kind in (10, 10 | os.O_NONBLOCK, 10 | os.O_CLOEXEC):
        calls[f"socket(AF_INET, SOCK_PACKET {kind:#x})"] = (number["socket"], 2, kind, 0x300), errno.EAFNOSUPPORT
    for family in (2, 10):
        for protocol in (33, 115, 132, 136, 256, 500):  # DCCP, L2TP, SCTP, UDPLITE, SMC, nothing
            calls[f"socket({family}, {protocol})"] = (number["socket"], family, 1, protocol), errno.EPROTONOSUPPORT
    for protocol in (2, 6, 9, 12, 15, 16, 21):  # USERSOCK, XFRM, AUDIT, NETFILTER, KOBJECT_UEVENT, GENERIC, CRYPTO
        calls[f"socket(AF_NETLINK, {protocol})"] = (number["socket"], 16, 3, protocol), errno.EPROTONOSUPPORT
    for name, (request, expected) in IOCTLS_REFUSED.items():
        for extra, what in ((0, ""), (HIGH, ", upper half set")):
            calls[f"ioctl({name}{what})"] = (number["ioctl"], 0, request | extra, ["bytes", 4096]), expected
    for name, value in PERSONALITIES_REFUSED.items():
        calls[f"personality({name})"] = (number["personality"], value), errno.EPERM
    calls["mmap(MAP_HUGETLB)"] = (number["mmap"], 0, 2 << 20, 3, 0x4_0022, -1, 0), errno.ENOMEM
    calls["memfd_create(MFD_HUGETLB)"] = (number["memfd_create"], ["bytes", 8], 4), errno.ENOMEM
    calls["shmget(SHM_HUGETLB)"] = (number["shmget"], 0, 2 << 20, 0x800 | 0o1600), errno.ENOMEM
    calls["prlimit64(RLIMIT_CORE), old and new"] = (number["prlimit64"], 0, 4, ["bytes", 16], ["bytes", 16]), errno.EPERM
    return calls


def test_t07_refusals_by_argument(box: Box) -> None:
    calls = refused_by_argument()
    found = answers(box, [call for call, _ in calls.values()])
    wrong = {name: os.strerror(got) for (name, (_, expected)), got in zip(calls.items(), found, strict=True) if got != expected}
    assert wrong == {}


@pytest.mark.usefixtures("rare")
def test_t07_it_is_the_filter_that_refuses_by_argument(box: Box) -> None:
    calls = refused_by_argument()
    found = answers(box, [call for call, _ in calls.values()])
    assert {name for name, got in zip(calls, found, strict=True) if got != RARE} == set()


def allowed_by_argument() -> dict[str, tuple[Call, int]]:
    """Neighbours of refusals that must go through to the kernel, with the kernel's own answer."""
    number = TABLE
    return {
        "personality(what is it?)": ((number["personality"], 0xFFFF_FFFF), 0),
        "personality(PER_LINUX)": ((number["personality"], 0), 0),
        "socket(AF_UNIX)": ((number["socket"], 1, 1, 0), 0),
        "socket(AF_UNIX, SOCK_PACKET)": ((number["socket"], 1, 10, 0), errno.ESOCKTNOSUPPORT),
        "socket(AF_INET, TCP)": ((number["socket"], 2, 1, 6), 0),
        "socket(AF_INET, UDP)": ((number["socket"], 2, 2, 17), 0),
        "socket(AF_INET, UDP, flags)": ((number["socket"], 2, 2 | os.O_CLOEXEC | os.O_NONBLOCK, 0), 0),
        "socket(AF_INET6)": ((number["socket"], 10, 1, 0), 0),
        "socket(AF_INET, raw)": ((number["socket"], 2, 3, 1), errno.EPERM),
        "socket(AF_NETLINK, ROUTE)": ((number["socket"], 16, 3, 0), 0),
        "socketpair(AF_UNIX)": ((number["socketpair"], 1, 1, 0, ["bytes", 8]), 0),
        "ioctl(FIONREAD)": ((number["ioctl"], 1, 0x541B, ["bytes", 8]), 0),
        "ioctl(FS_IOC_GETFLAGS) of a pipe": ((number["ioctl"], 1, 0x8008_6601, ["bytes", 8]), errno.ENOTTY),
        "ioctl(FICLONE) of nothing": ((number["ioctl"], 1, 0x4004_9409, 99), errno.EBADF),
        "memfd_create": ((number["memfd_create"], ["bytes", 8], 0), 0),
        "setrlimit(RLIMIT_NOFILE)": ((number["setrlimit"], 7, ["bytes", 16]), 0),
        "setrlimit(RLIMIT_CORE)": ((number["setrlimit"], 4, ["bytes", 16]), 0),  # without effect, see below
        "prlimit64(RLIMIT_CORE)": ((number["prlimit64"], 0, 4, ["bytes", 16], 0), 0),
        "sync": ((number["sync"],), 0),
    }


def test_what_is_beside_a_refusal_goes_through(box: Box) -> None:
    calls = allowed_by_argument()
    found = answers(box, [call for call, _ in calls.values()])
    wrong = {name: os.strerror(got) for (name, (_, expected)), got in zip(calls.items(), found, strict=True) if got != expected}
    assert wrong == {}


def test_t04_the_core_limit_stays(box: Box) -> None:
    """At 1 the kernel starts no program of the host's for a crash in here; at 0 it would."""
    source = """
import resource, subprocess
for wanted in ((0, 0), (1, 1), (0, 1)):
    resource.setrlimit(resource.RLIMIT_CORE, wanted)
print(resource.getrlimit(resource.RLIMIT_CORE), subprocess.run(["sh", "-c", "ulimit -c 0; ulimit -c"], capture_output=True).stdout)
"""
    assert box.python(source).text.startswith("(1, 1) ")


# --- other doors ---------------------------------------------------------------------------------------------------


def test_t07_x32(box: Box) -> None:
    """The same kernel functions under other numbers: mount, unshare, ptrace, getpid, read."""
    if abi.MACHINE != "x86_64":
        return
    bit = abi.X32_SYSCALL_BIT
    assert answers(box, [with_buffers(bit | number) for number in (165, 272, 521, 39, 0)]) == [errno.ENOSYS] * 5


INT_80 = """
import ctypes, mmap
code = bytes.fromhex("b814000000" "cd80" "c3")  # mov eax, 20 (getpid); int 0x80; ret
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(code)
call = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
print("calling", flush=True)
print(call())
"""


def test_t07_32_bit_entry(box: Box) -> None:
    """Killed by the filter, or by the kernel if it has no such entry."""
    if abi.MACHINE != "x86_64":
        return
    result = box.python(INT_80)
    assert result.out == b"calling\n"
    assert result.exit.signal in (signal.SIGSYS, signal.SIGSEGV)


def test_a_filter_can_only_be_tightened(box: Box) -> None:
    """A program may add its own; what was refused stays so."""
    source = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
allow = struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000)
buffer = ctypes.create_string_buffer(allow, len(allow))
program = struct.pack("@HP", 1, ctypes.addressof(buffer))
assert libc.syscall(317 if "x86_64" in __import__("platform").machine() else 277, 1, 0, program) == 0
print(libc.unshare(0x10000000), ctypes.get_errno())
"""
    assert box.python(source).text == f"-1 {errno.EPERM}\n"
