# SPDX-License-Identifier: Apache-2.0
"""Rungs for tests that need a living sandbox: a node (a container backend of its own), boxes in it, commands in those.

    def test_something(box: Box) -> None:                     # a fresh sandbox, removed after the test
        assert box.sh("echo hi").out == b"hi\n"

    def test_two(node: Node) -> None:
        with node.box(pids=10) as small, node.box() as other: ...

Tests are plain functions. A node has an event loop that turns only while something is waited for (`node.wait`), so nothing happens
behind a test's back. Commands get pipes, as the edge makes them; `Command.expect` waits for what a program says, instead of for time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from opendsec.api.exec import Pty
from opendsec.api.images import ImageConfig
from opendsec.api.spec import Container
from opendsec.images.layers import LayerRef
from opendsec.images.store import ImageStore
from opendsec.runtime.backend import Counters, ExecPlan, Exit, Handle, Placement, Running
from opendsec.runtime.container.backend import ContainerBackend
from opendsec.runtime.container.handle import ContainerHandle
from opendsec.runtime.scratch import ScratchDriver
from opendsec.runtime.scratch.tmpfs import TmpfsScratch
from opendsec.runtime.spawn import Spawner
from opendsec.testing import waiting
from tests.images import BASE

T = TypeVar("T")

RANGE = 65_536
UID_BASE = 0x4000_0000 + (os.getpid() % 64) * 256 * RANGE  # other sessions may be at work on this machine
STAGING = Path("/mnt")  # any directory of the host that everybody may look up
TIMEOUT_S = 60.0  # a test that waits this long for one thing has failed

_numbers = itertools.count()


@dataclass(frozen=True)
class Result:
    """What a command gave."""

    exit: Exit
    out: bytes
    err: bytes

    @property
    def code(self) -> int | None:
        return self.exit.code

    @property
    def text(self) -> str:
        """Standard output of a command that must have succeeded."""
        assert self.exit.code == 0, self
        return self.out.decode()

    @property
    def json(self) -> object:
        value: object = json.loads(self.text)
        return value


class Stream:
    """What a command writes, collected while the loop turns."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        os.set_blocking(fd, False)
        self.data = bytearray()
        self.ended = False
        self._loop, self._fd = loop, fd
        self._changed = asyncio.Event()
        loop.add_reader(fd, self._read)

    def _read(self) -> None:
        try:
            part = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return
        except OSError:  # a terminal whose other side is closed
            part = b""
        self.data += part
        self._changed.set()
        if not part:
            self.close()

    def drain(self) -> None:
        """Take what is there now."""
        size = -1
        while not self.ended and size != len(self.data):
            size = len(self.data)
            self._read()

    def close(self) -> None:
        if not self.ended:
            self.ended = True
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._changed.set()

    async def holds(self, text: bytes) -> None:
        while text not in self.data:
            assert not self.ended, f"ended without {text!r}: {bytes(self.data)!r}"
            self._changed.clear()
            await self._changed.wait()


@dataclass
class Command:
    """A started command."""

    box: Box
    process_id: str
    running: Running
    stdout: Stream
    stderr: Stream
    stdin: int | None = None  # ours to write to

    def expect(self, text: str) -> None:
        """Wait until it has written this to its standard output."""
        self.box.node.wait(self.stdout.holds(text.encode()))

    def write(self, data: bytes) -> None:
        assert self.stdin is not None
        os.write(self.stdin, data)

    def close_stdin(self) -> None:
        if self.stdin is not None:
            os.close(self.stdin)
            self.stdin = None

    async def ended(self) -> Result:
        exit = await self.running.exited
        self.stdout.drain()
        self.stderr.drain()
        await self.running.release()
        self.close()
        return Result(exit, bytes(self.stdout.data), bytes(self.stderr.data))

    def wait(self) -> Result:
        """Its end, with what it wrote until then."""
        return self.box.node.wait(self.ended())

    def kill(self) -> Result:
        self.running.kill_tree()
        return self.wait()

    def close(self) -> None:
        self.close_stdin()
        self.stdout.close()
        self.stderr.close()


@dataclass
class Box:
    """A living sandbox."""

    node: Node
    handle: Handle
    placement: Placement
    commands: list[Command] = field(default_factory=list)

    @property
    def pid(self) -> int:
        """The host's id of its PID 1."""
        return self.handle.record.pid

    @property
    def uid_base(self) -> int:
        return self.placement.uid_base

    @property
    def counters(self) -> Counters:
        return self.handle.counters()

    async def start_async(
        self,
        *argv: str,
        user: str = "root",
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        pty: Pty | None = None,
        input: bytes | int | None = None,
        stdin: bool = False,
        extra: Sequence[int] = (),
    ) -> Command:
        """`input`: what it reads, or a descriptor; `stdin`: a pipe that the test writes to; `extra`: become 3, 4, …"""
        plan = ExecPlan(process_id=f"proc_{next(_numbers)}", argv=argv, env=env or {}, cwd=cwd, user=user, pty=pty)
        ours: list[int] = []
        theirs: list[int | None] = []
        if isinstance(input, bytes):
            theirs.append(os.memfd_create("input"))
            os.write(theirs[0] or 0, input)
            os.lseek(theirs[0] or 0, 0, os.SEEK_SET)
        elif isinstance(input, int):
            theirs.append(os.dup(input))
        elif stdin:
            end, writer = os.pipe()
            theirs.append(end)
            ours.append(writer)
        else:
            theirs.append(None)
        for _ in range(2):
            reader, end = os.pipe()
            os.fchmod(end, 0o666)
            ours.append(reader)
            theirs.append(end)
        try:
            if pty is None:
                running = await self.handle.exec(plan, stdin=theirs[0], stdout=theirs[1], stderr=theirs[2], extra=extra)
            else:
                running = await self.handle.exec(plan, stdin=None, stdout=None, stderr=None)
        except BaseException:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for given in theirs:
                if given is not None:
                    os.close(given)
        if running.terminal is not None:
            os.close(ours[-2])
            ours[-2] = running.terminal
        loop = self.node.loop
        command = Command(self, plan.process_id, running, Stream(loop, ours[-2]), Stream(loop, ours[-1]), ours[0] if stdin else None)
        if running.terminal is not None:
            command.stdin = os.dup(running.terminal)
        self.commands.append(command)
        return command

    def start(
        self,
        *argv: str,
        user: str = "root",
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        pty: Pty | None = None,
        input: bytes | int | None = None,
        stdin: bool = False,
        extra: Sequence[int] = (),
    ) -> Command:
        return self.node.wait(self.start_async(*argv, user=user, cwd=cwd, env=env, pty=pty, input=input, stdin=stdin, extra=extra))

    def run(
        self,
        *argv: str,
        user: str = "root",
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        pty: Pty | None = None,
        input: bytes | int | None = None,
        extra: Sequence[int] = (),
    ) -> Result:
        return self.start(*argv, user=user, cwd=cwd, env=env, pty=pty, input=input, extra=extra).wait()

    def sh(self, text: str, *, user: str = "root") -> Result:
        return self.run("sh", "-c", text, user=user)

    def python(self, source: str, *args: str, user: str = "root", input: bytes | int | None = None, extra: Sequence[int] = ()) -> Result:
        """Run a program text with the sandbox's own Python."""
        return self.run("python3", "-ISc", source, *args, user=user, input=input, extra=extra)

    def start_python(self, source: str, *args: str, user: str = "root", stdin: bool = False) -> Command:
        return self.start("python3", "-ISuc", source, *args, user=user, stdin=stdin)

    def works(self) -> bool:
        """Whether an ordinary command gives what it should."""
        result = self.sh("echo fine; exit 7")
        return (result.out, result.code) == (b"fine\n", 7)

    async def _all_ended(self) -> None:
        """Hear of the ends of its commands now: the loop does not turn by itself, and they hold descriptors until then."""
        for command in self.commands:
            await command.running.exited

    def destroy(self) -> None:
        self.node.wait(self.handle.destroy())
        self.node.wait(self._all_ended())
        for command in self.commands:
            command.close()


class Node:
    """A container backend of one's own, with the loop it lives in."""

    def __init__(self, folder: Path, layers: Sequence[LayerRef], scratch: ScratchDriver | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(ThreadPoolExecutor(1))  # a thread that comes later would look like a leak of some test
        self.layers = tuple(layers)
        self.edge_id = f"edge_test{os.getpid()}n{next(_numbers)}"
        self.backend = ContainerBackend(
            edge_id=self.edge_id, scratch=scratch or TmpfsScratch(), staging=STAGING, lock=folder / f"{self.edge_id}.lock"
        )
        self._slots = itertools.cycle(range(256))
        self.wait(self.backend.start())

    def wait(self, awaitable: Awaitable[T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(awaitable, TIMEOUT_S))

    @property
    def spawner(self) -> Spawner:
        return self.wait(self.backend.spawner())

    def placement(
        self,
        *,
        memory: int | str = "64MiB",
        disk: int | str = "16MiB",
        inodes: int = 2_000,
        pids: int = 64,
        open_files: int = 256,
        cpu: float = 2.0,
        layers: Sequence[LayerRef] | None = None,
    ) -> Placement:
        slot = next(self._slots)
        spec = Container(image="test", memory=memory, disk=disk, inodes=inodes, pids=pids, open_files=open_files, cpu=cpu)
        return Placement(
            sandbox_id=f"sb_{next(_numbers):06}",
            uid_base=UID_BASE + slot * RANGE,
            limits=spec.check(),
            layers=self.layers if layers is None else tuple(layers),
            config=ImageConfig(),
            env={},
            user="root",
            workdir="/",
            hostname="box",
        )

    def create(self, placement: Placement) -> Box:
        return Box(self, self.wait(self.backend.create(placement)), placement)

    @contextmanager
    def box(
        self,
        *,
        memory: int | str = "64MiB",
        disk: int | str = "16MiB",
        inodes: int = 2_000,
        pids: int = 64,
        open_files: int = 256,
        cpu: float = 2.0,
        layers: Sequence[LayerRef] | None = None,
    ) -> Iterator[Box]:
        """A sandbox for as long as the block lasts."""
        box = self.create(self.placement(memory=memory, disk=disk, inodes=inodes, pids=pids, open_files=open_files, cpu=cpu, layers=layers))
        try:
            yield box
        finally:
            box.destroy()

    def container(self, box: Box) -> ContainerHandle:
        assert isinstance(box.handle, ContainerHandle)
        return box.handle

    def close(self) -> None:
        leftovers = self.backend.leftovers()
        self.wait(self.backend.close())
        self.wait(self.loop.shutdown_default_executor())
        self.loop.close()
        assert leftovers == []


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for what the kernel tells of nowhere but in a file that has to be read again. `what` is the complaint if it does not come."""
    waiting.until(condition, what, timeout_s=TIMEOUT_S / 2)


@pytest.fixture(scope="module")
def base_layers(test_images: Path) -> tuple[LayerRef, ...]:
    """A Debian with Python, git, patch and procps."""
    return ImageStore(test_images).resolve(BASE).layers


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, base_layers: tuple[LayerRef, ...]) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("node"), base_layers)
    with node.box() as first:  # so that what all sandboxes share is there before the first test
        assert first.works()
    yield node
    node.close()


@pytest.fixture
def box(node: Node) -> Iterator[Box]:
    """A fresh sandbox: 64 MiB, 64 processes, 256 open files, 16 MiB and 2,000 inodes to write."""
    with node.box() as box:
        yield box
