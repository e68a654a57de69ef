# SPDX-License-Identifier: Apache-2.0
"""Commands that are running: following one, talking to one, and shells that keep their state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType

from opendsec.api import routes, wire
from opendsec.api.errors import NotFound, OpenDSecError
from opendsec.api.exec import (
    DEFAULT_CAPTURE_BYTES,
    Command,
    ExecEvent,
    ExecResult,
    ProcessInfo,
    Pty,
    SessionInfo,
    SessionRun,
    SignalRequest,
)
from opendsec.client import _core
from opendsec.client.link import Link
from opendsec.client.results import Result, StreamEvent
from opendsec.client.transport import ConnectionBroken

STDIN_CHUNK_BYTES = 1 << 20


async def follow(
    link: Link,
    sandbox_id: str,
    *,
    command: Command | None = None,
    process_id: str = "",
    stdout_offset: int = 0,
    stderr_offset: int = 0,
    hold: bool = False,
    label: str = "",
) -> AsyncGenerator[StreamEvent, None]:
    """Start `command`, or attach to `process_id`, and yield what happens until it ends.

    If the connection breaks, this attaches again where it was: nothing is lost that the edge still keeps, nothing comes twice.
    """
    offsets = {"stdout": stdout_offset, "stderr": stderr_offset}
    decoders = {"stdout": _core.TextDecoder(), "stderr": _core.TextDecoder()}
    ids = {"sandbox_id": sandbox_id}
    started = False
    attempt = 1
    while True:
        if process_id:
            query: _core.Query = {**{f"{name}_offset": offset for name, offset in offsets.items()}, "hold": hold or None}
            source = link.lines(routes.ATTACH, ExecEvent, {**ids, "process_id": process_id}, query=query)
        else:
            source = link.lines(routes.STREAM, ExecEvent, ids, body=command)
        try:
            async with aclosing(source) as events:
                async for event in events:
                    attempt, process_id = 1, event.process_id
                    if event.kind == "started":
                        if not started:
                            yield StreamEvent(kind="started", process_id=process_id)
                        started = True
                    elif event.kind == "exit":
                        for late in _flush(decoders, offsets, process_id):
                            yield late
                        result = Result(event.result, label) if event.result else None
                        yield StreamEvent(kind="exit", process_id=process_id, result=result)
                        return
                    else:
                        yield _output(event, decoders, offsets)
            raise ConnectionBroken("the stream ended before the command did", sent=True)
        except ConnectionBroken as error:
            await link.before_retry(error, attempt, repeatable=True)
            attempt += 1


def _output(event: ExecEvent, decoders: dict[str, _core.TextDecoder], offsets: dict[str, int]) -> StreamEvent:
    stream = event.stream or "stdout"
    if event.kind == "gap":
        offsets[stream] = event.offset + event.missing_bytes
        text = decoders[stream].flush()
        return StreamEvent(
            kind="gap", process_id=event.process_id, stream=stream, offset=event.offset, text=text, missing_bytes=event.missing_bytes
        )
    offsets[stream] = event.offset + len(event.data)
    text = decoders[stream].feed(event.data)
    return StreamEvent(kind="output", process_id=event.process_id, stream=stream, offset=event.offset, data=event.data, text=text)


def _flush(decoders: dict[str, _core.TextDecoder], offsets: dict[str, int], process_id: str) -> list[StreamEvent]:
    """Events for characters that were begun and never ended."""
    late = []
    if text := decoders["stdout"].flush():
        late.append(StreamEvent(kind="output", process_id=process_id, stream="stdout", offset=offsets["stdout"], text=text))
    if text := decoders["stderr"].flush():
        late.append(StreamEvent(kind="output", process_id=process_id, stream="stderr", offset=offsets["stderr"], text=text))
    return late


class Process:
    """A command in the background. It goes on when the client goes away; `Sandbox.process(id)` finds it again."""

    def __init__(self, link: Link, sandbox_id: str, process_id: str, *, label: str = "") -> None:
        self._link = link
        self.sandbox_id = sandbox_id
        self.id = process_id
        self._ids = {"sandbox_id": sandbox_id, "process_id": process_id}
        self._label = label

    async def info(self) -> ProcessInfo:
        """Its state now."""
        return await self._link.call(routes.PROCESS, ProcessInfo, self._ids)

    async def wait(self, timeout_s: float | None = None) -> Result:
        """How it ended, with its captured output. Raises TimeoutError if it has not ended after `timeout_s`; it then goes on."""
        async with asyncio.timeout(timeout_s):
            raw = await self._link.call(routes.WAIT, ExecResult, self._ids)
        return Result(raw, self._label)

    def attach(self, *, stdout_offset: int = 0, stderr_offset: int = 0, hold: bool = False) -> AsyncGenerator[StreamEvent, None]:
        """What it does from now on, after what it wrote since the offsets (bytes from the start of each stream).

        With `hold` the command waits while this reader is behind, as it would for a full pipe, so that nothing is lost from now on.
        Without, what is not read in time and not kept is a "gap".
        """
        return follow(
            self._link,
            self.sandbox_id,
            process_id=self.id,
            stdout_offset=stdout_offset,
            stderr_offset=stderr_offset,
            hold=hold,
            label=self._label,
        )

    async def write(self, data: str | bytes, *, action_id: str | None = None) -> None:
        """Send to its standard input; returns once the edge has passed all of it on. Needs `stdin_stream=True` at the start.

        What is longer than 1 MiB goes in pieces, each an action of its own: of the second and later ones `@` and a number are added to
        the id.
        """
        raw = _core.text_bytes(data)
        starts = range(0, len(raw), STDIN_CHUNK_BYTES)
        names = [action_id if action_id is None or not start else f"{action_id}@{start}" for start in starts]
        for name in (action_id, *names[-1:]):
            _core.check_action(name)  # before any of it is sent
        for start, name in zip(starts, names, strict=True):
            await self._stdin(raw[start : start + STDIN_CHUNK_BYTES], close=False, action_id=name)

    async def close_stdin(self, *, action_id: str | None = None) -> None:
        """End of its standard input."""
        await self._stdin(b"", close=True, action_id=action_id)

    async def _stdin(self, data: bytes, *, close: bool, action_id: str | None) -> None:
        query: _core.Query = {"close": close or None, "action_id": action_id}
        _core.read_nothing(*await self._link.send(_core.request(routes.STDIN, self._ids, body=data, query=query)))

    async def signal(self, number: int, *, tree: bool = False, action_id: str | None = None) -> ProcessInfo:
        """Send signal `number` to its first process, or to every process of its tree."""
        body = wire.convert({"signal": number, "tree": tree}, SignalRequest)
        body.check()
        return await self._link.call(routes.SIGNAL, ProcessInfo, self._ids, body=body, query={"action_id": action_id})

    async def resize(self, rows: int, cols: int, *, action_id: str | None = None) -> ProcessInfo:
        """Change the size of its terminal."""
        body = wire.convert({"rows": rows, "cols": cols}, Pty)
        body.check()
        return await self._link.call(routes.RESIZE, ProcessInfo, self._ids, body=body, query={"action_id": action_id})

    async def kill(self, *, action_id: str | None = None) -> ProcessInfo:
        """SIGKILL to all of its tree."""
        return await self.signal(9, tree=True, action_id=action_id)

    def __repr__(self) -> str:
        return f"<Process {self.id}>"


class Session:
    """A shell that keeps its directory, variables, functions and background jobs between commands."""

    def __init__(self, link: Link, info: SessionInfo) -> None:
        self._link = link
        self.sandbox_id = info.sandbox_id
        self.id = info.id
        self._ids = {"sandbox_id": info.sandbox_id, "session_id": info.id}

    async def info(self) -> SessionInfo:
        """Its state now."""
        return await self._link.call(routes.SESSION, SessionInfo, self._ids)

    async def run(
        self,
        command: str,
        *,
        timeout_s: float | None = None,
        capture_bytes: int = DEFAULT_CAPTURE_BYTES,
        output_limit_bytes: int | None = None,
        action_id: str | None = None,
        check: bool = False,
    ) -> Result:
        """Run shell text in it and wait for the end. Raises Conflict if it is closed."""
        body = wire.convert(
            {
                "shell": command,
                "timeout_s": timeout_s,
                "capture_bytes": capture_bytes,
                "output_limit_bytes": output_limit_bytes,
                "action_id": action_id if action_id is not None else _core.new_action_id(),
            },
            SessionRun,
        )
        body.check()
        raw = await self._link.call(routes.SESSION_RUN, ExecResult, self._ids, body=body, repeatable=True)
        result = Result(raw, command)
        return result.check() if check else result

    async def close(self, *, action_id: str | None = None) -> None:
        """End the shell and what runs in it; may be repeated."""
        try:
            await self._link.call(routes.SESSION_CLOSE, SessionInfo, self._ids, query={"action_id": action_id})
        except NotFound:
            pass

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            await self.close()
        except OpenDSecError:
            if error is None:
                raise

    def __repr__(self) -> str:
        return f"<Session {self.id}>"
