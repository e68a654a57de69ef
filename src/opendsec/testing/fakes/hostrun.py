# SPDX-License-Identifier: Apache-2.0
"""Commands of the fake edge: plain processes of this machine, not isolated in any way. For tests that run their own commands only."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal as signals
import termios
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path

from opendsec.api.errors import Conflict, InvalidRequest
from opendsec.api.exec import Captured, Command, ExecEvent, ExecResult, Outcome, ProcessInfo, Pty, SessionRun, StreamName
from opendsec.api.ids import PROCESS, new_id

EVENT_BYTES = 64 << 10
BASE_ENV = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": "/root", "LANG": "C.UTF-8"}


class FakeProcess:
    """One command: its output so far, its end, and who waits for either."""

    def __init__(self, sandbox_id: str, command: Command, command_text: str) -> None:
        self.id = new_id(PROCESS)
        self.sandbox_id = sandbox_id
        self.command = command
        self.text = command_text
        self.started_at = time.time()
        self.output: dict[StreamName, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self.result: ExecResult | None = None
        self.ended = asyncio.Event()
        self._began = time.monotonic()
        self._changed = asyncio.Event()
        self._cause: Outcome | None = None
        self._limits: set[str] = set()
        self._child: asyncio.subprocess.Process | None = None
        self._readers: dict[int, StreamName] = {}
        self._stdin: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- life

    async def start(self, cwd: Path, env: Mapping[str, str]) -> None:
        """Never raises: a command that cannot start is a process that ended at once."""
        argv = list(self.command.argv or ("/bin/sh", "-c", self.command.shell or ""))
        environment = {**BASE_ENV, **env, **self.command.env}
        problem = ""
        if self.command.user not in (None, "", "root", "0"):
            problem = f"no such user: {self.command.user}"
        elif not cwd.is_dir():
            problem = f"no such directory: {self.command.cwd}"
        elif shutil.which(argv[0], path=environment.get("PATH")) is None:
            problem = f"no such program: {argv[0]}"
        if problem:
            self._finish("not_started", message=problem)
            return
        ours, theirs = self._open_ends()
        try:
            self._child = await asyncio.create_subprocess_exec(
                *argv, stdin=theirs[0], stdout=theirs[1], stderr=theirs[2], cwd=cwd, env=environment, start_new_session=True
            )
        except OSError as error:
            for fd in ours:
                os.close(fd)
            self._readers.clear()
            self._finish("not_started", message=f"not executable: {error.strerror}")
            return
        finally:
            for fd in set(theirs):
                os.close(fd)
        loop = asyncio.get_running_loop()
        for fd in self._readers:
            loop.add_reader(fd, self._read, fd)
        if self.command.stdin is not None:
            self._spawn(self._feed_all(self.command.stdin))
        if self.command.timeout_s is not None:
            loop.call_later(self.command.timeout_s, self.kill, "timed_out")
        self._spawn(self._watch(self._child))

    def _open_ends(self) -> tuple[list[int], tuple[int, int, int]]:
        if self.command.pty is not None:
            ours, theirs = os.openpty()
            termios.tcsetwinsize(theirs, (self.command.pty.rows, self.command.pty.cols))
            os.set_blocking(ours, False)
            self._readers[ours] = "stdout"
            self._stdin = ours
            return [ours], (theirs, theirs, theirs)
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        self._readers.update({out: "stdout", err: "stderr"})
        if self.command.stdin is None and self.command.stdin_mode == "closed":
            given = os.open(os.devnull, os.O_RDONLY)
        else:
            given, self._stdin = os.pipe()
            os.set_blocking(self._stdin, False)
        for fd in (out, err):
            os.set_blocking(fd, False)
        return [out, err, *([self._stdin] if self._stdin is not None else [])], (given, out_end, err_end)

    def _spawn(self, work: object) -> None:
        assert asyncio.iscoroutine(work)
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, child: asyncio.subprocess.Process) -> None:
        code = await child.wait()
        for fd in list(self._readers):
            self._read(fd)  # what is in the pipe; a child that still holds it is not waited for
            if fd in self._readers:
                self._stop_reading(fd)
        self.close_stdin()
        if self._cause is not None:
            self._finish(self._cause, signal=-code if code < 0 else None)
        elif code < 0:
            self._finish("signalled", signal=-code)
        else:
            self._finish("exited", exit_code=code)

    def _read(self, fd: int) -> None:
        while fd in self._readers:
            try:
                chunk = os.read(fd, EVENT_BYTES)
            except BlockingIOError:
                return
            except OSError:  # a terminal without a user
                chunk = b""
            if not chunk:
                self._stop_reading(fd)
                return
            self.output[self._readers[fd]] += chunk
            limit = self.command.output_limit_bytes
            if limit is not None and sum(map(len, self.output.values())) > limit:
                self.kill("output_limit")
            self._notify()

    def _stop_reading(self, fd: int) -> None:
        del self._readers[fd]
        asyncio.get_running_loop().remove_reader(fd)
        if fd == self._stdin:
            self._stdin = None
        os.close(fd)

    def _finish(self, outcome: Outcome, *, exit_code: int | None = None, signal: int | None = None, message: str = "") -> None:
        limits = {"timed_out": "time", "output_limit": "output"}.get(outcome)
        self.result = ExecResult(
            outcome=outcome,
            process_id=self.id,
            exit_code=exit_code,
            signal=signal,
            stdout=capture(bytes(self.output["stdout"]), self.command.capture_bytes),
            stderr=capture(bytes(self.output["stderr"]), self.command.capture_bytes),
            duration_ms=(time.monotonic() - self._began) * 1000,
            limits_hit=(limits,) if limits else (),
            message=message,
            action_id=self.command.action_id,
        )
        self.ended.set()
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- what callers do

    def kill(self, cause: Outcome = "killed") -> None:
        if self._child is not None and self.result is None:
            self._cause = self._cause or cause
            self.signal(signals.SIGKILL, tree=True)

    def signal(self, number: int, *, tree: bool) -> None:
        if self._child is None or self.result is not None:
            return
        try:
            if tree:
                os.killpg(self._child.pid, number)
            else:
                os.kill(self._child.pid, number)
        except ProcessLookupError:
            pass

    def resize(self, size: Pty) -> None:
        if self.command.pty is None:
            raise Conflict("it has no terminal")
        for fd in self._readers:
            termios.tcsetwinsize(fd, (size.rows, size.cols))

    async def feed(self, data: bytes) -> None:
        if self._stdin is None:
            raise Conflict("its input is closed")
        await self._feed(data)

    async def _feed(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        view = memoryview(data)
        while view and self._stdin is not None:
            try:
                view = view[os.write(self._stdin, view) :]
            except BlockingIOError:
                ready = asyncio.Event()
                loop.add_writer(self._stdin, ready.set)
                await ready.wait()
                if self._stdin is not None:
                    loop.remove_writer(self._stdin)
            except OSError:  # nobody reads it
                return

    async def _feed_all(self, data: bytes) -> None:
        await self._feed(data)
        self.close_stdin()

    def close_stdin(self) -> None:
        if self._stdin is not None and self.command.pty is None:
            fd, self._stdin = self._stdin, None
            asyncio.get_running_loop().remove_writer(fd)
            os.close(fd)

    def info(self) -> ProcessInfo:
        return ProcessInfo(
            id=self.id,
            sandbox_id=self.sandbox_id,
            state="ended" if self.result else "running",
            command=self.text[:200],
            started_at=self.started_at,
            stdout_bytes=len(self.output["stdout"]),
            stderr_bytes=len(self.output["stderr"]),
            action_id=self.command.action_id,
            result=without_output(self.result) if self.result else None,
        )

    async def events(self, offsets: dict[StreamName, int]) -> AsyncGenerator[ExecEvent, None]:
        yield ExecEvent(kind="started", process_id=self.id)
        while True:
            changed, result = self._changed, self.result
            for stream, data in self.output.items():
                while (at := offsets[stream]) < len(data):
                    chunk = bytes(data[at : at + EVENT_BYTES])
                    offsets[stream] += len(chunk)
                    yield ExecEvent(kind="output", process_id=self.id, stream=stream, offset=at, data=chunk)
            if result is not None:
                yield ExecEvent(kind="exit", process_id=self.id, result=without_output(result))
                return
            await changed.wait()

    async def close(self) -> None:
        self.kill()
        if self._child is not None:
            await self.ended.wait()


def capture(data: bytes, limit: int) -> Captured:
    """The first and the last half of the limit, cut between characters."""
    if len(data) <= limit:
        return Captured(head=data, total_bytes=len(data))
    head, tail = data[: limit // 2], data[len(data) - limit // 2 :]
    while tail and tail[0] & 0xC0 == 0x80:
        tail = tail[1:]
    return Captured(head=head.decode("utf-8", "ignore").encode(), tail=tail, total_bytes=len(data))


def without_output(result: ExecResult) -> ExecResult:
    return ExecResult(
        outcome=result.outcome,
        process_id=result.process_id,
        exit_code=result.exit_code,
        signal=result.signal,
        stdout=Captured(total_bytes=result.stdout.total_bytes),
        stderr=Captured(total_bytes=result.stderr.total_bytes),
        duration_ms=result.duration_ms,
        limits_hit=result.limits_hit,
        message=result.message,
        action_id=result.action_id,
    )


class FakeShell:
    """A bash that reads one script after the other; results come on a pipe of their own, output in files."""

    def __init__(self, folder: Path, on_close: Callable[[str], None]) -> None:
        self._folder = folder
        self._on_close = on_close
        self._lock = asyncio.Lock()
        self._child: asyncio.subprocess.Process | None = None
        self._codes: asyncio.StreamReader | None = None
        self._transport: asyncio.ReadTransport | None = None
        self.message = ""

    async def start(self, cwd: Path, env: Mapping[str, str]) -> None:
        if not cwd.is_dir():
            raise InvalidRequest("no such directory", field="cwd")
        readable, writable = os.pipe()
        self._codes = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(self._codes)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(readable, "rb", buffering=0))
        try:
            self._child = await asyncio.create_subprocess_exec(
                "bash",
                "--noprofile",
                "--norc",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                pass_fds=(writable,),
                cwd=cwd,
                env={**BASE_ENV, **env, "_RESULTS": str(writable)},
                start_new_session=True,
            )
        finally:
            os.close(writable)

    async def run(self, request: SessionRun) -> ExecResult:
        async with self._lock:
            if self.message or self._child is None or self._codes is None or self._child.stdin is None:
                raise Conflict(f"the session is closed: {self.message}")
            process_id, began = new_id(PROCESS), time.monotonic()
            script, out, err = (self._folder / f"{process_id}.{kind}" for kind in ("sh", "out", "err"))
            script.write_text(request.shell)
            self._child.stdin.write(f". {script} >{out} 2>{err} </dev/null; echo $? >&$_RESULTS\n".encode())
            outcome: Outcome = "exited"
            code: int | None = None
            try:
                async with asyncio.timeout(request.timeout_s):
                    line = await self._codes.readline()
                    code = int(line) if line else await self._child.wait()
                    if not line:
                        self._closed("the shell exited")
            except TimeoutError:
                outcome = "timed_out"
                await self.close("a command ran out of time")
            return ExecResult(
                outcome=outcome,
                process_id=process_id,
                exit_code=code,
                stdout=capture(out.read_bytes() if out.exists() else b"", request.capture_bytes),
                stderr=capture(err.read_bytes() if err.exists() else b"", request.capture_bytes),
                duration_ms=(time.monotonic() - began) * 1000,
                limits_hit=("time",) if outcome == "timed_out" else (),
                action_id=request.action_id,
            )

    def _closed(self, message: str) -> None:
        if not self.message:
            self.message = message
            self._on_close(message)

    async def close(self, message: str = "closed by the caller") -> None:
        self._closed(message)
        if self._child is not None:
            try:
                os.killpg(self._child.pid, signals.SIGKILL)
            except ProcessLookupError:
                pass
            if self._child.stdin is not None:
                self._child.stdin.close()
            await self._child.wait()
        if self._transport is not None:
            self._transport.close()
