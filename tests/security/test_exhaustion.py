# SPDX-License-Identifier: Apache-2.0
"""T11 to T18: a sandbox takes all it can get. It hurts itself alone: a neighbour works meanwhile, and it works again afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from opendsec.api.exec import Pty
from opendsec.kernel import procfs, syscalls
from opendsec.runtime.backend import Running
from tests.boxes import Box, Command, Node, until

MIB = 1 << 20


@pytest.fixture
def neighbour(node: Node) -> Iterator[Box]:
    with node.box() as neighbour:
        yield neighbour
        assert neighbour.works()


def empty(node: Node, box: Box) -> None:
    until(lambda: box.handle.processes() == 0, "processes are left")
    assert node.container(box).group.exists()


# --- processes -----------------------------------------------------------------------------------------------------

FORK_BOMBS = {
    "children": """
import os
while True:
    try: os.fork()
    except OSError: print("refused", flush=True)
""",
    "threads": """
import threading
stop = threading.Event()
try:
    while True: threading.Thread(target=stop.wait).start()
except RuntimeError: print("refused", flush=True)
stop.wait()
""",
    "zombies": """
import os
try:
    while True:
        if os.fork() == 0: os._exit(0)
except OSError: print("refused", flush=True)
__import__("signal").pause()
""",
    "sessions of orphans": """
import os, signal
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork(): os._exit(0)
            for n in (1, 2, 3, 15): signal.signal(n, signal.SIG_IGN)
    except OSError: print("refused", flush=True); signal.pause()
""",
}


@pytest.mark.parametrize("bomb", FORK_BOMBS.values(), ids=FORK_BOMBS.keys())
def test_t11_a_fork_bomb(node: Node, neighbour: Box, bomb: str) -> None:
    with node.box(pids=24) as box:
        command = box.start_python(bomb)
        command.expect("refused")
        assert box.counters.pids_denied > 0
        usage = box.handle.usage()
        assert usage.pids <= 24 and usage.pids_denied > 0
        assert neighbour.works()
        command.kill()
        empty(node, box)
        assert box.works()


def test_t11_the_shells_own(node: Node, neighbour: Box) -> None:
    with node.box(pids=24) as box:
        command = box.start("bash", "-c", ":(){ :|:& };:")
        until(lambda: box.counters.pids_denied > 3, "the bomb does not go off")
        assert neighbour.works()
        command.kill()
        empty(node, box)
        assert box.works()


def test_t11_destroying_a_bombed_sandbox(node: Node, neighbour: Box) -> None:
    with node.box(pids=64) as box:
        box.start_python(FORK_BOMBS["sessions of orphans"]).expect("refused")
    assert neighbour.works()


# --- memory --------------------------------------------------------------------------------------------------------

LIMIT = 24 * MIB
MEMORY_BOMBS = {
    # Each ends with the kernel's killing it, or is refused and says so, and then holds what it has.
    "heap": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "a mapping": "import mmap\nm = mmap.mmap(-1, 1 << 30)\nfor at in range(0, 1 << 30, 4096): m[at] = 1",
    "a memory file": "import os\nfd = os.memfd_create('x')\nwhile True: os.write(fd, bytes(1 << 20))",
    "files in /dev/shm and the root": """
import os
for n in range(1000):
    for place in ("/dev/shm", ""):
        try:
            with open(f"{place}/{n}", "wb", 0) as f: [f.write(bytes(65536)) for _ in range(8)]
        except OSError: pass
print("refused", flush=True)
""",
    "pipes": """
import fcntl, os
try:
    while True:
        r, w = os.pipe2(os.O_NONBLOCK)
        try: fcntl.fcntl(w, 1031, 1 << 20)
        except OSError: pass
        try:
            while True: os.write(w, bytes(65536))
        except BlockingIOError: pass
except OSError: print("refused", flush=True)
""",
    "unix sockets": """
import socket
kept = []
try:
    while True:
        a, b = socket.socketpair(); a.setblocking(False); kept += a, b
        try:
            while True: a.send(bytes(65536))
        except BlockingIOError: pass
except OSError: print("refused", flush=True)
""",
    "System V shared memory": """
import ctypes
libc = ctypes.CDLL(None); libc.shmat.restype = ctypes.c_void_p
while True: ctypes.memset(libc.shmat(libc.shmget(0, 1 << 20, 0o1600), None, 0), 1, 1 << 20)
""",
    "message queues": """
import ctypes
libc = ctypes.CDLL(None)
message = (ctypes.c_char * 8200)(*b"\\1\\0\\0\\0\\0\\0\\0\\0")
while True:
    queue = libc.msgget(0, 0o1600)
    if queue < 0: break
    while libc.msgsnd(queue, message, 8000, 0o4000) == 0: pass
print("refused", flush=True)
""",
    "names": """
import os
try:
    while True: os.makedirs("/n/" + os.urandom(100).hex())
except OSError: print("refused", flush=True)
""",
    "filters": """
import socket, struct, ctypes
kept = []
program = struct.pack("=HBBI", 0, 0, 0, 0) * 4095 + struct.pack("=HBBI", 6, 0, 0, 0xFFFF)
buffer = ctypes.create_string_buffer(program, len(program))
try:
    while True:
        kept.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        try: kept[-1].setsockopt(socket.SOL_SOCKET, 26, struct.pack("@HP", 4096, ctypes.addressof(buffer)))
        except OSError: pass
except OSError: print("refused", flush=True)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("bomb", MEMORY_BOMBS.values(), ids=MEMORY_BOMBS.keys())
def test_t12_a_memory_bomb(node: Node, neighbour: Box, bomb: str) -> None:
    with node.box(memory=LIMIT, disk="1GiB", inodes=100_000, open_files=2048) as box:
        command = box.start_python(bomb + "\nimport signal; signal.pause()")
        running = command.running
        until(lambda: running_ended(node, running) or b"refused" in command.stdout.data, "the bomb does not go off")
        usage = box.handle.usage()
        assert usage.memory_bytes <= LIMIT and usage.memory_peak_bytes <= LIMIT
        if running.exited.done():
            assert running.exited.result().signal == signal.SIGKILL
            assert box.counters.oom_kills >= 1
        assert neighbour.works()
        assert neighbour.counters.oom_kills == 0
        command.kill()
        empty(node, box)
        box.sh("rm -rf /dev/shm/* /n /[0-9]*; ipcrm -a")
        assert not box.handle.died.done()
        assert box.works()


def running_ended(node: Node, running: Running) -> bool:
    node.wait(asyncio.sleep(0))
    return running.exited.done()


def socket_pages(kind: str) -> int:
    """What all sockets of the machine buffer, in pages."""
    for line in procfs.read(procfs.path_of("self", "net", "sockstat")).decode().splitlines():
        words = line.split()
        if words[0] == f"{kind}:":
            return int(words[words.index("mem") + 1])
    raise AssertionError(f"no {kind} in sockstat")


SOCKETS = {
    "TCP": """
import socket
listener = socket.create_server(("127.0.0.1", 0), backlog=200); kept = []
for n in range(100):
    a = socket.create_connection(listener.getsockname()); b, _ = listener.accept(); kept += a, b; a.setblocking(False)
    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
    try:
        while True: a.send(bytes(65536))
    except BlockingIOError: pass
print("refused", flush=True)
""",
    "UDP": """
import socket
kept = []
for n in range(200):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); kept.append(s); s.setblocking(False)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24); s.bind(("127.0.0.1", 0)); s.connect(s.getsockname())
    for _ in range(50):
        try: s.send(bytes(60000))
        except OSError: break
print("refused", flush=True)
""",
}


@pytest.mark.parametrize("kind", SOCKETS)
def test_t12_what_sockets_buffer(node: Node, neighbour: Box, kind: str) -> None:
    """On v1 the kernel counts it apart, and the limit is an eighth. Without one this takes hundreds of MiB."""
    before = socket_pages(kind)
    with node.box(memory="32MiB", open_files=1024) as box:
        command = box.start_python(SOCKETS[kind] + "\nimport signal; signal.pause()")
        until(lambda: running_ended(node, command.running) or b"refused" in command.stdout.data, "it does not fill")
        assert (socket_pages(kind) - before) * 4096 < 40 * MIB
        assert neighbour.python("import socket; a, b = socket.socketpair(); a.send(bytes(9000)); print(len(b.recv(9999)))").text == "9000\n"
        command.kill()


def test_t10_process_1_outlives_every_shortage(node: Node) -> None:
    """Memory full to the brim with files that no kill gives back: the kernel goes on to kill whatever it may."""
    with node.box(memory="16MiB", disk="64MiB") as box:
        for _ in range(5):
            fill = "for n in 1 2 3 4 5 6; do dd if=/dev/zero of=/fill.$$.$n bs=4k; done; exec dd if=/dev/zero of=/dev/shm/$$ bs=4k"
            filler = box.start("sh", "-c", fill)
            node.wait(asyncio.shield(filler.running.exited))
            filler.kill()  # a dd that has outlived its shell would go on filling, and keep what is removed below
        assert box.counters.oom_kills >= 1
        assert not box.handle.died.done()
        empty(node, box)
        root = procfs.path_of(box.pid, "root")
        for name in os.listdir(root):
            if name.startswith("fill."):
                os.unlink(f"{root}/{name}")
        assert box.works()


# --- disk ----------------------------------------------------------------------------------------------------------


def test_t13_no_bytes_left(node: Node, neighbour: Box) -> None:
    with node.box(disk="4MiB") as box:
        result = box.sh("head -c 100M /dev/zero > /fill")
        assert b"No space left" in result.err
        assert box.counters.disk_full
        assert os.stat(f"{procfs.path_of(box.pid, 'root')}/fill").st_size <= 4 * MIB
        assert neighbour.sh("head -c 1M /dev/zero > /fine && stat -c %s /fine").text == f"{MIB}\n"
        assert box.sh("rm /fill && echo again > /file && cat /file").text == "again\n"
        assert not box.counters.disk_full


def test_t13_no_inodes_left(node: Node, neighbour: Box) -> None:
    with node.box(inodes=100) as box:
        source = """
import os
made = 0
try:
    while True: os.mkdir(f"/made{made}"); made += 1
except OSError as error: print(made, error.errno)
"""
        made, code = map(int, box.python(source).text.split())
        assert code == 28 and 90 <= made <= 100
        assert box.counters.inodes_full
        assert neighbour.sh("mkdir /fine").code == 0
        assert box.sh("rmdir /made* && echo again > /file && cat /file").text == "again\n"


def test_t13_a_sparse_or_reserved_file_takes_no_more(node: Node) -> None:
    with node.box(disk="4MiB") as box:
        source = """
import os
fd = os.open("/sparse", os.O_RDWR | os.O_CREAT); os.ftruncate(fd, 1 << 40)
try: os.posix_fallocate(fd, 0, 1 << 30)
except OSError as error: print(error.errno)
"""
        assert box.python(source).text == "28\n"
        assert box.handle.usage().disk_bytes <= 4 * MIB


# --- output, cpu, time ---------------------------------------------------------------------------------------------


def test_t14_who_writes_without_a_reader_waits(node: Node, neighbour: Box) -> None:
    with node.box() as box:
        command = box.start("sh", "-c", "exec yes >&2")
        until(lambda: b"pipe" in procfs.read(procfs.path_of(command.running.pid, "wchan")), "it does not wait")
        assert box.handle.usage().memory_bytes < 16 * MIB
        assert neighbour.works()
        command.kill()


@pytest.mark.slow
def test_t15_a_busy_loop(node: Node, neighbour: Box) -> None:
    with node.box(cpu=0.1) as box:
        commands = [box.start("sh", "-c", "while :; do :; done") for _ in range(4)]
        group = node.container(box).group
        until(lambda: group.events().cpu_throttled >= 3, "it is not throttled")
        assert neighbour.works()
        for command in commands:
            command.kill()


@pytest.mark.parametrize(
    "text",
    {
        "deaf": "trap '' TERM INT HUP QUIT; while :; do sleep 1000; done",
        "stopped": "kill -STOP $$; echo never",
        "in another session": "setsid sleep 1000 & setsid sh -c 'trap \"\" TERM; sleep 1000' & wait",
        "orphaned": "(sleep 1000 & (sleep 1000 &)) & sleep 1000",
        "nice": "nice -n 19 sleep 1000 & exec sleep 1000",
    }.values(),
    ids=lambda text: text.split()[0],
)
def test_t16_nothing_outlives_its_kill(node: Node, box: Box, text: str) -> None:
    command = box.start("sh", "-c", f"{text}")
    until(lambda: box.handle.processes() >= 1, "it does not start")
    result = command.kill()
    assert result.exit.signal == signal.SIGKILL
    empty(node, box)
    assert box.works()


def test_t16_a_start_that_is_stopped_from_inside_can_be_given_up(node: Node, box: Box) -> None:
    """Root inside stops every newcomer as soon as it may, and lets none go."""
    source = """
import os, signal
me = os.getpid(); print("ready", flush=True)
while True:
    for pid in os.listdir("/proc"):
        if pid.isdigit() and int(pid) not in (1, me):
            try: os.kill(int(pid), signal.SIGSTOP)
            except OSError: pass
"""
    lines = "".join(f"user{n}:x:{n}:5:5:/home:/bin/sh\n" for n in range(1000, 24_000))
    box.run("sh", "-c", "cat > /etc/passwd", input=lines.encode())  # takes a newcomer long enough to read
    attacker = box.start_python(source)
    attacker.expect("ready")
    group = node.container(box).group
    stuck: list[int] = []
    for _ in range(50):
        pending = node.loop.create_task(box.start_async("true", user="5"))

        def is_stuck(pending: asyncio.Task[Command] = pending, stuck: list[int] = stuck) -> bool:
            node.wait(asyncio.sleep(0))
            for pid in group.procs():
                try:
                    stat = procfs.stat(pid)
                except OSError:
                    continue
                if stat.comm == b"dsec-spawner" and stat.state == "T":
                    stuck.append(pid)
            return bool(stuck) or pending.done()

        until(is_stuck, "it neither starts nor stops")
        if stuck:
            pending.cancel()
            node.wait(asyncio.wait([pending]))
            break
        node.wait(finish(pending))
    assert stuck, "no start was caught"
    attacker.kill()
    empty(node, box)
    box.sh("echo root:x:0:0::/root:/bin/sh > /etc/passwd")
    assert box.works()


async def finish(task: asyncio.Task[Command]) -> None:
    command = await task
    command.running.kill_tree()
    await command.ended()


# --- descriptors and what else there is a number of ----------------------------------------------------------------

COUNTED = {
    # what it is, and how one more is made; each is refused at a limit that another sandbox does not feel
    "descriptors": "os.dup(0)",
    "pipes": "os.pipe()",
    "sockets": "kept.append(socket.socket())",
    "inotify instances": "assert libc.inotify_init1(0) >= 0",
    "message queues": "assert libc.mq_open(b'/q%d' % len(made), os.O_CREAT | os.O_RDWR, 0o600, None) >= 0",
    "terminals": "os.openpty()",
    "timers": "assert libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) == 0",
    "signals": "assert libc.sigqueue(os.getpid(), 40, 0) == 0",
    "locked memory": "kept.append(ctypes.create_string_buffer(1 << 20)); assert libc.mlock(kept[-1], 1 << 20) == 0",
    "watches": "epoll_one()",
}
COUNTER = """
import ctypes, mmap, os, signal, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mq_open.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 65))
kept, made = [], []
if sys.argv[2] == "epoll_one()":
    import select
    ends = [os.pipe()[0] for _ in range(100)]
    def epoll_one():
        poll = select.epoll(); kept.append(poll)
        for end in ends: poll.register(end)
try:
    while len(made) < int(sys.argv[1]):
        exec(sys.argv[2]); made.append(1)
except (OSError, AssertionError): pass
print(len(made), "made", flush=True)
signal.pause()
"""


@pytest.mark.slow
@pytest.mark.parametrize("one", COUNTED.values(), ids=COUNTED.keys())
def test_t17_what_is_counted(node: Node, neighbour: Box, one: str) -> None:
    """All that five processes of as many users can get, and then some in another sandbox."""
    with node.box(open_files=512, pids=32) as box:
        takers = [box.start_python(COUNTER, "100000", one, user=user) for user in ("root", "root", "1001", "1002", "1003")]
        for taker in takers:
            taker.expect("made")
        assert sum(int(taker.stdout.data.split()[0]) for taker in takers) > 5
        other = neighbour.start_python(COUNTER, "5", one)
        other.expect("made")
        assert other.stdout.data.split()[0] == b"5"
        other.kill()
        for taker in takers:
            taker.kill()
        assert box.works()


def test_t17_the_host_has_inotify_left(box: Box) -> None:
    """They were once counted against root, for all sandboxes and the host together."""
    taker = box.start_python(COUNTER, "100000", COUNTED["inotify instances"])
    taker.expect("made")
    assert int(taker.stdout.data.split()[0]) >= 100
    os.close(syscalls.inotify_init1())


def test_t17_terminals_are_the_boxs_own(node: Node, box: Box, neighbour: Box) -> None:
    taker = box.start_python(COUNTER, "100000", COUNTED["terminals"])
    taker.expect("made")
    assert taker.stdout.data.split()[0] == b"64"
    refused = box.run("tty", pty=Pty(rows=5, cols=5))
    assert "No space left" in refused.exit.not_started
    assert neighbour.run("tty", pty=Pty(rows=5, cols=5)).out == b"/dev/pts/0\r\n"
    master, slave = os.openpty()  # the host's own
    os.close(master)
    os.close(slave)


def test_t18_a_child_that_keeps_the_pipe_delays_nothing(box: Box) -> None:
    result = box.sh("sleep 1000 & setsid sleep 1000 & echo done")
    assert (result.out, result.code) == (b"done\n", 0)
    assert box.handle.processes() == 2
