# SPDX-License-Identifier: Apache-2.0
"""The script that native/restore.c follows: system calls with the results they must have, threads, and what these point to."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opendsec.kernel import syscall_table

SCRIPT_AT, VDSO_AT, FLOOR = 0x1000_0000, 0x0F00_0000, 0x2000_0000  # as in restore.c
BLOBS = SCRIPT_AT + 256
MAGIC = b"DSECPKR1"
EXACT, OK, DESCRIPTOR = range(3)
_HEADER = struct.Struct("<8sQ3Q4I8Q")
_SUMMED = 16  # from here on
_CALL = struct.Struct("<II6QQ")
THREAD = struct.Struct("<9Q16s")
_ORDER = (  # as in `struct sigcontext`
    *("r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "rdi", "rsi", "rbp", "rbx", "rdx", "rax", "rcx", "rsp", "rip", "eflags"),
)
_UC_FLAGS = 1 | 2 | 4  # extended registers, a stack segment that is restored strictly
_XSTATE_BEGIN, _XSTATE_END = 0x4650_5853, 0x4650_5845


@dataclass
class Script:
    """What `restore` follows, as it grows. Addresses are those at which it will lie."""

    calls: list[bytes] = field(default_factory=list)
    threads: list[bytes] = field(default_factory=list)
    blobs: bytearray = field(default_factory=bytearray)

    def call(self, name: str, *arguments: int, kind: int = OK, expected: int = 0) -> None:
        words = [word & (1 << 64) - 1 for word in (*arguments, *(0,) * (6 - len(arguments)))]
        self.calls.append(_CALL.pack(syscall_table.X86_64[name], kind, *words, expected & (1 << 64) - 1))

    def first(self, name: str, *arguments: int, kind: int = OK, expected: int = 0) -> None:
        self.call(name, *arguments, kind=kind, expected=expected)
        self.calls.insert(0, self.calls.pop())

    def opened(self, number: int, name: str, *arguments: int) -> None:
        """A call whose descriptor gets that number."""
        self.call(name, *arguments, kind=DESCRIPTOR, expected=number)

    def blob(self, data: bytes, align: int = 8) -> int:
        """Its address."""
        self.blobs += bytes(-len(self.blobs) % align)
        at = BLOBS + len(self.blobs)
        self.blobs += data
        return at

    def thread(self, *facts: int, name: bytes) -> None:
        """`facts`: in the order of restore.c's `struct thread`."""
        self.threads.append(THREAD.pack(*facts, name))

    def frame(self, registers: Mapping[str, int], xstate: bytes, mask: int, stack: tuple[int, int, int]) -> int:
        """The address of a signal frame, from which rt_sigreturn(2) makes a thread go on."""
        (features,) = struct.unpack_from("<Q", xstate, 464)  # where ptrace tells what the processor saves
        own = struct.pack("<IIQI7I", _XSTATE_BEGIN, len(xstate) + 4, features, len(xstate), *(0,) * 7)
        extended = self.blob(xstate[:464] + own + xstate[512:] + struct.pack("<I", _XSTATE_END), align=64)
        context = struct.pack("<18Q4H", *(registers[name] for name in _ORDER), registers["cs"], 0, 0, registers["ss"])
        context += struct.pack("<5Q8Q", 0, 0, mask, 0, extended, *(0,) * 8)
        address, flags, size = stack
        head = struct.pack("<QQQQiIQ", 0, _UC_FLAGS, 0, address, flags, 0, size)
        return self.blob(head + context + struct.pack("<Q", mask) + bytes(128), align=16)

    def file(self, parts: Sequence[tuple[int, int]]) -> bytes:
        calls, threads = b"".join(self.calls), b"".join(self.threads)
        begin = BLOBS - SCRIPT_AT + len(self.blobs)
        begin += -begin % 64
        at = begin + len(calls)
        flat = [word & (1 << 64) - 1 for part in parts for word in part]
        facts = (at + len(threads), begin, at, len(self.calls), len(self.threads), len(parts), 0, *flat, *(0,) * (8 - len(flat)))
        head = _HEADER.pack(MAGIC, 0, *facts).ljust(BLOBS - SCRIPT_AT, b"\0") + bytes(self.blobs)
        whole = head.ljust(begin, b"\0") + calls + threads
        return _HEADER.pack(MAGIC, _sum(whole[_SUMMED:]), *facts) + whole[_HEADER.size :]


def _sum(data: bytes) -> int:
    """FNV-1a over words of eight bytes."""
    result = 0xCBF2_9CE4_8422_2325
    for (word,) in struct.iter_unpack("<Q", data):
        result = (result ^ word) * 0x100_0000_01B3 & (1 << 64) - 1
    return result
