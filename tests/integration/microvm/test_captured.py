# SPDX-License-Identifier: Apache-2.0
"""Clones that go on from a captured QEMU: each is one of its own, and as good as one that was loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec.runtime.backend import Handle
from opendsec.runtime.microvm.backend import MicroVMBackend
from opendsec.runtime.vmm import processes
from opendsec.runtime.vmm.handle import VmHandle
from opendsec.testing.contracts.backend import Setup, output

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RANDOM = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex("480fc7f073fac3"))  # rdrand %rax; jnc back; ret
draw = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
print(" ".join(hex(draw()) for _ in range(8)))
"""


async def folder_of(setup: Setup) -> Path:
    """Of the captured process that this setup's sandboxes go on from."""
    backend = setup.backend
    assert isinstance(backend, MicroVMBackend)
    template = await backend.templates.get(backend.wanted(setup.layers, setup.placement()))
    found = processes.find(backend.store.template(template.key))
    assert found is not None
    return found


def goes_on(handle: Handle) -> bool:
    """Whether its QEMU is one that went on."""
    assert isinstance(handle, VmHandle)
    return handle.vmm.record.ram.endswith("/process/ram")


async def test_no_two_have_the_same_random_numbers(vms: Setup) -> None:
    seen: list[bytes] = []
    async with vms.box() as one, vms.box() as other:
        for handle in (one, other):
            assert goes_on(handle)
            text, ended = await output(handle, "python3", "-c", RANDOM)
            assert ended.code == 0
            seen += text.split()
            text, ended = await output(handle, "sh", "-c", "head -c 64 /dev/hwrng | sha256sum; head -c 64 /dev/urandom | sha256sum")
            assert ended.code == 0
            seen += [line.split()[0] for line in text.splitlines()]
    assert len(seen) == len(set(seen)) == 20, seen
