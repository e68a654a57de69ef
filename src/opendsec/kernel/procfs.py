# SPDX-License-Identifier: Apache-2.0
"""Reading /proc. Parsers take bytes and are total: what a process can put into its own entries (names, arguments, mount
points) is hostile text and never raises anything but `ValueError`, never shifts a field.

A process may end between two reads; then `OSError` (ENOENT or ESRCH) carries the path.
"""

from __future__ import annotations

import ctypes
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    Pid = int | str

PROC = "/proc"
PF_EXITING = 0x4  # a flag of /proc/<pid>/stat: include/linux/sched.h


def read(path: str) -> bytes:
    """The whole of a /proc, /sys or cgroup file, in one open. Errors of the read itself carry the path as well."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
        return b"".join(parts)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
    finally:
        os.close(fd)


def write(path: str, text: str | bytes) -> None:
    """Write to a /proc, /sys or cgroup file in one write(2), since those files take each write as a command."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode() if isinstance(text, str) else text)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
    finally:
        os.close(fd)


def path_of(pid: Pid, *parts: str) -> str:
    """`/proc/<pid>/...`; `pid` may be "self"."""
    return "/".join((PROC, str(pid), *parts))


def fd_path(fd: int) -> str:
    """A path that names what an open descriptor of ours names, for calls that take only paths."""
    return f"{PROC}/self/fd/{fd}"


# --- a process -----------------------------------------------------------------------------------------------------


class Stat:
    """The fields of /proc/<pid>/stat that we use. Times in clock ticks (`os.sysconf("SC_CLK_TCK")` a second)."""

    __slots__ = ("comm", "flags", "pgrp", "pid", "ppid", "session", "start_time", "state", "threads", "tty")

    def __init__(self, data: bytes) -> None:
        # The name is between the first "(" and the LAST ")": it may itself hold brackets, spaces and line ends.
        opening, closing = data.find(b"("), data.rfind(b")")
        fields = data[closing + 1 :].split() if 0 <= opening < closing else []
        if len(fields) < 20:
            raise ValueError("not a /proc/<pid>/stat text")
        self.pid = int(data[:opening])
        self.comm = data[opening + 1 : closing]
        self.state = fields[0].decode("ascii", "replace")
        self.ppid, self.pgrp, self.session, self.tty = (int(field) for field in fields[1:5])
        self.flags = int(fields[6])
        self.threads = int(fields[17])
        self.start_time = int(fields[19])


def stat(pid: Pid) -> Stat:
    return Stat(read(path_of(pid, "stat")))


def is_exiting(pid: Pid, start_time: int) -> bool:
    """Whether the process that started then has begun to exit, or is gone. The first process of a pid namespace bears the flag before the
    kernel kills the others, and cannot be waited for until they are gone."""
    try:
        now = stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    return now.start_time != start_time or bool(now.flags & PF_EXITING)


def pid_start_time(pid: Pid) -> int:
    """Clock ticks after boot at which the process started. With the boot id and the pid it names a process for good."""
    return stat(pid).start_time


class Scheduling:
    """What the threads of a process have had of the CPUs. `held`: one of them is in the midst of a system call that nothing interrupts, as
    reading from a disk is, or was stopped."""

    __slots__ = ("held", "threads")

    def __init__(self, pid: Pid) -> None:
        self.held = False
        self.threads: dict[str, tuple[int, int]] = {}  # ns on a CPU, ns waiting for one
        for thread in os.listdir(path_of(pid, "task")):
            try:
                ran, waited = read(path_of(pid, "task", thread, "schedstat")).split()[:2]
                self.held = self.held or stat(f"{pid}/task/{thread}").state in "DTt"
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            self.threads[thread] = (int(ran), int(waited))

    def since(self, before: Scheduling) -> tuple[int, int]:
        """(ns on a CPU, ns waiting for one) of those threads that were there before."""
        ran = waited = 0
        for thread, (now_ran, now_waited) in self.threads.items():
            then_ran, then_waited = before.threads.get(thread, (now_ran, now_waited))
            ran, waited = ran + now_ran - then_ran, waited + now_waited - then_waited
        return ran, waited


def parse_status(data: bytes) -> dict[str, str]:
    """Field → text. Of a repeated field the first counts: the kernel escapes line ends in Name, so none can be forged."""
    fields: dict[str, str] = {}
    for line in data.split(b"\n"):
        name, colon, value = line.partition(b":")
        if colon:
            fields.setdefault(name.decode("utf-8", "surrogateescape"), value.strip().decode("utf-8", "surrogateescape"))
    return fields


def status(pid: Pid) -> dict[str, str]:
    return parse_status(read(path_of(pid, "status")))


def cmdline(pid: Pid) -> list[bytes]:
    """Arguments as the process presents them (it can write there what it likes); empty for kernel threads, zombies."""
    data = read(path_of(pid, "cmdline"))
    return data.rstrip(b"\0").split(b"\0") if data else []


def layout(pid: Pid) -> tuple[int, ...]:
    """start_code, end_code, start_data, end_data, start_brk, start_stack, arg_start, arg_end, env_start, env_end: what the kernel takes for
    the parts of its memory. Zeros for who may not know."""
    fields = read(path_of(pid, "stat")).rpartition(b")")[2].split()
    return tuple(int(fields[number - 3]) for number in (26, 27, 45, 46, 47, 28, 48, 49, 50, 51))


def set_command_line(text: bytes) -> None:
    """Write over this process's own arguments, as others see them. What does not fit is left out, the rest is cleared."""
    fields = read(path_of("self", "stat")).rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end
    if end > start:
        ctypes.memmove(start, text[: end - start - 1].ljust(end - start, b"\0"), end - start)


def environ(pid: Pid) -> list[bytes]:
    """`NAME=value` strings the program was started with."""
    return [item for item in read(path_of(pid, "environ")).split(b"\0") if item]


def parse_limits(data: bytes) -> dict[str, tuple[int | None, int | None]]:
    """Limit name as in the file ("Max open files") → (soft, hard); None is unlimited."""
    limits = {}
    for line in data.decode("ascii", "replace").split("\n")[1:]:
        name, values = line[:26].strip(), line[26:].split()
        if name and len(values) >= 2:
            soft, hard = (None if value == "unlimited" else int(value) for value in values[:2])
            limits[name] = (soft, hard)
    return limits


def limits(pid: Pid) -> dict[str, tuple[int | None, int | None]]:
    return parse_limits(read(path_of(pid, "limits")))


def mapping_flags(pid: Pid) -> list[tuple[bytes, list[str]]]:
    """The path of each mapping and its flags, as smaps has them: two letters each, such as "mg" for what KSM may merge."""
    found, path = [], b""
    for line in read(path_of(pid, "smaps")).splitlines():
        words = line.split(None, 5)
        if words[0] == b"VmFlags:":
            found.append((path, line.decode().split()[1:]))
        elif not words[0].endswith(b":"):
            path = words[5] if len(words) > 5 else b""
    return found


def pss_bytes(pid: Pid) -> int:
    """Memory of a process, with what it shares divided by how many share it. Costs a walk over its pages."""
    for line in read(path_of(pid, "smaps_rollup")).split(b"\n"):
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def fds(pid: Pid = "self") -> dict[int, bytes]:
    """Open descriptors and what each names. For "self" the descriptor of the listing itself is left out."""
    directory = os.open(path_of(pid, "fd"), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = {}
        for name in os.listdir(directory):
            try:
                found[int(name)] = os.fsencode(os.readlink(name, dir_fd=directory))
            except FileNotFoundError:
                continue  # closed meanwhile, as is the descriptor that listdir used
        if str(pid) in ("self", str(os.getpid())):
            found.pop(directory, None)
        return found
    finally:
        os.close(directory)


def fd_info(pid: Pid, fd: int) -> dict[str, str]:
    """/proc/<pid>/fdinfo: pos, flags (octal), mnt_id, and more by kind (a pidfd has Pid)."""
    return parse_status(read(path_of(pid, "fdinfo", str(fd))))


def fd_rows(pid: Pid, fd: int, kind: str) -> list[dict[str, str]]:
    """The rows of fdinfo that begin with `kind`, of which there may be many: an epoll descriptor's are "tfd: 5 events: 19 data: 7"."""
    rows = []
    for line in read(path_of(pid, "fdinfo", str(fd))).decode().splitlines():
        words = line.replace(":", " ").split()
        if words[:1] == [kind]:
            rows.append(dict(zip(words[::2], words[1::2], strict=False)))
    return rows


def parse_cgroup(data: bytes) -> dict[str, bytes]:
    """Controller → path of the group; "" is the v2 hierarchy, `name=...` a named one."""
    groups = {}
    for line in data.split(b"\n"):
        parts = line.split(b":", 2)
        if len(parts) == 3:
            for controller in parts[1].decode("ascii", "replace").split(","):
                groups[controller] = parts[2]
    return groups


def cgroup(pid: Pid = "self") -> dict[str, bytes]:
    return parse_cgroup(read(path_of(pid, "cgroup")))


def pids() -> Iterator[int]:
    """Every process we see, in no particular order."""
    for name in os.listdir(PROC):
        if name.isdigit():
            yield int(name)


def threads(pid: int) -> list[int]:
    return sorted(map(int, os.listdir(path_of(pid, "task"))))


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid` now, those of every thread of it included."""
    found: list[int] = []
    for task in os.listdir(path_of(pid, "task")):
        try:
            found += map(int, read(path_of(pid, "task", task, "children")).split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


# --- mounts --------------------------------------------------------------------------------------------------------


class Mount:
    """One line of mountinfo. Paths are bytes with the kernel's octal escapes undone."""

    __slots__ = (
        "device",
        "fstype",
        "mount_id",
        "mount_point",
        "optional",
        "options",
        "parent_id",
        "root",
        "source",
        "super_options",
    )

    def __init__(self, line: bytes) -> None:
        # Blanks inside a field are escaped, so splitting is exact; the optional fields end at a lone "-".
        fields = line.split(b" ")
        try:
            dash = fields.index(b"-", 6)
            self.mount_id, self.parent_id = int(fields[0]), int(fields[1])
            self.device = fields[2].decode("ascii")
            self.root, self.mount_point = unescape(fields[3]), unescape(fields[4])
            self.options: tuple[str, ...] = _words(fields[5], ",")
            self.optional: tuple[str, ...] = tuple(field.decode("ascii", "replace") for field in fields[6:dash])
            self.fstype = fields[dash + 1].decode("ascii", "replace")
            self.source = unescape(fields[dash + 2])
            self.super_options: tuple[str, ...] = _words(fields[dash + 3], ",")
        except (ValueError, IndexError):
            raise ValueError(f"not a mountinfo line: {line[:200]!r}") from None

    def __repr__(self) -> str:
        return f"Mount({self.mount_point!r}, {self.fstype}, {','.join(self.options)})"


def _words(field: bytes, separator: str) -> tuple[str, ...]:
    return tuple(field.decode("utf-8", "surrogateescape").split(separator))


def unescape(field: bytes) -> bytes:
    r"""Undo the kernel's mangling: `\040` and the like, three octal digits. A lone backslash stays as it is."""
    if b"\\" not in field:
        return field
    out = bytearray()
    at = 0
    while at < len(field):
        digits = field[at + 1 : at + 4]
        if field[at] == 0x5C and len(digits) == 3 and all(0x30 <= digit <= 0x37 for digit in digits):
            out.append(int(digits, 8) & 0xFF)
            at += 4
        else:
            out.append(field[at])
            at += 1
    return bytes(out)


def parse_mountinfo(data: bytes) -> list[Mount]:
    return [Mount(line) for line in data.split(b"\n") if line]


def mountinfo(pid: Pid = "self") -> list[Mount]:
    """The mounts of a process's namespace, as far as its root reaches, in the kernel's order."""
    return parse_mountinfo(read(path_of(pid, "mountinfo")))


# --- the machine ---------------------------------------------------------------------------------------------------


def parse_meminfo(data: bytes) -> dict[str, int]:
    """Field → bytes (or a plain count for fields without a unit)."""
    fields = {}
    for line in data.decode("ascii", "replace").split("\n"):
        name, colon, value = line.partition(":")
        words = value.split()
        if colon and words and words[0].isdigit():
            fields[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return fields


def meminfo() -> dict[str, int]:
    return parse_meminfo(read(f"{PROC}/meminfo"))


def cpu_model() -> str:
    """Maker, family, model, stepping, microcode and features of the first CPU: what a saved state of a virtual CPU is bound to."""
    wanted = (b"vendor_id", b"cpu family", b"model", b"stepping", b"microcode", b"flags")
    first = read(f"{PROC}/cpuinfo").partition(b"\n\n")[0]
    found = (line.partition(b":") for line in first.split(b"\n"))
    return "; ".join(value.strip().decode("ascii", "replace") for name, _, value in found if name.strip() in wanted)


def cpu_khz() -> int:
    """What the first CPU says of its speed; 0 if it says nothing."""
    for line in read(f"{PROC}/cpuinfo").split(b"\n"):
        if line.startswith(b"cpu MHz"):
            return int(float(line.partition(b":")[2]) * 1000)
    return 0


def boot_id() -> str:
    """A UUID that is new at each boot: pids and start times from another boot mean nothing."""
    return read(f"{PROC}/sys/kernel/random/boot_id").decode("ascii").strip()


def filesystems() -> frozenset[str]:
    """File system types the running kernel has registered (a module not yet loaded is missing here)."""
    return frozenset(line.split()[-1] for line in read(f"{PROC}/filesystems").decode("ascii").splitlines() if line)


def sysctl(name: str) -> str:
    """A sysctl by its dotted name. Raises OSError (ENOENT) when the kernel has none such."""
    return read(f"{PROC}/sys/" + name.replace(".", "/")).decode("utf-8", "replace").strip()
