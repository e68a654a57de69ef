# SPDX-License-Identifier: Apache-2.0
"""A process held still by ptrace(2), to be looked at and asked: its threads' registers, signal handling, system call filters.

All of it has to be done by one thread of ours, since a tracer is a thread. The process goes on when the block ends. If we die before,
so does it: it may be in the midst of a call that it did not want.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import struct

from opendsec.kernel import procfs, syscall_table, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# include/uapi/linux/ptrace.h, elf.h
_CONT, _SINGLESTEP, _DETACH = 7, 9, 17
_GETREGSET, _SETREGSET, _SEIZE, _INTERRUPT = 0x4204, 0x4205, 0x4206, 0x4207
_GETSIGMASK, _SETSIGMASK, _SECCOMP_GET_FILTER, _GET_RSEQ_CONFIGURATION = 0x420A, 0x420B, 0x420C, 0x420F
_EXITKILL = 1 << 20
_EVENT_STOP = 128
_NT_PRSTATUS, _NT_X86_XSTATE = 1, 0x202
_WALL = 0x4000_0000
_XSTATE_ROOM = 1 << 16
_TRIES = 10

SIGNALS = 64
REGISTERS = (
    *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi"),
    *("orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs"),
)
_REGISTERS = struct.Struct(f"={len(REGISTERS)}Q")
_SYSCALL = b"\x0f\x05"
_SIGACTION = struct.Struct("=4Q")  # handler, flags, restorer, mask
_STACK = struct.Struct("=QiIQ")
_RED_ZONE = 128
PR_GET_TID_ADDRESS = 40


class Thread:
    """A thread that stands still. Signals wait until it goes on."""

    def __init__(self, pid: int, tid: int) -> None:
        """Of one that has been stopped."""
        self.pid, self.tid = pid, tid
        self.mask = struct.unpack("=Q", self._signal_mask(_GETSIGMASK, bytes(8)))[0]
        self._signal_mask(_SETSIGMASK, b"\xff" * 8)

    def let_go(self) -> None:
        self._signal_mask(_SETSIGMASK, struct.pack("=Q", self.mask))
        _ptrace(_DETACH, self.tid, 0, 0)

    # --- registers ---------------------------------------------------------------------------------------------------

    def registers(self) -> dict[str, int]:
        data = self._get(_NT_PRSTATUS, _REGISTERS.size)
        return dict(zip(REGISTERS, _REGISTERS.unpack(data), strict=True))

    def set_registers(self, registers: dict[str, int]) -> None:
        data = _REGISTERS.pack(*(registers[name] for name in REGISTERS))
        buffer = ctypes.create_string_buffer(data, len(data))
        _ptrace(_SETREGSET, self.tid, _NT_PRSTATUS, struct.pack("=2Q", ctypes.addressof(buffer), len(data)))

    def xstate(self) -> bytes:
        """Floating point and vector registers, as XSAVE writes them."""
        return self._get(_NT_X86_XSTATE, _XSTATE_ROOM)

    def _get(self, kind: int, room: int) -> bytes:
        buffer = ctypes.create_string_buffer(room)
        vector = ctypes.create_string_buffer(struct.pack("=2Q", ctypes.addressof(buffer), room), 16)
        _ptrace(_GETREGSET, self.tid, kind, vector)
        return buffer.raw[: struct.unpack("=2Q", vector.raw)[1]]

    # --- what the kernel keeps for it ----------------------------------------------------------------------------------

    def _signal_mask(self, request: int, mask: bytes) -> bytes:
        buffer = ctypes.create_string_buffer(mask, 8)
        _ptrace(request, self.tid, 8, buffer)
        return buffer.raw

    def rseq(self) -> tuple[int, int, int]:
        """Address, size and signature of its restartable-sequences area; address 0: none."""
        buffer = ctypes.create_string_buffer(24)
        _ptrace(_GET_RSEQ_CONFIGURATION, self.tid, 24, buffer)
        address, size, signature, _, _ = struct.unpack("=QIIII", buffer.raw)
        return address, size, signature

    def robust_list(self) -> tuple[int, int]:
        """Address and size of the head of its list of held mutexes."""
        head, size = ctypes.create_string_buffer(8), ctypes.create_string_buffer(8)
        syscalls.syscall("get_robust_list", self.tid, head, size)
        return int(struct.unpack("=Q", head.raw)[0]), int(struct.unpack("=Q", size.raw)[0])

    def filters(self) -> list[bytes]:
        """Its system call filters, the first one installed first."""
        found: list[bytes] = []
        while True:
            try:
                count = _ptrace(_SECCOMP_GET_FILTER, self.tid, len(found), 0)
            except OSError as error:
                if error.errno == errno.ENOENT:
                    return found[::-1]
                if error.errno == errno.EINVAL and not found:
                    return []  # it has none at all
                raise
            buffer = ctypes.create_string_buffer(8 * count)
            _ptrace(_SECCOMP_GET_FILTER, self.tid, len(found), buffer)
            found.append(buffer.raw)

    # --- asking it -------------------------------------------------------------------------------------------------------

    def in_call(self) -> bool:
        """Whether it stands in a system call, or right behind one."""
        return self.read(self.registers()["rip"] - len(_SYSCALL), len(_SYSCALL)) == _SYSCALL

    def call(self, name: str, *arguments: int, room: int = 0, at: int | None = None) -> tuple[int, bytes]:
        """Have it make a system call. `at`: which argument is the address of `room` bytes, which come back. It must stand in a call, where
        the instruction is known. Its registers are afterwards as before."""
        if not self.in_call():
            raise OSError(errno.EBUSY, f"thread {self.tid} does not stand in a system call")
        before = self.registers()
        instruction = before["rip"] - len(_SYSCALL)
        buffer = (before["rsp"] - _RED_ZONE - room - 64) & ~63
        words = list(arguments)
        if at is not None:
            words.insert(at, buffer)
        words += [0] * (6 - len(words))
        changes = dict(zip(("rdi", "rsi", "rdx", "r10", "r8", "r9"), words, strict=True))
        self.set_registers(before | changes | {"rax": syscall_table.X86_64[name], "orig_rax": (1 << 64) - 1, "rip": instruction})
        try:
            _ptrace(_SINGLESTEP, self.tid, 0, 0)
            if (stop := _wait(self.tid)) != signal.SIGTRAP:
                raise OSError(errno.EINTR, f"{name} in another process: stopped by {stop:#x}")
            result = self.registers()["rax"]
            answer = self.read(buffer, room) if room else b""
        finally:
            self.set_registers(before)
        result -= (result >> 63) << 64
        if result < 0:
            raise OSError(-result, f"{name} in another process: {os.strerror(-result)}")
        return result, answer

    def sigaction(self, number: int) -> tuple[int, int, int, int]:
        """Handler, flags, restorer and mask of a signal."""
        _, data = self.call("rt_sigaction", number, 0, 8, room=_SIGACTION.size, at=2)
        handler, flags, restorer, mask = _SIGACTION.unpack(data)
        return handler, flags, restorer, mask

    def alternate_stack(self) -> tuple[int, int, int]:
        """Address, flags and size."""
        _, data = self.call("sigaltstack", 0, room=_STACK.size, at=1)
        address, flags, _, size = _STACK.unpack(data)
        return address, flags, size

    def tid_address(self) -> int:
        """Where its C library keeps its number, and the kernel clears it at the end."""
        _, data = self.call("prctl", PR_GET_TID_ADDRESS, room=8, at=1)
        return int(struct.unpack("=Q", data)[0])

    def read(self, address: int, size: int) -> bytes:
        with open(procfs.path_of(self.pid, "mem"), "rb", buffering=0) as memory:
            return os.pread(memory.fileno(), size, address)


@contextlib.contextmanager
def held(pid: int) -> Iterator[list[Thread]]:
    """All threads of a process, standing still, the first one first. Raises OSError."""
    stopped: dict[int, Thread] = {}
    try:
        for _ in range(_TRIES):
            fresh = [tid for tid in procfs.threads(pid) if tid not in stopped]
            if not fresh:
                break
            for tid in fresh:
                with contextlib.suppress(ProcessLookupError):
                    stopped[tid] = _stop(pid, tid)
        else:
            raise OSError(errno.EBUSY, f"process {pid} starts and ends threads all the time")
        yield [stopped[tid] for tid in sorted(stopped, key=lambda tid: (tid != pid, tid))]
    finally:
        for tid in sorted(stopped, key=lambda tid: (tid == pid, tid)):  # the first one's end is told when there are no others any more
            try:
                stopped[tid].let_go()
            except ProcessLookupError:
                _reap(tid)


def _stop(pid: int, tid: int) -> Thread:
    _ptrace(_SEIZE, tid, 0, _EXITKILL)
    try:
        _ptrace(_INTERRUPT, tid, 0, 0)
        while (stop := _wait(tid)) >> 8 != _EVENT_STOP:
            _ptrace(_CONT, tid, 0, stop)  # a signal that had come before: it is taken as ever
        return Thread(pid, tid)
    except ProcessLookupError:
        _reap(tid)
        raise


def _wait(tid: int) -> int:
    """The signal that stopped it, and above that which event."""
    _, status = os.waitpid(tid, _WALL)
    if not os.WIFSTOPPED(status):
        raise ProcessLookupError(errno.ESRCH, f"thread {tid} ended")
    return status >> 8


def _reap(tid: int) -> None:
    """One that was killed. Nobody else hears of its end before us."""
    with contextlib.suppress(ChildProcessError):
        while os.WIFSTOPPED(os.waitpid(tid, _WALL)[1]):
            pass


def _ptrace(request: int, tid: int, address: int, data: bytes | ctypes.Array[ctypes.c_char] | int) -> int:
    return syscalls.syscall("ptrace", request, tid, address, data)
