# SPDX-License-Identifier: Apache-2.0
"""A process as files, from which others like it are made: QEMU with all the code it has translated.

An emulator translates what its guest executes piece by piece, and a clone of a machine would do all of that again: some 25,000 pieces,
a quarter of a second, until its first command has answered. So a template also has its QEMU itself, stopped after it has done that once.
A new process takes over that one's memory (mapped, shared with all others until it is written to), descriptors, signal handlers and
threads, and goes on. What it is confined by, and which files it has, is the new process's own.

    pages       memory that is no file's
    script      for native/restore.c: header, system calls, threads, and what these point to. It is for one boot of one kernel.

Only what is known is captured. A process that has anything else open or mapped raises Unsupported, and machines start the longer way.

Memory that was nobody's file is a file's now, private. Three things differ, and nothing relies on them: a page that is given back
(MADV_DONTNEED) is what it was when it was captured and not zeros (malloc keeps account of what it has had from the kernel, and clears all
else; stacks of threads are not expected to be clear); a mapping that grows (mremap) has what follows in `pages`, and there is room behind
the last; all processes made of one have the same addresses. What must not be the same in two, states of random number generators that would
not be in a forked child either, is left out; QEMU itself has none (native/ram.c).
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from opendsec.api.errors import Unsupported
from opendsec.kernel import abi, process_memory, procfs, tracee
from opendsec.kernel.process_memory import PAGE
from opendsec.kernel.process_memory import Mapping as Area
from opendsec.runtime.vmm.memory import write_at
from opendsec.runtime.vmm.script import EXACT, FLOOR, VDSO_AT, Script

PAGES, SCRIPT = "pages", "script"
QUIET_S = 5.0
FIRST_KEPT = 600  # numbers that nothing of the process has, for what it is given
SOURCE = 599
MERGED_PAGES = 16  # a hole of so many pages is not worth a mapping of its own
STACK = b"[stack]"
GROWTH_ROOM = 64 << 20  # of no block
_LAYOUT = struct.Struct("<12QIi")
_RESTARTED = (-512, -513, -514)
_ERESTART_RESTARTBLOCK, _EINTR = -516, -4
_MADV_MERGEABLE = 12
_FIXED, _PRIVATE, _ANONYMOUS, _NORESERVE, _GROWSDOWN = 0x10, 2, 0x20, 0x4000, 0x100
_EPOLL_CTL_ADD, _SECCOMP_SET_MODE_FILTER, _SEEK_END = 1, 1, 2
_PR_SET_TIMERSLACK, _PR_SET_MM, _PR_SET_MM_MAP = 29, 35, 14
_F_SETFD, _F_SETFL = 2, 4
_SIGKILL, _SIGSTOP, _SIG_BLOCK = 9, 19, 0


@dataclass(frozen=True)
class File:
    """An open file that the new process is given under a number."""

    number: int
    device: int
    inode: int
    access: int  # O_RDONLY, O_WRONLY, O_RDWR

    @classmethod
    def of(cls, number: int, path: str | Path, access: int) -> File:
        facts = os.stat(path)
        return cls(number, facts.st_dev, facts.st_ino, access)


NOT_INHERITED = {"wf", "dp"}  # empty in a forked child; the kernel may drop it
FILTERS = 1  # that a process has before it begins


@contextlib.contextmanager
def held(pid: int, *, sockets: Sequence[int]) -> Iterator[list[tracee.Thread]]:
    """The threads of a process that has no connection any more, standing still. All that follows has to be done by one thread."""
    until = time.monotonic() + QUIET_S
    while True:
        with tracee.held(pid) as threads:
            connected = [number for number, name in procfs.fds(pid).items() if name.startswith(b"socket:") and number not in sockets]
            states = [procfs.status(f"{pid}/task/{thread.tid}") for thread in threads]
            pending = sorted({state[name] for state in states for name in ("SigPnd", "ShdPnd") if int(state[name], 16)})
            running = [thread.tid for thread in threads if not thread.in_call()]
            if not connected and not pending and not running:
                yield threads
                return
            if time.monotonic() > until:
                raise Unsupported(f"the process does not come to rest: connections {connected}, signals {pending}, running {running}")
        time.sleep(0.001)  # it has to find out by itself that we have hung up, and nothing says when it has


def capture(
    threads: Sequence[tracee.Thread],
    *,
    root: Path,
    files: Sequence[File],
    sockets: Sequence[int],
    pages: Path,
    script: Path,
    own: Mapping[str, int],
    merge: bool = False,
) -> None:
    """Write the process of these threads to the new files `pages` and `script`. Blocking.

    `root`: its root directory. `files`, `sockets`: what a new process is given, under the same numbers. `own`: further numbers of it: of
    PAGES, of programs that cannot be opened by name, and of the script, which `restore` closes itself.
    `merge`: whether equal pages of the guest's memory may be merged.
    """
    first = threads[0]
    pid = first.pid
    result = Script()
    kept = {name: number for name, number in own.items() if name != SCRIPT}
    with open(pages, "xb", buffering=0) as file, contextlib.ExitStack() as undo:
        undo.callback(pages.unlink)
        _descriptors(result, pid, files, sockets, kept)
        parts = _memory(result, pid, root, kept, file, merge)
        file.truncate(file.tell() + GROWTH_ROOM)
        result.first("lseek", kept[PAGES], 0, _SEEK_END, kind=EXACT, expected=file.tell() + GROWTH_ROOM)
        _layout(result, first)
        _timers(first)
        _signals(result, first)
        result.call("prctl", _PR_SET_TIMERSLACK, int(procfs.read(procfs.path_of(pid, "timerslack_ns"))))
        for number in sorted(kept.values()):
            result.call("close", FIRST_KEPT + number)
        _filters(result, threads)
        for thread in threads:
            _thread(result, thread)
        with open(script, "xb") as target:
            undo.callback(script.unlink)
            target.write(result.file(parts))
        undo.pop_all()


# --- descriptors -------------------------------------------------------------------------------------------------------


def _descriptors(script: Script, pid: int, files: Sequence[File], sockets: Sequence[int], own: Mapping[str, int]) -> None:
    """First all that is given goes out of the way, then each goes where it was."""
    given = sorted({*(file.number for file in files), *sockets, *own.values()})
    for number in given:
        script.opened(FIRST_KEPT + number, "fcntl", number, 0, FIRST_KEPT)
        script.call("close", number)
    by_facts = {(file.device, file.inode, file.access): file.number for file in files}
    polls: list[tuple[int, dict[str, str]]] = []
    for number, target in sorted(procfs.fds(pid).items()):
        if number >= SOURCE:
            raise Unsupported(f"descriptor {number} is too high")
        info = procfs.fd_info(pid, number)
        flags = int(info["flags"], 8)
        name = target.decode(errors="replace")
        facts = os.stat(procfs.path_of(pid, "fd", str(number)))
        known = by_facts.get((facts.st_dev, facts.st_ino, flags & os.O_ACCMODE))
        if known is None and name.startswith("socket:") and number in sockets:
            known = number
        if "lock" in info:
            raise Unsupported(f"descriptor {number}, {name}, has a lock")
        if known is not None:
            script.opened(number, "fcntl", FIRST_KEPT + known, 0, 0)
            script.call("fcntl", number, _F_SETFL, flags & (os.O_NONBLOCK | os.O_APPEND))
        elif name == "anon_inode:[eventfd]":
            count = int(info["eventfd-count"], 16)
            script.opened(number, "eventfd2", min(count, 0xFFFF_FFFE), flags & os.O_NONBLOCK | int(info.get("eventfd-semaphore", "0")))
        elif name == "anon_inode:[eventpoll]":
            script.opened(number, "epoll_create1", 0)
            polls += [(number, row) for row in procfs.fd_rows(pid, number, "tfd")]
        elif name == "anon_inode:[signalfd]":
            mask = script.blob(struct.pack("<Q", int(info["sigmask"], 16)))
            script.opened(number, "signalfd4", -1, mask, 8, flags & os.O_NONBLOCK)
        elif stat.S_ISREG(facts.st_mode) or name in ("/dev/null", "/dev/urandom"):
            if not name.startswith("/") or "(deleted)" in name:
                raise Unsupported(f"descriptor {number} is {name}")
            path = script.blob(os.fsencode(name) + b"\0")
            script.opened(number, "openat", abi.AT_FDCWD, path, flags & ~(os.O_CREAT | os.O_TRUNC | os.O_EXCL))
        else:
            raise Unsupported(f"descriptor {number} is {name}")
        if stat.S_ISREG(facts.st_mode):
            script.call("lseek", number, int(info["pos"]), os.SEEK_SET)
        if flags & os.O_CLOEXEC:
            script.call("fcntl", number, _F_SETFD, 1)
    for number, row in polls:
        event = script.blob(struct.pack("<IQ", int(row["events"], 16), int(row["data"], 16)))
        script.call("epoll_ctl", number, _EPOLL_CTL_ADD, int(row["tfd"]), event)
    for number in given:
        if number not in own.values():
            script.call("close", FIRST_KEPT + number)


# --- memory ------------------------------------------------------------------------------------------------------------


def _memory(script: Script, pid: int, root: Path, own: Mapping[str, int], file: FileIO, merge: bool) -> list[tuple[int, int]]:
    """The parts of the vDSO as (offset from it, size)."""
    areas = process_memory.mappings(pid)
    kernels = {area.path: area for area in areas if area.path.startswith(b"[v") and area.path != b"[vsyscall]"}
    parts, moves, at = [], [], VDSO_AT
    here = kernels[b"[vdso]"].start
    for area in kernels.values():
        size = area.end - area.start
        parts.append((area.start - here, size))
        moves.append((at, size, area.start))
        at += size
    source, number = "", -1
    for area, (_, flags) in zip(areas, procfs.mapping_flags(pid), strict=True):
        if area.path.startswith(b"[v"):
            continue
        size, protection = area.end - area.start, _protection(area)
        if area.inode:
            if area.path != source.encode():
                source = _open_source(script, root, area, own)
                number = FIRST_KEPT + own[source] if source in own else SOURCE
            _map(script, area.start, size, protection, 0, number, area.offset)
        else:
            grows = _GROWSDOWN if area.path == STACK else 0
            _map(script, area.start, size, protection, _ANONYMOUS | _NORESERVE | grows, -1, 0)
        if area.path == b"/ram":
            if merge:
                script.call("madvise", area.start, size, _MADV_MERGEABLE)
            continue  # written anew as a whole: no page of it differs from the file
        if NOT_INHERITED & set(flags):
            continue
        for start, end in _merged(process_memory.private_pages(pid, area.start, area.end)):
            offset = file.tell()
            _copy(pid, start, end, file.fileno(), offset)
            file.seek(offset + end - start)
            if area.path == STACK:  # which can grow, and whose arguments others can see, only if it is no file's
                script.call("pread64", FIRST_KEPT + own[PAGES], start, end - start, offset, kind=EXACT, expected=end - start)
            else:
                _map(script, start, end - start, protection, 0, FIRST_KEPT + own[PAGES], offset)
    script.call("close", SOURCE)
    for start, size, target in moves:
        script.call("mremap", start, size, size, 3, target, kind=EXACT, expected=target)
    return parts


def _protection(area: Area) -> int:
    if area.permissions[3] != "p":
        raise Unsupported(f"{area.path.decode(errors='replace') or 'memory'} is shared")
    if area.start < FLOOR:
        raise Unsupported(f"there is memory at {area.start:#x}")
    return sum(bit for letter, bit in zip("rwx", (1, 2, 4), strict=True) if letter in area.permissions)


def _open_source(script: Script, root: Path, area: Area, own: Mapping[str, int]) -> str:
    name = area.path.decode()
    if name not in own:
        script.opened(SOURCE, "openat", abi.AT_FDCWD, script.blob(area.path + b"\0"), os.O_RDONLY)
        there = root / name.lstrip("/")
        if name != "/ram" and not (there.exists() and there.stat().st_ino == area.inode):
            raise Unsupported(f"{name} is another file by now")
    return name


def _map(script: Script, start: int, size: int, protection: int, flags: int, fd: int, offset: int) -> None:
    script.call("mmap", start, size, protection, _PRIVATE | _FIXED | flags, fd, offset, kind=EXACT, expected=start)


def _merged(ranges: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    last: tuple[int, int] | None = None
    for start, end in ranges:
        if last is not None and start - last[1] <= MERGED_PAGES * PAGE:
            last = last[0], end
            continue
        if last is not None:
            yield last
        last = start, end
    if last is not None:
        yield last


def _copy(pid: int, start: int, end: int, target: int, offset: int) -> None:
    with open(procfs.path_of(pid, "mem"), "rb", buffering=0) as memory:
        while start < end:
            data = os.pread(memory.fileno(), min(end - start, 4 << 20), start)
            if not data:
                raise Unsupported("the process's memory cannot be read")
            write_at(target, memoryview(data), offset)
            start, offset = start + len(data), offset + len(data)


def _layout(script: Script, thread: tracee.Thread) -> None:
    """Where the kernel believes its parts to be. Above all the heap's end, which malloc asks for when it gives memory back."""
    parts = procfs.layout(thread.pid)
    brk, _ = thread.call("brk", 0)
    layout = _LAYOUT.pack(*parts[:5], brk, *parts[5:], 0, 0, -1)
    script.call("prctl", _PR_SET_MM, _PR_SET_MM_MAP, script.blob(layout), len(layout))


# --- signals and threads -------------------------------------------------------------------------------------------------


def _signals(script: Script, thread: tracee.Thread) -> None:
    everything = script.blob(struct.pack("<Q", (1 << 64) - 1))
    script.call("rt_sigprocmask", _SIG_BLOCK, everything, 0, 8)
    for number in range(1, tracee.SIGNALS + 1):
        if number in (_SIGKILL, _SIGSTOP):
            continue
        script.call("rt_sigaction", number, script.blob(struct.pack("<4Q", *thread.sigaction(number))), 0, 8)


def _timers(thread: tracee.Thread) -> None:
    if procfs.read(procfs.path_of(thread.pid, "timers")):
        raise Unsupported("the process has a timer")
    for which in range(3):
        _, data = thread.call("getitimer", which, room=32, at=1)
        if any(data):
            raise Unsupported(f"the process has interval timer {which}")


def _filters(script: Script, threads: Sequence[tracee.Thread]) -> None:
    filters = threads[0].filters()
    if any(thread.filters() != filters for thread in threads[1:]):
        raise Unsupported("its threads have filters of their own")
    for program in filters[FILTERS:]:
        address = script.blob(program)
        script.call("seccomp", _SECCOMP_SET_MODE_FILTER, 0, script.blob(struct.pack("<QQ", len(program) // 8, address)))


def _thread(script: Script, thread: tracee.Thread) -> None:
    stack = thread.alternate_stack()
    tid_address = thread.tid_address()
    registers = thread.registers()
    result = registers["rax"] - (registers["rax"] >> 63 << 64)
    if registers["orig_rax"] < 1 << 63:
        if result in _RESTARTED:
            registers |= {"rax": registers["orig_rax"], "rip": registers["rip"] - 2}
        elif result == _ERESTART_RESTARTBLOCK:
            registers["rax"] = _EINTR & (1 << 64) - 1
    robust, rseq = thread.robust_list(), thread.rseq()
    frame = script.frame(registers, thread.xstate(), thread.mask, stack)
    if registers["gs_base"]:
        raise Unsupported("a thread uses segment GS")
    name = procfs.read(procfs.path_of(thread.pid, "task", str(thread.tid), "comm"))[:-1]
    number = int(procfs.status(f"{thread.pid}/task/{thread.tid}")["NSpid"].split()[-1])
    script.thread(frame, registers["fs_base"], tid_address, *robust, *rseq, number, name=name[:15])
