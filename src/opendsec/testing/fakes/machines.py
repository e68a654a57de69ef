# SPDX-License-Identifier: Apache-2.0
"""Fake machines: the fake backend's sandboxes that can be paused, kept, copied and looked at.

Pausing stops their processes. What is beneath /dev/shm stands for memory: a snapshot without memory, or a boot, has none of it; what is
made of one with memory has a copy. (Processes are not copied.) What is stored lies beside the sandboxes, so that it outlives an edge.
"""

from __future__ import annotations

import asyncio
import shutil
import signal as signals
import socket
import struct
import zlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from msgspec.structs import replace

from opendsec.api.errors import InvalidRequest, OpenDSecError, SandboxLost, Unsupported
from opendsec.api.ids import SESSION
from opendsec.api.sandboxes import Capability
from opendsec.runtime.backend import Handle, MouseButton, Placement, Record, Screen, SnapshotRecord, VmOptions, VmRecord
from opendsec.testing.fakes.backend import FakeBackend, FakeHandle, FakeMachine, FakeSandbox

SNAPSHOTS = ".snapshots"  # beside the sandboxes' directories
MEMORY = "dev/shm"


class FakeScreen:
    """A black picture. `done`: what pointer and keyboard were told, in order."""

    def __init__(self, width: int, height: int) -> None:
        self.size = (width, height)
        self._tasks: set[asyncio.Task[None]] = set()
        self.done: list[tuple[object, ...]] = []

    async def png(self) -> bytes:
        width, height = self.size
        rows = zlib.compress(b"".join(b"\0" + b"\0" * width for _ in range(height)))
        header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*one) for one in ((b"IHDR", header), (b"IDAT", rows), (b"IEND", b"")))

    async def move(self, x: int, y: int) -> None:
        self.done.append(("move", x, y))

    async def button(self, button: MouseButton, *, down: bool) -> None:
        self.done.append(("button", button, down))

    async def click(self, x: int, y: int, *, button: MouseButton = "left", count: int = 1) -> None:
        self.done.append(("click", x, y, button, count))

    async def scroll(self, x: int, y: int, *, dx: int = 0, dy: int = 0) -> None:
        self.done.append(("scroll", x, y, dx, dy))

    async def key(self, keys: str) -> None:
        if "hyper" in keys:
            raise InvalidRequest(f"no key is called {keys!r}", field="keys")
        self.done.append(("key", keys))

    async def text(self, text: str) -> None:
        self.done.append(("text", text))

    async def resize(self, width: int, height: int) -> None:
        self.size = (width, height)

    async def vnc(self) -> socket.socket:
        """A server that greets, and then says again what it hears."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        task = asyncio.create_task(_echo(theirs))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return ours


async def _echo(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with connection:
        await loop.sock_sendall(connection, b"RFB 003.008\n")
        while data := await loop.sock_recv(connection, 4096):
            await loop.sock_sendall(connection, data)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


class FakeMachineHandle(FakeHandle):
    """One that can be paused."""

    def __init__(self, sandbox: FakeSandbox, backend: FakeMachines) -> None:
        super().__init__(sandbox)
        self._backend = backend
        self.fail_pause: OpenDSecError | None = None
        vm = sandbox.record.vm
        assert vm is not None
        self._screen = FakeScreen(vm.options.width, vm.options.height) if vm.options.width else None

    @property
    def screen(self) -> Screen | None:  # type: ignore[override]  # of the class it is None
        return self._screen

    def _check(self) -> None:
        super()._check()
        assert self.sandbox.record.vm is not None and self.sandbox.record.vm.state == "running", "the edge talks to a paused sandbox"

    async def pause(self) -> Record:
        self._check()
        if self.fail_pause is not None:
            failure, self.fail_pause = self.fail_pause, None
            if isinstance(failure, SandboxLost):
                self.sandbox.die(failure.message)
            raise failure
        self._signal(signals.SIGSTOP)
        return self.turn("paused", self._backend.paused_bytes)

    def turn(self, state: str, stored_bytes: int = 0) -> Record:
        vm = self.sandbox.record.vm
        assert vm is not None
        self.record = self.sandbox.record = replace(self.sandbox.record, vm=replace(vm, state=state, stored_bytes=stored_bytes))
        return self.record

    def go_on(self) -> None:
        self.turn("running")
        self._signal(signals.SIGCONT)

    async def snapshot(self, snapshot_id: str, *, memory: bool, durable: bool = True) -> SnapshotRecord:
        self._check()
        vm, place = self.record.vm, self._backend.stored / snapshot_id
        assert vm is not None
        if self._backend.before_snapshot is not None:
            await self._backend.before_snapshot(snapshot_id)
        await asyncio.to_thread(shutil.copytree, self.sandbox.root, place, symlinks=True)
        if not memory:
            shutil.rmtree(place / MEMORY, ignore_errors=True)
        return SnapshotRecord(
            snapshot_id=snapshot_id,
            backend=self.record.backend,
            sandbox_id=self.sandbox_id,
            memory=memory,
            limits=self.record.limits,
            layers=self.record.layers,
            stored_bytes=sum(path.stat().st_size for path in place.rglob("*") if path.is_file()),
            vm=vm,
        )


class FakeMachines(FakeBackend):
    """Machines on a FakeMachine, which may have other sandboxes too. `before_resume` may raise, for a test's purposes.
    `paused_bytes`: what the memory of one that is paused takes."""

    def __init__(self, machine: FakeMachine, name: str = "microvm") -> None:
        super().__init__(machine)
        self.name = name
        self.before_resume: Callable[[Record], OpenDSecError | None] = lambda record: None
        self.before_snapshot: Callable[[str], asyncio.Future[None]] | None = None
        self.paused_bytes = 0

    @property
    def stored(self) -> Path:
        assert self.machine.root is not None
        place = self.machine.root / SNAPSHOTS
        place.mkdir(parents=True, exist_ok=True)
        return place

    def capabilities(self) -> tuple[Capability, ...]:
        screen = Capability(name="screen", available=self.name == "vm", reason="" if self.name == "vm" else "microVMs have none")
        return (*(Capability(name=name, available=True) for name in ("create", "pause", "fork", "snapshot")), screen)

    async def create(self, placement: Placement) -> Handle:
        options = placement.vm or VmOptions()
        if options.hardware_required:
            raise Unsupported("this is a fake, and has no hardware virtualisation", field="spec.hardware_virtualization")
        handle = await super().create(placement)
        assert isinstance(handle, FakeHandle)
        vm = VmRecord(state="running", accelerator="tcg", template="fake", options=options)
        handle.sandbox.record = replace(handle.record, vm=vm)
        root = handle.sandbox.root
        if placement.snapshot is not None:
            shutil.rmtree(root)
            await asyncio.to_thread(shutil.copytree, self.stored / placement.snapshot.snapshot_id, root, symlinks=True)
        (root / MEMORY).mkdir(parents=True, exist_ok=True)
        handle.sandbox.on_death.clear()
        made = self.handles[placement.sandbox_id] = FakeMachineHandle(handle.sandbox, self)
        return made

    async def adopt(self, record: Record, *, cut: Collection[str] = ()) -> Handle:
        sandbox = await self._found(record, cut)
        if record.boot_id != self.machine.boot_id and sandbox.record.vm is not None and sandbox.record.vm.state != "paused":
            raise SandboxLost("the sandbox has ended")
        handle = self.handles[record.sandbox_id] = FakeMachineHandle(sandbox, self)
        handle.go_on()
        return handle

    async def _found(self, record: Record, cut: Collection[str]) -> FakeSandbox:
        sandbox = self.machine.sandboxes.get(record.sandbox_id)
        if sandbox is None or not sandbox.alive:
            raise SandboxLost("the sandbox has ended")
        for process_id in cut:
            sandbox.kill_all(process_id)
        sandbox.kill_all(f"{SESSION}_")
        await sandbox.reaped()
        return sandbox

    async def resume(self, record: Record, *, cut: Collection[str] = ()) -> Handle:
        hindrance = self.before_resume(record)
        if hindrance is not None:
            raise hindrance
        known = self.handles.get(record.sandbox_id)
        if isinstance(known, FakeMachineHandle):
            if not known.alive():
                raise SandboxLost("what was stored is gone")
            known.go_on()
            return known
        sandbox = await self._found(record, cut)
        handle = self.handles[record.sandbox_id] = FakeMachineHandle(sandbox, self)
        handle.go_on()
        return handle

    async def remove_snapshot(self, record: SnapshotRecord) -> None:
        await asyncio.to_thread(shutil.rmtree, self.stored / record.snapshot_id, ignore_errors=True)

    def snapshots(self) -> Sequence[str]:
        return [path.name for path in self.stored.iterdir()]

    def leftovers(self) -> Sequence[str]:
        return [sandbox_id for sandbox_id, one in self.machine.sandboxes.items() if one.record.backend == self.name]
