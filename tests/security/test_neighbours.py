# SPDX-License-Identifier: Apache-2.0
"""T08, T34: two sandboxes beside each other, and the host's network beside both."""

from __future__ import annotations

import ast
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.kernel import procfs
from tests.boxes import Box, Node


@pytest.fixture
def other(node: Node) -> Iterator[Box]:
    with node.box() as other:
        yield other


# --- ids -----------------------------------------------------------------------------------------------------------


def test_t08_files_belong_to_different_ids(box: Box, other: Box) -> None:
    for one in (box, other):
        one.sh("echo mine > /file; chown 1000:1000 /file; chmod 600 /file")
    owners = {os.stat(f"{procfs.path_of(one.pid, 'root')}/file").st_uid for one in (box, other)}
    assert owners == {box.uid_base + 1000, other.uid_base + 1000}


def test_t08_a_directory_both_can_reach(box: Box, other: Box, tmp_path: Path) -> None:
    """As if the host had given both the same directory. What one makes there the other cannot touch, whoever it is inside."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    fd = os.open(shared, os.O_RDONLY | os.O_DIRECTORY)
    make = """
import os
fd = os.open("secret", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=3); os.write(fd, b"mine"); os.fchmod(fd, 0o6700)
os.mkdir("folder", 0o700, dir_fd=3); os.open("folder/inner", os.O_WRONLY | os.O_CREAT, 0o666, dir_fd=3)
"""
    attack = """
import os
attempts = {
    "read": lambda: os.open("secret", os.O_RDONLY, dir_fd=3),
    "write": lambda: os.open("secret", os.O_WRONLY, dir_fd=3),
    "chown": lambda: os.chown("secret", 0, 0, dir_fd=3),
    "chmod": lambda: os.chmod("secret", 0o777, dir_fd=3),
    "remove": lambda: os.unlink("secret", dir_fd=3),
    "rename": lambda: os.rename("secret", "stolen", src_dir_fd=3, dst_dir_fd=3),
    "link": lambda: os.link("secret", "/tmp/stolen", src_dir_fd=3),
    "xattr": lambda: os.setxattr("/proc/self/fd/3/secret", "user.x", b"1"),
    "enter": lambda: os.open("folder/inner", os.O_RDONLY, dir_fd=3),
    "execute": lambda: os.execve("/proc/self/fd/3/secret", ["x"], {}),
    "trusted": lambda: os.setxattr("/proc/self/fd/3", "trusted.overlay.opaque", b"y"),
    "time": lambda: os.utime("/proc/self/fd/3/secret"),
}
done = []
for name, attempt in attempts.items():
    try: attempt()
    except OSError: continue
    done.append(name)
print(done, os.stat("secret", dir_fd=3).st_uid, sorted(os.listdir(3)))
"""
    try:
        assert box.python(make, extra=[fd]).code == 0
        for user in ("root", "nobody"):
            assert other.python(attack, user=user, extra=[fd]).text == "[] 65534 ['folder', 'secret']\n"  # 65534: nobody it knows
    finally:
        os.close(fd)
    assert (shared / "secret").read_bytes() == b"mine"
    assert (shared / "secret").stat().st_uid == box.uid_base


def test_t08_what_is_the_hosts_belongs_to_nobody(box: Box, tmp_path: Path) -> None:
    """A file of the host's root in such a directory, of a mode that spares it from others."""
    (tmp_path / "hosts").write_text("secret")
    (tmp_path / "hosts").chmod(0o600)
    tmp_path.chmod(0o755)
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    source = """
import os
for attempt in (lambda: os.open("hosts", os.O_RDONLY, dir_fd=3), lambda: os.chown("hosts", 0, 0, dir_fd=3),
                lambda: os.unlink("hosts", dir_fd=3), lambda: os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=3)):
    try: attempt()
    except OSError: continue
    raise SystemExit("reached")
"""
    try:
        assert box.python(source, extra=[fd]).code == 0
    finally:
        os.close(fd)


# --- processes and ipc ---------------------------------------------------------------------------------------------


def test_t08_processes_of_another_are_not_there(box: Box, other: Box) -> None:
    victim = other.start("sleep", "1000")
    source = """
import os, signal, sys
reached = []
for pid in range(1, 33000):
    if pid in (1, os.getpid(), os.getppid()): continue
    try: os.kill(pid, 0)
    except ProcessLookupError: continue
    except PermissionError: pass
    reached.append(pid)
print(reached)
"""
    assert box.python(source).text == "[]\n"
    assert not victim.running.exited.done()


IPC = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mq_open.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
make = sys.argv[1] == "make"
found = []
flags = 0o1666 if make else 0
for name, get in (("shm", lambda: libc.shmget(0x1234, 4096, flags)), ("sem", lambda: libc.semget(0x1234, 1, flags)),
                  ("msg", lambda: libc.msgget(0x1234, flags)),
                  ("mq", lambda: libc.mq_open(b"/queue", os.O_RDWR | (os.O_CREAT if make else 0), 0o666, None))):
    if get() >= 0: found.append(name)
if make: open("/dev/shm/block", "w").write("x")
if os.path.exists("/dev/shm/block"): found.append("/dev/shm")
print(found)
"""


def test_t08_ipc_is_each_ones_own(box: Box, other: Box) -> None:
    everything = "['shm', 'sem', 'msg', 'mq', '/dev/shm']\n"
    assert box.python(IPC, "make").text == everything
    assert box.python(IPC, "look").text == everything  # between its own commands it is shared
    assert other.python(IPC, "look").text == "[]\n"


# --- network -------------------------------------------------------------------------------------------------------


def test_t34_what_listens_on_the_host_is_not_there(box: Box, other: Box) -> None:
    """Not on its loopback address, not by an abstract name; and a neighbour's neither."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as abstract:
        name = f"opendsec-host-{os.getpid()}"
        abstract.bind("\0" + name)
        abstract.listen()
        served = other.start_python(
            """
import socket, sys
a = socket.socket(socket.AF_UNIX); a.bind("\\0neighbour"); a.listen()
t = socket.create_server(("127.0.0.1", 4242)); print("listening", flush=True); t.accept()
"""
        )
        served.expect("listening")
        source = """
import errno, socket, sys
results = []
for family, address in ((socket.AF_INET, ("127.0.0.1", int(sys.argv[1]))), (socket.AF_INET, ("127.0.0.1", 4242)),
                        (socket.AF_UNIX, "\\0" + sys.argv[2]), (socket.AF_UNIX, "\\0neighbour")):
    try: socket.socket(family).connect(address); results.append("connected")
    except OSError as e: results.append(errno.errorcode[e.errno])
print(results)
"""
        said = box.python(source, str(listener.getsockname()[1]), name).text
        assert said == f"{['ECONNREFUSED'] * 4}\n"
        served.kill()


def test_t34_its_network_cannot_be_changed(box: Box) -> None:
    """No capability over it: no address, no route, no packet filter, no device, no setting, no raw socket."""
    source = """
import errno, fcntl, socket, struct
results = []
def attempt(call):
    try: call()
    except OSError as e: results.append(errno.errorcode[e.errno])
    else: results.append("done")
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
attempt(lambda: fcntl.ioctl(s, 0x8914, struct.pack("16sh14x", b"lo", 0)))  # SIOCSIFFLAGS
attempt(lambda: fcntl.ioctl(s, 0x8916, struct.pack("16sH2x4s8x", b"lo", 2, b"\\x0a\\x00\\x00\\x01")))  # SIOCSIFADDR
attempt(lambda: fcntl.ioctl(s, 0x890B, bytes(120)))  # SIOCADDRT
attempt(lambda: s.setsockopt(socket.SOL_IP, 64, bytes(84)))  # IPT_SO_SET_REPLACE
attempt(lambda: s.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, 1))
attempt(lambda: s.setsockopt(socket.SOL_SOCKET, 33, 1 << 30))  # SO_RCVBUFFORCE
attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
n = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
n.send(struct.pack("=IHHIIBxHiII", 32, 16, 5, 1, 0, 0, 0, 0, 0, 0) )  # RTM_NEWLINK with an acknowledgement
code = struct.unpack_from("=i", n.recv(4096), 16)[0]
results.append(errno.errorcode.get(-code, "done"))
print(results)
"""
    assert set(ast.literal_eval(box.python(source).text)) <= {"EPERM", "EACCES", "ENOPROTOOPT", "EOPNOTSUPP"}


def test_neighbours_work_at_the_same_time(node: Node, box: Box, other: Box) -> None:
    """The same port, the same names, the same everything."""
    source = """
import os, socket, sys
s = socket.create_server(("127.0.0.1", 8080)); os.mkdir("/same"); open("/same/" + sys.argv[1], "w")
print("up", flush=True); sys.stdin.readline(); print(os.listdir("/same"))
"""
    commands = [one.start("python3", "-ISuc", source, name, stdin=True) for one, name in ((box, "first"), (other, "second"))]
    for command in commands:
        command.expect("up")
    for command in commands:
        command.write(b"\n")
    assert [command.wait().out for command in commands] == [b"up\n['first']\n", b"up\n['second']\n"]
