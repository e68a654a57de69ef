# SPDX-License-Identifier: Apache-2.0
"""Firecracker, for microVMs on hardware. UNTESTED ON HARDWARE: driven against a server that speaks its API, never against the program.

It is started by its own jailer, which makes the user, namespaces, control group and root directory that our spawner makes for QEMU, and
is told everything over an HTTP API on a unix socket in that directory. Differences from QEMU that show here:

* files have names in the jail: they are linked into it, so the jail lies on the file system of what it uses;
* disks are raw files: what qcow2 overlays do for QEMU, copies that share blocks have to do;
* a snapshot is written whole, device state and memory at once (`save_devices` makes both, `dump_memory` hands the second out);
* the guest's agent is reached by vsock: a unix socket at which one asks for a port.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from opendsec.api.errors import Internal, SandboxLost, Unavailable, Unsupported
from opendsec.kernel import procfs, syscalls
from opendsec.runtime.vmm.console import Tail
from opendsec.runtime.vmm.machine import MIB, Machine

PROGRAM = "/usr/bin/firecracker"
JAILER = "/usr/bin/jailer"
API_SOCKET, VSOCK, SERIAL = "api.sock", "vsock.sock", "serial"
GUEST_CID, GUEST_PORT = 3, 1024
CALL_TIMEOUT_S = 20.0
DIE_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 1 << 20
MAX_DISKS = 8  # with the other devices, as many as its virtio-mmio bus has interrupts for

Launch = Callable[[list[str], int, int], Awaitable[tuple[int, int]]]
"""Start a program with these words and descriptors for its output and errors: (pid of what became of it, pidfd)."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call of the API."""

    method: str
    path: str
    body: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Jail:
    """What the jailer is told. `base`: the jail is `<base>/firecracker/<name>/root`."""

    name: str
    base: str
    uid: int
    group: str
    limits: Mapping[str, str]  # files of the control group → content

    @property
    def root(self) -> Path:
        return Path(self.base) / Path(PROGRAM).name / self.name / "root"


def jailer_arguments(jail: Jail) -> list[str]:
    """The jailer's command line."""
    words = [JAILER, "--id", jail.name, "--exec-file", PROGRAM, "--uid", str(jail.uid), "--gid", str(jail.uid)]
    words += ["--chroot-base-dir", jail.base, "--cgroup-version", "2", "--parent-cgroup", jail.group, "--new-pid-ns"]
    for name, value in sorted(jail.limits.items()):
        words += ["--cgroup", f"{name}={value}"]
    words += ["--resource-limit", "no-file=1024"]
    return [*words, "--", "--api-sock", f"/{API_SOCKET}"]


def problems(machine: Machine) -> list[str]:
    """Why Firecracker cannot run a machine."""
    found = []
    if machine.kind != "microvm" or machine.display or machine.firmware or machine.tpm or machine.agent:
        found.append("Firecracker runs microVMs without display, firmware or TPM")
    if any(disk.format != "raw" or disk.backing for disk in machine.disks):
        found.append("Firecracker's disks are raw files")
    if len(machine.disks) > MAX_DISKS:
        found.append(f"Firecracker has at most {MAX_DISKS} disks")
    if machine.incoming and not machine.ram.path:
        found.append("a machine that is to be restored has a file for its memory")
    return found


def inside(machine: Machine) -> dict[str, str]:
    """Name in the jail → file of the host."""
    files = {f"disk-{disk.id}": disk.path for disk in machine.disks}
    if machine.incoming:
        files["memory"] = machine.ram.path
    else:
        files |= {name: path for name, path in (("kernel", machine.kernel), ("initrd", machine.initrd)) if path}
    return files


def boot_requests(machine: Machine, taps: Sequence[str] = ()) -> list[Request]:
    """What a fresh machine is made of, and the word to start it. `taps`: names of network devices."""
    source: dict[str, object] = {"kernel_image_path": "/kernel", "boot_args": machine.append}
    if machine.initrd:
        source["initrd_path"] = "/initrd"
    found = [
        Request("PUT", "/machine-config", {"vcpu_count": machine.cpus, "mem_size_mib": machine.memory_bytes // MIB, "smt": False}),
        Request("PUT", "/boot-source", source),
    ]
    for disk in machine.disks:
        body = {"drive_id": disk.id, "path_on_host": f"/disk-{disk.id}", "is_root_device": False, "is_read_only": disk.read_only}
        found.append(Request("PUT", f"/drives/{disk.id}", body))
    for nic, tap in zip(machine.nics, taps, strict=True):
        found.append(Request("PUT", f"/network-interfaces/{nic.id}", {"iface_id": nic.id, "guest_mac": nic.mac, "host_dev_name": tap}))
    if machine.channel:
        found.append(Request("PUT", "/vsock", {"guest_cid": GUEST_CID, "uds_path": f"/{VSOCK}"}))
    if machine.balloon:
        found.append(Request("PUT", "/balloon", {"amount_mib": 0, "deflate_on_oom": True, "stats_polling_interval_s": 0}))
    if machine.rng:
        found.append(Request("PUT", "/entropy", {}))
    return [*found, Request("PUT", "/actions", {"action_type": "InstanceStart"})]


def load_request() -> Request:
    """Map the memory privately, and stand still."""
    memory = {"backend_type": "File", "backend_path": "/memory"}
    return Request("PUT", "/snapshot/load", {"snapshot_path": "/devices", "mem_backend": memory, "resume_vm": False})


class Api:
    """Calls of the API, one at a time, each on a connection of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def call(self, request: Request, *, timeout_s: float = CALL_TIMEOUT_S) -> bytes:
        """The answer's body. Raises Internal (refused, with what it says), Unavailable (no answer)."""
        try:
            async with asyncio.timeout(timeout_s):
                status, body = await self._exchange(request)
        except (OSError, EOFError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, ValueError) as error:
            raise Unavailable(f"Firecracker does not answer {request.method} {request.path}: {str(error) or 'in time'}") from error
        if not 200 <= status < 300:
            raise Internal(f"Firecracker refuses {request.method} {request.path}: {fault(body)}")
        return body

    async def _exchange(self, request: Request) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_unix_connection(str(self._path), limit=1 << 16)
        try:
            writer.write(encoded(request))
            await writer.drain()
            _, status, *_ = (*(await reader.readuntil(b"\r\n")).split(), b"")
            length = 0
            while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            if not 0 <= length <= MAX_ANSWER_BYTES:
                raise ValueError(f"an answer of {length} bytes")
            return int(status), await reader.readexactly(length)
        finally:
            writer.close()


def encoded(request: Request) -> bytes:
    body = b"" if request.method == "GET" else msgspec.json.encode(request.body)
    head = f"{request.method} {request.path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n"
    if body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


def fault(body: bytes) -> str:
    try:
        said = msgspec.json.decode(body, type=dict[str, object]).get("fault_message")
    except msgspec.DecodeError:
        said = None
    return str(said)[:500] if said else repr(body[:200])


class Firecracker:
    """A running Firecracker: a `monitor.Monitor`."""

    def __init__(self, jail: Jail, machine: Machine, pid: int, pidfd: int) -> None:
        self.jail, self.machine, self._pid, self._pidfd = jail, machine, pid, pidfd
        self._start_time = procfs.pid_start_time(pid)
        self._loop = asyncio.get_running_loop()
        self._api = Api(jail.root / API_SOCKET)
        self._serial = Tail(jail.root / SERIAL)
        self._died: asyncio.Future[str] = self._loop.create_future()
        self._killed = False
        self._loop.add_reader(pidfd, self._on_death)

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def died(self) -> asyncio.Future[str]:
        return self._died

    @classmethod
    async def start(cls, launch: Launch, machine: Machine, jail: Jail, *, taps: Sequence[str] = ()) -> Firecracker:
        """Fill the jail, have the jailer started in it, describe the machine and start it; one that is `incoming` waits for `load`.

        On failure nothing is left. Raises Unsupported for a machine that Firecracker cannot run.
        """
        if wrong := problems(machine):
            raise Unsupported("; ".join(wrong), field="spec.backend")
        firecracker = None
        try:
            output = fill(jail, machine)
            try:
                pid, pidfd = await launch(jailer_arguments(jail), output, output)
            finally:
                os.close(output)
            try:
                firecracker = cls(jail, machine, pid, pidfd)
            except BaseException:
                os.close(pidfd)
                raise
            await firecracker._wait_ready()
            if not machine.incoming:
                for request in boot_requests(machine, taps):
                    await firecracker._call(request)
            return firecracker
        except BaseException as error:
            if firecracker is not None:
                await asyncio.shield(firecracker.kill())
            else:
                shutil.rmtree(jail.root.parent, ignore_errors=True)
            if isinstance(error, OSError):
                raise Unavailable(f"Firecracker cannot be started: {error}") from error
            raise

    async def _wait_ready(self) -> None:
        """The API's socket appears after a moment; nothing tells when, but that it can be connected to."""
        async with asyncio.timeout(CALL_TIMEOUT_S):
            while True:
                try:
                    await self._call(Request("GET", "/", {}))
                    return
                except Unavailable:
                    await asyncio.wait([self._died], timeout=0.005)

    async def _call(self, request: Request) -> bytes:
        if self._died.done():
            raise SandboxLost(self._died.result())
        try:
            return await self._api.call(request)
        except Unavailable as error:
            if self.alive():
                raise
            await asyncio.wait([self._died], timeout=DIE_TIMEOUT_S)
            raise SandboxLost(self._died.result() if self._died.done() else "Firecracker ended") from error

    def alive(self) -> bool:
        return not self._died.done() and not procfs.is_exiting(self._pid, self._start_time)

    def _on_death(self) -> None:
        self._loop.remove_reader(self._pidfd)
        if not self._died.done():
            last = [line for line in self._serial.text().strip().splitlines() if line][-1:]
            ended = "the machine was ended" if self._killed else "Firecracker ended"
            self._died.set_result(f"{ended}: {last[0][:300]}" if last and not self._killed else ended)

    async def stop(self) -> None:
        await self._call(Request("PATCH", "/vm", {"state": "Paused"}))

    async def cont(self) -> None:
        await self._call(Request("PATCH", "/vm", {"state": "Resumed"}))

    async def save_devices(self, path: Path) -> None:
        devices, memory = self.jail.root / "saved-devices", self.jail.root / "saved-memory"
        for old in (devices, memory):
            old.unlink(missing_ok=True)
        body = {"snapshot_type": "Full", "snapshot_path": "/saved-devices", "mem_file_path": "/saved-memory"}
        await self._call(Request("PUT", "/snapshot/create", body))
        os.link(devices, path)  # which fails if it is there
        devices.unlink()

    async def dump_memory(self, to: Path) -> int:
        memory = self.jail.root / "saved-memory"
        if not memory.exists():
            raise Internal("memory is written when the devices are saved")
        os.link(memory, to)
        memory.unlink()
        return os.stat(to).st_size

    async def load(self, path: Path) -> None:
        os.link(path, self.jail.root / "devices")
        await self._call(load_request())

    async def channel(self) -> socket.socket:
        """Raises Unavailable as long as nobody in the guest listens."""
        dialled = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            dialled.setblocking(False)
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._loop.sock_connect(dialled, str(self.jail.root / VSOCK))
                await self._loop.sock_sendall(dialled, b"CONNECT %d\n" % GUEST_PORT)
                answer = b""
                while not answer.endswith(b"\n"):  # byte by byte: what follows is the guest's
                    part = await self._loop.sock_recv(dialled, 1)
                    if not part or len(answer) > 64:
                        raise Unavailable("nobody in the guest listens")
                    answer += part
            if not answer.startswith(b"OK "):
                raise Unavailable("nobody in the guest listens")
            return dialled
        except BaseException as error:
            dialled.close()
            if isinstance(error, OSError | TimeoutError):
                if not self.alive():
                    raise SandboxLost("Firecracker ended") from error
                raise Unavailable(f"the guest cannot be reached: {str(error) or 'in time'}") from error
            raise

    def console(self) -> str:
        return self._serial.text()

    async def let_go(self) -> None:
        if self._pidfd >= 0:
            if not self._died.done():
                self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._serial.close()

    async def kill(self) -> None:
        self._killed = True
        if self._pidfd >= 0 and not self._died.done():
            try:
                syscalls.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            await asyncio.wait([self._died], timeout=DIE_TIMEOUT_S)
        await self.let_go()
        await asyncio.to_thread(shutil.rmtree, self.jail.root.parent, ignore_errors=True)


def fill(jail: Jail, machine: Machine) -> int:
    """Put the machine's files into the jail; a descriptor of the FIFO that what it prints goes to."""
    jail.root.mkdir(mode=0o700, parents=True)
    writable = {f"disk-{disk.id}" for disk in machine.disks if not disk.read_only}
    for name, path in inside(machine).items():
        os.link(path, jail.root / name)
        if name in writable:
            os.chown(jail.root / name, jail.uid, jail.uid)
    os.mkfifo(jail.root / SERIAL, 0o600)
    return os.open(jail.root / SERIAL, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
