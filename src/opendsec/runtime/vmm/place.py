# SPDX-License-Identifier: Apache-2.0
"""Where a machine monitor runs: what the host gives it, puts ready for it, and takes away after it."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from opendsec.api.errors import Internal, Unavailable
from opendsec.kernel import cgroups
from opendsec.runtime.spawn import Message
from opendsec.runtime.vmm import arguments, profile, programs
from opendsec.runtime.vmm.arguments import Accel, Inside, Opened
from opendsec.runtime.vmm.checkpoint import PAGES, SCRIPT
from opendsec.runtime.vmm.machine import Machine
from opendsec.runtime.vmm.qmp import short_path

QMP_SOCKET, CHANNEL_SOCKET, AGENT_SOCKET = "qmp", "guest", "agent"
ERRORS_FIFO, SERIAL_FIFO = "errors", "serial"
FILE_SLACK = 64 << 20
FIRST_UID = 65_536  # below it are the host's own
ENVIRONMENT = {b"PATH": b"/usr/bin", b"TMPDIR": b"/tmp"}


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a QEMU is to run: what the host gives it."""

    name: str
    directory: str  # of its sockets: `<run_dir>/vm/<name>`, made by `start`, removed by `kill`
    group: str  # its control group, relative to the hierarchies' roots
    limits: Mapping[str, float | int]  # of the group, by the names of `kernel.cgroups`; memory is the guest's and `overhead_bytes`
    uid: int  # of the host; nobody else's
    root: str  # what it has for a root directory: `programs.prepare`
    staging: str  # an existing directory to mount at, in its own namespace


def overhead_bytes(machine: Machine) -> int:
    """Memory that QEMU needs besides the guest's: itself, translated code, block caches, the screen's buffers."""
    return (128 << 20) + (8 << 20) * machine.cpus + ((64 << 20) if machine.display else 0) + ((16 << 20) if machine.tpm else 0)


def file_bytes(machine: Machine) -> int | None:
    """The largest file that QEMU may write: its disk with all of its tables, or a device state or a screen if those are larger. None: it
    has a disk of unknown size."""
    sizes = [disk.size_bytes for disk in machine.disks if not disk.read_only]
    if 0 in sizes:
        return None
    memory = 0 if machine.ram.path else machine.memory_bytes  # which is a file of its own making
    return max(memory, *sizes, 0) + max(sizes, default=0) // 1024 + FILE_SLACK


def group_limits(machine: Machine, *, cpu: float, cpu_weight: int | None = None) -> dict[str, float | int]:
    """Limits of the control group for a machine that may use `cpu` cores."""
    limits: dict[str, float | int] = {
        "memory_bytes": machine.memory_bytes + overhead_bytes(machine),
        "cpu_cores": cpu,
        "pids": machine.cpus + 80,  # virtual CPUs, and at most 64 threads for disks
    }
    if cpu_weight is not None:
        limits["cpu_weight"] = cpu_weight
    return limits


def group_of(place: Place) -> cgroups.Group:
    return cgroups.discover().group(place.group)


async def remove(place: Place) -> None:
    """Everything of a machine that is dead or is to die: processes, group, directory. May be repeated."""
    try:
        await asyncio.to_thread(group_of(place).remove)
    except TimeoutError as error:
        raise Unavailable(f"{place.name} does not die: {error}") from error
    finally:
        await asyncio.to_thread(shutil.rmtree, place.directory, ignore_errors=True)


def prepare(
    machine: Machine, place: Place, accel: Accel, taps: Sequence[int], tpm: int | None, held: list[int], process: Path | None = None
) -> tuple[Message, list[int]]:
    """What `kernel.machine.start` takes, and the descriptors to send along, which are left in `held` as well. `process`: the directory of
    a captured one that it is to become."""
    if len(taps) != len(machine.nics) or (tpm is None) == machine.tpm:
        raise ValueError("a tap for each network card, and a TPM if there is to be one")
    words = arguments.arguments(machine, accel)
    directory = Path(place.directory)
    numbers, given = [], []

    def give(number: int, fd: int) -> None:
        numbers.append(number)
        given.append(fd)

    sockets = [(arguments.QMP_FD, QMP_SOCKET)]
    if machine.channel:
        sockets.append((arguments.CHANNEL_FD, CHANNEL_SOCKET))
    if machine.agent:
        sockets.append((arguments.AGENT_FD, AGENT_SOCKET))
    for number, name in sockets:
        held.append(listening(directory, name))
        give(number, held[-1])
    for name in (ERRORS_FIFO, SERIAL_FIFO):
        os.mkfifo(directory / name, 0o600)
        # For both directions: so nobody needs to listen for it to be written to.
        held.append(os.open(directory / name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
    errors, serial = held[-2:]
    held.append(os.open(directory / SERIAL_FIFO, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    for number, fd in ((0, serial), (1, errors), (2, errors), (arguments.SERIAL_FD, held[-1])):
        give(number, fd)
    for index, tap in enumerate(taps):
        give(arguments.nic_fd(machine, index), tap)
    if tpm is not None:
        give(arguments.tpm_fd(machine), tpm)
    limit = {"rlimits": profile.rlimits(file_bytes(machine))}
    if process is None:
        change: Message = {"env": ENVIRONMENT | {b"LD_PRELOAD": programs.PRELOADED.encode()}}
    else:
        further = further_numbers(machine, accel)
        for name, path in ((PAGES, process / PAGES), (SCRIPT, process / SCRIPT), (arguments.QEMU, Path(place.root + arguments.QEMU))):
            try:
                held.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            except FileNotFoundError:
                raise Internal(f"of a captured process {path.name} is missing") from None
            give(further[name], held[-1])
        change = {"program": programs.RESTORE.encode(), "env": {b"S": str(further[SCRIPT]).encode()}}
    return plan_of(place, words, arguments.inside(machine), arguments.descriptors(machine, accel), numbers) | limit | change, given


def further_numbers(machine: Machine, accel: Accel) -> dict[str, int]:
    """Numbers of the files that a process has which becomes a captured one."""
    first = max((file.fd for file in arguments.descriptors(machine, accel)), default=arguments.FIRST_FD) + 1
    return {name: first + index for index, name in enumerate((PAGES, arguments.QEMU, SCRIPT))}


def plan_of(place: Place, words: Sequence[str], files: Sequence[Inside], opened: Sequence[Opened], numbers: Sequence[int]) -> Message:
    """What `kernel.machine.start` takes. Lets the place's user get at `files`. `numbers`: of the descriptors that come along."""
    if place.uid < FIRST_UID:
        raise ValueError(f"{place.uid} is a user of the host")
    for file in files:
        admit(file, place.uid)
    return {
        "group": place.group,
        "limits": dict(place.limits),
        "uid": place.uid,
        "root": os.fsencode(place.root),
        "staging": os.fsencode(place.staging),
        "inside": [(os.fsencode(file.path), file.name.encode(), file.writable) for file in files],
        "open": [(file.fd, os.fsencode(file.path), file.writable) for file in opened],
        "given": list(numbers),
        "argv": [os.fsencode(word) for word in words],
        "env": ENVIRONMENT,
        "rlimits": profile.rlimits(),
        "profile": profile.NAME,
        "hostname": b"machine",
    }


def listening(directory: Path, name: str) -> int:
    """A descriptor of a new socket that is listened at."""
    at = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.bind(short_path(at, directory / name))
            os.chmod(directory / name, 0o600)
            sock.listen(4)
            return sock.detach()
    finally:
        os.close(at)


def admit(file: Inside, uid: int) -> None:
    """Let QEMU's user open a file by name. Nobody else gets at it through that: no name of the host's leads there for them."""
    facts = os.stat(file.path)
    if file.writable:
        if facts.st_uid != uid:
            os.chown(file.path, uid, uid)
    elif facts.st_mode & 0o444 != 0o444:
        os.chmod(file.path, stat.S_IMODE(facts.st_mode) | 0o444)
