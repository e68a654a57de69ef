# SPDX-License-Identifier: Apache-2.0
"""A process is captured and another one becomes it, the way QEMU does, with tests/guests/alive.c in its place: it goes on exactly, or it
does not begin, with a reason and without remains."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from opendsec.api.errors import Internal, SandboxLost, Unsupported
from opendsec.kernel import procfs, syscalls, tracee
from opendsec.runtime.vmm import checkpoint
from opendsec.runtime.vmm import script as steps
from opendsec.runtime.vmm.checkpoint import PAGES, SCRIPT
from opendsec.runtime.vmm.machine import Machine, Ram
from opendsec.runtime.vmm.place import QMP_SOCKET
from opendsec.runtime.vmm.process import Place, Vmm
from opendsec.runtime.vmm.qmp import Qmp
from tests.support import ROOT
from tests.vmms import Vmms

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

THREADS = ["alive futex", "alive epoll", "alive vector", "alive handler", "alive timed", "alive spare"]
OUTSIDE = {PAGES: 40, SCRIPT: 42}


@pytest.fixture(scope="module")
def alive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("alive") / "alive"
    command = ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", str(ROOT / "tests/guests/alive.c"), "-o", str(program), "-lm"]
    subprocess.run(command, check=True, timeout=60)
    return program


class Alive:
    """A test's processes: one root directory, one machine, whose memory lies on a file."""

    def __init__(self, vmms: Vmms, program: Path) -> None:
        self.vmms = vmms
        self.root = vmms.folder / "root"
        shutil.copytree(vmms.programs.root, self.root, symlinks=True)
        for name, source in (("qemu-system-x86_64", program), ("dsec-file", program)):
            target = self.root / "usr/bin" / name
            target.unlink(missing_ok=True)
            shutil.copyfile(source, target)
        (self.root / "usr/bin/qemu-system-x86_64").chmod(0o111)
        (self.root / "usr/bin/dsec-file").chmod(0o444)
        first = vmms.machine(shared=False)
        self.machine = first.clone(first.ram.path, ())
        self.folder = vmms.folder / "captured"
        self.folder.mkdir()

    def place(self, machine: Machine, memory_bytes: int | None = None) -> Place:
        place = self.vmms.place(machine, memory_bytes=memory_bytes)
        return Place(**{name: getattr(place, name) for name in Place.__struct_fields__} | {"root": str(self.root)})

    async def start(self, process: Path | None = None, *, what: str = "nothing", memory_bytes: int | None = None) -> Vmm:
        machine = replace(self.machine, extra=(what,))
        if process is not None:
            machine = replace(machine, ram=Ram(str(process / "ram"), shared=False))
        place = self.place(machine, memory_bytes)
        vmm = await Vmm.start(self.vmms.spawner, machine, place, accel="tcg", process=process)
        self.vmms.started.append(vmm)
        return vmm

    def places(self) -> list[Path]:
        """Directories of those that there are."""
        alive = {vmm.directory for vmm in self.vmms.started if vmm.pidfd >= 0}
        return [path for path in (self.vmms.folder / "run").glob("*") if path not in alive]

    async def capture(self) -> Path:
        """The directory of one that stood where all wait."""
        vmm = await self.start()
        await vmm.capture(self.machine, self.folder)
        await vmm.kill()
        return self.folder


@pytest.fixture
def processes(vmms: Vmms, alive: Path) -> Alive:
    return Alive(vmms, alive)


async def ask(vmm: Vmm, letter: bytes) -> str:
    sock = await vmm.channel()
    try:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(60):
            await loop.sock_sendall(sock, letter)
            return (await loop.sock_recv(sock, 4096)).decode()
    finally:
        sock.close()


def numbered(pid: int) -> list[tuple[str, str]]:
    """Number in its own namespace and name of each, without those that only used up a number and are about to be gone."""
    while True:
        try:
            states = [procfs.status(f"{pid}/task/{tid}") for tid in procfs.threads(pid)]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if not any(state["Name"] == "dsec-restore" for state in states):
            return [(state["NSpid"].split()[-1], state["Name"]) for state in states]


async def test_the_program_itself(processes: Alive) -> None:
    assert await ask(await processes.start(), b"w") == "ok\n"
    assert await ask(await processes.start(), b"c") == "ok\n"


async def test_it_goes_on_exactly(processes: Alive) -> None:
    vmm = await processes.start()
    named = numbered(vmm.pid)
    assert [name for _, name in named][1:] == THREADS
    assert [int(number) for number, _ in named] != list(range(1, len(named) + 1))  # some numbers nobody has any more
    command, environment = procfs.cmdline(vmm.pid), procfs.environ(vmm.pid)
    await vmm.capture(processes.machine, processes.folder)
    await vmm.kill()
    before = {path.name: hashlib.sha256(path.read_bytes()).digest() for path in processes.folder.iterdir() if path.name != PAGES}
    clones = [await processes.start(processes.folder) for _ in range(3)]
    for clone in clones:
        assert numbered(clone.pid) == named
        assert (procfs.cmdline(clone.pid), procfs.environ(clone.pid)) == (command, environment)
    for clone in clones:
        assert await ask(clone, b"w") == "ok\n"
        assert await ask(clone, b"c") == "ok\n"
    assert {path.name: hashlib.sha256(path.read_bytes()).digest() for path in processes.folder.iterdir() if path.name != PAGES} == before


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def change(path: Path) -> None:
    """One bit of it."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size * 2 // 3)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


DAMAGED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "cut script": (SCRIPT, cut, "no script, or not the whole"),
    "empty script": (SCRIPT, empty, "no script, or not the whole"),
    "changed script": (SCRIPT, change, "the script is damaged"),
    "no script": (SCRIPT, Path.unlink, "script is missing"),
    "cut pages": (PAGES, cut, "restore: step 0"),
    "empty pages": (PAGES, empty, "restore: step 0"),
    "no pages": (PAGES, Path.unlink, "pages is missing"),
}


async def test_damaged_files_are_told_of(processes: Alive) -> None:
    folder = await processes.capture()
    for name, damage, reason in DAMAGED.values():
        damaged = processes.vmms.folder / "damaged"
        shutil.copytree(folder, damaged)
        damage(damaged / name)
        with pytest.raises(Internal, match=reason):
            await processes.start(damaged)
        assert not processes.places()  # and no group: see `Vmms.close`
        shutil.rmtree(damaged)
    assert await ask(await processes.start(folder), b"c") == "ok\n"


async def test_one_whose_numbers_are_taken_does_not_begin(processes: Alive, monkeypatch: pytest.MonkeyPatch) -> None:
    """As outside a namespace of its own."""
    pack = steps.THREAD.pack

    class Others:
        size = steps.THREAD.size

        @staticmethod
        def pack(*values: object) -> bytes:
            *head, number, name = values
            return pack(*head, int(str(number)) - 1, name)

    monkeypatch.setattr(steps, "THREAD", Others)
    folder = await processes.capture()
    with pytest.raises(Internal, match="restore: thread 0"):
        await processes.start(folder)


async def test_one_that_dies_while_it_is_captured(processes: Alive, monkeypatch: pytest.MonkeyPatch) -> None:
    vmm = await processes.start()
    signals = checkpoint._signals

    def die(script: steps.Script, thread: tracee.Thread) -> None:
        syscalls.pidfd_send_signal(vmm.pidfd, signal.SIGKILL)
        while vmm.alive():
            pass
        signals(script, thread)

    monkeypatch.setattr(checkpoint, "_signals", die)
    with pytest.raises(SandboxLost):
        await vmm.capture(processes.machine, processes.folder)
    assert list(processes.folder.iterdir()) == []
    async with asyncio.timeout(30):
        await vmm.died
    assert not Path(procfs.path_of(vmm.pid)).exists()  # its spawner could bury it
    await vmm.kill()


async def test_whoever_gives_up_waits_until_nothing_is_held(processes: Alive, monkeypatch: pytest.MonkeyPatch) -> None:
    vmm = await processes.start()
    loop, reached, further = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    signals = checkpoint._signals

    def wait(script: steps.Script, thread: tracee.Thread) -> None:
        loop.call_soon_threadsafe(reached.set)
        further.wait(30)
        signals(script, thread)

    monkeypatch.setattr(checkpoint, "_signals", wait)
    capturing = asyncio.ensure_future(vmm.capture(processes.machine, processes.folder))
    await reached.wait()
    capturing.cancel()
    await asyncio.wait([capturing], timeout=0.01)
    assert not capturing.done() and procfs.status(vmm.pid)["TracerPid"] != "0"
    further.set()
    with pytest.raises(asyncio.CancelledError):
        await capturing
    assert procfs.status(vmm.pid)["TracerPid"] == "0"
    await vmm.kill()


async def test_no_room_to_capture(processes: Alive, monkeypatch: pytest.MonkeyPatch) -> None:
    vmm = await processes.start()
    for megabytes in (1, 4):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", processes.folder], check=True)
        try:
            with pytest.raises(OSError, match="No space left"):
                await vmm.capture(processes.machine, processes.folder)
            assert list(processes.folder.iterdir()) == []
        finally:
            subprocess.run(["umount", processes.folder], check=True)
        vmm._qmp = await Qmp.connect(vmm.directory / QMP_SOCKET, lambda name, data: None)  # it goes on
    assert await ask(vmm, b"c") == "ok\n"


async def test_no_memory_to_go_on_in(processes: Alive) -> None:
    folder = await processes.capture()
    with pytest.raises(Internal, match="killed"):
        await processes.start(folder, memory_bytes=256 << 10)
    assert not processes.places()
    vmm = await processes.start(folder, memory_bytes=3 << 20)
    with contextlib.suppress(OSError):
        assert await ask(vmm, b"c") == ""
    async with asyncio.timeout(30):
        assert "memory limit" in await vmm.died


UNKNOWN = {
    "pipe": "pipe:",
    "socket": "does not come to rest: connections",
    "timerfd": "timerfd",
    "inotify": "inotify",
    "memfd": "memfd:some",
    "shared": "/dev/zero .* is shared",
    "low": "memory at 0x10000000",
    "timer": "has a timer",
    "alarm": "interval timer 0",
    "lock": "has a lock",
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_is_not_known_is_refused_by_name(alive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(checkpoint, "QUIET_S", 0.1 if what == "socket" else 5.0)
    with socket.socket(socket.AF_UNIX) as monitor, socket.socket(socket.AF_UNIX) as guest:
        for sock, name in ((monitor, "monitor"), (guest, "guest")):
            sock.bind(str(tmp_path / name))
            sock.listen()
        # Without confinement, which would keep it from some of this.
        first, second = given = (monitor.fileno(), guest.fileno())  # which may be 4 and 3
        line = f"exec {{m}}<&{first} {{g}}<&{second}; exec {first}<&- {second}<&-; "
        line += 'exec 3<&$m 4<&$g {m}<&- {g}<&-; exec "$@"'
        with subprocess.Popen(
            ["bash", "-c", line, "bash", alive, what],
            pass_fds=given,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                with socket.socket(socket.AF_UNIX) as hello:
                    hello.connect(str(tmp_path / "monitor"))
                    assert hello.recv(100)  # it has all
                (tmp_path / "to").mkdir()
                pages, script = tmp_path / "to/pages", tmp_path / "to/script"
                with pytest.raises(Unsupported, match=UNKNOWN[what]), checkpoint.held(process.pid, sockets=(3, 4)) as threads:
                    checkpoint.capture(threads, root=Path("/"), files=(), sockets=(3, 4), pages=pages, script=script, own=OUTSIDE)
                assert list((tmp_path / "to").iterdir()) == []
                with socket.socket(socket.AF_UNIX) as talk:  # it goes on
                    talk.connect(str(tmp_path / "guest"))
                    talk.sendall(b"c")
                    assert talk.recv(1000) == b"ok\n"
            finally:
                process.kill()
