# SPDX-License-Identifier: Apache-2.0
"""Nothing of one call is there for the next: each time a hostile call, then an honest one that looks for what the first left.

Both kinds of calls are mixed, since they meet in one member: what a fork of the interpreter left must not reach a program, nor the reverse.
"""

# ruff: noqa: E501  (programs, line by line)
from __future__ import annotations

import os

import pytest

from opendsec.kernel import procfs
from tests.fnmembers import MIB, Calls, FnNode

pytestmark = pytest.mark.slow

# name → (what the hostile call does, what the honest one looks for, what it must print)
LEFT_BEHIND = {
    "processes": (
        "import os, time\nfor i in range(5):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n            time.sleep(1000)\n        os._exit(0)",
        "import os\nprint([n for n in os.listdir('/proc') if n.isdigit()])",
        "['1', '2']",
    ),
    "a process that ignores signals": (
        "import os, signal, time\nif os.fork() == 0:\n    [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15, 20, 21, 22)]\n    os.setsid()\n    time.sleep(1000)",
        "import os\nprint([n for n in os.listdir('/proc') if n.isdigit()])",
        "['1', '2']",
    ),
    "a process that is no child of the call": (
        "import ctypes, os\nc = ctypes.CDLL(None)\nnumber = 56 if os.uname().machine == 'x86_64' else 220\n"
        "if c.syscall(number, 0x8011, 0, 0, 0, 0) == 0:\n    c.sleep(1000)",  # CLONE_PARENT: a sibling
        "import os\nprint([n for n in os.listdir('/proc') if n.isdigit()], os.getpid())",
        "['1', '2'] 2",
    ),
    "a signal to process 1": (
        "import os, signal\nfor n in range(1, 65):\n    try:\n        os.kill(1, n)\n    except OSError: pass",
        "print([line.split()[1].strip('0') for line in open('/proc/1/status') if line.startswith(('SigPnd', 'ShdPnd'))])",
        "['', '']",
    ),
    "a process that holds the output open": (
        "import subprocess\nsubprocess.Popen(['sleep', '1000'])",
        "import os\nprint([n for n in os.listdir('/proc') if n.isdigit()])",
        "['1', '2']",
    ),
    "files": (
        "import os\nfor d in ('/tmp', '/var/tmp', '/dev/shm', os.getcwd(), os.path.expanduser('~')):\n"
        "    try:\n        os.makedirs(d, exist_ok=True)\n        open(d + '/left', 'w').write('x')\n    except OSError: pass",
        "import os\nprint([d for d in ('/tmp', '/var/tmp', '/dev/shm', os.getcwd(), os.path.expanduser('~')) if os.path.exists(d + '/left')])",
        "[]",
    ),
    "a file that is open and has no name": (
        "import os\nfd = os.open('/tmp', os.O_TMPFILE | os.O_RDWR)\nos.write(fd, bytes(8 << 20))\nos.fork() or __import__('time').sleep(100)",
        "import os\ns = os.statvfs('/tmp')\nprint((s.f_blocks - s.f_bfree) * s.f_bsize < 65536)",
        "True",
    ),
    "shared memory": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nprint(libc.shmget(42, 4096, 0o1666), libc.semget(42, 3, 0o1666), libc.msgget(42, 0o1666))",
        "import ctypes\nlibc = ctypes.CDLL(None)\nprint(libc.shmget(42, 0, 0), libc.semget(42, 0, 0), libc.msgget(42, 0))",
        "-1 -1 -1",
    ),
    "numbers of shared memory": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nfor _ in range(3):\n    for get, ctl in ((libc.shmget, libc.shmctl), (libc.msgget, libc.msgctl)):\n"
        "        ctl(get(0, *((4096, 0o600) if get is libc.shmget else (0o600,))), 0, 0)\n    libc.semctl(libc.semget(0, 1, 0o600), 0, 0)",
        "import ctypes\nlibc = ctypes.CDLL(None)\nprint(libc.shmget(0, 4096, 0o600), libc.semget(0, 1, 0o600), libc.msgget(0, 0o600))",
        "0 0 0",
    ),
    "shared memory made when the call had ended": (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nif os.fork() == 0:\n    for key in range(1, 1000):\n        libc.shmget(key, 4096, 0o1666)\n    os._exit(0)",
        "import ctypes\nlibc = ctypes.CDLL(None)\nprint(max(libc.shmget(key, 0, 0) for key in range(1, 1000)))",
        "-1",
    ),
    "a message queue": (
        "import ctypes\nprint(ctypes.CDLL('librt.so.1').mq_open(b'/left', 0o102, 0o666, None) >= 0)",
        "import ctypes\nprint(ctypes.CDLL('librt.so.1').mq_open(b'/left', 2))",
        "-1",
    ),
    "a named semaphore": (
        "from multiprocessing import shared_memory\nm = shared_memory.SharedMemory('left', create=True, size=100)\nimport os\nos._exit(0)",
        "from multiprocessing import shared_memory\ntry:\n    shared_memory.SharedMemory('left')\nexcept FileNotFoundError:\n    print('none')",
        "none",
    ),
    "sockets": (
        "import os, socket, time\nif os.fork() == 0:\n    os.setsid()\n    a = socket.socket(socket.AF_UNIX)\n    a.bind('\\0left')\n    a.listen()\n"
        "    b = socket.socket(socket.AF_UNIX)\n    b.bind('/tmp/left')\n    b.listen()\n    time.sleep(1000)\ntime.sleep(0.1)",
        "import socket\nfor name in ('\\0left', '/tmp/left'):\n    try:\n        socket.socket(socket.AF_UNIX).connect(name)\n"
        "    except OSError as e:\n        print(e.errno, end=' ')\nsocket.socket(socket.AF_UNIX).bind('\\0left')\nprint()",
        "111 2",
    ),
    "a socket under way to itself, and what goes with it": (
        "import os, socket, time\nlistener = socket.socket(socket.AF_UNIX)\nlistener.bind('\\0left')\nlistener.listen()\nc = socket.socket(socket.AF_UNIX)\nc.connect('\\0left')\n"
        "f = os.open('/tmp/big', os.O_CREAT | os.O_RDWR)\nos.write(f, bytes(4 << 20))\nsocket.send_fds(c, [b'x'], [listener.fileno(), f, *os.openpty()])\n"
        "c.close()\ntime.sleep(0.02)",  # by then the kernel has looked for garbage, and found none yet
        "import os, socket\ntry:\n    socket.socket(socket.AF_UNIX).connect('\\0left')\nexcept OSError as e:\n    print(e.errno, os.listdir('/dev/pts'))\n"
        "socket.socket(socket.AF_UNIX).bind('\\0left')",
        "111 ['ptmx']",
    ),
    "timers": (
        "import signal, ctypes\nsignal.setitimer(signal.ITIMER_REAL, 0.05, 0.05) if 0 else signal.alarm(1)\n"
        "signal.signal(signal.SIGVTALRM, lambda *a: None)\nsignal.setitimer(signal.ITIMER_VIRTUAL, 0.01, 0.01)\nsignal.setitimer(signal.ITIMER_PROF, 5, 5)",
        "import signal\nprint(*(signal.getitimer(i) for i in (0, 1, 2)), signal.alarm(0))",
        "(0.0, 0.0) (0.0, 0.0) (0.0, 0.0) 0",
    ),
    "the environment": (
        "import os\nos.environ['LEFT'] = '1'\nos.putenv('LEFT2', '2')\nos.environ['PATH'] = '/x'",
        "import os, subprocess\nprint('LEFT' in os.environ, b'LEFT' in subprocess.check_output('env'), os.environ['PATH'][:5])",
        "False False /usr/",
    ),
    "modules": (
        "import builtins, json, os, sys, math\nbuiltins.print = builtins.sorted = json.loads = os.getpid = math.sqrt = None\nsys.path.insert(0, '/x')\n"
        "sys.modules['left'] = sys\nsys.setrecursionlimit(77)\nsys.stdout = None\nsys.excepthook = None\nos._exit(0)",
        "import json, os, sys, math\nprint(sorted([2, 1]), json.loads('1'), os.getpid(), math.sqrt(4), '/x' in sys.path, 'left' in sys.modules, sys.getrecursionlimit())",
        "[1, 2] 1 2 2.0 False False 1000",
    ),
    "what the interpreter itself holds": (
        "import ctypes, sys, gc\ngc.disable()\nn = 7\nctypes.memset(id(n) + 24, 9, 1)\nctypes.pythonapi.Py_AddPendingCall(0, 0) if 0 else None\n"
        "ctypes.memset(id(sys.version) + 48, 65, 10)\nimport os\nos._exit(0)",
        "import gc, sys\nprint(3 + 4, sys.version[:1], gc.isenabled())",
        "7 3 True",
    ),
    "limits and places": (
        "import os, resource, signal\nos.umask(0)\nos.chdir('/')\nos.nice(5)\nresource.setrlimit(resource.RLIMIT_NOFILE, (5, 5))\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "import os, resource, signal\nprint(oct(os.umask(0)), os.getcwd(), os.nice(0), resource.getrlimit(resource.RLIMIT_NOFILE), "
        "signal.pthread_sigmask(0, []), signal.getsignal(15) == 0)",
        "0o22 /tmp 0 (256, 256) set() True",
    ),
    "the host name": (
        "import ctypes, socket\nctypes.CDLL(None).sethostname(b'left', 4)",
        "import socket\nprint(socket.gethostname())",
        "call",
    ),
    "locks on files of the image": (
        "import fcntl, os, time\nif os.fork() == 0:\n    f = open('/etc/passwd')\n    fcntl.flock(f, fcntl.LOCK_EX)\n    os.setsid()\n    time.sleep(1000)\ntime.sleep(0.1)",
        "import fcntl\nfcntl.flock(open('/etc/passwd'), fcntl.LOCK_EX | fcntl.LOCK_NB)\nprint('free')",
        "free",
    ),
    "a terminal": (
        "import os\nm, s = os.openpty()\nos.fork() or __import__('time').sleep(100)",
        "import os\nprint(os.listdir('/dev/pts'))",
        "['ptmx']",
    ),
    "standard input, which is /dev/null": (
        "import fcntl, os\nfcntl.flock(0, fcntl.LOCK_EX)\nfcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())\nfcntl.fcntl(0, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND)",
        "import fcntl, os\nfcntl.flock(open('/dev/null'), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "print(fcntl.fcntl(0, fcntl.F_GETOWN), fcntl.fcntl(0, fcntl.F_GETFL) & (os.O_NONBLOCK | os.O_APPEND))",
        "0 0",
    ),
    "memory locked, and much of it": (
        "import ctypes\nx = bytearray(4 << 20)\nctypes.CDLL(None).mlockall(3)\nprint(1)",
        "x = bytearray(100 << 20)\nprint(len(x))",
        str(100 << 20),
    ),
}
AS_ROOT = {
    "a signal to process 1": LEFT_BEHIND["a signal to process 1"],
    "files of the image": (
        "import os, glob\nopen('/etc/passwd', 'w').write('')\nopen('/usr/bin/env', 'ab').write(b'x')\nos.remove('/bin/sh' if not os.path.islink('/bin') else '/usr/bin/sh')\n"
        "os.rename('/etc/hosts', '/etc/left') if os.path.exists('/etc/hosts') else open('/etc/left', 'w')\nos.chmod('/', 0o777)\nos.utime('/', (1, 1))\n"
        "d = os.path.dirname(os.__file__)\nopen(d + '/json/__init__.py', 'w').write('raise SystemExit(9)')\nopen(d + '/leftcustom.py', 'w').write('1/0')\n"
        "[os.remove(p) for p in glob.glob(d + '/collections/*.py')]",
        "import os, stat, subprocess\nd = os.path.dirname(os.__file__)\nprint(len(open('/etc/passwd').read()) > 100, oct(os.stat('/').st_mode), os.stat('/').st_mtime > 9, "
        "os.path.exists('/etc/left'), os.path.exists(d + '/leftcustom.py'), subprocess.check_output(['sh', '-c', \"python3 -c 'import json; print(5)'\"]))",
        "True 0o40755 True False False b'5\\n'",
    ),
    "limits and priority of process 1, which programs inherit": (
        "import ctypes, os, resource\nc = ctypes.CDLL(None)\nioprio_set = 251 if os.uname().machine == 'x86_64' else 30\n"
        "for f in (lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (20, 20)), lambda: resource.prlimit(1, resource.RLIMIT_FSIZE, (0, 0)), lambda: os.setpriority(0, 1, 7),\n"
        "          lambda: os.sched_setscheduler(1, os.SCHED_BATCH, os.sched_param(0)), lambda: os.sched_setaffinity(1, {min(os.sched_getaffinity(0))}),\n"
        "          lambda: c.syscall(ioprio_set, 1, 1, 3 << 13 | 7) and os.stat('/none')):\n    try: f(); print('done')\n    except OSError: pass\nassert 'Uid:\\t65533' in open('/proc/1/status').read()",
        "import ctypes, os, resource\nc = ctypes.CDLL(None)\nprint(resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_FSIZE)[0], os.nice(0), os.sched_getscheduler(0),\n"
        "      c.syscall(252 if os.uname().machine == 'x86_64' else 31, 1, 0) >> 13)",
        "(256, 256) -1 0 0 0",
    ),
    "the directory of terminals": (
        "import os\nfor f in (lambda: os.chmod('/dev/pts/ptmx', 0), lambda: os.chmod('/dev/pts', 0), lambda: os.utime('/dev/pts', (5, 5)), lambda: os.setxattr('/dev/pts', 'user.x', b'1')):\n"
        "    try: f()\n    except OSError: pass",
        "import os\nm, s = os.openpty()\nos.write(m, b'x\\n')\nprint(os.read(s, 9), os.ttyname(s)[:9], oct(os.stat('/dev/pts').st_mode), oct(os.stat('/dev/pts/ptmx').st_mode), os.stat('/dev/pts').st_mtime > 9)",
        "b'x\\n' /dev/pts/ 0o40755 0o20666 True",
    ),
    "kernel settings of its own": (
        "for n in ('shmmax', 'msgmax', 'hostname', 'sem'):\n    try:\n        open('/proc/sys/kernel/' + n, 'w').write('1')\n    except OSError: pass",
        "print(open('/proc/sys/kernel/shmmax').read() != '1\\n', open('/proc/sys/kernel/hostname').read())",
        "True call",
    ),
}


@pytest.mark.parametrize("kind", ["fork", "program"])
@pytest.mark.parametrize(("hostile", "honest", "told"), LEFT_BEHIND.values(), ids=LEFT_BEHIND.keys())
def test_nothing_is_left_behind(member: Calls, hostile: str, honest: str, told: str, kind: str) -> None:
    check(member, hostile, honest, told, kind)


@pytest.mark.parametrize("kind", ["fork", "program"])
@pytest.mark.parametrize(("hostile", "honest", "told"), AS_ROOT.values(), ids=AS_ROOT.keys())
def test_nothing_is_left_behind_by_root(root_member: Calls, hostile: str, honest: str, told: str, kind: str) -> None:
    check(root_member, hostile, honest, told, kind)


def check(calls: Calls, hostile: str, honest: str, told: str, kind: str) -> None:
    at_rest = 3  # the supervisor, the interpreter, and process 1 of the next call
    ended = calls.python(hostile) if kind == "fork" else calls.exec("python3", "-c", hostile)
    assert ended.code == 0 or ended.signal, ended
    assert ended.stderr == b"", ended
    assert calls.kernel_processes() <= at_rest  # when a call has ended, nothing of it runs
    assert calls.says(honest).strip() == told
    again = calls.exec("python3", "-c", honest)
    assert again.stdout.decode().strip() == told, again


# Calls that attack what serves them. Each must be told as what it was, and the next be served as ever.
ATTACKS = {
    "kill everything": ("import os\ntry: os.kill(-1, 9)\nexcept OSError: pass\nos.kill(0, 9)", {"signal": 9}),
    "kill its parent": ("import os\nos.kill(1, 9)\nos.kill(1, 15)\nprint('alive')", None),
    "kill the parent it has": ("import os\nos.kill(os.getppid(), 9)", None),
    "stop process 1": ("import os, signal\nos.kill(1, signal.SIGSTOP)\nprint('alive')", None),
    "_exit": ("import os\nos._exit(33)", {"code": 33}),
    "exec": ("import os\nos.execvp('sh', ['sh', '-c', 'exit 44'])", {"code": 44}),
    "close everything": ("import os\nos.closerange(0, 256)", None),
    "a storm of signals": (
        "import os, signal\nfor n in range(64):\n    if os.fork() == 0:\n        while True:\n            try: os.kill(-1, signal.SIGWINCH)\n            except OSError: pass\n"
        "    if n > 5: break\nwhile True: os.kill(os.getpid(), signal.SIGCONT)",
        {"signal": 9},
    ),
    "trace process 1": (
        "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nto = ctypes.create_string_buffer(9)\nhere, there = ((ctypes.c_long * 2)(at, 1) for at in (ctypes.addressof(to), 0x400000))\n"
        "print(c.ptrace(16, 1, 0, 0), c.ptrace(0x4206, 1, 0, 0), c.process_vm_readv(1, here, 1, there, 1, 0))\n"
        "for n in ('mem', 'environ', 'maps', 'fd/3', 'root', 'cwd', 'exe', 'ns/user', 'stack', 'syscall', 'auxv'):\n    try:\n        import os\n"
        "        (os.readlink if n in ('fd/3', 'root', 'cwd', 'exe', 'ns/user') else lambda p: open(p, 'rb').read(1) and 1)('/proc/1/' + n)\n        print('open', n)\n"
        "    except OSError: pass",
        {"stdout": b"-1 -1 -1\n"},
    ),
    "namespaces and mounts": (
        "import ctypes, os\nc = ctypes.CDLL(None, use_errno=True)\nr = [c.unshare(f) for f in (0x10000000, 0x20000, 0x20000000, 0x8000000, 0x40000000)]\n"
        "r += [c.setns(os.open('/proc/self/ns/' + n, 0), 0) for n in ('user', 'mnt', 'pid', 'net', 'ipc')]\n"
        "r += [c.mount(b'none', b'/tmp', b'tmpfs', 0, 0), c.umount2(b'/proc/sys', 2), c.mount(0, b'/', 0, 32, 0), c.chroot(b'/tmp'), c.pivot_root(b'/', b'/') if hasattr(c, 'pivot_root') else -1]\n"
        "print(set(r))",
        {"stdout": b"{-1}\n"},
    ),
    "a network": (
        "import socket\nfor f in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET):\n    try:\n        socket.socket(f)\n        print('open')\n"
        "    except OSError as e:\n        print(e.errno)\n",
        {"stdout": b"97\n97\n97\n97\n"},
    ),
    "another's memory, by what is inherited": (
        "import os\nprint(sorted(os.listdir('/proc/self/fd')), len([l for l in open('/proc/self/maps') if 'memfd:value' in l or 'memfd:call' in l]))",
        {"stdout": b"['0', '1', '2', '3'] 0\n"},
    ),
    "a name of the interpreter's": (
        "import os\nprint(os.path.exists('/proc/32000'))\ntry:\n    os.kill(32000, 9)\nexcept OSError as e:\n    print(e.errno)",
        {"stdout": b"False\n3\n"},
    ),
    "results of its own making": (
        "import os\nfor fd in range(3, 256):\n    for data in (b'\\x44\\x46\\x43\\x31' + bytes(300), b'\\x02\\0\\0\\0', bytes(4)):\n        try:\n            os.write(fd, data)\n            print('wrote', fd)\n"
        "        except OSError: pass\nos._exit(5)",
        {"code": 5, "stdout": b""},
    ),
}


@pytest.mark.parametrize(("source", "expected"), ATTACKS.values(), ids=ATTACKS.keys())
def test_attacks_on_what_serves(member: Calls, source: str, expected: dict[str, object] | None) -> None:
    at_rest = procfs.pid_start_time(member.member.pid)
    for ended in (member.python(source, cpu_time_s=0.5), member.exec("python3", "-c", source, cpu_time_s=0.5)):
        assert not ended.spoiled and not ended.not_started, ended
        if expected is not None:
            assert {key: getattr(ended, key) for key in expected} == expected, ended
        member.check()
    assert procfs.pid_start_time(member.member.pid) == at_rest  # the same member all the while


@pytest.mark.parametrize("name", ["trace process 1", "namespaces and mounts", "kill its parent", "results of its own making"])
def test_attacks_by_root(root_member: Calls, name: str) -> None:
    source, expected = ATTACKS[name]
    for ended in (root_member.python(source), root_member.exec("python3", "-c", source)):
        assert {key: getattr(ended, key) for key in expected or {}} == (expected or {}), ended
    assert root_member.says("print('fine')") == "fine\n"


def test_a_function_cannot_forge_more_than_its_own_value(member: Calls) -> None:
    """It may write what it likes where its value goes: a length out of bounds, another kind, garbage. None of it reaches the next call."""
    text = (
        "import ctypes, os, re\n"
        "def f(kind, length):\n"
        "    at = next(int(l.split('-')[0], 16) for l in open('/proc/self/maps') if 'memfd:value' in l)\n"
        "    ctypes.memmove(at, kind.to_bytes(4, 'little') + length.to_bytes(4, 'little') + b'forged', 14)\n"
        "    os._exit(0)\n"
    )
    for kind, length in ((1, 6), (1, 1 << 31), (1, (16 << 20) + 1), (9, 6), (0, 6), (2, 6)):
        ended = member.function("m:f", kind, length, files={"m.py": text.encode()})
        assert ended.value in ((b"forged", None) if (kind, length) == (1, 6) else (None,))
        assert member.function("math:sqrt", 4).value == b"2.0"


def test_a_call_sees_no_more_than_its_own_processes(member: Calls) -> None:
    assert member.exec("ps", "-e", "-o", "pid=,user=,comm=").stdout.split() == [b"1", b"65533", b"call", b"2", b"nobody", b"ps"]
    told = member.exec("sh", "-c", "ls /proc | grep -c '^[0-9]'; cat /proc/1/comm")
    assert told.stdout.split()[1] == b"call"


RESIDUE = r"""
import re
found = []
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
    for line in maps:
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if " rw-p " in line and end - start < 64 << 20:
            memory.seek(start)
            found += re.findall(rb"secret-[0-9]{6}", memory.read(end - start))
print(len(found))
"""


def test_no_call_may_join_namespaces(member: Calls) -> None:
    """The filter refuses it: the kernel would complain of the descriptor."""
    number = 308 if os.uname().machine == "x86_64" else 268
    source = f"import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nprint([(c.syscall({number}, -1, 0, key, key), ctypes.get_errno()) for key in (0, -1, 1)])"
    assert member.says(source) == "[(-1, 1), (-1, 1), (-1, 1)]\n"
    assert member.exec("python3", "-c", source).stdout == b"[(-1, 1), (-1, 1), (-1, 1)]\n"


def test_an_envelope_stays_only_after_a_call_that_left_nothing_to_end(member: Calls) -> None:
    """And so the next has the same pid namespace."""
    pid = "import os\nprint(os.stat('/proc/self/ns/pid').st_ino)\n"
    first = member.says(pid)
    assert member.says(pid) == first
    for left in ("os.fork() or __import__('time').sleep(100)", "os.kill(os.getpid(), 9)", "print('x' * (2 << 20))"):
        before = member.says(pid)
        ended = member.python(f"import os\n{left}", output_bytes=MIB)
        assert not ended.spoiled
        assert (member.says(pid) == before) == ("kill" in left), left


BELOW = """
import ctypes, os
c = ctypes.CDLL(None, use_errno=True)
top = sorted(os.listdir("/"))
for way in ("/..", "/../../..", "/proc/self/root", "/proc/self/root/..", "/proc/1/root/..", "/proc/self/cwd/../../..", "/dev/../.."):
    try:
        assert sorted(os.listdir(way)) == top, way
    except PermissionError:
        pass
os.chdir("/")
os.chdir("..")
assert sorted(os.listdir()) == top
print(c.umount2(b"/", 2), c.umount2(b".", 2), c.unshare(0x10000000), c.chroot(b"/tmp"), os.path.exists("/l0") or os.path.exists("/t"))
"""


@pytest.mark.parametrize("user", ["nobody", "root"])
def test_what_lies_below_the_root_directory_is_out_of_reach(request: pytest.FixtureRequest, user: str) -> None:
    """A call's root directory is mounted over that of its member."""
    calls: Calls = request.getfixturevalue("member" if user == "nobody" else "root_member")
    assert calls.says(BELOW) == "-1 -1 -1 -1 False\n"
    ended = calls.exec("python3", "-c", BELOW)
    assert (ended.stdout, ended.stderr) == (b"-1 -1 -1 -1 False\n", b"")


def test_the_program_of_the_call_before_is_nowhere_in_memory(member: Calls) -> None:
    source = "x = 'secret-271828'\n" * 2000  # more than the next one
    for _ in range(2):
        assert member.python(source).code == 0
        assert member.says(RESIDUE) == "0\n"


def test_two_members_share_nothing(fn_node: FnNode, member: Calls) -> None:
    with fn_node.member() as other:
        assert other.plan.uid_base != member.plan.uid_base
        for name in ("user", "mnt", "pid", "ipc", "net", "uts", "cgroup"):
            mine, its = (procfs.path_of(one.member.pid, "ns", name) for one in (member, other))
            assert os.stat(mine).st_ino != os.stat(its).st_ino
        assert other.exec("sh", "-c", "kill -9 -1; :").spoiled == ""
        member.check()
        other.check()


def test_memory_comes_back(member: Calls) -> None:
    for _ in range(3):
        member.python("x = bytearray(500 << 20)", memory_bytes=64 * MIB)
        member.exec("sh", "-c", "yes > /tmp/x", disk_bytes=32 * MIB)
    assert member.member.memory_bytes() < member.member.base_bytes + 24 * MIB
    assert member.member.processes() == 0
