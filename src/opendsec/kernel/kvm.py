# SPDX-License-Identifier: Apache-2.0
"""/dev/kvm as far as a probe needs it: one virtual CPU that runs a loop, and how long that takes.

That the device is there and makes machines proves nothing: in a nested machine whose host hands no hardware virtualisation on, each
instruction of a guest's kernel may be emulated, a thousand times slower, or not at all. So the loop is in ring 0, in protected mode without
paging, where such hosts have to emulate.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import time

DEVICE = "/dev/kvm"
INTERFACE = 12

KVM_GET_API_VERSION, KVM_CREATE_VM, KVM_GET_VCPU_MMAP_SIZE = 0xAE00, 0xAE01, 0xAE04
KVM_CREATE_VCPU, KVM_SET_USER_MEMORY_REGION, KVM_RUN = 0xAE41, 0x4020_AE46, 0xAE80
KVM_SET_REGS, KVM_GET_SREGS, KVM_SET_SREGS = 0x4090_AE82, 0x8138_AE83, 0x4138_AE84
KVM_EXIT_HLT = 5

MEMORY_BYTES, CODE_AT = 1 << 16, 0x1000
_SEGMENT = struct.Struct("=QIH10B")  # base, limit, selector, type, present, dpl, db, s, l, g, avl, unusable, padding
_SREGS_BYTES, _CR0_AT = 312, 192 + 32
_REGS_BYTES, _RIP_AT, _RFLAGS_AT = 144, 128, 136
_EXIT_REASON_AT = 8


def interface() -> int:
    """The version of the interface that the device speaks."""
    fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        return fcntl.ioctl(fd, KVM_GET_API_VERSION)
    finally:
        os.close(fd)


def time_loop(turns: int) -> float:
    """Seconds that a guest takes for so many turns of a loop of two instructions. x86 only. Raises OSError, also if it never ends well; it
    may hang for good: call it in a child that can be killed."""
    held: list[int] = []
    try:
        held.append(os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC))
        device = held[0]
        held.append(fcntl.ioctl(device, KVM_CREATE_VM, 0))
        machine = held[1]
        held.append(fcntl.ioctl(machine, KVM_CREATE_VCPU, 0))
        cpu = held[2]
        memory = mmap.mmap(-1, MEMORY_BYTES)
        code = b"\xb9" + struct.pack("<I", turns) + b"\x49\x75\xfd\xf4"  # mov ecx, turns; 1: dec ecx; jnz 1b; hlt
        memory[CODE_AT : CODE_AT + len(code)] = code
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        fcntl.ioctl(machine, KVM_SET_USER_MEMORY_REGION, struct.pack("=IIQQQ", 0, 0, 0, MEMORY_BYTES, address))
        fcntl.ioctl(cpu, KVM_SET_SREGS, bytes(_flat(cpu)))
        registers = bytearray(_REGS_BYTES)
        struct.pack_into("=Q", registers, _RIP_AT, CODE_AT)
        struct.pack_into("=Q", registers, _RFLAGS_AT, 2)
        fcntl.ioctl(cpu, KVM_SET_REGS, bytes(registers))
        with mmap.mmap(cpu, fcntl.ioctl(device, KVM_GET_VCPU_MMAP_SIZE)) as shared:
            begun = time.perf_counter()
            fcntl.ioctl(cpu, KVM_RUN, 0)
            taken = time.perf_counter() - begun
            (reason,) = struct.unpack_from("=I", shared, _EXIT_REASON_AT)
        if reason != KVM_EXIT_HLT:
            raise OSError(0, f"the guest ended its loop with exit reason {reason}")
        return taken
    finally:
        for fd in reversed(held):
            os.close(fd)


def _flat(cpu: int) -> bytearray:
    """Special registers for protected mode with flat segments."""
    registers = bytearray(_SREGS_BYTES)
    fcntl.ioctl(cpu, KVM_GET_SREGS, registers)
    code = _SEGMENT.pack(0, 0xFFFF_FFFF, 8, 11, 1, 0, 1, 1, 0, 1, 0, 0, 0)
    data = _SEGMENT.pack(0, 0xFFFF_FFFF, 16, 3, 1, 0, 1, 1, 0, 1, 0, 0, 0)
    registers[: 6 * _SEGMENT.size] = code + data * 5
    (cr0,) = struct.unpack_from("=Q", registers, _CR0_AT)
    struct.pack_into("=Q", registers, _CR0_AT, cr0 | 1)
    return registers
