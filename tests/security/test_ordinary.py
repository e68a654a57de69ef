# SPDX-License-Identifier: Apache-2.0
"""What programs ordinarily do works, as root and as a user: confinement that breaks them would be switched off."""

from __future__ import annotations

import pytest

from tests.boxes import Box

PROGRAMS: dict[str, str] = {
    "threads": """
import threading
got = []
threads = [threading.Thread(target=got.append, args=(n,)) for n in range(20)]
[t.start() for t in threads]; [t.join() for t in threads]
assert sorted(got) == list(range(20))
""",
    "fork": """
import os
pids = [os.fork() or os._exit(n) for n in range(10)]
assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == list(range(10))
""",
    "subprocess": """
import subprocess
assert subprocess.run(["sh", "-c", "cat; echo err >&2; exit 3"], input=b"hi", capture_output=True) .returncode == 3
""",
    "multiprocessing": """
import multiprocessing as mp
def work(n): return n * n
if __name__ == "__main__":
    with mp.get_context("fork").Pool(3) as pool: assert pool.map(work, range(10)) == [n * n for n in range(10)]
""",
    "shared memory and semaphores": """
import multiprocessing as mp
from multiprocessing.shared_memory import SharedMemory
m = SharedMemory(create=True, size=4096); m.buf[0] = 7; n = SharedMemory(m.name); assert n.buf[0] == 7; n.close(); m.close(); m.unlink()
s = mp.Semaphore(1); assert s.acquire(timeout=1); s.release()
""",
    "sqlite": """
import sqlite3
db = sqlite3.connect("test.db")
assert db.execute("pragma journal_mode=wal").fetchone() == ("wal",)
db.execute("create table t (a)"); db.executemany("insert into t values (?)", [(n,) for n in range(1000)]); db.commit()
assert db.execute("select sum(a) from t").fetchone() == (499500,)
""",
    "file locks": """
import fcntl, os
f = open("lock", "w"); fcntl.flock(f, fcntl.LOCK_EX); fcntl.lockf(f, fcntl.LOCK_EX)
if (pid := os.fork()) == 0:
    g = open("lock", "w")
    try: fcntl.flock(g, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError: os._exit(5)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
""",
    "files": """
import os
os.makedirs("a/b"); open("a/b/f", "w").write("x"); os.link("a/b/f", "a/l"); os.symlink("b/f", "a/s"); os.rename("a", "c")
assert open("c/s").read() == "x" and os.stat("c/l").st_nlink == 2
os.mkfifo("pipe"); os.truncate("c/b/f", 1 << 20); os.utime("c/b/f", (1, 2)); os.chmod("c/b/f", 0o4755)
with open("c/b/f", "r+b") as f: os.posix_fallocate(f.fileno(), 0, 8192); os.fsync(f.fileno())
os.setxattr("c/b/f", "user.note", b"hello"); assert os.getxattr("c/b/f", "user.note") == b"hello"
os.copy_file_range(os.open("c/b/f", 0), os.open("copy", os.O_WRONLY | os.O_CREAT), 100)
os.sync()
""",
    "pipes, splice, sendfile": """
import os
r, w = os.pipe(); os.write(w, b"abc")
r2, w2 = os.pipe(); assert os.splice(r, w2, 3) == 3 and os.read(r2, 9) == b"abc"
f = os.open("f", os.O_RDWR | os.O_CREAT); os.write(f, b"x" * 100); os.lseek(f, 0, 0)
assert os.sendfile(w, f, 0, 100) == 100
""",
    "inotify": """
import ctypes, os
libc = ctypes.CDLL(None)
fd = libc.inotify_init1(0); assert fd >= 0 and libc.inotify_add_watch(fd, b".", 0x100) >= 0
open("new", "w"); assert b"new" in os.read(fd, 4096)
""",
    "epoll, eventfd, timerfd, signalfd": """
import ctypes, os, select, signal
p = select.epoll(); e = os.eventfd(0); p.register(e); os.eventfd_write(e, 1); assert p.poll(5)[0][0] == e
libc = ctypes.CDLL(None); assert libc.timerfd_create(1, 0) >= 0
assert libc.signalfd(-1, ctypes.create_string_buffer(128), 0) >= 0
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]); signal.setitimer(signal.ITIMER_REAL, 0.001)
assert signal.sigwait([signal.SIGALRM]) == signal.SIGALRM
""",
    "unix sockets": """
import array, os, socket
a, b = socket.socketpair(); a.sendall(b"x"); assert b.recv(1) == b"x"
r, w = os.pipe(); socket.send_fds(a, [b"f"], [r]); _, (fd,), _, _ = socket.recv_fds(b, 1, 1)
os.write(w, b"y"); assert os.read(fd, 1) == b"y"
for name in ("sock", "\\0abstract"):
    s = socket.socket(socket.AF_UNIX); s.bind(name); s.listen(); c = socket.socket(socket.AF_UNIX); c.connect(name); s.accept()
""",
    "loopback": """
import socket, threading
for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
    s = socket.create_server((host, 0), family=family)
    c = socket.create_connection(s.getsockname()[:2]); d, _ = s.accept(); c.sendall(b"hi"); assert d.recv(2) == b"hi"
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(("127.0.0.1", 0)); u.sendto(b"z", u.getsockname()); assert u.recv(1) == b"z"
assert [name for _, name in socket.if_nameindex()] == ["lo"]
""",
    "asyncio": """
import asyncio
async def serve(r, w): w.write(await r.readline()); await w.drain(); w.close()
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    r, w = await asyncio.open_connection(*server.sockets[0].getsockname()); w.write(b"line\\n"); assert await r.read() == b"line\\n"
    p = await asyncio.create_subprocess_exec("true"); assert await p.wait() == 0
asyncio.run(main())
""",
    "memory": """
import ctypes, mmap, resource
m = mmap.mmap(-1, 1 << 20); m[0] = 1; m.madvise(mmap.MADV_DONTNEED); m.flush()
libc = ctypes.CDLL(None, use_errno=True); fd = libc.memfd_create(b"x", 0); assert fd >= 0
b = ctypes.create_string_buffer(4096); assert libc.mlock(b, 4096) == 0
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
""",
    "system V and posix ipc": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True); libc.shmat.restype = ctypes.c_void_p
i = libc.shmget(0, 4096, 0o1600); assert i >= 0 and libc.shmat(i, None, 0) not in (None, -1) and libc.shmctl(i, 0, None) == 0
q = libc.msgget(0, 0o1600); assert q >= 0 and libc.msgctl(q, 0, None) == 0
s = libc.semget(0, 1, 0o1600); assert s >= 0 and libc.semctl(s, 0, 0) == 0
""",
    "a traced child": """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.restype = ctypes.c_long; libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
if (pid := os.fork()) == 0:
    libc.ptrace(0, 0, None, None); os.kill(os.getpid(), signal.SIGSTOP); os.getpid(); os._exit(9)
os.waitpid(pid, 0); stops = 0
while True:
    assert libc.ptrace(24, pid, None, None) == 0  # PTRACE_SYSCALL
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status): break
    stops += 1
assert stops >= 2 and os.WEXITSTATUS(status) == 9
""",
    "a terminal of its own": """
import os, pty
m, s = os.openpty(); assert os.isatty(s) and os.ttyname(s).startswith("/dev/pts/")
assert pty.spawn(["true"]) == 0
""",
    "the clock and chance": """
import os, random, time
assert time.time() > 1e9 and len(os.urandom(16)) == 16 and time.clock_gettime(time.CLOCK_MONOTONIC) > 0; time.sleep(0.001)
""",
    "scheduling": """
import os
assert os.nice(5) == 5; os.sched_setaffinity(0, os.sched_getaffinity(0)); os.sched_yield(); os.setpriority(os.PRIO_PROCESS, 0, 10)
""",
    "/dev": """
import os
assert open("/dev/zero", "rb").read(3) == b"\\0\\0\\0" and open("/dev/null", "w").write("x") == 1 and open("/dev/null").read() == ""
open("/dev/stdout", "w").write("out"); open("/dev/fd/2", "w").write("err"); open("/proc/self/fd/1", "w").write("x")
try: os.write(os.open("/dev/full", os.O_WRONLY), b"x")
except OSError as e: assert e.errno == 28
else: raise SystemExit("full is not full")
""",
    "landlock": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True); assert libc.syscall(444, None, 0, 1) >= 1 or ctypes.get_errno() in (38, 95)
""",
}

ROOT_ONLY: dict[str, str] = {
    "owners": """
import os, shutil
open("f", "w"); os.chown("f", 1234, 60000); assert os.stat("f").st_uid == 1234; shutil.chown("f", "games", "nogroup")
if (pid := os.fork()) == 0:
    os.setgroups([5]); os.setgid(60); os.setuid(5); assert os.getresuid() == (5, 5, 5)
    try: open("/root/x", "w")
    except PermissionError: os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
""",
    "chroot": """
import os
os.makedirs("/jail/inner"); os.chroot("/jail"); os.chdir("/"); assert os.listdir("/") == ["inner"]
""",
    "files of the image": """
import os, shutil
shutil.rmtree("/usr/share/doc", ignore_errors=True); os.rename("/etc", "/etc2"); os.rename("/etc2", "/etc")
open("/etc/passwd", "a").write("")
os.remove("/etc/hostname") if os.path.exists("/etc/hostname") else None
os.rename("/usr/games", "/usr/toys") if os.path.isdir("/usr/games") else None
""",
    "a privileged port": """
import socket
socket.create_server(("127.0.0.1", 80))
""",
    "file capabilities and setuid bits": """
import os, struct
open("f", "w"); os.chmod("f", 0o6755); assert os.stat("f").st_mode & 0o7777 == 0o6755
os.setxattr("f", "security.capability", struct.pack("<5I", 0x2000001, 1 << 10, 0, 0, 0))
""",
}

SHELL: dict[str, str] = {
    "git": """
cd "$(mktemp -d)"; git init -q .; git config user.email a@b; git config user.name x
echo 1 > f; git add f; git commit -qm one; git checkout -qb other; echo 2 >> f; git commit -qam two
git checkout -q -; git merge -q other; git gc -q; git fsck; test "$(git log --oneline | wc -l)" = 2
""",
    "copies": """
cd "$(mktemp -d)"; seq 1000 > a; cp --reflink=auto --preserve=all a b; cmp a b
cp -a /etc/apt .; tar cf t.tar apt; mkdir x; tar xf t.tar -C x; mv x y; rm -r y
ln a c; chmod 600 c; touch -d @1 c; find . -newer c | wc -l; df . >/dev/null; du -s . >/dev/null; stat a >/dev/null
""",
    "jobs": """
sleep 100 & kill $!; wait $! || true
sh -c 'trap "exit 3" TERM; kill $$; exit 4' || test $? = 3
ps aux | grep -c ps; mkfifo /tmp/p.$$; echo hi > /tmp/p.$$ & test "$(cat /tmp/p.$$)" = hi
""",
}


@pytest.mark.parametrize("user", ["root", "nobody"])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_program(box: Box, program: str, user: str) -> None:
    result = box.run("python3", "-c", program, user=user, cwd="/tmp")
    assert result.exit.code == 0, result


@pytest.mark.parametrize("program", ROOT_ONLY.values(), ids=ROOT_ONLY.keys())
def test_program_of_root(box: Box, program: str) -> None:
    result = box.run("python3", "-c", program, cwd="/tmp")
    assert result.exit.code == 0, result


@pytest.mark.parametrize("user", ["root", "games"])
@pytest.mark.parametrize("text", SHELL.values(), ids=SHELL.keys())
def test_shell(box: Box, text: str, user: str) -> None:
    result = box.run("sh", "-ec", text, user=user, env={"HOME": "/tmp"})
    assert result.exit.code == 0, result
