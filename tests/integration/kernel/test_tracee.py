# SPDX-License-Identifier: Apache-2.0
"""A process is held, looked at and asked, and knows nothing of it afterwards."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.kernel import abi, procfs, tracee

pytestmark = pytest.mark.skipif(abi.MACHINE != "x86_64", reason="missing kernel feature process_capture: no frames for this processor")

# Two threads that wait in read(2), one with a mask, an alternate stack and a filter. A byte for the second and it tells that its registers
# are what they were; a byte for the first and it turns without a system call until it is told to stop.
SOURCE = r"""
#define _GNU_SOURCE
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static int turning[2], telling[2];
static char stack[65536];
static volatile int heard;

static void hear(int number) { heard = number; }

static void *second(void *to)
{
    stack_t own = { .ss_sp = stack, .ss_size = sizeof(stack) };
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGUSR2);
    pthread_sigmask(SIG_BLOCK, &mask, NULL);
    sigaltstack(&own, NULL);
    struct sock_filter all[] = { BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW) };
    struct sock_fprog program = { 1, all };
    syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program);
    printf("%d %p\n", (int)syscall(SYS_gettid), (void *)stack);
    fflush(stdout);
    char byte;
    long result, one = 1, same;
    register long r10 __asm__("r10") = 10, r8 __asm__("r8") = 8, r9 __asm__("r9") = 9, r12 __asm__("r12") = 12, r13 __asm__("r13") = 13;
    __asm__ volatile("movq %[one], %%xmm7\n\tsyscall\n\tmovq %%xmm7, %[same]"
             : "=a"(result), [same] "=&r"(same), "+r"(r10), "+r"(r8), "+r"(r9), "+r"(r12), "+r"(r13)
             : "a"(SYS_read), "D"(telling[0]), "S"(&byte), "d"(1), [one] "r"(one)
             : "rcx", "r11", "xmm7", "memory");
    printf("%d %d\n", result == 1 && same == 1 && r10 == 10 && r8 == 8 && r9 == 9 && r12 == 12 && r13 == 13, heard);
    fflush(stdout);
    return to;
}

int main(int argc, char **argv)
{
    pthread_t thread;
    char byte;
    (void)argc;
    sscanf(argv[1], "%d %d", &turning[0], &telling[0]);
    prctl(PR_SET_NO_NEW_PRIVS, 1);
    struct sigaction action = { .sa_handler = hear, .sa_flags = SA_RESTART };
    sigaddset(&action.sa_mask, SIGWINCH);
    sigaction(SIGURG, &action, NULL);
    pthread_create(&thread, NULL, second, NULL);
    while (read(turning[0], &byte, 1) != 1)
        ;
    printf("turning\n");
    fflush(stdout);
    for (;;)
        __asm__ volatile("pause");
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tracee")
    (folder / "two.c").write_text(SOURCE)
    subprocess.run(["cc", "-O1", "-Wall", "-Werror", "-pthread", folder / "two.c", "-o", folder / "two"], check=True, timeout=60)
    return folder / "two"


class Two:
    def __init__(self, process: subprocess.Popen[bytes], turn: int, tell: int) -> None:
        self.process, self.pid, self.turn, self.tell = process, process.pid, turn, tell
        number, stack = self.line().split()
        self.second, self.stack = int(number), int(stack, 16)

    def line(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    @contextlib.contextmanager
    def held(self, *, turning: bool = False) -> Iterator[list[tracee.Thread]]:
        """Where both wait, or the first turns: it is on its way there."""
        while True:
            with tracee.held(self.pid) as threads:
                if turning:
                    if not threads[0].in_call():
                        yield threads
                        return
                elif [thread.registers()["orig_rax"] for thread in threads] == [0, 0] and all(thread.in_call() for thread in threads):
                    yield threads
                    return


@pytest.fixture
def two(program: Path) -> Iterator[Two]:
    turn, tell = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    command = [str(program), f"{turn[0]} {tell[0]}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=(turn[0], tell[0])) as process:
        try:
            yield Two(process, turn[1], tell[1])
        finally:
            process.kill()
            for fd in (*turn, *tell):
                os.close(fd)


def test_what_it_is_asked_and_knows_nothing_of(two: Two) -> None:
    with two.held() as threads:
        first, second = threads
        assert (first.tid, second.tid) == (two.pid, two.second)
        assert [thread.registers()["rdx"] for thread in threads] == [1, 1]
        before = [(thread.registers(), thread.xstate()) for thread in threads]
        assert struct.unpack_from("<Q", second.xstate(), 160 + 7 * 16) == (1,)  # xmm7
        assert not first.mask and second.mask == 1 << signal.SIGUSR2 - 1
        handler, flags, restorer, mask = first.sigaction(signal.SIGURG)
        assert handler and restorer and flags & 0x1000_0000 and mask == 1 << signal.SIGWINCH - 1
        assert first.sigaction(signal.SIGUSR1) == (0, 0, 0, 0)
        assert first.alternate_stack() == (0, 2, 0) and second.alternate_stack() == (two.stack, 0, 65536)
        assert first.filters() == [] and second.filters() == [struct.pack("<HBBI", 6, 0, 0, 0x7FFF_0000)]
        for thread in threads:
            address, size, _ = thread.rseq()
            assert (address, size) == (0, 0) or size >= 32
            assert struct.unpack("<i", thread.read(thread.tid_address(), 4)) == (thread.tid,)
            assert thread.robust_list()[1] == 24
            assert thread.call("gettid")[0] == thread.tid
            with pytest.raises(OSError, match="close in another process") as caught:
                thread.call("close", 999)
            assert caught.value.errno == errno.EBADF
        assert [(thread.registers(), thread.xstate()) for thread in threads] == before
    os.write(two.tell, b"x")
    assert two.line() == b"1 0\n"


def test_signals_wait_and_are_not_lost(two: Two) -> None:
    with two.held() as threads:
        os.kill(two.pid, signal.SIGURG)
        assert threads[1].call("gettid")[0] == two.second
        assert [thread.mask for thread in threads] == [0, 1 << signal.SIGUSR2 - 1]
        ignored = 1 << signal.SIGURG - 1
        assert int(procfs.status(two.pid)["ShdPnd"], 16) == ignored
    pending = True
    while pending:  # it may be held again before it has taken the signal
        with two.held() as threads:
            pending = int(procfs.status(two.pid)["ShdPnd"], 16) != 0
            assert [thread.mask for thread in threads] == [0, 1 << signal.SIGUSR2 - 1]
    os.write(two.tell, b"x")
    assert two.line() == f"1 {int(signal.SIGURG)}\n".encode()


def test_who_does_not_stand_in_a_call_cannot_be_asked(two: Two) -> None:
    os.write(two.turn, b"x")
    assert two.line() == b"turning\n"
    with two.held(turning=True) as threads:
        with pytest.raises(OSError, match=f"thread {two.pid} does not stand in a system call"):
            threads[0].call("getpid")
        with pytest.raises(OSError, match="does not stand") as caught:
            threads[0].tid_address()
        assert caught.value.errno == errno.EBUSY
        assert threads[1].call("getpid")[0] == two.pid


def in_thread(body: object) -> None:
    """In a thread that lives on, as those of a pool do: the kernel clears nothing up for it."""
    assert callable(body)
    done, end = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:
            failed.append(error)
        done.set()
        end.wait()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert done.wait(30), "the tracer waits for ever"
        if failed:
            raise failed[0]
    finally:
        end.set()
        thread.join()


def test_one_that_dies_while_it_is_held_is_gone(two: Two) -> None:
    def hold() -> None:
        with pytest.raises(ProcessLookupError), two.held() as threads:
            pidfd = os.pidfd_open(two.pid)
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                while not procfs.is_exiting(two.pid, procfs.pid_start_time(two.pid)):
                    pass
                threads[1].call("getpid")
            finally:
                os.close(pidfd)
        assert not [line for line in tasks(two.pid) if line]

    in_thread(hold)


def tasks(pid: int) -> list[str]:
    """States of its threads."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [procfs.stat(f"{pid}/task/{tid}").state for tid in procfs.threads(pid)]
    return []


def test_it_dies_with_who_holds_it(two: Two) -> None:
    code = (
        f"import os, signal, sys; sys.path[:0] = {sys.path!r}\n"
        f"from opendsec.kernel import tracee\n"
        f"with tracee.held({two.pid}): os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert two.process.wait(30) == -signal.SIGKILL


def test_who_is_not_there_cannot_be_held() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    with pytest.raises(OSError, match=re.compile("No such (process|file)")), tracee.held(process.pid):
        pass
