# SPDX-License-Identifier: Apache-2.0
"""An interpreter for seccomp's classic BPF, written from the kernel's documentation and not from our assembler."""

from __future__ import annotations

import struct
from collections.abc import Sequence

ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7, "i386": 0x40000003}
KILL_PROCESS = 0x80000000


class BadProgram(Exception):
    """What the kernel's checker would refuse."""


def check(program: bytes) -> None:
    """The rules of seccomp_check_filter and bpf_check_classic that an assembler can break."""
    if len(program) % 8 or not 1 <= len(program) // 8 <= 4096:
        raise BadProgram("length")
    code = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    for at, (opcode, true, false, k) in enumerate(code):
        if opcode == 0x20 and (k % 4 or k > 60):
            raise BadProgram(f"{at}: loads outside seccomp_data")
        if opcode == 0x05 and at + 1 + k >= len(code):
            raise BadProgram(f"{at}: jumps out of the program")
        if opcode in (0x15, 0x25, 0x35, 0x45) and at + 1 + max(true, false) >= len(code):
            raise BadProgram(f"{at}: jumps out of the program")
        if opcode not in (0x20, 0x54, 0x05, 0x15, 0x25, 0x35, 0x45, 0x06):
            raise BadProgram(f"{at}: opcode {opcode:#x}")
    if code[-1][0] != 0x06:
        raise BadProgram("does not end in a return")


def simulate(program: bytes, nr: int, args: Sequence[int] = (), arch: str = "x86_64") -> int:
    """What the filter answers to a call."""
    return run(program, nr, args, arch)[0]


def run(program: bytes, nr: int, args: Sequence[int] = (), arch: str = "x86_64") -> tuple[int, int, bool]:
    """(answer, instructions executed, whether an argument was read)."""
    padded = [*args, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("=iIQ6Q", nr - (1 << 32) if nr >= 1 << 31 else nr, ARCHES[arch], 0x4000, *padded)
    at = accumulator = steps = 0
    read_argument = False
    while True:
        opcode, true, false, k = struct.unpack_from("=HBBI", program, at * 8)
        at += 1
        steps += 1
        match opcode:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, k)
                read_argument |= k >= 16
            case 0x54:
                accumulator &= k
            case 0x05:
                at += k
            case 0x15:
                at += true if accumulator == k else false
            case 0x25:
                at += true if accumulator > k else false
            case 0x35:
                at += true if accumulator >= k else false
            case 0x06:
                return k, steps, read_argument
            case _:
                raise BadProgram(f"opcode {opcode:#x}")
