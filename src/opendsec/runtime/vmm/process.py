# SPDX-License-Identifier: Apache-2.0
"""One living QEMU: started by the spawner, driven by QMP, known by its pidfd.

It outlives the edge and the spawner. What the next edge needs lies in its directory, `<run_dir>/<backend>/<name>/`: `qmp` and `guest`,
sockets that QEMU listens at, and `errors` and `serial`, two FIFOs that it writes to. Those never fill anything up: what nobody reads stays
in the pipe's buffer, what does not fit is lost, and a guest that floods its serial port costs nothing but itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from opendsec.api.errors import Internal, SandboxLost, Unavailable, Unsupported
from opendsec.images.waiting import in_thread
from opendsec.kernel import procfs, syscalls
from opendsec.kernel.fds import reopen
from opendsec.runtime.backend import Exit
from opendsec.runtime.spawn import Spawner, SpawnError, close_all
from opendsec.runtime.vmm import arguments, blocks, checkpoint, memory, profile
from opendsec.runtime.vmm.arguments import Accel
from opendsec.runtime.vmm.checkpoint import PAGES, SCRIPT
from opendsec.runtime.vmm.console import Tail
from opendsec.runtime.vmm.diagnosis import SHUTDOWN_REASONS, diagnosis
from opendsec.runtime.vmm.machine import Machine
from opendsec.runtime.vmm.place import (
    AGENT_SOCKET,
    CHANNEL_SOCKET,
    ERRORS_FIFO,
    QMP_SOCKET,
    SERIAL_FIFO,
    further_numbers,
)
from opendsec.runtime.vmm.place import Place as Place
from opendsec.runtime.vmm.place import group_limits as group_limits
from opendsec.runtime.vmm.place import group_of as group_of
from opendsec.runtime.vmm.place import overhead_bytes as overhead_bytes
from opendsec.runtime.vmm.place import prepare as prepare
from opendsec.runtime.vmm.place import remove as remove
from opendsec.runtime.vmm.qmp import CALL_TIMEOUT_S, Qmp, QmpError, QmpGone, short_path
from opendsec.runtime.vmm.tpm import Tpm

LOAD_TIMEOUT_S = 60.0
DIE_TIMEOUT_S = 10.0
MAX_SCREEN_BYTES = 64 << 20
MAPPED_RAM = b"/ram"

T = TypeVar("T")


class VmmRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal keeps of a running one."""

    place: Place
    pid: int
    start_time: int
    boot_id: str
    accel: str
    memory_bytes: int
    channel: bool = True
    ram: str = ""
    ram_shared: bool = False
    blocks: bool = False  # whether devices have memory of their own


class Vmm:
    """A running QEMU. Methods raise SandboxLost once it is dead, Internal when it refuses what we ask."""

    def __init__(self, record: VmmRecord, pidfd: int, ended: asyncio.Future[Exit] | None) -> None:
        self.record = record
        self.pidfd = pidfd
        self._loop = asyncio.get_running_loop()
        self.died: asyncio.Future[str] = self._loop.create_future()
        """Done once the process is gone, with what is known of the reason."""
        self.listeners: list[Callable[[str, Mapping[str, object]], None]] = []
        """Called with each QMP event: name, data."""
        self._qmp: Qmp | None = None
        self._ended = ended
        self._telling: asyncio.Future[None] | None = None
        self._killed = False
        self._reason = ""
        self._loaded, self._load_failure = asyncio.Event(), ""
        self._stands = False
        self._scheduling: procfs.Scheduling | None = None
        self._errors = Tail(Path(record.place.directory) / ERRORS_FIFO)
        self._serial = Tail(Path(record.place.directory) / SERIAL_FIFO)
        self._loop.add_reader(pidfd, self._on_death)

    @property
    def pid(self) -> int:
        return self.record.pid

    @property
    def directory(self) -> Path:
        return Path(self.record.place.directory)

    # --- beginning and end -----------------------------------------------------------------------------------------

    @classmethod
    async def start(
        cls,
        spawner: Spawner,
        machine: Machine,
        place: Place,
        *,
        accel: Accel,
        taps: Sequence[int] = (),
        tpm: Tpm | None = None,
        process: Path | None = None,
    ) -> Vmm:
        """Start QEMU and wait until it answers. `taps`: descriptors the caller keeps and closes. On failure nothing is left.
        `process`: what `capture` wrote; it goes on from there, with the device state it had, and stands still.

        Files named in the machine are prepared for its uid: what it writes by name is given to it, what it reads by name is made readable.
        """
        directory = Path(place.directory)
        directory.mkdir(mode=0o700, parents=True)
        held: list[int] = []
        control = socket.socketpair() if tpm is not None else None
        vmm = None
        try:
            try:
                plan, given = prepare(machine, place, accel, taps, control[0].fileno() if control else None, held, process)
                await profile.install(spawner)
                answer = await spawner.call("machine", plan, given)
                (pidfd,) = answer.fds
                try:
                    record = VmmRecord(
                        place=place,
                        pid=answer.pid,
                        start_time=_start_time(answer.pid),
                        boot_id=procfs.boot_id(),
                        accel=accel,
                        memory_bytes=machine.memory_bytes,
                        ram=machine.ram.path,
                        ram_shared=machine.ram.shared,
                        blocks=machine.kind != "microvm",
                    )
                    vmm = cls(record, pidfd, answer.exited)
                    vmm._stands = machine.incoming
                except BaseException:
                    with contextlib.suppress(ProcessLookupError):
                        syscalls.pidfd_send_signal(pidfd, signal.SIGKILL)
                    os.close(pidfd)
                    raise
            finally:
                close_all(held)  # now that we listen to what it says: it may be dead already, and then nobody else would keep that
            if tpm is not None and control is not None:
                control[0].close()
                await tpm.start(spawner, place, control[1].fileno())
                control[1].close()
            await vmm._connect()
            return vmm
        except BaseException as error:
            for end in control or ():
                end.close()
            await asyncio.shield(cls._undo(vmm, spawner, place, cancelled=isinstance(error, asyncio.CancelledError)))
            if isinstance(error, SpawnError):
                raise Internal(f"cannot start QEMU: {error}", data={"step": error.step, "errno": error.errno}) from error
            if isinstance(error, FileNotFoundError | ProcessLookupError):
                raise SandboxLost("QEMU died while it was started") from error
            raise

    @classmethod
    async def adopt(cls, record: VmmRecord) -> Vmm:
        """One that an earlier edge started. Raises SandboxLost if it is gone or does not answer."""
        if record.boot_id != procfs.boot_id():
            raise SandboxLost("the machine was restarted")
        try:
            pidfd = syscalls.pidfd_open(record.pid)
        except ProcessLookupError:
            raise SandboxLost("QEMU is gone") from None
        vmm = None
        try:
            if procfs.is_exiting(record.pid, record.start_time):
                raise SandboxLost("QEMU is gone")
            vmm = cls(record, pidfd, None)
            await vmm._connect()
            return vmm
        except BaseException as error:
            if vmm is None:
                os.close(pidfd)
            else:
                await vmm.let_go()
            if isinstance(error, OSError | Internal):
                raise SandboxLost(f"QEMU cannot be reached: {error}") from error
            raise

    def alive(self) -> bool:
        return not procfs.is_exiting(self.record.pid, self.record.start_time)

    async def kill(self) -> None:
        """End it and remove its group, sockets and directory; may be repeated."""
        self._killed = True
        if self.pidfd >= 0 and not self.died.done():
            try:
                syscalls.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass
        await remove(self.record.place)
        if not self.died.done() and self.pidfd >= 0:
            await asyncio.wait([self.died], timeout=DIE_TIMEOUT_S)
        await self.let_go()

    async def let_go(self) -> None:
        """Close what this edge holds of it; it runs on."""
        if self.pidfd >= 0:
            if not self.died.done():
                self._loop.remove_reader(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1
        for tail in (self._errors, self._serial):
            tail.close()
        if self._telling is not None and not self._telling.done():
            self._telling.cancel()
        if self._qmp is not None:
            await self._qmp.close()

    # --- running -----------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """All virtual CPUs stand still and disks are flushed when this returns; may be repeated."""
        await self.call("stop")
        self._stands = True

    async def cont(self) -> None:
        await self.call("cont")
        self._stands = False

    def served(self, seconds: float) -> float:
        """Of so many seconds since this was called last, how many its guest could run: not while it stands still, or waits for a disk,
        and only as much of the rest as it had a CPU when it wanted one, but for a twentieth, so that there is an end."""
        before = self._scheduling
        try:
            now = self._scheduling = procfs.Scheduling(self.pid)
        except (OSError, ValueError):  # it is gone, or this kernel does not tell
            return seconds
        if self._stands or now.held or before is None:
            return 0.0
        ran, waited = now.since(before)
        return seconds * max(ran / (ran + waited) if waited > 0 else 1.0, 0.05)

    async def status(self) -> str:
        """QEMU's own word: running, paused, inmigrate, shutdown, internal-error, …"""
        answer = await self.call("query-status")
        return str(answer["status"]) if isinstance(answer, dict) else ""

    async def save_devices(self, path: Path) -> None:
        """Write the state of CPUs and devices, without memory, to a new file. The machine has to be stopped."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            number, name = await self.add_fd(fd)
            try:
                # Written for Xen, which has its own way with memory, and just what is wanted: everything but memory.
                await self.call("xen-save-devices-state", filename=name, live=False)
            finally:
                await self.remove_fd(number)
            if not os.fstat(fd).st_size:
                raise Internal("QEMU wrote no device state")
            if self.record.blocks:
                found = await self._blocks()
                await self._or_dead(lambda: blocks.append(self.pid, found, path))
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(fd)

    async def capture(self, machine: Machine, to: Path) -> None:
        """Write all of it, the guest's memory too, to new files in a directory: `ram`, and what `start` takes as `process`. It stands
        still, nobody is connected to the guest, and it is to be killed afterwards. Raises Unsupported if it has what cannot be captured."""
        await self.qmp.close()
        self._qmp = None
        accel: Accel = "kvm" if self.record.accel == "kvm" else "tcg"
        here, own = self.directory, further_numbers(machine, accel)
        files = [
            checkpoint.File.of(0, here / SERIAL_FIFO, os.O_RDWR),
            checkpoint.File.of(1, here / ERRORS_FIFO, os.O_RDWR),
            checkpoint.File.of(arguments.SERIAL_FD, here / SERIAL_FIFO, os.O_WRONLY),
            *(
                checkpoint.File.of(one.fd, one.path, os.O_RDWR if one.writable else os.O_RDONLY)
                for one in arguments.descriptors(machine, accel)
            ),
        ]
        sockets = [arguments.QMP_FD, arguments.CHANNEL_FD]

        def capture() -> None:
            root, ram = Path(self.record.place.root), to / "ram"
            with checkpoint.held(self.pid, sockets=sockets) as threads:
                memory.dump(self.pid, MAPPED_RAM, self._base(), ram, private=True)
                try:
                    checkpoint.capture(
                        threads,
                        root=root,
                        files=files,
                        sockets=sockets,
                        pages=to / PAGES,
                        script=to / SCRIPT,
                        own=own,
                        merge=machine.merge,
                    )
                except BaseException:
                    ram.unlink()
                    raise

        await self._or_dead(capture)

    async def load(self, path: Path) -> None:
        """Take the state in `path`; the machine was started with `incoming`. It stands still until `cont`."""
        if self.record.blocks:
            found = await self._blocks()
            await self._or_dead(lambda: blocks.restore(self.pid, found, path))
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            number, name = await self.add_fd(fd)
        finally:
            os.close(fd)
        try:
            await self.call("migrate-set-capabilities", capabilities=[{"capability": "events", "state": True}])
            await self.execute("migrate-incoming", {"channels": [migration_channel(name)], "exit-on-error": False})
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await self._or_death(self._loaded.wait())
        except TimeoutError:
            raise Internal(f"QEMU did not take the device state within {LOAD_TIMEOUT_S:g} s") from None
        if self._load_failure:
            answer = await self.call("query-migrate")
            detail = answer.get("error-desc", "") if isinstance(answer, dict) else ""
            raise Internal(f"QEMU refused the device state: {detail or self._errors.text()[-300:]}".rstrip())
        await self.remove_fd(number)

    async def _blocks(self) -> list[blocks.Block]:
        """Memory of devices."""
        told = await self.call("human-monitor-command", command_line="info ramblock")
        return blocks.parse(told if isinstance(told, str) else "")

    async def _or_dead(self, work: Callable[[], None]) -> None:
        """Something with its memory, in a thread. Raises SandboxLost if it fails because QEMU is dead."""
        try:
            await in_thread(work)
        except OSError as error:
            if self.alive():
                raise
            raise SandboxLost("QEMU died while its memory was used") from error

    async def dump_memory(self, to: Path) -> int:
        """Write the guest's memory to a new file; the machine has to be stopped. Of memory that lies privately on a base, what differs
        is written over a copy of the base (which shares its blocks, where the file system can). Bytes written besides the base's."""
        base, private = self._base(), not self.record.ram_shared
        return await self._dump(to, lambda: memory.dump(self.pid, MAPPED_RAM, base, to, private=private))

    async def dump_changes(self, to: Path) -> int:
        """Write what differs from the file that the memory lies on to a new file, for a machine that will lie on the same; this one has to
        be stopped, and to have private memory. Bytes of pages."""
        if self.record.ram_shared:
            raise Unsupported("nothing differs from memory that is shared")
        self._base()
        return await self._dump(to, lambda: memory.dump_changes(self.pid, MAPPED_RAM, self.record.memory_bytes, to))

    async def load_changes(self, path: Path) -> int:
        """Take what `dump_changes` wrote; the machine was started with `incoming` and has not been loaded yet. Bytes of pages."""
        self._base()
        try:
            return await in_thread(memory.load_changes, self.pid, MAPPED_RAM, self.record.memory_bytes, path)
        except (OSError, Internal) as error:
            if self.alive():
                raise
            raise SandboxLost("QEMU died while its memory was written") from error

    def _base(self) -> Path:
        if not self.record.ram:
            raise Unsupported("this machine's memory lies on no file")
        return Path(self.record.ram)

    async def _dump(self, to: Path, dump: Callable[[], int]) -> int:
        try:
            written = await in_thread(dump)
        except (OSError, Internal) as error:
            if self.alive() or isinstance(error, FileExistsError):
                raise
            raise SandboxLost("QEMU died while its memory was read") from error
        if not self.alive():  # a process that ends loses its pages one by one, before it is gone
            to.unlink()
            raise SandboxLost("QEMU died while its memory was read")
        return written

    async def add_fd(self, fd: int, *, number: int | None = None) -> tuple[int, str]:
        """Give QEMU another open file: (number of the set, the name to use it by). The caller closes its own."""
        arguments = {} if number is None else {"fdset-id": number}
        answer = await self.execute("add-fd", arguments, fd=fd)
        if not isinstance(answer, dict) or not isinstance(answer.get("fdset-id"), int):
            raise Internal(f"QEMU answers add-fd with {answer!r}")
        return answer["fdset-id"], f"/dev/fdset/{answer['fdset-id']}"

    async def remove_fd(self, number: int) -> None:
        """Close the open files of a set; one that QEMU uses stays open as long."""
        await self.call("remove-fd", fdset_id=number)

    async def push_overlay(self, node: str, beneath: Path, path: Path, new_node: str) -> None:
        """From now on the disk whose top node is `node`, the image at `beneath`, writes to the empty qcow2 file at `path`, as node
        `new_node`; the image beneath is as it was at this moment, and never changes again. The machine should be stopped."""
        number, name = None, ""
        for flags in (os.O_RDWR, os.O_RDONLY):  # the latter for when another lies upon this one
            fd = os.open(path, flags | os.O_CLOEXEC)
            try:
                number, name = await self.add_fd(fd, number=number)
            finally:
                os.close(fd)
        options = arguments.overlay_node(new_node, name)
        await self.execute("blockdev-add", options)
        await self.call("blockdev-snapshot", node=node, overlay=new_node)
        await self._drop_writable(beneath)

    async def _drop_writable(self, path: Path) -> None:
        """Have it close the descriptors by which it could still write to a file, which it only reads from now on."""
        told = await self.call("query-fdsets")
        pairs = [(one["fdset-id"], fd["fd"]) for one in (told if isinstance(told, list) else ()) for fd in one["fds"]]
        file = os.stat(path)
        for number, fd in pairs:
            try:
                flags = int(procfs.fd_info(self.pid, fd)["flags"], 8)
                if flags & os.O_ACCMODE != os.O_RDONLY and os.path.samestat(os.stat(procfs.path_of(self.pid, "fd", str(fd))), file):
                    await self.call("remove-fd", fdset_id=number, fd=fd)
            except FileNotFoundError:
                continue  # it has closed that one by itself

    # --- ways in -----------------------------------------------------------------------------------------------------

    async def channel(self) -> socket.socket:
        """A connection to the guest's port. QEMU serves one at a time: close the last one first."""
        return await self._dial(CHANNEL_SOCKET)

    async def agent(self) -> socket.socket:
        """The same for the port of the QEMU guest agent."""
        return await self._dial(AGENT_SOCKET)

    async def vnc(self) -> socket.socket:
        """A connection that speaks RFB, already authorised."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                # A name of its own, for two may come at once.
                name = f"viewer-{secrets.token_hex(4)}"
                await self.execute("getfd", {"fdname": name}, fd=theirs.fileno())
                await self.call("add_client", protocol="vnc", fdname=name, skipauth=True)
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        return ours

    async def screendump(self) -> bytes:
        """The screen as PNG."""
        fd = os.memfd_create("screen", os.MFD_CLOEXEC)
        try:
            # QEMU wants a descriptor for writing only.
            writing = reopen(fd, os.O_WRONLY)
            try:
                number, name = await self.add_fd(writing)
            finally:
                os.close(writing)
            try:
                await self.call("screendump", filename=name, format="png")
            finally:
                await self.remove_fd(number)
            size = os.fstat(fd).st_size
            if size > MAX_SCREEN_BYTES:
                raise Internal(f"a screen of {size} bytes")
            return os.pread(fd, size, 0)
        finally:
            os.close(fd)

    def console(self) -> str:
        """The last of what the guest wrote to its serial port since this edge knows it."""
        return self._serial.text()

    @property
    def said(self) -> asyncio.Event:
        """Set whenever the guest writes to its serial port; whoever waits clears it."""
        return self._serial.heard

    def errors(self) -> str:
        """The last of what QEMU itself complained of."""
        return self._errors.text()

    # --- control -----------------------------------------------------------------------------------------------------

    @property
    def qmp(self) -> Qmp:
        if self._qmp is None:
            raise SandboxLost("QEMU is not connected")
        return self._qmp

    async def call(self, command: str, *, timeout_s: float = CALL_TIMEOUT_S, **arguments: object) -> object:
        """A QMP command; see `Qmp.call`. Raises SandboxLost if QEMU is dead or silent, Internal if it refuses."""
        return await self.execute(command, {name.replace("_", "-"): value for name, value in arguments.items()}, timeout_s=timeout_s)

    async def execute(
        self, command: str, arguments: Mapping[str, object], *, fd: int | None = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> object:
        """As `call`, with the names as they are, and perhaps a descriptor."""
        try:
            return await self.qmp.execute(command, arguments, fd=fd, timeout_s=timeout_s)
        except QmpGone as error:
            if self.alive():
                raise Unavailable(f"QEMU does not answer: {error}") from error
            await asyncio.wait([self.died], timeout=DIE_TIMEOUT_S)
            raise SandboxLost(self.died.result() if self.died.done() else "QEMU ended") from error
        except QmpError as error:
            raise Internal(f"QEMU refuses {error}") from error

    async def _connect(self) -> None:
        try:
            self._qmp = await self._or_death(Qmp.connect(self.directory / QMP_SOCKET, self._on_event))
        except SandboxLost as error:
            raise Internal(f"QEMU did not start: {error.message}") from None
        except QmpGone as error:
            if not self.alive():
                await asyncio.wait([self.died], timeout=DIE_TIMEOUT_S)
                raise Internal(f"QEMU did not start: {self.died.result() if self.died.done() else error}") from error
            raise Unavailable(f"QEMU does not answer: {error}") from error

    async def _or_death(self, waiting: Coroutine[object, object, T]) -> T:
        """Its result. Raises SandboxLost if QEMU dies first."""
        task = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait((task, self.died), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise SandboxLost(self.died.result())
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _dial(self, name: str) -> socket.socket:
        dialled = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        directory = -1
        try:
            dialled.setblocking(False)
            directory = os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            await self._loop.sock_connect(dialled, short_path(directory, self.directory / name))
            return dialled
        except BaseException as error:
            dialled.close()
            if isinstance(error, OSError):
                raise SandboxLost("QEMU cannot be reached") from error
            raise
        finally:
            if directory >= 0:
                os.close(directory)

    # --- what happens to it ------------------------------------------------------------------------------------------

    def _on_event(self, name: str, data: Mapping[str, object]) -> None:
        if name == "SHUTDOWN":
            self._reason = SHUTDOWN_REASONS.get(str(data.get("reason")), f"the machine shut down ({data.get('reason')})")
        elif name == "GUEST_PANICKED":
            self._reason = "the guest's kernel panicked"
        elif name == "MIGRATION":
            status = str(data.get("status"))
            if status in ("completed", "failed"):
                self._load_failure = "" if status == "completed" else status
                self._loaded.set()
        for listener in self.listeners:
            listener(name, data)

    def _on_death(self) -> None:
        self._loop.remove_reader(self.pidfd)
        self._telling = asyncio.ensure_future(self._tell())

    async def _tell(self) -> None:
        """Find out why it died, as far as can be known, and say so."""
        exit = None
        if self._ended is not None:
            await asyncio.wait([self._ended], timeout=1.0)  # the spawner's word may come a little later than the pidfd's
            exit = self._ended.result() if self._ended.done() else None
        oom = False
        try:
            oom = group_of(self.record.place).events().oom_kills > 0
        except OSError:
            pass  # it was removed already
        if not self.died.done():
            self.died.set_result(diagnosis(exit, reason=self._reason, killed=self._killed, oom=oom, errors=self._errors.text()))

    @classmethod
    async def _undo(cls, vmm: Vmm | None, spawner: Spawner, place: Place, *, cancelled: bool) -> None:
        if cancelled:
            await spawner.settle()  # else it could be made after we have cleared up
        if vmm is not None:
            await vmm.kill()
        else:
            await remove(place)


def _start_time(pid: int) -> int:
    """0 if it has ended already: no process has that."""
    try:
        return procfs.pid_start_time(pid)
    except (FileNotFoundError, ProcessLookupError):
        return 0


def migration_channel(name: str) -> dict[str, object]:
    return {"channel-type": "main", "addr": {"transport": "file", "filename": name, "offset": 0}}
