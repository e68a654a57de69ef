# SPDX-License-Identifier: Apache-2.0
"""Clones that go on from a captured QEMU: each is one of its own, and as good as one that was loaded."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pytest

from opendsec.api.ids import SNAPSHOT, new_id
from opendsec.images.store import ImageStore
from opendsec.kernel import procfs
from opendsec.runtime.backend import Handle
from opendsec.runtime.microvm.backend import MicroVMBackend
from opendsec.runtime.vmm import processes
from opendsec.runtime.vmm.handle import VmHandle
from opendsec.runtime.vmm.processes import ProcessState
from opendsec.runtime.vmm.store import write
from opendsec.testing.contracts.backend import Setup, output
from tests.images import BASE, base_store
from tests.support import ROOT
from tests.vms import LIMITS, VmNode

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


async def test_of_an_earlier_boot_it_is_not_used(vms: Setup) -> None:
    folder = await folder_of(vms)
    write(folder / "process.json", msgspec.json.encode(ProcessState(boot_id="00000000-0000-4000-8000-000000000000")))
    async with vms.box() as handle:
        assert not goes_on(handle)
        assert (await output(handle, "echo", "on"))[0] == b"on\n"
        paused = await handle.pause()
        await vms.backend.resume(paused)
        assert (await output(handle, "echo", "on"))[0] == b"on\n"


async def test_nothing_of_it_is_written_to(vms: Setup) -> None:
    folder = await folder_of(vms)

    def content() -> dict[str, str]:
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}

    before = await asyncio.to_thread(content)
    assert before.keys() == {"disk", "pages", "process.json", "ram", "script"}
    async with vms.box() as one, vms.box() as other:
        for handle in (one, other):
            assert goes_on(handle)
            _, ended = await output(handle, "python3", "-c", "x = b'x' * (15 << 20); open('/root/x', 'wb').write(x[: 5 << 20])")
            assert ended.code == 0
        await other.snapshot(new_id(SNAPSHOT), memory=True)
        await other.pause()
    assert await asyncio.to_thread(content) == before


TIMES = """
import select, threading, time
begun = time.monotonic()
time.sleep(0.3)
slept = time.monotonic() - begun
fired = threading.Event()
threading.Timer(0.2, fired.set).start()
assert fired.wait(30)
select.select([], [], [], 0.1)
assert 0.3 <= slept < 20 and 0.6 <= time.monotonic() - begun < 60, (slept, time.monotonic() - begun)
print(time.time(), time.monotonic())
"""


async def test_its_time_is_now(vms: Setup) -> None:
    async with vms.box() as handle:
        assert goes_on(handle)
        seen = []
        for _ in range(2):
            before = time.time()
            text, ended = await output(handle, "python3", "-c", TIMES)
            assert ended.code == 0, text
            wall, own = map(float, text.split())
            assert before + 0.6 <= wall <= time.time()
            seen.append((wall, own))
        (wall, own), (later, further) = seen
        assert further - own == pytest.approx(later - wall, abs=0.1)  # one runs as fast as the other
        paused = await handle.pause()
        await vms.backend.resume(paused)
        before = time.time()
        text, _ = await output(handle, "python3", "-c", TIMES)
        assert before + 0.6 <= float(text.split()[0]) <= time.time()


async def test_ten_cycles_lose_nothing(vms: Setup) -> None:
    """Each is a copy of the one before with its memory, paused and resumed."""
    vms.timeout_s = 250.0
    backend = vms.backend
    handle = await backend.create(vms.placement())
    try:
        assert goes_on(handle)
        assert (await output(handle, "mount", "-t", "tmpfs", "tmpfs", "/mnt"))[1].code == 0
        up = 0.0
        for number in range(10):
            what = f"head -c 200000 /dev/urandom | tee /mnt/{number} >/root/{number}; echo {number} >>/root/all"
            assert (await output(handle, "sh", "-c", what))[1].code == 0
            sums, _ = await output(handle, "sh", "-c", "cd /root; sha256sum [0-9]; cd /mnt; sha256sum [0-9]; cat /root/all")
            snapshot = await handle.snapshot(new_id(SNAPSHOT), memory=True)
            copy = await backend.create(vms.placement(snapshot=snapshot))
            await handle.destroy()
            handle = copy
            await backend.remove_snapshot(snapshot)
            await backend.resume(await handle.pause())
            assert (await output(handle, "sh", "-c", "cd /root; sha256sum [0-9]; cd /mnt; sha256sum [0-9]; cat /root/all"))[0] == sums
            before, up = up, float((await output(handle, "cat", "/proc/uptime"))[0].split()[0])
            assert up > before
    finally:
        await handle.destroy()


EDGE = """
import asyncio, os, shutil, signal, sys
from pathlib import Path
from opendsec.images.store import ImageStore
from opendsec.kernel import procfs
from opendsec.runtime.guest.channel import Channel
from opendsec.runtime.vmm import checkpoint
from opendsec.runtime.vmm.templates import Templates
from opendsec.testing.contracts.backend import Setup
from tests.images import BASE, base_store
from tests.vms import LIMITS, VmNode

def die(thread):
    print(thread.pid, procfs.pid_start_time(thread.pid), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

talk = Templates._talk

async def tried(self, vmm, what):
    if what is Channel.usage:
        die(vmm)
    await talk(self, vmm, what)

async def main(folder, edge_id, moment):
    if moment == "captured":
        checkpoint._signals = lambda script, thread: die(thread)
    else:
        Templates._talk = tried
    node = VmNode(Path(folder), edge_id=edge_id)
    await node.containers.start()
    vms = Setup(make=node.make, layers=ImageStore(base_store()).resolve(BASE).layers, murder=lambda _: None, limits=LIMITS)
    await vms.start()
    wanted = vms.backend.wanted(vms.layers, vms.placement())
    key = vms.backend.templates.key(wanted)
    shutil.rmtree(vms.backend.store.template(key), ignore_errors=True)  # the kept one
    vms.backend.store.disk(f"template-{key}").unlink(missing_ok=True)
    await vms.backend.templates.get(wanted)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("moment", ["captured", "tried"])
async def test_the_edge_dies_while_one_is(moment: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with VmNode(Path(folder)) as node:
            await node.containers.close()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", EDGE, str(node.directory), node.edge_id, moment), stdout=asyncio.subprocess.PIPE, cwd=ROOT
            )
            said, _ = await process.communicate()
            assert process.returncode == -signal.SIGKILL
            pid, started = map(int, said.split())
            await node.containers.start()  # waits for the spawner of the one that died
            # While it is held, it may be in the midst of what it did not want to do: then it has died as well.
            assert procfs.is_exiting(pid, started) == (moment == "captured")
            backend = await node.make()
            try:
                assert procfs.is_exiting(pid, started)
                assert not list((backend.store.root / "templates").glob(".*"))
                setup = Setup(make=node.make, layers=ImageStore(base_store()).resolve(BASE).layers, murder=lambda _: None, limits=LIMITS)
                setup.backend = backend
                async with setup.box() as handle:
                    assert goes_on(handle)
                    assert (await output(handle, "echo", "on"))[0] == b"on\n"
            finally:
                await backend.close()
