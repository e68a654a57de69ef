# SPDX-License-Identifier: Apache-2.0
"""What a process gives up: capabilities, system calls, files, namespaces. Each in a child, and asked of the kernel itself."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct
from pathlib import Path

import pytest

from opendsec.kernel import abi, capabilities, landlock, namespaces, netlink, procfs, seccomp, syscall_table, syscalls
from opendsec.kernel.seccomp import ALLOW, ENOSYS, ArgCheck, Rule, compile_filter, errno_action
from tests.integration.kernel.children import in_child, waiting_child
from tests.support import requires

pytestmark = requires("seccomp_filter", "user_namespaces")

TABLE = syscall_table.BY_ARCH[abi.MACHINE]
libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *args: int) -> int:
    """A system call by name: its result, or minus errno."""
    ctypes.set_errno(0)
    result = int(libc.syscall(ctypes.c_long(TABLE[name]), *[ctypes.c_ulong(arg) for arg in args]))
    return result if result >= 0 else -ctypes.get_errno()


# --- capabilities


def test_drop_to_makes_all_five_sets_exact() -> None:
    bits = {name: capabilities.mask([name]) for name in ("chown", "kill", "setuid", "net_raw")}

    def body() -> None:
        os.setgroups([])
        capabilities.drop_to(
            bounding=bits["chown"] | bits["kill"] | bits["setuid"],
            effective=bits["kill"],
            permitted=bits["kill"] | bits["chown"],
            inheritable=bits["kill"],
            ambient=bits["kill"],
        )
        fields = procfs.status("self")
        assert {name: int(fields[name], 16) for name in ("CapBnd", "CapEff", "CapPrm", "CapInh", "CapAmb")} == {
            "CapBnd": bits["chown"] | bits["kill"] | bits["setuid"],
            "CapEff": bits["kill"],
            "CapPrm": bits["kill"] | bits["chown"],
            "CapInh": bits["kill"],
            "CapAmb": bits["kill"],
        }
        assert capabilities.bounding() == int(fields["CapBnd"], 16)
        assert capabilities.ambient() == bits["kill"]
        with pytest.raises(PermissionError):
            os.setuid(5)
        with pytest.raises(PermissionError, match="prctl"):
            capabilities.drop_bounding(0)

    in_child(body)


def test_drop_to_nothing() -> None:
    def body() -> None:
        capabilities.drop_to(bounding=0)
        fields = procfs.status("self")
        assert {int(fields[name], 16) for name in ("CapBnd", "CapEff", "CapPrm", "CapInh", "CapAmb")} == {0}

    in_child(body)


def test_last_cap_is_the_kernels() -> None:
    assert capabilities.last_cap() == int(procfs.sysctl("kernel.cap_last_cap"))
    assert capabilities.bounding() == int(procfs.status("self")["CapBnd"], 16)


# --- seccomp


def filtered(rules: list[Rule], default: int = ALLOW) -> None:
    syscalls.prctl(abi.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(compile_filter(rules, default))


def test_a_filter_holds_for_the_process_and_its_children() -> None:
    def body() -> None:
        filtered([Rule(errno_action(errno.EXFULL), ["unshare"], [ArgCheck(0, "==", abi.CLONE_NEWUSER, abi.CLONE_NEWUSER)])])
        assert procfs.status("self")["Seccomp"] == "2"
        for attempt in (abi.CLONE_NEWUSER, abi.CLONE_NEWUSER | abi.CLONE_NEWNS):
            assert call("unshare", attempt) == -errno.EXFULL
        in_child(lambda: exec_under_filter())
        assert call("unshare", abi.CLONE_NEWUTS) == 0

    def exec_under_filter() -> None:
        assert call("unshare", abi.CLONE_NEWUSER) == -errno.EXFULL

    in_child(body)


def test_glibc_falls_back_when_clone3_is_unknown() -> None:
    """posix_spawn and pthread_create use clone3 first; ENOSYS and nothing else makes them use clone."""

    def body() -> None:
        filtered([Rule(ENOSYS, ["clone3"])])
        assert call("clone3", 0, 0) == -errno.ENOSYS
        pid = os.posix_spawn("/bin/true", ["true"], {})
        assert os.waitpid(pid, 0)[1] == 0

    in_child(body)


def test_an_int_argument_with_dirt_above() -> None:
    def body() -> None:
        filtered([Rule(errno_action(errno.EXFULL), ["ioctl"], [ArgCheck.u32(1, "==", 0x5412)])])
        for request in (0x5412, 0x5412 | 1 << 32, 0x5412 | 0xFFFF_FFFF << 32):
            assert call("ioctl", 0, request, 0) == -errno.EXFULL

    in_child(body)


def test_x32_and_nonsense_numbers_are_unknown() -> None:
    def body() -> None:
        filtered([Rule(errno_action(errno.EXFULL), ["getpid"])])
        x32 = [abi.X32_SYSCALL_BIT | TABLE["getpid"]] if abi.MACHINE == "x86_64" else []
        for number in (*x32, 0x7FFF_FFFF, -1):
            ctypes.set_errno(0)
            assert libc.syscall(ctypes.c_long(number)) == -1
            assert ctypes.get_errno() == errno.ENOSYS
        assert call("getpid") == -errno.EXFULL

    in_child(body)


def test_kill_process() -> None:
    pid = os.fork()
    if pid == 0:
        filtered([Rule(seccomp.KILL_PROCESS, ["setdomainname"])])
        call("setdomainname", 0, 0)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGSYS


def test_the_kernel_takes_the_longest_filters() -> None:
    """Relaxed jumps, judged by the kernel's own checker."""
    names = [name for name in TABLE if name not in ("exit_group", "write", "prctl", "seccomp")]
    rules = [Rule(errno_action(5), [name], [ArgCheck(5, "==", 0xDEAD_BEEF_0000_0000 + i)]) for i, name in enumerate(names)]

    def body() -> None:
        program = compile_filter(rules, ALLOW)
        assert len(program) // 8 > 1500
        syscalls.prctl(abi.PR_SET_NO_NEW_PRIVS, 1)
        seccomp.install(program)
        assert os.getpid() == call("getpid", 0, 0, 0, 0, 0, 0)
        assert call("getpid", 0, 0, 0, 0, 0, 0xDEAD_BEEF_0000_0000 + names.index("getpid")) == -5

    in_child(body)


def test_install_needs_no_new_privs_or_privilege() -> None:
    def body() -> None:
        capabilities.drop_to(bounding=0)
        with pytest.raises(PermissionError, match="seccomp"):
            seccomp.install(compile_filter([], ALLOW))

    in_child(body)


@requires("seccomp_notify")
def test_notification() -> None:
    def body() -> None:
        syscalls.prctl(abi.PR_SET_NO_NEW_PRIVS, 1)
        program = compile_filter([Rule(seccomp.NOTIFY, ["setdomainname"])], ALLOW)
        listener = seccomp.install(program, abi.SECCOMP_FILTER_FLAG_NEW_LISTENER)
        assert not os.get_inheritable(listener)
        pid = os.fork()
        if pid == 0:
            os._exit(call("setdomainname", 11, 22))
        notification = bytearray(80)
        fcntl.ioctl(listener, 0xC050_2100, notification)
        number, sender, _, nr = struct.unpack_from("=QIIi", notification)
        assert (sender, nr) == (pid, TABLE["setdomainname"])
        assert struct.unpack_from("=2Q", notification, 32) == (11, 22)
        fcntl.ioctl(listener, 0xC018_2101, bytearray(struct.pack("=QqiI", number, 42, 0, 0)))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42

    in_child(body)


# --- Landlock


@requires("landlock")
def test_landlock_allows_what_the_rules_say(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open/file").write_text("x")
    (tmp_path / "closed").write_text("x")

    def body() -> None:
        syscalls.prctl(abi.PR_SET_NO_NEW_PRIVS, 1)
        directory = os.open(tmp_path / "open", os.O_PATH)
        landlock.restrict([(directory, landlock.READ)])
        assert (tmp_path / "open/file").read_text() == "x"
        for path, mode in ((tmp_path / "open/file", "w"), (tmp_path / "closed", "r"), (tmp_path / "open/new", "w")):
            with pytest.raises(PermissionError):
                path.open(mode)
        with pytest.raises(PermissionError):
            os.listdir("/")

    in_child(body)


@requires("landlock")
def test_landlock_errors(tmp_path: Path) -> None:
    with landlock.Ruleset(landlock.READ_FILE | 1 << 60) as ruleset:  # unknown rights are left out
        assert ruleset.handled == landlock.READ_FILE
        assert not os.get_inheritable(ruleset.fd)
        with pytest.raises(FileNotFoundError):
            ruleset.allow(tmp_path / "missing", landlock.READ_FILE)
        with pytest.raises(OSError, match="landlock_add_rule") as raised:
            ruleset.allow(tmp_path, 0)
        assert raised.value.filename == str(tmp_path)
    ruleset.close()


# --- namespaces


def test_namespace_ids_tell_which_are_shared() -> None:
    ours = namespaces.namespace_ids()
    with waiting_child(flags=abi.CLONE_NEWUTS | abi.CLONE_NEWNET) as (pid, _):
        theirs = namespaces.namespace_ids(pid)
        assert {name for name in ours if ours[name] != theirs[name]} == {"uts", "net"}
        fd = namespaces.open_namespace(pid, "uts")
        assert os.fstat(fd).st_ino == theirs["uts"]
        os.close(fd)
    for attempt in (lambda: namespaces.namespace_ids(1 << 22), lambda: namespaces.open_namespace(1 << 22, "uts")):
        with pytest.raises(FileNotFoundError):
            attempt()


@requires("user_namespaces")
def test_id_maps() -> None:
    with waiting_child(flags=abi.CLONE_NEWUSER) as (pid, _):
        namespaces.write_id_maps(pid, [(0, 1_000_000, 1000), (2000, 2_000_000, 10)], [(0, 3_000_000, 5)])
        assert namespaces.parse_map(procfs.read(f"/proc/{pid}/uid_map")) == [(0, 1_000_000, 1000), (2000, 2_000_000, 10)]
        assert namespaces.parse_map(procfs.read(f"/proc/{pid}/gid_map")) == [(0, 3_000_000, 5)]
        assert procfs.status(pid)["Uid"].split()[0] == procfs.sysctl("kernel.overflowuid") or os.getuid() == 0
        with pytest.raises(PermissionError) as raised:
            namespaces.write_id_maps(pid, [(0, 1, 1)])
        assert raised.value.filename == f"/proc/{pid}/gid_map"
    with waiting_child(flags=abi.CLONE_NEWUSER) as (pid, _):
        namespaces.deny_setgroups(pid)
        assert procfs.read(f"/proc/{pid}/setgroups") == b"deny\n"
    with pytest.raises(OSError, match="Invalid argument"):
        namespaces.user_namespace([(0, 1_000_000, 10), (5, 2_000_000, 10)])


@requires("user_namespaces")
def test_a_user_namespace_without_processes() -> None:
    fd = namespaces.user_namespace([(0, 1_000_000, 65_536)])

    def body() -> None:
        syscalls.setns(fd, abi.CLONE_NEWUSER)
        os.setresuid(0, 0, 0)
        assert namespaces.parse_map(procfs.read("/proc/self/uid_map")) == [(0, 1_000_000, 65_536)]

    in_child(body)
    os.close(fd)


# --- netlink


def test_loopback_comes_up_with_both_addresses() -> None:
    def body() -> None:
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with socket.socket(family) as before, pytest.raises(OSError, match=r"assign|unreachable"):
                before.bind((address, 0))
                before.listen()
                with socket.socket(family) as client:
                    client.connect(before.getsockname())
        netlink.loopback_up()
        netlink.loopback_up()  # again is fine
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with socket.socket(family) as server, socket.socket(family) as client:
                server.bind((address, 0))
                server.listen()
                client.connect(server.getsockname())
        with pytest.raises(OSError, match="netlink: No such device") as raised:
            netlink.link_up(99)
        assert raised.value.filename == "link 99"
        capabilities.drop_to(bounding=0)
        with pytest.raises(PermissionError, match="netlink"):
            netlink.loopback_up()

    in_child(body, flags=abi.CLONE_NEWNET)
