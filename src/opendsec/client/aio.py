# SPDX-License-Identifier: Apache-2.0
"""The SDK: `Client` for an edge, `Sandbox` for one of its sandboxes. `sync.py` mirrors every class of it.

Errors are those of `opendsec.api.errors`. Constructors do no I/O. A broken connection is repaired where that cannot run anything
twice (`RetryPolicy`); for that, every mutating call bears an action id, the caller's or one that is made up.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Literal, Unpack

from opendsec.api import routes, wire
from opendsec.api.errors import Internal, InvalidRequest, NotFound, OpenDSecError, Unavailable, from_body
from opendsec.api.exec import ExecResult, ProcessInfo, ProcessList, SessionInfo, SessionRequest
from opendsec.api.fn import FnCall, JudgeResult, JudgeTask, Language, LanguageList
from opendsec.api.images import LayerKind, PackRequest, PackResult
from opendsec.api.references import pack_names
from opendsec.api.sandboxes import Capabilities, CreateResponse, EdgeInfo, Event, SandboxInfo, SandboxList, SandboxState, Slot, Usage
from opendsec.api.snapshots import ForkRequest, SnapshotInfo, SnapshotRequest
from opendsec.api.spec import BATCH, AnySpec, CreateRequest, Spec, check_integer
from opendsec.client import _core, batch, fn, launch
from opendsec.client._core import CommandOptions, RetryPolicy
from opendsec.client.batch import Inputs
from opendsec.client.files import Files
from opendsec.client.fn import CallOptions, Pools
from opendsec.client.images import Images
from opendsec.client.link import Link
from opendsec.client.processes import Process, Session, follow
from opendsec.client.results import FnResult, Result, StreamEvent
from opendsec.client.screen import Keyboard, Mouse, Screen
from opendsec.client.snapshots import Snapshots
from opendsec.client.transport import ConnectionBroken, HttpxTransport, Transport
from opendsec.client.unix import UnixTransport

KILL_TIMEOUT_S = 10.0  # how long a cancelled task waits for the end of its sandbox

__all__ = [
    "Client",
    "Files",
    "Images",
    "Keyboard",
    "Mouse",
    "Pools",
    "Process",
    "RetryPolicy",
    "Sandbox",
    "Screen",
    "Session",
    "Snapshots",
]


class Client:
    """An edge, or a gateway that speaks for many.

    `address`: None for the edge of this machine, which is started if none runs; `unix:/path/to/edge.sock`, where one is started only if
    `state_dir` is given as well; `http://…` or `https://…` with a `token`. Without an address `$OPENDSEC_ADDRESS` and `$OPENDSEC_TOKEN`
    are used if set. `run_dir` and `state_dir` say where the local edge lives (`$OPENDSEC_RUN_DIR`, `$OPENDSEC_STATE_DIR`, else
    `/run/opendsec`, `/var/lib/opendsec`).

    Use it as `async with Client() as client:`, or call `aclose()` at the end. Closing it ends no sandbox.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        state_dir: str | os.PathLike[str] | None = None,
        start_edge: bool = True,
        retry: RetryPolicy | None = None,
        transport: Transport | None = None,
    ) -> None:
        if transport is None:
            transport = _transport(address, token, run_dir, state_dir, start_edge)
        self._link = Link(transport, retry or RetryPolicy())
        self.images = Images(self._link)
        self.pools = Pools(self._link)
        self.snapshots = Snapshots(self._link)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections; may be repeated."""
        await self._link.transport.aclose()

    # --- sandboxes

    async def create(self, spec: AnySpec, *, action_id: str | None = None) -> Sandbox:
        """A sandbox, ready for commands. Raises InvalidRequest, QuotaExceeded (admission), NotFound (the image), Unsupported.

        If the call is cancelled, what came of it is ended.
        """
        slot = (await self.create_many(spec, 1, action_id=action_id))[0]
        if isinstance(slot, OpenDSecError):
            raise slot
        return slot

    async def create_many(self, spec: AnySpec, count: int, *, action_id: str | None = None) -> list[Sandbox | OpenDSecError]:
        """`count` sandboxes of one spec by one request: in each slot a sandbox, or why there is none."""
        if not isinstance(spec, Spec):
            raise _no_spec(spec)
        fields = {"spec": spec, "count": count, "action_id": action_id if action_id is not None else _core.new_action_id()}
        # Through JSON and back: a spec is made by its constructor, which does not look at types.
        body = wire.decode(_core.encode(wire.convert(fields, CreateRequest)), CreateRequest)
        check_integer(body.count, "count", BATCH)
        body.spec.check()
        _core.check_action(body.action_id)
        return await _slots(self._link, self._link.call(routes.CREATE, CreateResponse, body=body, repeatable=True), count)

    async def get(self, sandbox_id: str) -> Sandbox:
        """The sandbox of that id. Raises NotFound."""
        info = await self._link.call(routes.GET, SandboxInfo, {"sandbox_id": sandbox_id})
        return Sandbox(self._link, info.id, info)

    def sandbox(self, sandbox_id: str) -> Sandbox:
        """The sandbox of that id, without asking whether it exists: the first call on it tells."""
        return Sandbox(self._link, sandbox_id)

    async def list(self, *, labels: Mapping[str, str] | None = None, state: SandboxState | Literal["all"] | None = None) -> list[Sandbox]:
        """Sandboxes that have all of `labels`: the living ones, those in `state`, or all that the edge remembers, ended ones too."""
        wanted = dict(labels or {})
        first = next((f"{key}={value}" for key, value in wanted.items()), None)
        answer = await self._link.call(routes.LIST, SandboxList, query={"label": first, "state": state})
        return [
            Sandbox(self._link, info.id, info)
            for info in answer.sandboxes
            if all(info.labels.get(key) == value for key, value in wanted.items())
        ]

    # --- function calls

    async def call(self, call: FnCall | None = None, *, check: bool = False, **options: Unpack[CallOptions]) -> FnResult:
        """Run a program or a Python function in a warm pool and wait for its end; nothing of it stays behind.

        `options` are the fields of FnCall, in the place of those of `call`: `client.call(source="print(1)")`,
        `client.call(function="statistics:mean", args=[[1, 2, 3]])`. A program that fails is a result; with `check` it raises
        CommandFailed. Cancelling the call kills the program.
        """
        result = await fn.call(self._link, fn.made_call(call, options))
        return result.check() if check else result

    async def map(self, call: FnCall, inputs: Inputs, *, window: int = 64) -> AsyncGenerator[FnResult, None]:
        """One call over many inputs: results as they end, each with the `index` of its input.

        An input is an FnInput, or text or bytes for stdin; for a function a list of arguments, a mapping of named ones, or any other
        JSON value as the only argument. The edge works on `window` inputs at a time; at most twice as many are taken from `inputs` ahead
        of the results that were asked for. An input that fails is a result. Leaving the loop kills what still runs
        (`contextlib.aclosing` waits for that).
        """
        async with aclosing(self.map_lists(call, inputs, window=window)) as lists:
            async for results in lists:
                for result in results:
                    yield result

    async def map_lists(self, call: FnCall, inputs: Inputs, *, window: int = 64) -> AsyncGenerator[Sequence[FnResult], None]:
        """As `map`, in lists of what came together: for programs that cannot spend a step of the event loop on each result."""
        async with aclosing(batch.run(self._link, fn.made_batch(call, window), inputs)) as lists:
            async for results in lists:
                yield [FnResult(one) for one in results]

    async def judge(self, task: JudgeTask) -> JudgeResult:
        """Compile a program once and run it on many tests. What it gets wrong is a result."""
        return await self._link.call(routes.JUDGE, JudgeResult, body=fn.made_task(task), repeatable=True)

    async def languages(self) -> Sequence[Language]:
        """The languages of programs that this edge knows."""
        return (await self._link.call(routes.LANGUAGES, LanguageList)).languages

    # --- the edge

    async def info(self) -> EdgeInfo:
        """The edge itself: state, sandboxes, what it has promised and may promise."""
        return await self._link.call(routes.INFO, EdgeInfo)

    async def capabilities(self) -> Capabilities:
        """What this edge offers, and why something is missing."""
        return await self._link.call(routes.CAPABILITIES, Capabilities)

    async def events(self, *, sandbox_id: str | None = None, after: int = 0, follow: bool = False) -> AsyncGenerator[Event, None]:
        """What happened after event number `after`; with `follow`, what happens from then on, across broken connections."""
        attempt = 1
        while True:
            query: _core.Query = {"sandbox_id": sandbox_id, "after": after, "follow": follow}
            try:
                async with aclosing(self._link.lines(routes.EVENTS, Event, query=query)) as lines:
                    async for event in lines:
                        attempt, after = 1, event.seq
                        yield event
                if not follow:
                    return
                raise ConnectionBroken("the edge ended the stream", sent=True)
            except ConnectionBroken as error:
                await self._link.before_retry(error, attempt, repeatable=True)
                attempt += 1

    async def drain(self, *, action_id: str | None = None) -> EdgeInfo:
        """From now on the edge makes no new sandboxes."""
        return await self._link.call(routes.DRAIN, EdgeInfo, query={"action_id": action_id})

    async def shutdown(self, *, kill: bool = False, action_id: str | None = None) -> EdgeInfo:
        """End the edge. Its sandboxes live on for the next one, unless `kill` ends them first."""
        return await self._link.call(routes.SHUTDOWN, EdgeInfo, query={"kill": kill, "action_id": action_id})


class Sandbox:
    """One isolated, stateful execution environment. As `async with box:` it is killed at the end."""

    def __init__(self, link: Link, sandbox_id: str, info: SandboxInfo | None = None) -> None:
        self._link = link
        self.id = sandbox_id
        self._ids = {"sandbox_id": sandbox_id}
        self.info = info  # as last heard of; None before the first `refresh`
        self.files = Files(link, sandbox_id)
        self.screen, self.mouse, self.keyboard = Screen(link, sandbox_id), Mouse(link, sandbox_id), Keyboard(link, sandbox_id)

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # Shielded: a cancelled task must not leave its sandbox behind.
        killing = asyncio.ensure_future(self.kill())
        try:
            await asyncio.shield(killing)
        except asyncio.CancelledError:
            await asyncio.wait((killing,), timeout=KILL_TIMEOUT_S)
            killing.cancel()
            raise
        except OpenDSecError:
            if error is None:
                raise

    async def refresh(self) -> SandboxInfo:
        """Ask the edge for its state."""
        self.info = await self._link.call(routes.GET, SandboxInfo, self._ids)
        return self.info

    async def usage(self) -> Usage:
        """What it uses now."""
        return await self._link.call(routes.USAGE, Usage, self._ids)

    async def kill(self, *, action_id: str | None = None) -> None:
        """End it and all that runs in it. Killing one that has ended already is no error."""
        try:
            self.info = await self._link.call(routes.KILL, SandboxInfo, self._ids, query={"action_id": action_id})
        except NotFound:
            if self.info is None:
                raise  # nothing ever said that it existed

    # --- pause, copies

    async def pause(self, *, action_id: str | None = None) -> SandboxInfo:
        """Save its state, memory too, and let go of its memory and processors; what runs in it goes on when it is resumed, which any call
        does that needs it. One that is paused already stays so. Raises Unsupported where the backend cannot."""
        self.info = await self._link.call(routes.PAUSE, SandboxInfo, self._ids, query={"action_id": action_id})
        return self.info

    async def resume(self, *, action_id: str | None = None) -> SandboxInfo:
        """Let it run again. Raises QuotaExceeded if its memory has been promised to others by now; it stays paused then."""
        self.info = await self._link.call(routes.RESUME, SandboxInfo, self._ids, query={"action_id": action_id})
        return self.info

    async def fork(self, count: int = 1, *, action_id: str | None = None) -> list[Sandbox | OpenDSecError]:
        """`count` live copies: each goes on from this moment, with an identity and a TTL of its own; in each slot a sandbox, or why there
        is none. If the call is cancelled, what came of it is ended. Raises Unsupported where the backend cannot."""
        fields = {"count": count, "action_id": action_id if action_id is not None else _core.new_action_id()}
        body = wire.convert(fields, ForkRequest)
        body.check()
        return await _slots(self._link, self._link.call(routes.FORK, CreateResponse, self._ids, body=body, repeatable=True), count)

    async def snapshot(self, name: str = "", *, memory: bool = True, action_id: str | None = None) -> SnapshotInfo:
        """Keep what it is now, under a new name (or the snapshot's id): its disk and its memory, or its disk alone. It stands still for a
        moment. `client.snapshots` lists and removes; a spec's `snapshot` makes sandboxes of it. Raises Conflict if the name is taken."""
        fields = {"name": name, "memory": memory, "action_id": action_id if action_id is not None else _core.new_action_id()}
        body = wire.convert(fields, SnapshotRequest)
        body.check()
        return await self._link.call(routes.SNAPSHOT, SnapshotInfo, self._ids, body=body, repeatable=True)

    async def pack(
        self,
        name: str,
        *,
        kind: LayerKind = "workspace",
        scrub: bool = True,
        scrub_paths: Sequence[str] = (),
        keep_paths: Sequence[str] = (),
        packages: Sequence[str] = (),
        fail_on_warnings: bool = False,
        action_id: str | None = None,
    ) -> PackResult:
        """Make what was written in this sandbox a layer `name` (`NAME@VERSION`), and of it and what lies below an image `NAME:VERSION`. The
        sandbox stands still for moments and goes on running.

        `scrub` leaves out histories, caches, credentials, /tmp and what tools leave behind; `scrub_paths` are more shell patterns to leave
        out, `keep_paths` what is kept in any case. A linter warns of leaked answers, also of `packages` in caches; with `fail_on_warnings`
        it makes the call raise Conflict, and nothing is kept.
        """
        fields = {
            "name": name,
            "kind": kind,
            "scrub": scrub,
            "scrub_paths": scrub_paths,
            "keep_paths": keep_paths,
            "packages": packages,
            "fail_on_warnings": fail_on_warnings,
            "action_id": action_id if action_id is not None else _core.new_action_id(),
        }
        body = wire.decode(_core.encode(wire.convert(fields, PackRequest)), PackRequest)
        pack_names(body)
        return await self._link.call(routes.PACK, PackResult, self._ids, body=body, repeatable=True)

    # --- commands

    async def run(self, command: str | Sequence[str], *, check: bool = False, **options: Unpack[CommandOptions]) -> Result:
        """Run a command and wait for its end: text is shell text, a sequence is a program and its arguments.

        `options` are those of `CommandOptions`. A command that fails is a result; with `check` it raises CommandFailed. Raises
        SandboxLost or Unavailable if it cannot be known how it ended. Cancelling the call does not stop the command: give `timeout_s`.
        """
        body = _core.command(command, options)
        raw = await self._link.call(routes.RUN, ExecResult, self._ids, body=body, repeatable=True)
        result = Result(raw, _core.label(command))
        return result.check() if check else result

    def stream(self, command: str | Sequence[str], **options: Unpack[CommandOptions]) -> AsyncGenerator[StreamEvent, None]:
        """Run a command and iterate over what it does, as it happens; the last event has the result."""
        return follow(self._link, self.id, command=_core.command(command, options), label=_core.label(command))

    async def start(self, command: str | Sequence[str], *, stdin_stream: bool = False, **options: Unpack[CommandOptions]) -> Process:
        """Start a command in the background. With `stdin_stream` its input comes by `Process.write`."""
        body = _core.command(command, options, stdin_stream=stdin_stream)
        info = await self._link.call(routes.START, ProcessInfo, self._ids, body=body, repeatable=True)
        return Process(self._link, self.id, info.id, label=_core.label(command))

    async def processes(self) -> Sequence[ProcessInfo]:
        """The commands that run, and those that ended lately, whoever started them."""
        return (await self._link.call(routes.PROCESSES, ProcessList, self._ids)).processes

    def process(self, process_id: str) -> Process:
        """A command that was started before, by its id; no I/O."""
        return Process(self._link, self.id, process_id)

    async def session(
        self,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        action_id: str | None = None,
    ) -> Session:
        """A shell that keeps its directory, variables, functions and background jobs between commands."""
        fields = {"cwd": cwd, "env": dict(env or {}), "user": user, "action_id": action_id or _core.new_action_id()}
        body = wire.convert(fields, SessionRequest)
        body.check()
        return Session(self._link, await self._link.call(routes.OPEN_SESSION, SessionInfo, self._ids, body=body, repeatable=True))

    def __repr__(self) -> str:
        return f"<Sandbox {self.id}>"


async def _slots(link: Link, asking: Coroutine[None, None, CreateResponse], count: int) -> list[Sandbox | OpenDSecError]:
    """What is in the slots of the answer. Cancelled, it ends what came of it: nobody else will ever learn the ids."""
    answering = asyncio.ensure_future(asking)
    try:
        answer = await asyncio.shield(answering)
    except asyncio.CancelledError:
        await asyncio.wait((answering,), timeout=KILL_TIMEOUT_S)
        if not answering.done():
            answering.cancel()
        elif answering.exception() is None:
            boxes = [_slot(link, slot) for slot in answering.result().slots]
            await asyncio.gather(*(box.kill() for box in boxes if isinstance(box, Sandbox)), return_exceptions=True)
        raise
    if len(answer.slots) != count:
        raise Internal(f"asked for {count} sandboxes, got {len(answer.slots)} slots")
    return [_slot(link, slot) for slot in answer.slots]


def _slot(link: Link, slot: Slot) -> Sandbox | OpenDSecError:
    if slot.sandbox is not None:
        return Sandbox(link, slot.sandbox.id, slot.sandbox)
    return from_body(slot.error) if slot.error else Internal("an empty slot")


def _no_spec(given: object) -> InvalidRequest:
    if isinstance(given, FnCall):
        return InvalidRequest("an FnCall makes no sandbox: use client.call, or client.map for many", field="spec")
    return InvalidRequest(f"must be a spec such as Container(image=…), not {type(given).__name__}", field="spec")


def _transport(
    address: str | None,
    token: str | None,
    run_dir: str | os.PathLike[str] | None,
    state_dir: str | os.PathLike[str] | None,
    start_edge: bool,
) -> Transport:
    if address is None and run_dir is None:
        address = os.environ.get("OPENDSEC_ADDRESS") or None
    token = token or os.environ.get("OPENDSEC_TOKEN") or None
    if address is not None and address.startswith(("http://", "https://")):
        return HttpxTransport(address, token=token)
    runs = Path(run_dir) if run_dir is not None else launch.default_run_dir()
    socket_path = runs / launch.SOCKET_NAME
    if address is not None:
        if not address.startswith("unix:/"):
            raise InvalidRequest(f"must be unix:/path, http://… or https://…; got {address[:80]!r}", field="address")
        socket_path = Path("/" + address.removeprefix("unix:").lstrip("/"))
        # Who names a socket means the edge that is there. One started in its place would have the default state, somebody else's.
        start_edge = start_edge and state_dir is not None and socket_path.name == launch.SOCKET_NAME
        runs = socket_path.parent
    state = Path(state_dir) if state_dir is not None else launch.default_state_dir()

    async def start() -> None:
        await asyncio.to_thread(launch.start_edge, runs, state)

    if len(os.fsencode(socket_path)) > 107:
        raise Unavailable(f"{socket_path}: a unix socket's path may have at most 107 bytes")
    return UnixTransport(str(socket_path), token=token, start=start if start_edge else None)
