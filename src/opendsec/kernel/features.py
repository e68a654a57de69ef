# SPDX-License-Identifier: Apache-2.0
"""What this machine can do, found out by doing it once: never by the kernel's version, never by a file's mere existence.

`probe(name)` tries one feature and remembers; `probe_all()` gives the table that `doctor` prints. Each probe does the real
thing in a forked child, a detached mount or a scratch directory, and leaves nothing behind. Some fork, so probe before the
process starts threads. Not for the spawner: this module may import what it likes.

`OPENDSEC_FORCE_MISSING=name,name` makes features absent for those who ask here, so that fallbacks can be tested.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from opendsec.kernel import (
    abi,
    btrfs,
    cgroup_files,
    cgroups,
    fds,
    landlock,
    loop,
    mounts,
    namespaces,
    netlink,
    procfs,
    seccomp,
    syscall_table,
    syscalls,
)

FORCE_MISSING = "OPENDSEC_FORCE_MISSING"
SCRATCH_DIR = "/var/tmp"
"""Where probes put files; on a disk, since EROFS and fanotify differ on tmpfs. `probe_all` can be told another place."""


@dataclass(frozen=True, slots=True)
class Feature:
    """`reason` says why it is absent, and may add a detail when it is present (a version, a place)."""

    name: str
    present: bool
    reason: str
    needed_for: str
    without_it: str


class Missing(Exception):
    """Raised by a probe: absent, for the reason given. An OSError means the same."""


@dataclass(frozen=True, slots=True)
class _Probe:
    run: Callable[[str], str]  # takes a scratch directory; returns a detail
    needed_for: str
    without_it: str


_probes: dict[str, _Probe] = {}
_results: dict[str, Feature] = {}


def _feature(name: str, needed_for: str, without_it: str) -> Callable[[Callable[[str], str]], Callable[[str], str]]:
    def register(run: Callable[[str], str]) -> Callable[[str], str]:
        _probes[name] = _Probe(run, needed_for, without_it)
        return run

    return register


def names() -> list[str]:
    """Every feature, in the table's order."""
    return list(_probes)


def forced_missing() -> frozenset[str]:
    """The names in OPENDSEC_FORCE_MISSING. Raises ValueError for one that is no feature: a typo must not pass for a test."""
    forced = frozenset(name.strip() for name in os.environ.get(FORCE_MISSING, "").split(",") if name.strip())
    if unknown := forced - _probes.keys():
        raise ValueError(f"{FORCE_MISSING} names no feature: {', '.join(sorted(unknown))}")
    return forced


def probe(name: str, scratch_dir: str | None = None) -> Feature:
    """Try a feature, or give what an earlier try found. Raises KeyError for an unknown name."""
    entry = _probes[name]
    if name in forced_missing():
        return Feature(name, False, f"forced by {FORCE_MISSING}", entry.needed_for, entry.without_it)
    if name not in _results:
        present, reason = True, ""
        try:
            with tempfile.TemporaryDirectory(prefix="opendsec-probe-", dir=scratch_dir or SCRATCH_DIR) as scratch:
                reason = entry.run(scratch)
        except Missing as error:
            present, reason = False, str(error)
        except OSError as error:
            subject = f" ({error.filename})" if isinstance(error.filename, str) else ""
            present, reason = False, f"{error.strerror or error}{subject}"
        _results[name] = Feature(name, present, reason, entry.needed_for, entry.without_it)
    return _results[name]


def probe_all(scratch_dir: str | None = None) -> list[Feature]:
    """The whole table; about a second the first time."""
    return [probe(name, scratch_dir) for name in _probes]


def forget() -> None:
    """Drop what was found; the next question tries again."""
    _results.clear()


# --- tools for probes ----------------------------------------------------------------------------------------------


def _in_child(body: Callable[[], object], *, flags: int = 0, cgroup_fd: int | None = None) -> None:
    """Run `body` in a forked child; what it raises is raised here as `Missing`."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        pid, _ = syscalls.clone3(flags, cgroup_fd=cgroup_fd)
        if pid == 0:
            try:
                signal.alarm(10)  # a probe that hangs ends as "absent"
                body()
            except BaseException as error:
                os.write(writing, f"{error}"[:1000].encode("utf-8", "replace") or b"failed")
            finally:
                os._exit(0)
        os.close(writing)
        writing = -1
        text = b""
        while part := os.read(reading, 4096):
            text += part
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
    if text:
        raise Missing(text.decode("utf-8", "replace"))
    if status:
        raise Missing(f"the probe ended with {signal.Signals(status & 0x7F).name}")


@contextmanager
def _waiting_child(flags: int = 0, cgroup_fd: int | None = None) -> Iterator[tuple[int, int]]:
    """(pid, pidfd) of a child that only waits; killed and reaped at the end."""
    pid, pidfd = syscalls.clone3(flags, cgroup_fd=cgroup_fd, want_pidfd=True)
    if pid == 0:
        try:
            while True:
                signal.pause()
        finally:
            os._exit(0)
    try:
        yield pid, pidfd
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pidfd)


@contextmanager
def _closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def _need(condition: object, reason: str) -> None:
    if not condition:
        raise Missing(reason)


# Two images of a directory with one file, "probe", that holds "opendsec": all in one, and with the data apart.
_EROFS_WHOLE = (
    b"c-muN7zLwX6pU2x=;7A~OK)<yGXvQ?3@QvvSky4m(0&#me(T7@pabRq2Lfby6*$cVXR89)>QJ^i&~<uxdId%KNvXKZU((3Pz=32wvVZamQu9)ZQ<Fzi!YCL8q"
    b"hJ(_f>AIEM!_f;2><{qJr@7"
)
_EROFS_META = (
    b"c-muN7zLwX6pU2x=;7A~5>MDpG6UH>3>pkfSky3*U>*-t2j>v+KMN4Qb!1}Df%5+Y0kXUXlvV+T42-P`WNSm&>OjBh>FE^|<tL?LGoJ&9mozehX%JAr2v5e*L^u"
    b"jY!6+C7qhJ(_f>AIE=mr3$j}Q6"
)
_CONTENT = b"opendsec"
IDS = [(0, 1_000_000, 65_536)]


def _write_erofs(scratch: str) -> tuple[str, str, str]:
    """(whole, metadata, data) image files."""
    contents = {
        "whole": zlib.decompress(base64.b85decode(_EROFS_WHOLE)),
        "meta": zlib.decompress(base64.b85decode(_EROFS_META)),
        "data": _CONTENT.ljust(4096, b"\0"),
    }
    for name, content in contents.items():
        with open(f"{scratch}/{name}", "wb") as file:
            file.write(content)
    return f"{scratch}/whole", f"{scratch}/meta", f"{scratch}/data"


def _read_at(mount: int, name: str) -> bytes:
    with _closing(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=mount)) as fd:
        return os.read(fd, 100)


@contextmanager
def _erofs(scratch: str) -> Iterator[int]:
    """A detached EROFS mount, by whatever means the machine has."""
    with _closing(mounts.mount_erofs(_write_erofs(scratch)[0])) as fd:
        yield fd


# --- isolation -----------------------------------------------------------------------------------------------------


@_feature("user_namespaces", "container sandboxes: root inside is nobody outside", "containers are refused")
def _user_namespaces(scratch: str) -> str:
    os.close(namespaces.user_namespace(IDS))
    return ""


@_feature("sandbox_namespaces", "container sandboxes: own mounts, processes, ipc, host name, network", "containers are refused")
def _sandbox_namespaces(scratch: str) -> str:
    flags = abi.CLONE_NEW_MASK & ~(abi.CLONE_NEWUSER | abi.CLONE_NEWTIME)
    _in_child(netlink.loopback_up, flags=flags)
    return ""


@_feature("pidfd", "waiting for, signalling and joining processes without pid reuse races", "containers are refused")
def _pidfd(scratch: str) -> str:
    with _waiting_child(abi.CLONE_NEWUTS | abi.CLONE_NEWNS) as (_, pidfd):
        _in_child(lambda: syscalls.setns(pidfd, abi.CLONE_NEWUTS | abi.CLONE_NEWNS))
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        _need(not poller.poll(0), "a pidfd of a living process polls readable")
        syscalls.pidfd_send_signal(pidfd, signal.SIGKILL)
        _need(poller.poll(5000), "a pidfd does not report the end of its process")
    return ""


@_feature("seccomp_filter", "the system call profile of sandboxes", "containers are refused")
def _seccomp_filter(scratch: str) -> str:
    def body() -> None:
        syscalls.prctl(abi.PR_SET_NO_NEW_PRIVS, 1)
        rule = seccomp.Rule(seccomp.errno_action(errno.EXFULL), ["unshare"])
        seccomp.install(seccomp.compile_filter([rule], seccomp.ALLOW))
        try:
            syscalls.unshare(0)
        except OSError as error:
            _need(error.errno == errno.EXFULL, "the filter answers wrongly")
        else:
            raise Missing("the filter does not hold")

    _need(abi.MACHINE in seccomp.ARCHES, f"no system call table for {abi.MACHINE}")
    _in_child(body)
    return ""


_NOTIF_RECV, _NOTIF_SEND = 0xC050_2100, 0xC018_2101


@_feature("seccomp_notify", "asking the edge about single system calls", "the few mediated calls are denied instead")
def _seccomp_notify(scratch: str) -> str:
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
        _need(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42, "the answer did not arrive")

    _in_child(body)
    return ""


@_feature("landlock", "a second fence around helpers that read hostile files", "helpers rely on users and namespaces alone")
def _landlock(scratch: str) -> str:
    def body() -> None:
        syscalls.prctl(abi.PR_SET_NO_NEW_PRIVS, 1)
        landlock.restrict([])
        try:
            os.listdir("/")
        except PermissionError:
            return
        raise Missing("a restricted process still reads")

    version = landlock.abi_version()
    _need(version, "the kernel has no Landlock, or was booted without")
    _in_child(body)
    return f"ABI {version}"


@_feature("openat2", "every file operation: resolving paths beneath a sandbox's root", "containers are refused")
def _openat2(scratch: str) -> str:
    os.symlink("/etc", f"{scratch}/link")
    os.mkdir(f"{scratch}/etc")
    with _closing(fds.open_path(scratch, directory=True)) as root, _closing(fds.beneath(root, "link/../../etc", os.O_PATH)) as found:
        _need(os.path.samestat(os.fstat(found), os.stat(f"{scratch}/etc")), "a path left its root")
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


@_feature("apparmor", "a mandatory profile around each sandbox", "namespaces, seccomp and capabilities hold alone")
def _apparmor(scratch: str) -> str:
    _need("apparmor" in _security_modules(), "not among the kernel's active security modules")
    return ""


@_feature("bpf_lsm", "audit and policy programs at security hooks", "audit sees what seccomp and fanotify see")
def _bpf_lsm(scratch: str) -> str:
    _need("bpf" in _security_modules(), "not among the kernel's active security modules")
    return ""


# --- mounts and images ---------------------------------------------------------------------------------------------


@_feature("erofs_file", "mounting layers straight from files", "layers are mounted through loop devices")
def _erofs_file(scratch: str) -> str:
    whole, _, _ = _write_erofs(scratch)
    with _closing(mounts.new_mount("erofs", {"source": whole, "ro": None}, abi.MOUNT_ATTR_RDONLY)) as mount:
        _need(_read_at(mount, "probe") == _CONTENT, "the file reads wrongly")
    return ""


@_feature("erofs_device", "layers whose data lies apart from their metadata", "layers are built as one file, and cannot load on demand")
def _erofs_device(scratch: str) -> str:
    _, meta, data = _write_erofs(scratch)
    with _closing(mounts.mount_erofs(meta, data)) as mount:
        _need(_read_at(mount, "probe") == _CONTENT, "the file reads wrongly")
    return ""


@_feature("detached_clone", "handing the shared mount of a layer to a sandbox by descriptor", "layers are attached in a private namespace")
def _detached_clone(scratch: str) -> str:
    with _erofs(scratch) as mount, _closing(mounts.clone(mount)) as copy, _closing(mounts.clone(copy)) as second:
        _need(_read_at(second, "probe") == _CONTENT, "the file reads wrongly")
    return ""


@_feature("idmapped_mounts", "one shared layer for sandboxes with different users", "containers are refused")
def _idmapped_mounts(scratch: str) -> str:
    with (
        _erofs(scratch) as mount,
        _closing(namespaces.user_namespace(IDS)) as userns,
        _closing(mounts.idmapped_clone(mount, userns)) as copy,
    ):
        _need(os.stat("probe", dir_fd=copy).st_uid == IDS[0][1], "the owner is not mapped")
    return ""


@_feature("overlay_fd", "a sandbox's root: mapped layers given to overlay by descriptor, a writable upper", "containers are refused")
def _overlay_fd(scratch: str) -> str:
    with ExitStack() as stack:
        lower = stack.enter_context(_erofs(scratch))
        userns = stack.enter_context(_closing(namespaces.user_namespace(IDS)))
        copy = stack.enter_context(_closing(mounts.idmapped_clone(lower, userns)))
        uid = IDS[0][1]
        upper_fs = stack.enter_context(_closing(mounts.tmpfs(1 << 20, 64, uid=uid, gid=uid)))
        directories = []
        for name in ("upper", "work"):
            os.mkdir(name, dir_fd=upper_fs)
            directories.append(stack.enter_context(_closing(fds.open_path(name, dir_fd=upper_fs, directory=True))))
        root = stack.enter_context(_closing(mounts.overlay([copy], *directories)))
        with _closing(os.open("probe", os.O_RDWR | os.O_CLOEXEC, dir_fd=root)) as fd:
            os.write(fd, b"changed!")
        _need(_read_at(root, "probe") == b"changed!", "the upper does not hold what was written")
        _need(os.stat("upper/probe", dir_fd=upper_fs).st_uid == uid, "the copy has the wrong owner")
    return ""


@_feature("loop", "the pool of scratch disks, and layers where EROFS cannot mount files", "scratch lies in memory (tmpfs)")
def _loop(scratch: str) -> str:
    with open(f"{scratch}/disk", "wb") as file:
        file.write(_CONTENT.ljust(1 << 20, b"\0"))
    with loop.attach(f"{scratch}/disk") as device:
        _need(os.pread(device.fd, 8, 0) == _CONTENT, "the device reads wrongly")
        return ""


@_feature("tmpfs", "scratch in memory with exact limits on bytes and inodes; /dev and /dev/shm", "containers are refused")
def _tmpfs(scratch: str) -> str:
    with _closing(mounts.tmpfs(4096, 3)) as mount:
        with _closing(os.open("full", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, dir_fd=mount)) as fd:
            os.write(fd, bytes(4096))
            try:
                os.write(fd, b"x")
            except OSError as error:
                _need(error.errno == errno.ENOSPC, "the limit on bytes answers wrongly")
            else:
                raise Missing("the limit on bytes does not hold")
        os.mkdir("second", dir_fd=mount)
        try:
            os.mkdir("third", dir_fd=mount)
        except OSError as error:
            _need(error.errno == errno.ENOSPC, "the limit on inodes answers wrongly")
        else:
            raise Missing("the limit on inodes does not hold")
    return ""


def _with_btrfs(scratch: str, *, simple: bool) -> None:
    tool = shutil.which("mkfs.btrfs", path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")
    _need(tool, "mkfs.btrfs is not installed (btrfs-progs)")
    image = f"{scratch}/disk"
    with open(image, "wb") as file:
        file.truncate(128 << 20)
    made = subprocess.run([str(tool), "-q", image], capture_output=True, text=True, check=False)
    _need(made.returncode == 0, f"mkfs.btrfs: {made.stderr.strip()[:200]}")
    with loop.attach(image) as device:
        mount = mounts.new_mount("btrfs", {"source": device.path})
    with _closing(mount), _closing(fds.reopen(mount, os.O_RDONLY | os.O_DIRECTORY)) as root:
        btrfs.quota_enable(root, simple=simple)
        btrfs.subvolume_create(root, "scratch", max_bytes=1 << 20)
        with _closing(os.open("scratch/file", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, dir_fd=root)) as fd:
            try:
                os.posix_fallocate(fd, 0, 4 << 20)
            except OSError as error:
                _need(error.errno == errno.EDQUOT, f"the limit answers wrongly: {error.strerror}")
            else:
                raise Missing("the limit on a subvolume does not hold")
        with _closing(os.open("scratch", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)) as source:
            btrfs.snapshot(source, root, "copy")


@_feature("btrfs", "scratch disks with limits and snapshots", "scratch lies in memory (tmpfs); snapshots copy")
def _btrfs(scratch: str) -> str:
    _with_btrfs(scratch, simple=False)
    return ""


@_feature("btrfs_simple_quota", "cheap accounting with many snapshots", "classic quota groups, slower as snapshots grow in number")
def _btrfs_simple_quota(scratch: str) -> str:
    _with_btrfs(scratch, simple=True)
    return ""


@_feature("fanotify_pre_content", "loading layers on demand", "layers are fetched whole before use")
def _fanotify_pre_content(scratch: str) -> str:
    path = f"{scratch}/file"
    with open(path, "wb") as file:
        file.write(_CONTENT)

    def reader() -> None:
        with open(path, "rb") as file:
            _need(file.read() == _CONTENT, "the file reads wrongly")

    flags = abi.FAN_CLASS_PRE_CONTENT | abi.FAN_CLOEXEC | abi.FAN_NONBLOCK
    with _closing(syscalls.fanotify_init(flags, os.O_RDWR | os.O_CLOEXEC)) as group:
        syscalls.fanotify_mark(group, abi.FAN_MARK_ADD, abi.FAN_PRE_ACCESS, abi.AT_FDCWD, path)
        pid = os.fork()
        if pid == 0:
            try:
                reader()
            except BaseException:
                os._exit(1)
            os._exit(0)
        try:
            answered = False
            poller = select.poll()
            poller.register(group, select.POLLIN)
            with _closing(syscalls.pidfd_open(pid)) as pidfd:
                poller.register(pidfd, select.POLLIN)
                while (ready := dict(poller.poll(5000))) and pidfd not in ready:
                    event = os.read(group, 4096)
                    (fd,) = struct.unpack_from("=i", event, 16)
                    os.write(group, struct.pack("=iI", fd, abi.FAN_ALLOW))
                    os.close(fd)
                    answered = True
        finally:
            # Closing the group lets a reader go that still waits for an answer; this one ends either way.
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
    _need(answered and status == 0, "a read of the file asked nobody")
    return ""


# --- control groups ------------------------------------------------------------------------------------------------


@contextmanager
def _group(limits: dict[str, int | float | None] | None = None) -> Iterator[cgroups.Group]:
    group = cgroups.discover().group(f"opendsec-probe-{os.getpid()}")
    group.create(limits)
    try:
        yield group
    finally:
        group.remove()


@_feature("cgroup_limits", "limits of memory, cpu and processes for each sandbox", "containers are refused")
def _cgroup_limits(scratch: str) -> str:
    hierarchies = cgroups.discover()
    _need(not hierarchies.missing, f"no hierarchy offers {', '.join(hierarchies.missing)}")
    with _group({"memory_bytes": 64 << 20, "cpu_cores": 1, "cpu_weight": 100, "pids": 100}):
        pass
    return ", ".join(f"{name} on v{hierarchies.homes[name][0]}" for name in cgroup_files.CONTROLLERS)


@_feature("cgroup_v2", "killing and freezing whole process trees, child groups for each command", "the v1 freezer is used, more slowly")
def _cgroup_v2(scratch: str) -> str:
    hierarchies = cgroups.discover()
    _need(hierarchies.v2, "no cgroup2 is mounted")
    with _group() as group:
        child = group.child("command")
        child.create()
    return str(hierarchies.v2)


@_feature("clone_into_cgroup", "starting processes in their group at no cost", "processes join by cgroup.procs, up to 15 ms each")
def _clone_into_cgroup(scratch: str) -> str:
    with _group() as group:
        directory = group.open_v2_dir()
        if directory is None:
            raise Missing("no cgroup2 is mounted")
        name = f"/{group.name}".encode()

        def body() -> None:
            _need(procfs.cgroup()[""].endswith(name), "the child is elsewhere")

        with _closing(directory):
            _in_child(body, cgroup_fd=directory)
    return ""


@_feature("cgroup_kill", "ending every process of a command, forks in flight included", "processes are frozen, listed and killed in turn")
def _cgroup_kill(scratch: str) -> str:
    with _group() as group:
        directory = group.open_v2_dir()
        if directory is None:
            raise Missing("no cgroup2 is mounted")
        with _closing(directory), _waiting_child(cgroup_fd=directory):
            procfs.write(f"{group.tree_path}/cgroup.kill", b"1")
            group.wait_empty(5)
    return ""


@_feature("cgroup_freeze", "pausing a sandbox", "pause is not offered")
def _cgroup_freeze(scratch: str) -> str:
    with _group() as group:
        directory = group.open_v2_dir()
        if directory is None:
            group.freeze(5)
            group.thaw()
            return "v1 freezer"
        with _closing(directory), _waiting_child(cgroup_fd=directory):
            group.freeze(5)
            group.thaw()
    return ""


# --- the rest ------------------------------------------------------------------------------------------------------

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


@_feature("memfd_exec", "starting process 1 from a sealed copy of its program", "the program is executed from its file")
def _memfd_exec(scratch: str) -> str:
    _need(abi.MACHINE in _EXIT_CODE, f"no test program for {abi.MACHINE}")
    with _closing(fds.sealed_memfd("probe", _exit_program(), executable=True)) as fd:
        _in_child(lambda: syscalls.execveat(fd, "", ["probe"], [], abi.AT_EMPTY_PATH))
    return ""


@_feature("kvm", "hardware speed for microVMs and VMs", "VMs run under emulation (TCG), several times slower")
def _kvm(scratch: str) -> str:
    with _closing(os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)) as fd:
        version = fcntl.ioctl(fd, 0xAE00)  # KVM_GET_API_VERSION
    _need(version == 12, f"unknown KVM interface {version}")
    return "not proven: boots are probed by the VM backend"
