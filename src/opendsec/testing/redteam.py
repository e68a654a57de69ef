# SPDX-License-Identifier: Apache-2.0
"""Attack probes as data, by the threats of docs/threat-model.md, for tests and for operators who want to know it of their own node.

A probe is a Python program that runs in a sandbox and tries what the threat says. It prints nothing and exits with 0 if the defence held;
else it exits with 1 and says what it got. Probes take no more than the sandbox can spare: exhaustion is not among them. The image needs
Python 3. Whatever carries commands into the sandbox carries the probes: see `Execute`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

Execute = Callable[[Sequence[str], str], Awaitable[tuple[int | None, str]]]
"""Run argv as a user in the sandbox: (exit code or None if it was killed or never started, standard output and error)."""


@dataclass(frozen=True)
class Probe:
    threat: str  # its number in docs/threat-model.md
    title: str
    program: str
    users: tuple[str, ...] = ("root", "nobody")


class Verdict(StrEnum):
    HELD = "held"
    BROKEN = "broken"
    UNKNOWN = "unknown"  # the probe itself failed


@dataclass(frozen=True)
class Finding:
    probe: Probe
    user: str
    verdict: Verdict
    detail: str


async def run(execute: Execute, probes: Sequence[Probe] = ()) -> list[Finding]:
    """Every probe as each of its users, in order, in one sandbox."""
    findings = []
    for probe in probes or PROBES:
        for user in probe.users:
            code, output = await execute(["python3", "-ISc", PRELUDE + probe.program], user)
            verdict = Verdict.HELD if (code, output) == (0, "") else Verdict.BROKEN if code == 1 else Verdict.UNKNOWN
            findings.append(Finding(probe, user, verdict, output.strip()))
    return findings


PRELUDE = """
import ctypes, errno, os, stat, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
def got(what): sys.exit(what)  # exit status 1, and the text to standard error
def refused(what, call, *codes):
    try: call()
    except OSError as error:
        if codes and error.errno not in codes: got(f"{what}: refused, but with {error}")
    else: got(what)
def failed(what, result, *codes):
    if result != -1: got(what)
    if codes and ctypes.get_errno() not in codes: got(f"{what}: refused, but with {os.strerror(ctypes.get_errno())}")
"""

PROBES = (
    Probe(
        "T02",
        "a mount, a remount, a covered path laid bare",
        """
for flags, target in ((0, b"/mnt"), (4096, b"/mnt"), (32 | 4096, b"/proc/sys"), (8192, b"/proc/sys")):
    failed(f"mount({flags:#x}, {target})", libc.mount(b"none", target, b"tmpfs", flags, None), errno.EPERM)
for line in open("/proc/self/mountinfo"):
    path = line.split()[4]
    failed(f"umount {path}", libc.umount2(path.encode(), 2), errno.EPERM)
    if not path.startswith("/proc/") or path == "/proc/sys": continue
    for attempt in (os.remove, os.rmdir, lambda p: os.rename(p, "/x"), lambda p: os.symlink("/x", p + "/y")):
        refused(f"change {path}", lambda: attempt(path))
    if os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(): got(f"{path} is not covered")
""",
    ),
    Probe(
        "T02",
        "another directory in the place of /dev or /proc",
        """
import shutil
for path in ("/dev", "/proc", "/dev/pts", "/dev/shm", "/proc/sys"):
    for attempt in (lambda: os.rename(path, "/tmp/x"), lambda: os.rmdir(path), lambda: os.rename("/tmp", path)): refused(path, attempt)
    if not [line for line in open("/proc/self/mountinfo") if line.split()[4] == path]: got(f"nothing is mounted at {path}")
""",
    ),
    Probe(
        "T03",
        "a device node",
        """
for kind in (stat.S_IFCHR, stat.S_IFBLK):
    for device in ((1, 1), (1, 3), (8, 0), (259, 0), (10, 229), (254, 0)):
        for where in ("/tmp", "/dev/shm", "/dev"):
            refused(f"mknod {device} in {where}", lambda: os.mknod(f"{where}/node", kind | 0o666, os.makedev(*device)))
""",
    ),
    Probe(
        "T03",
        "a change of /dev",
        """
for attempt in (lambda: open("/dev/x", "w"), lambda: os.remove("/dev/null"), lambda: os.chmod("/dev/null", 0), lambda: os.mkdir("/dev/d"),
                lambda: os.rename("/dev/tty", "/dev/t"), lambda: os.symlink("x", "/dev/l"), lambda: os.utime("/dev/null")):
    refused("/dev", attempt)
""",
    ),
    Probe(
        "T04",
        "a setting of the machine, written through /proc",
        """
for folder, folders, files in os.walk("/proc"):
    if folder == "/proc": folders[:] = [f for f in folders if not f.isdigit() and f not in ("self", "thread-self")]
    for name in files:
        path = f"{folder}/{name}"
        s = os.lstat(path)
        if stat.S_ISLNK(s.st_mode) or s.st_rdev == os.makedev(1, 3): continue  # into self; covered by /dev/null
        refused(f"write {path}", lambda: os.open(path, os.O_WRONLY | os.O_NONBLOCK))
""",
    ),
    Probe(
        "T04",
        "what only the host's root may read",
        """
for name in ("kcore", "kmsg", "kpagecount", "kpageflags", "kpagecgroup", "slabinfo", "vmallocinfo", "timer_list"):
    def read():
        if not os.read(os.open("/proc/" + name, os.O_RDONLY | os.O_NONBLOCK), 4096): raise OSError("empty")
    if os.path.exists("/proc/" + name): refused(name, read)
for line in open("/proc/kallsyms") if os.path.exists("/proc/kallsyms") else ():
    if set(line.split()[0]) != {"0"}: got(f"an address: {line}")
for name in ("keys", "interrupts", "softirqs"):
    if os.path.exists("/proc/" + name) and open("/proc/" + name).read(): got(f"/proc/{name}")
""",
    ),
    Probe(
        "T04",
        "/sys, or a control group's files",
        """
if os.path.exists("/sys") and os.listdir("/sys"): got("/sys")
for line in open("/proc/self/mountinfo"):
    if " cgroup" in line or " sysfs " in line: got(line)
""",
    ),
    Probe(
        "T05",
        "capabilities beyond its bounding set",
        """
import struct
libc.capset(struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", *[0xFFFFFFFF] * 3, *[0x1FF] * 3))
libc.prctl(47, 2, 21, 0, 0); libc.prctl(28, 0x3F, 0, 0, 0)
allowed = sum(1 << n for n in (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 31))
for line in open("/proc/self/status"):
    if line.startswith("Cap") and int(line.split()[1], 16) & ~allowed: got(line)
if "NoNewPrivs:\\t1" not in open("/proc/self/status").read(): got("new privileges")
""",
    ),
    Probe(
        "T06",
        "a namespace, made or entered",
        """
for name, flag in (("time", 0x80), ("mnt", 0x20000), ("cgroup", 0x2000000), ("uts", 0x4000000), ("ipc", 0x8000000), ("user", 0x10000000),
                   ("pid", 0x20000000), ("net", 0x40000000)):
    failed(f"unshare {name}", libc.unshare(flag), errno.EPERM)
    if name != "time" and os.uname().machine == "x86_64":
        failed(f"clone {name}", libc.syscall(56, ctypes.c_long(flag | 17), 0, 0, 0, 0), errno.EPERM)
failed("clone3", libc.syscall(435, bytes(88), 88), errno.ENOSYS)
""",
    ),
    Probe(
        "T07",
        "calls with a large kernel side",
        """
x86 = {"keyctl": 250, "add_key": 248, "request_key": 249, "open_by_handle_at": 304, "perf_event_open": 298, "bpf": 321, "userfaultfd": 323,
       "kexec_load": 246, "init_module": 175, "finit_module": 313, "fanotify_init": 300, "acct": 163, "swapon": 167, "reboot": 169,
       "syslog": 103}
every = {"fsopen": 430, "open_tree": 428, "move_mount": 429, "mount_setattr": 442, "pidfd_getfd": 438}
for name, number in (x86 if os.uname().machine == "x86_64" else {}).items() | every.items():
    failed(name, libc.syscall(number, bytes(256), bytes(256), 0, 0, 0), errno.EPERM)
failed("io_uring_setup", libc.syscall(425, 8, bytes(256)), errno.ENOSYS)
""",
    ),
    Probe(
        "T10",
        "process 1, signalled, traced or looked into",
        """
for number in range(1, 65):
    try: os.kill(1, number)
    except OSError: pass
for request in (16, 0x4206): failed("ptrace", libc.ptrace(request, 1, None, None), errno.EPERM)
iov = (ctypes.c_size_t * 2)(0, 8)
failed("process_vm_readv", libc.process_vm_readv(1, iov, 1, iov, 1, 0), errno.EPERM)
for name in ("mem", "environ", "maps", "auxv", "exe", "root/etc/passwd"): refused(name, lambda: open(f"/proc/1/{name}", "rb").read())
for name in ("exe", "root", "cwd", "ns/mnt"): refused(name, lambda: os.readlink(f"/proc/1/{name}"))
refused("fd", lambda: os.listdir("/proc/1/fd"))
""",
    ),
    Probe(
        "T20",
        "a channel to the outside",
        """
for fd in map(int, os.listdir("/proc/self/fd")):
    try: mode = os.fstat(fd).st_mode
    except OSError: continue  # that of the listing
    if fd > 2 or not (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISREG(mode)): got(f"descriptor {fd}: {stat.filemode(mode)}")
if open("/proc/net/unix").read().count("\\n") > 1: got("a unix socket")
""",
    ),
    Probe(
        "T34",
        "a way into the network",
        """
import socket
if [name for _, name in socket.if_nameindex()] != ["lo"]: got("a device")
for family, kind, address in (
    (socket.AF_INET, socket.SOCK_STREAM, ("169.254.169.254", 80)), (socket.AF_INET, socket.SOCK_DGRAM, ("192.0.2.1", 53)),
    (socket.AF_INET, socket.SOCK_DGRAM, ("224.0.0.251", 5353)), (socket.AF_INET6, socket.SOCK_DGRAM, ("2001:db8::1", 53)),
):
    def send():
        s = socket.socket(family, kind); s.connect(address); s.send(b"x")
    refused(f"sent to {address}", send)
""",
    ),
    Probe(
        "T35",
        "a rare socket family",
        """
import socket
for family in (3, 4, 5, 9, 15, 17, 21, 24, 26, 29, 30, 31, 33, 38, 39, 40, 41, 43, 44):
    refused(f"family {family}", lambda: socket.socket(family, socket.SOCK_DGRAM, 0), errno.EAFNOSUPPORT)
refused("AF_INET, SOCK_PACKET", lambda: socket.socket(socket.AF_INET, 10, 0x300), errno.EAFNOSUPPORT)
refused("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1), errno.EPERM)
""",
    ),
)
