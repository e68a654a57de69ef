# SPDX-License-Identifier: Apache-2.0
"""What ends a call before it ends itself, and how that is told; each time an honest call comes after."""

from __future__ import annotations

import asyncio
import time

import pytest

from opendsec.testing.waiting import eventually
from tests.fnmembers import LIMITS, MIB, Calls

pytestmark = pytest.mark.slow


def test_cpu_time(member: Calls) -> None:
    ended = member.python("while True: pass", cpu_time_s=0.2)
    assert (ended.signal, ended.timed_out) == (9, "cpu") and 200 <= ended.cpu_ms < 1500
    assert member.exec("sh", "-c", "while :; do :; done", cpu_time_s=0.2).timed_out == "cpu"
    member.check()


def test_cpu_time_of_the_whole_tree(member: Calls) -> None:
    """Of processes that are waited for, and of one that nobody waits for."""
    ended = member.python("import os\nos.fork()\nos.fork()\nos.setsid() if os.fork() == 0 else None\nwhile True: pass", cpu_time_s=0.3)
    assert ended.timed_out == "cpu" and ended.cpu_ms >= 300
    member.check()


def test_wall_time(member: Calls) -> None:
    ended = member.python("import time\nprint('a', flush=True)\ntime.sleep(100)", wall_time_s=0.2)
    assert (ended.signal, ended.timed_out, ended.stdout) == (9, "wall", b"a\n") and 200 <= ended.wall_ms < 5000
    assert member.exec("sleep", "100", wall_time_s=0.2).timed_out == "wall"
    member.check()


def test_a_signal_that_is_ignored_does_not_put_it_off(member: Calls) -> None:
    source = "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
    source += "while True: pass\n"
    assert member.python(source, cpu_time_s=0.2).timed_out == "cpu"


def test_memory(member: Calls) -> None:
    ended = member.python("x = bytearray(200 << 20)", memory_bytes=64 * MIB)
    assert (ended.signal, ended.oom_killed) == (9, True) and ended.peak_memory_bytes > 48 * MIB
    ended = member.exec("sh", "-c", "python3 -c 'x = bytearray(300 << 20)'; echo $?", memory_bytes=64 * MIB)
    assert (ended.code, ended.stdout, ended.oom_killed) == (0, b"137\n", True)
    ended = member.python("x = bytearray(40 << 20)", memory_bytes=64 * MIB)
    # The kernel counts by the batch, on each processor.
    assert (ended.code, ended.oom_killed) == (0, False) and 39 * MIB < ended.peak_memory_bytes < 64 * MIB
    member.check()


# Whatever it holds the memory by, and however harmless it makes itself look, none of those that serve it is killed in its stead.
HOARD = """
import os, sys
for score in ('-1000', '-1', '0', '500'):
    try:
        with open('/proc/self/oom_score_adj', 'w') as file: file.write(score)
        print('lowered')
    except OSError: pass
sys.stdout.write('x' * 4_000_000)
sys.stdout.flush()
with open('/dev/shm/x', 'wb', buffering=0) as file:
    while True: file.write(bytes(65536))
"""


def test_memory_that_no_process_has(member: Calls) -> None:
    for kind in ("source", "exec"):
        job = member.job(
            kind, source=HOARD, argv=["python3", "-c", HOARD], output_bytes=4 * MIB, memory_bytes=32 * MIB, disk_bytes=256 * MIB
        )
        ended = member.run(job)
        assert (ended.signal, ended.spoiled) == (9, "")
        # At the limit the kernel may rather drop the program's own text and read it again, for as long as there is time.
        assert ended.oom_killed or ended.timed_out
        assert ended.stdout == b"x" * 4_000_000
    small = "for i in 1 2 3 4 5 6 7 8; do sleep 100 & done; exec cat /dev/zero > /dev/shm/x"
    ended = member.exec("sh", "-c", small, memory_bytes=32 * MIB, disk_bytes=256 * MIB, wall_time_s=10)
    assert (ended.code, ended.oom_killed or bool(ended.timed_out), ended.spoiled) == (None, True, "")
    member.check()


def test_memory_of_one_call_is_not_the_next_ones(member: Calls) -> None:
    for _ in range(4):
        assert member.python("x = bytearray(90 << 20)", memory_bytes=100 * MIB).code == 0
        assert member.python("open('/tmp/x', 'wb').write(bytes(20 << 20))", memory_bytes=100 * MIB, disk_bytes=32 * MIB).code == 0


def test_files_that_were_read_cost_the_next_calls_nothing(member: Calls) -> None:
    """The kernel keeps them at hand for as long as there is room. Nobody waits for them to go, and no limit is the wider for them."""
    member.exec("sh", "-c", "find /usr/lib /usr/bin -type f -size +100k -exec cat {} + > /dev/null", memory_bytes=128 * MIB)
    usage = member.member.group.usage().memory_bytes
    assert usage is not None and usage > member.member.base_bytes + 24 * MIB
    before = time.monotonic()
    for _ in range(4):
        assert member.python("x = bytearray(20 << 20)", memory_bytes=128 * MIB).code == 0
    assert time.monotonic() - before < 1.2, "half a second each is what it waits for memory that does not come back"
    ended = member.python("x = bytearray(60 << 20)", memory_bytes=48 * MIB)
    assert ended.oom_killed and ended.peak_memory_bytes > 47 * MIB, "the files gave way to it"
    member.check()


def test_output(member: Calls) -> None:
    ended = member.python("import os\nwhile True: os.write(1, b'x' * 4096)", output_bytes=10_000)
    assert (ended.signal, ended.output_exceeded, ended.stdout) == (9, True, b"x" * 10_000) and ended.stdout_total > 10_000
    ended = member.exec("sh", "-c", "yes >&2", output_bytes=10_000)
    assert ended.output_exceeded and len(ended.stderr) == 10_000
    ended = member.python("print('x' * 9_999)", output_bytes=10_000)
    assert (ended.code, ended.output_exceeded, len(ended.stdout)) == (0, False, 10_000)
    ended = member.python("import os\nos.write(1, b'x' * 10_001)", output_bytes=10_000)
    assert (ended.output_exceeded, len(ended.stdout), ended.stdout_total) == (True, 10_000, 10_001)
    member.check()


def test_processes(member: Calls) -> None:
    source = "import os\nn = 0\ntry:\n    while os.fork(): n += 1\n    import time; time.sleep(100)\nexcept OSError: print(n)"
    ended = member.python(source, pids=10)
    assert (ended.code, ended.stdout, ended.pids_denied) == (0, b"9\n", True)
    assert member.exec("sh", "-c", "true; true | true", pids=10).pids_denied is False
    ended = member.exec("sh", "-c", "f() { f | f & }; f; sleep 0.3", pids=20, wall_time_s=2)
    assert ended.pids_denied
    member.check()


def test_zombies_that_were_left_to_process_1_do_not_count(member: Calls) -> None:
    source = (
        "import os\nfor i in range(40):\n    if os.fork() == 0:\n        os._exit(0) if os.fork() else os._exit(0)\n    os.wait()\nprint(i)"
    )
    assert member.says(source, pids=10) == "39\n"
    again = member.exec("python3", "-c", source, pids=10)
    assert again.stdout == b"39\n"


def test_disk(member: Calls) -> None:
    source = "import sys\ntry:\n    f = open('x', 'wb', 0)\n    while True: f.write(bytes(65536))\nexcept OSError as e: print(e.errno)"
    ended = member.python(source, disk_bytes=4 * MIB)
    assert (ended.code, ended.stdout, ended.disk_full) == (0, b"28\n", True)
    for where in ("/dev/shm/x", "/tmp/x", "/var/tmp/x"):
        ended = member.exec("dd", "if=/dev/zero", f"of={where}", "bs=64k", disk_bytes=4 * MIB)
        assert ended.code == 1 and ended.disk_full and b"No space left" in ended.stderr
    assert member.python("open('x', 'wb').write(bytes(3 << 20))", disk_bytes=4 * MIB).disk_full is False
    many = "import os\ntry:\n    for i in range(10**6): os.mkdir(str(i))\nexcept OSError as e: print(e.errno)"
    assert member.python(many, disk_bytes=4 * MIB).disk_full
    member.check()


def test_files_that_do_not_fit(member: Calls) -> None:
    ended = member.python("1", files={"big": bytes(2 * MIB)}, disk_bytes=MIB)
    assert ended.code is None and ended.not_started.startswith("cannot write the call's files: big: no room on the disk")
    member.check()


def test_a_cancelled_call_is_gone(member: Calls) -> None:
    before = member.kernel_processes()

    async def give_up() -> None:
        job = member.job("exec", argv=["sh", "-c", "sleep 1000 & setsid sleep 1000 & sleep 1000"])
        task = asyncio.ensure_future(member.member.call(job))
        await eventually(lambda: member.kernel_processes() >= before + 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # What is new is the envelope that waits for the next call.
        assert member.kernel_processes() <= before

    member.node.wait(give_up())
    member.check()


def test_a_call_that_is_cancelled_at_any_moment(member: Calls) -> None:
    async def give_up(turns: int) -> None:
        kind, text = ("source", "import time\ntime.sleep(1000)") if turns % 2 else ("exec", "")
        task = asyncio.ensure_future(member.member.call(member.job(kind, source=text, argv=["sleep", "1000"])))  # type: ignore[arg-type]
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for turns in (*range(1, 12), *range(20, 400, 27)):
        member.node.wait(give_up(turns))
    member.check()


def test_a_cancellation_that_meets_the_end_of_its_call(member: Calls) -> None:
    """It is too late, or just in time; the next call's answer is its own all the same."""

    async def give_up(number: int) -> None:
        task = asyncio.ensure_future(member.member.call(member.job("source", source=f"print({number})")))
        for _ in range(number * 7 % 400):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        ended = await member.member.call(member.job("source", source=f"print({-number})"))
        assert (ended.stdout, ended.spoiled, ended.not_started) == (f"{-number}\n".encode(), "", "")

    for number in range(1, 81):
        member.node.wait(give_up(number))
    member.check()


def test_denied(member: Calls) -> None:
    """A system call of another architecture ends the process; what is merely refused does not."""
    source = "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3')\n"
    source += "ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()\n"
    ended = member.python(source)
    assert ended.signal == 31 and ended.denied
    assert not member.python("import os\nos.sethostname if 0 else 1").denied


def test_limits_differ_from_call_to_call(member: Calls) -> None:
    for disk, pids in ((2, 5), (8, 9), (2, 5)):
        ended = member.exec("sh", "-c", "df -B1M --output=size / | tail -1", disk_bytes=disk * MIB, pids=pids)
        assert ended.stdout.split() == [str(disk).encode()]
    assert LIMITS.disk_bytes == 16 * MIB
