# SPDX-License-Identifier: Apache-2.0
"""Attempts to reach the host from inside: mounts, devices, /proc, privileges, what the host's own files are worth."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import stat
from pathlib import Path

import pytest

from opendsec.api.exec import Pty
from opendsec.kernel import procfs
from tests.boxes import Box, Node
from tests.support import NATIVE_INIT

# --- mounts --------------------------------------------------------------------------------------------------------


def host_mounts() -> list[tuple[int, bytes]]:
    return [(mount.mount_id, mount.mount_point) for mount in procfs.mountinfo()]


def test_t02_nothing_appears_in_the_hosts_mount_table(node: Node) -> None:
    before = host_mounts()
    with node.box() as box:
        assert host_mounts() == before
        result = box.sh("mount -t tmpfs x /mnt; mount --bind / /mnt; mount -o remount,rw /proc/sys; umount /proc/keys; umount -l /dev")
        assert result.err.count(b"permission denied") >= 4 or result.code != 0
        assert box.works()
        assert host_mounts() == before
    assert host_mounts() == before


def test_t02_a_mounted_directory_cannot_be_replaced(box: Box) -> None:
    """/dev and /proc are looked up again for every command: nothing of the sandbox's may be in their place."""
    source = """
import os, shutil
for path in ("/dev", "/proc", "/dev/pts", "/dev/shm", "/proc/sys"):
    for attempt in (lambda p: os.rename(p, "/tmp/x"), os.rmdir, shutil.rmtree, lambda p: os.rename("/tmp", p)):
        try: attempt(path)
        except OSError: continue
        raise SystemExit(f"{path} is gone")
    assert [line for line in open("/proc/self/mountinfo") if line.split()[4] == path], path
print("in place")
"""
    assert box.python(source).text == "in place\n"
    assert box.run("tty", pty=Pty(rows=5, cols=5)).out == b"/dev/pts/0\r\n"


# --- devices -------------------------------------------------------------------------------------------------------


def test_t03_dev_is_a_fixed_list(box: Box) -> None:
    source = """
import json, os, stat
found = {}
for name in sorted(os.listdir("/dev")):
    s = os.lstat(f"/dev/{name}")
    link, device = stat.S_ISLNK(s.st_mode), [stat.filemode(s.st_mode), os.major(s.st_rdev), os.minor(s.st_rdev)]
    found[name] = os.readlink(f"/dev/{name}") if link else device
for attempt in (lambda: open("/dev/x", "w"), lambda: os.remove("/dev/null"), lambda: os.chmod("/dev/null", 0), lambda: os.mkdir("/dev/d"),
                lambda: os.rename("/dev/tty", "/dev/t"), lambda: os.symlink("x", "/dev/l"), lambda: os.utime("/dev/null")):
    try: attempt()
    except OSError as e: assert e.errno in (1, 13, 30), e
    else: raise SystemExit("changed /dev")
print(json.dumps(found))
"""
    assert box.python(source).json == {
        "null": ["crw-rw-rw-", 1, 3],
        "zero": ["crw-rw-rw-", 1, 5],
        "full": ["crw-rw-rw-", 1, 7],
        "random": ["crw-rw-rw-", 1, 8],
        "urandom": ["crw-rw-rw-", 1, 9],
        "tty": ["crw-rw-rw-", 5, 0],
        "fd": "/proc/self/fd",
        "stdin": "/proc/self/fd/0",
        "stdout": "/proc/self/fd/1",
        "stderr": "/proc/self/fd/2",
        "ptmx": "pts/ptmx",
        "pts": ["drwxr-xr-x", 0, 0],
        "shm": ["drwxrwxrwt", 0, 0],
    }


# --- /proc and /sys ------------------------------------------------------------------------------------------------


def test_t04_settings_of_the_host_stay(box: Box) -> None:
    wanted = ("kernel.core_pattern", "kernel.modprobe", "kernel.hostname", "vm.overcommit_memory", "net.ipv4.ip_forward", "kernel.pid_max")
    names = [name for name in wanted if os.path.exists(procfs.path_of("sys", *name.split(".")))]
    before = {name: procfs.sysctl(name) for name in names}
    for name in names:
        path = name.replace(".", "/")
        result = box.sh(f"echo '|/bin/sh' > /proc/sys/{path}; echo b > /proc/sysrq-trigger; echo 1 > /proc/sys/{path}")
        assert result.code != 0
    assert {name: procfs.sysctl(name) for name in names} == before


def test_t04_there_is_no_sys_and_no_cgroup_file(box: Box) -> None:
    source = """
import os
assert not os.path.exists("/sys") or os.listdir("/sys") == []
for folder, folders, files in os.walk("/"):
    if folder == "/proc": folders[:] = []
    assert not {"cgroup.procs", "memory.max", "memory.limit_in_bytes", "uevent_helper", "notify_on_release"} & set(files), folder
assert not [line for line in open("/proc/self/mountinfo") if " cgroup" in line or " sysfs " in line]
print("none", open("/proc/self/cgroup").read().split("0::")[-1].strip())
"""
    said, group = box.python(source).text.split()
    assert said == "none"
    assert group.startswith("/proc_")  # below its own root, which is all it can see


def test_t29_nothing_tells_where_the_host_keeps_things(node: Node, box: Box, tmp_path: Path) -> None:
    """Every readable file of /proc and of the process itself, searched for the host's own names."""
    words = [node.edge_id, str(tmp_path.parent.parent), box.handle.sandbox_id, "opendsec", "dsec-"]
    source = """
import json, os, sys
words, found = json.loads(sys.argv[1]), []
for folder, folders, files in os.walk("/proc"):
    if folder == "/proc": folders[:] = [f for f in folders if not f.isdigit() or int(f) == os.getpid()]
    for name in files:
        path = f"{folder}/{name}"
        if name in ("mem", "kmsg", "pagemap", "environ", "cmdline", "filesystems", "kallsyms"): continue
        try: text = os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 1 << 20).decode("latin-1")
        except OSError: continue
        found += [f"{path}: {word}" for word in words if word in text]
print(found)
"""
    assert box.python(source, json.dumps(words)).text == "[]\n"


def test_t04_only_its_own_processes_are_there(box: Box) -> None:
    other = box.start("sleep", "1000")
    source = "import os; print(sorted(open(f'/proc/{pid}/comm').read().strip() for pid in os.listdir('/proc') if pid.isdigit()))"
    assert box.python(source).text == "['init', 'python3', 'sleep']\n"
    other.kill()


# --- privileges ----------------------------------------------------------------------------------------------------


def test_t05_a_setuid_program_gives_nothing(box: Box) -> None:
    assert box.sh("cp /usr/bin/id /usr/local/bin/me; chown root:root /usr/local/bin/me; chmod 6755 /usr/local/bin/me").code == 0
    said = box.run("/usr/local/bin/me", user="nobody").text
    assert said.startswith("uid=65534") and "euid" not in said and "egid" not in said
    assert box.run("su", "-c", "id", user="nobody").code != 0


def test_t05_file_capabilities_give_nothing(box: Box) -> None:
    source = """
import os, shutil, struct
shutil.copy("/usr/bin/cat", "/usr/local/bin/reader"); os.chmod("/usr/local/bin/reader", 0o755)
every = (1 << 41) - 1
os.setxattr("/usr/local/bin/reader", "security.capability", struct.pack("<5I", 0x2000001, every & 0xFFFFFFFF, 0, every >> 32, 0))
"""
    assert box.python(source).code == 0
    status = box.run("/usr/local/bin/reader", "/proc/self/status", user="nobody").text
    assert "CapEff:\t0000000000000000" in status and "CapPrm:\t0000000000000000" in status


def test_t06_no_namespace_can_be_made_or_entered(box: Box) -> None:
    result = box.sh(
        "unshare -U true; unshare -m true; unshare -n true; unshare -p true; nsenter -t 1 -a true; chroot / true && echo chrooted"
    )
    assert result.out == b"chrooted\n"
    assert result.err.count(b"Operation not permitted") + result.err.count(b"Permission denied") >= 5


# --- the host's own files ------------------------------------------------------------------------------------------


def test_t10_the_program_of_process_1_stays_as_it_is(box: Box) -> None:
    digest = hashlib.sha256(NATIVE_INIT.read_bytes()).digest()
    source = """
import os
for path in ("/proc/1/exe", "/proc/1/root/proc/1/exe", "/dsec-init"):
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_PATH):
        try: fd = os.open(path, flags)
        except OSError: continue
        raise SystemExit(f"opened {path} with {flags:#x}")
print("closed")
"""
    assert box.python(source).text == "closed\n"
    running = Path(procfs.path_of(box.pid, "exe"))
    assert hashlib.sha256(running.read_bytes()).digest() == digest
    assert hashlib.sha256(NATIVE_INIT.read_bytes()).digest() == digest


def test_t09_the_hosts_interpreter_is_out_of_reach(node: Node, box: Box) -> None:
    """A command is the spawner's image until it is executed, so /proc/self/exe in its arguments, in a script or a link means the spawner's
    program. That is a copy for the host's root alone."""
    program = procfs.path_of(node.spawner.pid, "exe")
    assert stat.S_IMODE(os.stat(program).st_mode) == 0o700 and os.stat(program).st_uid == 0
    assert os.readlink(program).startswith("/memfd:")
    box.sh("cd /usr/local/bin; ln -s /proc/self/exe again; echo '#!/proc/self/exe' > hashbang; chmod 755 hashbang")
    for argv in (["/proc/self/exe", "-c", "1"], ["again", "-c", "1"], ["hashbang"]):
        assert "Permission denied" in box.run(*argv).exit.not_started


def test_t20_there_is_no_channel_to_the_outside(box: Box) -> None:
    """No descriptor but the command's own three, no socket, no file that anything outside listens on."""
    source = """
import os, stat
kinds = {fd: stat.filemode(os.fstat(int(fd)).st_mode)[0] for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
assert {kinds["0"], kinds["1"], kinds["2"]} == {"c", "p"} and len(kinds) <= 4, kinds
assert open("/proc/net/unix").read().count("\\n") == 1
sockets = []
for folder, folders, files in os.walk("/"):
    if folder == "/proc": folders[:] = []
    sockets += [f for f in files if stat.S_ISSOCK(os.lstat(f"{folder}/{f}").st_mode)]
print(sockets)
"""
    assert box.python(source).text == "[]\n"


def test_what_it_writes_stays_in_its_scratch(node: Node, box: Box) -> None:
    """Through /proc/self/fd, /proc/self/root, /proc/self/cwd and their like."""
    assert (
        box.sh("echo x > /proc/self/root/one; cd /tmp; echo x > /proc/self/cwd/two; echo x > /proc/$$/root/tmp/three; ls / /tmp").code == 0
    )
    root = procfs.path_of(box.pid, "root")
    assert sorted(name for name in ("one", "tmp/two", "tmp/three") if os.path.exists(f"{root}/{name}")) == ["one", "tmp/three", "tmp/two"]
    assert os.stat(f"{root}/one").st_uid == box.uid_base
    assert not os.path.exists("/one") and not os.path.exists("/tmp/two")


# --- terminals -----------------------------------------------------------------------------------------------------


def test_no_terminal_but_its_own(box: Box) -> None:
    source = """
import os
try: os.open("/dev/tty", os.O_RDWR)
except OSError as error: print(error.errno, os.listdir("/dev/pts"))
"""
    assert box.python(source).text == f"{errno.ENXIO} ['ptmx']\n"


def test_t07_nothing_can_be_typed_into_a_terminal(box: Box) -> None:
    source = """
import fcntl, os, termios
fd = os.open("/dev/tty", os.O_RDWR)
for request in (0x5412, 0x5412 | 1 << 40):  # TIOCSTI
    try: fcntl.ioctl(fd, request & 0xFFFFFFFF, b"x")
    except PermissionError: print("refused")
"""
    result = box.run("python3", "-ISc", source, pty=Pty(rows=5, cols=80))
    assert result.out == b"refused\r\nrefused\r\n"


# --- /etc/passwd of an attacker ------------------------------------------------------------------------------------

TRAPS = {
    "a FIFO": "rm /etc/passwd; mkfifo /etc/passwd",
    "a directory": "rm /etc/passwd; mkdir /etc/passwd",
    "nothing": "rm /etc/passwd",
    "endless": "rm /etc/passwd; ln -s /dev/zero /etc/passwd",
    "a terminal": "rm /etc/passwd; ln -s /dev/ptmx /etc/passwd",
    "a link to itself": "rm /etc/passwd; ln -s passwd /etc/passwd",
    "a link into /proc": "rm /etc/passwd; ln -s /proc/self/mem /etc/passwd",
    "a link to process 1": "rm /etc/passwd; ln -s /proc/1/environ /etc/passwd",
    "a link to its own input": "rm /etc/passwd; ln -s /proc/self/fd/0 /etc/passwd",
    "huge and sparse": "truncate -s 1T /etc/passwd",
    "one long line": "rm /etc/passwd; head -c 3000000 /dev/zero | tr '\\0' x > /etc/passwd",
    "colons": "rm /etc/passwd; head -c 3000000 /dev/zero | tr '\\0' : > /etc/passwd",
    "empty lines": "rm /etc/passwd; yes '' | head -c 3000000 > /etc/passwd",
    "bytes": "head -c 100000 /dev/urandom > /etc/passwd",
    "numbers out of range": "echo 'evil:x:-1:99999999999:x:/:/bin/sh' > /etc/passwd; echo 'nobody:x:4294967295:0:::' >> /etc/passwd",
    "socket": "rm /etc/passwd; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"/etc/passwd\")'",
}


@pytest.mark.parametrize("trap", TRAPS.values(), ids=TRAPS.keys())
def test_t25_a_hostile_passwd(node: Node, box: Box, trap: str) -> None:
    """It decides nothing but users inside; it neither blocks nor ends anything."""
    spawner = node.spawner.pid
    box.sh(trap)
    assert box.sh("id -u").text == "0\n"
    assert box.run("id", "-u", user="4321").text == "4321\n"
    by_name = box.run("id", "-u", user="nobody")
    assert by_name.exit.not_started or by_name.code == 0
    assert box.run("true", user="evil").exit.not_started
    assert node.spawner.pid == spawner


def test_a_name_for_root_is_only_the_sandboxs(box: Box) -> None:
    box.sh("echo 'admin:x:0:0::/root:/bin/sh' >> /etc/passwd; sed -i s/^nobody:x:65534/nobody:x:0/ /etc/passwd")
    for user in ("admin", "nobody"):
        command = box.start("sleep", "1000", user=user)
        assert procfs.status(command.running.pid)["Uid"].split() == [str(box.uid_base)] * 4
        command.kill()


def test_t23_arguments_and_environment_are_data(box: Box) -> None:
    nasty = ["$(touch /pwned)", "`touch /pwned`", "; touch /pwned", "\n touch /pwned", "--help", "\udcff\udcfe", "a" * 100_000, ""]
    result = box.run("python3", "-ISc", "import os, sys; print([os.fsencode(a) for a in sys.argv[1:]])", *nasty)
    assert result.out.decode() == f"{[os.fsencode(word) for word in nasty]}\n"
    env = {"A": "$(touch /pwned)", "BASH_ENV": "/pwned", "X Y": "\udcff", "LD_PRELOAD": "/nonexistent.so"}
    result = box.run("python3", "-ISc", "import os; print(os.environb[b'A'], os.environb[b'X Y'])", env=env)
    assert result.out == b"b'$(touch /pwned)' b'\\xff'\n"
    assert box.sh("test -e /pwned").code == 1


def test_a_preloaded_library_is_loaded_inside_only(node: Node, box: Box) -> None:
    """Into the command, never into the spawner's image that becomes it: that is loaded already, by the host."""
    assert box.sh("printf 'not a library' > /evil.so").code == 0
    spawner = node.spawner.pid
    result = box.run("echo", "fine", env={"LD_PRELOAD": "/evil.so", "LD_LIBRARY_PATH": "/", "PYTHONPATH": "/", "PYTHONSTARTUP": "/evil.py"})
    assert result.out == b"fine\n" and b"/evil.so" in result.err
    assert node.spawner.pid == spawner


def test_signals_of_a_command_stay_in_its_sandbox(box: Box) -> None:
    """kill(-1) reaches all that the sender may signal and sees."""
    source = "import os, signal\ntry: os.kill(-1, signal.SIGKILL)\nexcept OSError: pass\nprint('alive')"
    other = box.start("sleep", "1000")
    assert box.python(source).out == b"alive\n"
    assert other.wait().exit.signal == signal.SIGKILL
    assert box.works()
