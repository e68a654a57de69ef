# SPDX-License-Identifier: Apache-2.0
"""The edge's side of the spawner: starts it, sends plans and descriptors, resolves answers and exits as futures.

One spawner an edge. If it dies, every call under way fails with Unavailable, every command under way ends as `lost` (nobody can know
its exit status any more), and the next `start()` makes a new one; sandboxes are not its children's children and live on.
"""

from __future__ import annotations

import asyncio
import marshal
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from opendsec.api.errors import Unavailable
from opendsec.kernel import procfs
from opendsec.kernel.fds import sealed_memfd
from opendsec.runtime.backend import Exit
from opendsec.runtime.interpreter import private_copy

Value = object  # what marshal carries: int, str, bytes, None, and lists, tuples and dicts of these
Message = dict[str, Value]

DATAGRAM_BYTES = 64 << 10  # a larger plan goes through a memfd
RECEIVE_BYTES = 64 << 10
MAX_FDS = 4
CALLD = "dsec-calld"  # PID 1 of members, beside that of containers
SOURCE = Path(__file__).resolve().parents[2]
START = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); from opendsec.kernel.spawner import main; main(int(sys.argv[1]))"


class SpawnError(Exception):
    """The spawner refused a plan or a child failed: the step, the errno (0 if none), and what happened."""

    def __init__(self, step: str, code: int, text: str) -> None:
        super().__init__(f"{step}: {text}")
        self.step, self.errno, self.text = step, code, text


class Answer:
    """An `ok`, with the descriptors that came along (the caller closes them). `exited` is there for commands."""

    __slots__ = ("exited", "fds", "message")

    def __init__(self, message: Message, fds: list[int], exited: asyncio.Future[Exit] | None) -> None:
        self.message, self.fds, self.exited = message, fds, exited

    @property
    def pid(self) -> int:
        pid = self.message["pid"]
        assert isinstance(pid, int)
        return pid


class Spawner:
    """A running spawner process."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._next = 0
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._commands: dict[int, asyncio.Future[Exit]] = {}
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self.died: asyncio.Future[None] = self._loop.create_future()
        # End of file on the channel is not enough: a child born into a frozen cgroup keeps a copy of it open.
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(control, self._receive)
        self._loop.add_reader(self._pidfd, self._fail, "the spawner died")

    @classmethod
    async def start(cls, init: Path, hold: Sequence[int] = ()) -> Spawner:
        """Fork the spawner from this process, hand it the programs of PID 1, and wait until it is ready.

        It keeps `hold` open as long as it lives: the edge's lock, so that a new edge waits for the spawner of the last to be gone.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, private_copy() as program:
            process = subprocess.Popen(
                [sys.executable, "-SI", "-c", START, str(theirs.fileno())],
                executable=None if program is None else procfs.fd_path(program),
                pass_fds=[theirs.fileno(), *hold, *([] if program is None else [program])],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                env={},
            )
        ours.setblocking(False)
        spawner = cls(process, ours)
        programs: list[int] = []
        try:
            for program_path in (init, init.with_name(CALLD)):
                programs.append(os.open(program_path, os.O_RDONLY | os.O_CLOEXEC))
            await spawner.call("setup", {}, programs)
        except BaseException:
            await spawner.close()
            raise
        finally:
            close_all(programs)
        return spawner

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self.died.done()

    async def call(self, op: str, fields: Message, fds: Sequence[int] = ()) -> Answer:
        """Send one request and wait for its answer. The caller keeps and closes `fds`.

        Raises SpawnError if it is refused or fails, Unavailable if the spawner is gone. When the waiting is cancelled the request still
        happens; what its answer brings is closed.
        """
        if not self.alive:
            raise Unavailable("the spawner died")
        self._next += 1
        number = self._next
        data = marshal.dumps({**fields, "id": number, "op": op})
        sent: list[int] = []
        try:
            if len(data) > DATAGRAM_BYTES:
                sent.append(sealed_memfd("plan", data))
                data = marshal.dumps({"memfd": True})
            # Descriptors are duplicated, because the datagram may leave later than this call returns when cancelled.
            sent += [os.dup(fd) for fd in fds]
        except BaseException:
            close_all(sent)
            raise
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._calls[number] = future
        self._outbox.append((data, sent))
        if len(self._outbox) == 1:
            self._flush()
        return await future

    async def settle(self) -> None:
        """Return once every request sent so far has been taken up, or never will be because the spawner is gone. For callers that were
        cancelled and have to undo what happens all the same."""
        try:
            await self.call("ping", {})
        except Unavailable:
            pass

    def _flush(self) -> None:
        while self._outbox:
            data, fds = self._outbox[0]
            try:
                socket.send_fds(self._control, [data], fds)
            except BlockingIOError:
                self._loop.add_writer(self._control, self._flush)
                return
            except OSError as error:
                self._fail(f"the spawner is gone: {error}")
                return
            self._outbox.popleft()
            close_all(fds)
        self._loop.remove_writer(self._control)

    def _receive(self) -> None:
        while True:
            try:
                data, fds, _flags, _ = socket.recv_fds(self._control, RECEIVE_BYTES, MAX_FDS)
            except BlockingIOError:
                return
            except OSError as error:
                self._fail(f"the spawner is gone: {error}")
                return
            if not data:
                self._fail("the spawner died")
                return
            self._handle(marshal.loads(data), fds)

    def _handle(self, message: Message, fds: list[int]) -> None:
        if "exit" in message:
            self._handle_exit(message)
            return
        number = message["id"]
        assert isinstance(number, int)
        future = self._calls.pop(number, None)
        exited = None
        if message.get("command") and isinstance(pid := message.get("pid"), int):
            exited = self._commands[pid] = self._loop.create_future()
        if future is None or future.done():
            close_all(fds)
        elif "error" in message:
            close_all(fds)
            error = message["error"]
            assert isinstance(error, tuple)
            future.set_exception(SpawnError(*error))
        else:
            future.set_result(Answer(message, fds, exited))

    def _handle_exit(self, message: Message) -> None:
        pid, status, cpu_us, rss = (message[key] for key in ("exit", "status", "cpu_us", "max_rss_kib"))
        assert isinstance(pid, int) and isinstance(status, int) and isinstance(cpu_us, int) and isinstance(rss, int)
        future = self._commands.pop(pid, None)
        if future is None or future.done():
            return
        ended = os.waitstatus_to_exitcode(status)
        code, signal = (ended, None) if ended >= 0 else (None, -ended)
        future.set_result(Exit(code=code, signal=signal, cpu_ms=cpu_us / 1000, max_rss_bytes=rss * 1024))

    def _fail(self, reason: str) -> None:
        """The spawner is gone: settle everything that waits on it."""
        if self.died.done():
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._loop.remove_reader(self._control)
        self._loop.remove_writer(self._control)
        self._control.close()
        self.died.set_result(None)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(Unavailable(reason))
        for command in self._commands.values():
            if not command.done():
                command.set_result(Exit(lost=True))
        self._calls.clear()
        self._commands.clear()
        for _, fds in self._outbox:
            close_all(fds)
        self._outbox.clear()

    async def close(self) -> None:
        """End the spawner (it ends by itself at end of file) and reap it."""
        self._fail("the spawner was closed")
        await asyncio.to_thread(self._process.wait)


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
