# SPDX-License-Identifier: Apache-2.0
"""The Firecracker driver against a server that holds the API's rules (tests/firecracker_fake.py). On hardware it is untested."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from opendsec.api.errors import Internal, SandboxLost, Unavailable, Unsupported
from opendsec.kernel import syscalls
from opendsec.runtime.vmm import firecracker
from opendsec.runtime.vmm.firecracker import Firecracker, Jail, Request
from opendsec.runtime.vmm.machine import MIB, Disk, Machine, Nic, Ram
from opendsec.runtime.vmm.monitor import Monitor
from tests.support import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


class Host:
    """A folder with a machine's files, and a launcher of fakes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs: list[subprocess.Popen[bytes]] = []
        self.jails = 0
        for name, size in (("kernel", 10), ("layer", 4096), ("scratch", 4096), ("memory", 4096)):
            (folder / name).write_bytes(b"x" * size)

    def jail(self) -> Jail:
        self.jails += 1
        return Jail(f"m{self.jails}", str(self.folder / "jails"), 0, "opendsec-test", {"memory.max": "1G", "cpu.max": "100000 100000"})

    def machine(self) -> Machine:
        disks = (Disk("layer", str(self.folder / "layer"), read_only=True), Disk("scratch", str(self.folder / "scratch")))
        return Machine(kind="microvm", cpus=2, memory_bytes=128 * MIB, kernel=str(self.folder / "kernel"), append="quiet", disks=disks)

    async def launch(self, words: list[str], out: int, err: int) -> tuple[int, int]:
        assert words[0] == firecracker.JAILER
        command = [sys.executable, "-m", "tests.firecracker_fake", *words[1:]]
        # The jailer's flags without a value are for the program that it is, not for a table of options.
        command = [word for word in command if word != "--new-pid-ns"]
        self.programs.append(subprocess.Popen(command, stdout=out, stderr=err, cwd=ROOT))
        return self.programs[-1].pid, syscalls.pidfd_open(self.programs[-1].pid)

    def calls(self, jail: Jail) -> list[tuple[str, str]]:
        return [tuple(json.loads(line)[:2]) for line in (jail.root.parent / "calls").read_text().splitlines()]


@pytest.fixture
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory(prefix="fc-", dir="/var/tmp") as folder:
        made = Host(Path(folder))
        yield made
        for program in made.programs:
            program.kill()
            program.wait()
        assert not list((made.folder / "jails/firecracker").glob("*")), "jails are left"


def test_the_jailers_command_line() -> None:
    jail = Jail("m1", "/srv/jail", 70_000, "opendsec-e1", {"memory.max": "256M"})
    assert " ".join(firecracker.jailer_arguments(jail)) == (
        "/usr/bin/jailer --id m1 --exec-file /usr/bin/firecracker --uid 70000 --gid 70000 --chroot-base-dir /srv/jail --cgroup-version 2"
        " --parent-cgroup opendsec-e1 --new-pid-ns --cgroup memory.max=256M --resource-limit no-file=1024 -- --api-sock /api.sock"
    )
    assert str(jail.root) == "/srv/jail/firecracker/m1/root"


def test_what_a_machine_is_made_of() -> None:
    machine = Machine(
        kind="microvm",
        cpus=2,
        memory_bytes=256 * MIB,
        kernel="/host/kernel",
        append="console=ttyS0",
        disks=(Disk("root", "/host/disk"),),
        nics=(Nic("net0", "02:00:00:00:00:01"),),
    )
    made = firecracker.boot_requests(machine, ["tap0"])
    assert [(request.method, request.path) for request in made] == [
        ("PUT", "/machine-config"),
        ("PUT", "/boot-source"),
        ("PUT", "/drives/root"),
        ("PUT", "/network-interfaces/net0"),
        ("PUT", "/vsock"),
        ("PUT", "/balloon"),
        ("PUT", "/entropy"),
        ("PUT", "/actions"),
    ]
    assert "/host" not in repr(made)
    assert made[0].body == {"vcpu_count": 2, "mem_size_mib": 256, "smt": False}


def test_what_it_cannot_run() -> None:
    machine = Machine(kind="microvm", cpus=1, memory_bytes=64 * MIB, kernel="/k", disks=(Disk("d", "/d", "qcow2"),))
    assert firecracker.problems(machine) == ["Firecracker's disks are raw files"]
    assert firecracker.problems(replace(machine, kind="q35", disks=())) != []


async def test_a_life(host: Host) -> None:
    jail = host.jail()
    vmm: Monitor = await Firecracker.start(host.launch, host.machine(), jail)
    assert host.calls(jail)[-1] == ("PUT", "/actions")
    assert vmm.alive() and "guest: up" in vmm.console()
    with await vmm.channel() as channel:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(channel, b"ping")
        assert await loop.sock_recv(channel, 16) == b"ping"
    with pytest.raises(Internal, match="not paused"):
        await vmm.save_devices(host.folder / "devices")
    await vmm.stop()
    await vmm.save_devices(host.folder / "devices")
    assert await vmm.dump_memory(host.folder / "saved") == 4096
    with pytest.raises(Unavailable):
        await vmm.channel()
    await vmm.cont()
    clone: Monitor = await Firecracker.start(
        host.launch, replace(host.machine(), kernel="", incoming=True, ram=Ram(str(host.folder / "saved"))), host.jail()
    )
    await clone.load(host.folder / "devices")
    await clone.cont()
    (await clone.channel()).close()
    for one in (vmm, clone):
        await one.kill()
        assert await one.died == "the machine was ended"
        with pytest.raises(SandboxLost):
            await one.cont()


async def test_what_it_refuses_is_told_and_leaves_nothing(host: Host) -> None:
    with pytest.raises(Unsupported):
        await Firecracker.start(host.launch, replace(host.machine(), kind="q35"), host.jail())
    bad = replace(host.machine(), kernel=str(host.folder / "none"))
    with pytest.raises(Unavailable, match="No such file"):
        await Firecracker.start(host.launch, bad, host.jail())
    damaged = host.folder / "damaged"
    damaged.write_bytes(b"?")
    incoming = replace(host.machine(), incoming=True, ram=Ram(str(host.folder / "memory")))
    vmm = await Firecracker.start(host.launch, incoming, host.jail())
    with pytest.raises(Internal, match="Cannot deserialize"):
        await vmm.load(damaged)
    await vmm.kill()


async def test_death(host: Host) -> None:
    vmm = await Firecracker.start(host.launch, host.machine(), host.jail())
    os.kill(vmm.pid, signal.SIGKILL)
    host.programs[-1].wait()
    assert (await asyncio.wait_for(vmm.died, 10)).startswith("Firecracker ended")
    with pytest.raises(SandboxLost):
        await vmm.stop()
    await vmm.kill()


async def test_one_that_never_answers(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firecracker, "CALL_TIMEOUT_S", 0.5)
    slow = replace(host.machine(), disks=(Disk("slow", str(host.folder / "layer")),))
    with pytest.raises((TimeoutError, Unavailable)):
        await Firecracker.start(host.launch, slow, host.jail())


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n",
        b"x" * 70_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab",
    ],
)
async def test_answers_that_are_none(tmp_path: Path, answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    with tempfile.TemporaryDirectory() as folder:
        server = await asyncio.start_unix_server(serve, f"{folder}/s")
        with pytest.raises(Unavailable):
            await firecracker.Api(Path(folder, "s")).call(Request("GET", "/", {}))
        server.close()
        await server.wait_closed()
