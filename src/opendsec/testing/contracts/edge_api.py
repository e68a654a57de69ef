# SPDX-License-Identifier: Apache-2.0
"""The contract of an edge on the wire: named checks over a connected HTTP client.

    @pytest.mark.parametrize("name", edge_api.CHECKS)
    async def test_contract(name, edge):          # edge: an Edge, see below
        await edge_api.CHECKS[name](edge)

Each check makes what it needs and ends it. They need of an image: /bin/sh and the usual small programs (cat, printf, sleep, kill, stty).
Commands work in `WORK` by relative names, so that a backend that does not isolate can take part.
"""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote_from_bytes

import httpx
import msgspec

from opendsec.api import wire
from opendsec.api.errors import ErrorBody
from opendsec.api.exec import ExecEvent, ExecResult, ProcessInfo, ProcessList, SessionInfo
from opendsec.api.files import FileInfo, FileList, WatchEvent, Written
from opendsec.api.ids import new_id
from opendsec.api.images import ImageList
from opendsec.api.sandboxes import Capabilities, CreateResponse, EdgeInfo, Event, SandboxInfo, SandboxList, Slot, Usage
from opendsec.api.units import parse_bytes

WORK = "/workspace"
TIMEOUT_S = 60.0
INODES = 4096
S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True)
class Edge:
    """An edge under test. `occupied`: ids of sandboxes of which anything is left on the machine, by its own evidence. `records`: how many
    rows of each kind its journal has."""

    client: httpx.AsyncClient
    image: str
    occupied: Callable[[], set[str]]
    records: Callable[[], dict[str, int]]
    restart: Callable[[], Awaitable[None]]  # stop it gracefully, start another on the same state
    tcp: Callable[[str | None], httpx.AsyncClient]  # over TCP, with this token or none
    token: str
    socket: str
    memory: str = "64MiB"
    disk: str = "64MiB"
    backend: str = "container"
    ttl_s: float = 0.5  # long enough to be made and looked at

    def spec(self, **fields: object) -> dict[str, object]:
        sizes = {"memory": self.memory, "disk": self.disk, "inodes": INODES}
        return {"backend": self.backend, "image": self.image, **sizes, **fields}

    async def call(self, kind: type[S], method: str, path: str, body: object = None, *, content: bytes | None = None) -> S:
        """A call that must succeed."""
        response = await self.client.request(method, path, content=content if body is None else json.dumps(body).encode())
        assert response.status_code == 200, f"{method} {path}: {response.status_code} {response.text}"
        return wire.decode(response.content, kind)

    async def refuse(self, status: int, method: str, path: str, body: object = None) -> ErrorBody:
        """A call that must fail with this status."""
        response = await self.client.request(method, path, content=None if body is None else json.dumps(body).encode())
        assert response.status_code == status, f"{method} {path}: {response.status_code} {response.text}"
        return wire.decode(response.content, wire.ErrorResponse).error

    async def create(self, count: int = 1, *, action_id: str | None = None, **fields: object) -> tuple[Slot, ...]:
        return await self._create(count, action_id, fields)

    async def _create(self, count: int, action_id: str | None, fields: dict[str, object]) -> tuple[Slot, ...]:
        body: dict[str, object] = {"spec": self.spec(**fields), "count": count}
        if action_id is not None:
            body["action_id"] = action_id
        return (await self.call(CreateResponse, "POST", "/v1/sandboxes", body)).slots

    @asynccontextmanager
    async def box(self, **fields: object) -> AsyncIterator[str]:
        """The path of a sandbox that is ended afterwards."""
        async with asyncio.timeout(TIMEOUT_S):
            (slot,) = await self._create(1, None, fields)
            assert slot.sandbox is not None, slot.error
            path = f"/v1/sandboxes/{slot.sandbox.id}"
            try:
                await self.call(FileInfo, "POST", f"{path}/files/mkdir?path={WORK}&parents=1")
                yield path
            finally:
                await self.client.delete(path)

    async def run(self, box: str, shell: str, **fields: object) -> ExecResult:
        return await self.call(ExecResult, "POST", f"{box}/run", {"shell": shell, "cwd": WORK, **fields})

    @asynccontextmanager
    async def lines(self, kind: type[S], method: str, path: str, body: object = None) -> AsyncIterator[AsyncIterator[S]]:
        """The items of a stream; leaving ends it."""
        async with self.client.stream(method, path, content=None if body is None else json.dumps(body).encode()) as response:
            if response.status_code != 200:
                raise AssertionError(f"{method} {path}: {response.status_code} {(await response.aread()).decode()}")

            async def items() -> AsyncIterator[S]:
                async for line in response.aiter_lines():
                    yield wire.decode(line.encode(), kind)

            yield items()

    async def wait_event(self, kind: str, sandbox_id: str, *, count: int = 1) -> Event:
        """The first event of this kind about the sandbox, or the `count`-th, past or to come."""
        async with self.lines(Event, "GET", f"/v1/events?follow=1&sandbox_id={sandbox_id}") as events:
            async for event in events:
                count -= event.kind == kind
                if not count:
                    return event
        raise AssertionError(f"no {kind}")


Check = Callable[[Edge], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def box_id(path: str) -> str:
    return path.rpartition("/")[2]


def sandbox(slot: Slot) -> SandboxInfo:
    assert slot.sandbox is not None, slot.error
    return slot.sandbox


# --- the edge and its sandboxes --------------------------------------------------------------------------------------------


@check
async def tells_about_itself(edge: Edge) -> None:
    info = await edge.call(EdgeInfo, "GET", "/v1/info")
    assert (info.api, info.state) == (wire.API_GENERATION, "ready")
    found = await edge.call(Capabilities, "GET", "/v1/capabilities")
    assert all(one.available or one.reason for some in found.backends.values() for one in some)
    images = await edge.call(ImageList, "GET", "/v1/images")
    assert edge.image in [image.name for image in images.images]


@check
async def creates_shows_and_kills(edge: Edge) -> None:
    before = await edge.call(EdgeInfo, "GET", "/v1/info")
    (slot,) = await edge.create(labels={"purpose": "contract", "who": "a"}, env={"A": "1"})
    made = sandbox(slot)
    assert (made.state, made.image, made.backend) == ("running", edge.image, edge.backend)
    assert made.limits.memory_bytes == parse_bytes(edge.memory, field="memory")
    path = f"/v1/sandboxes/{made.id}"
    shown = await edge.call(SandboxInfo, "GET", path)
    assert shown.spec is not None and shown.spec.env == {"A": "1"}
    during = await edge.call(EdgeInfo, "GET", "/v1/info")
    assert during.sandboxes == before.sandboxes + 1
    assert during.memory_promised_bytes >= before.memory_promised_bytes + made.limits.memory_bytes
    for label, there in (("", True), ("purpose", True), ("purpose=contract", True), ("purpose=x", False), ("x", False)):
        listed = await edge.call(SandboxList, "GET", f"/v1/sandboxes?label={label}" if label else "/v1/sandboxes")
        assert (made.id in [one.id for one in listed.sandboxes]) is there, label
        assert all(one.spec is None for one in listed.sandboxes)
    assert made.id in edge.occupied()
    killed = await edge.call(SandboxInfo, "DELETE", path)
    assert (killed.state, killed.message) == ("stopped", "killed by the caller")
    assert made.id not in edge.occupied()
    assert await edge.call(SandboxInfo, "DELETE", path) == killed
    for query, there in (("", False), ("?state=running", False), ("?state=stopped", True), ("?state=all", True)):
        listed = await edge.call(SandboxList, "GET", f"/v1/sandboxes{query}")
        assert (made.id in [one.id for one in listed.sandboxes]) is there, query
    after = await edge.call(EdgeInfo, "GET", "/v1/info")
    assert (after.sandboxes, after.memory_promised_bytes) == (before.sandboxes, before.memory_promised_bytes)


@check
async def creates_many_in_one_request(edge: Edge) -> None:
    made = [sandbox(slot) for slot in await edge.create(20, labels={"batch": "1"})]
    assert len({one.id for one in made}) == 20 and all(one.state == "running" for one in made)
    assert {one.id for one in made} <= edge.occupied()
    await asyncio.gather(*(edge.client.delete(f"/v1/sandboxes/{one.id}") for one in made))
    assert not {one.id for one in made} & edge.occupied()


@check
async def refuses_what_it_cannot_promise_slot_by_slot(edge: Edge) -> None:
    info = await edge.call(EdgeInfo, "GET", "/v1/info")
    memory = int((info.memory_limit_bytes - info.memory_promised_bytes) / 2.5)
    slots = await edge.create(4, memory=memory, disk="16MiB")
    made = [slot.sandbox for slot in slots if slot.sandbox is not None]
    try:
        assert [slot.sandbox is not None for slot in slots] == [True, True, False, False]
        error = slots[2].error
        assert error is not None and (error.code, error.field) == ("quota_exceeded", "memory")
        assert {"resource", "asked", "promised", "limit"} <= set(error.data) and error.data["resource"] == "memory"
        refused = await edge.refuse(429, "POST", "/v1/sandboxes", {"spec": edge.spec(memory=memory, disk="16MiB")})
        assert (refused.code, refused.field) == ("quota_exceeded", "memory")
    finally:
        for one in made:
            await edge.client.delete(f"/v1/sandboxes/{one.id}")


@check
async def creates_once_for_one_action_id(edge: Edge) -> None:
    action = new_id("edge")
    first, second = await asyncio.gather(edge.create(2, action_id=action), edge.create(2, action_id=action))
    third = await edge.create(2, action_id=action)
    made = [sandbox(slot).id for slot in first]
    assert [sandbox(slot).id for slot in second] == [sandbox(slot).id for slot in third] == made
    error = await edge.refuse(409, "POST", "/v1/sandboxes", {"spec": edge.spec(), "count": 3, "action_id": action})
    assert (error.code, error.field) == ("conflict", "action_id")
    for one in made:
        await edge.client.delete(f"/v1/sandboxes/{one}")
    assert [sandbox(slot).state for slot in await edge.create(2, action_id=action)] == ["stopped", "stopped"]


@check
async def kills_once_for_one_action_id(edge: Edge) -> None:
    async with edge.box() as box, edge.box() as other:
        action = new_id("edge")
        killed = await edge.call(SandboxInfo, "DELETE", f"{box}?action_id={action}")
        assert await edge.call(SandboxInfo, "DELETE", f"{box}?action_id={action}") == killed
        await edge.refuse(409, "DELETE", f"{other}?action_id={action}")


@check
async def ends_at_its_absolute_ttl(edge: Edge) -> None:
    async with edge.box(ttl_s=edge.ttl_s) as box:
        event = await edge.wait_event("sandbox.stopped", box_id(box))
        shown = await edge.call(SandboxInfo, "GET", box)
        assert (shown.state, shown.message) == ("stopped", "its ttl_s has passed")
        assert shown.expires_at is not None and event.at >= shown.expires_at == shown.created_at + edge.ttl_s
        assert box_id(box) not in edge.occupied()


@check
async def is_not_idle_while_a_command_runs(edge: Edge) -> None:
    async with edge.box(ttl_idle_s=0.4) as box:
        result = await edge.run(box, "sleep 0.9")
        assert result.outcome == "exited"
        event = await edge.wait_event("sandbox.stopped", box_id(box))
        ended = await edge.wait_event("exec.ended", box_id(box))
        assert event.at - ended.at >= 0.39
        assert (await edge.call(SandboxInfo, "GET", box)).message == "it was idle for ttl_idle_s"


@check
async def tells_what_a_sandbox_uses(edge: Edge) -> None:
    async with edge.box() as box:
        used = await edge.call(Usage, "GET", f"{box}/usage")
        assert used.memory_bytes >= 0 and used.pids >= 0


@check
async def tells_what_happened(edge: Edge) -> None:
    async with edge.box() as box:
        await edge.run(box, "exit 3")
        async with edge.lines(Event, "GET", f"/v1/events?sandbox_id={box_id(box)}") as events:
            found = [event async for event in events]
        assert [event.kind for event in found] == ["sandbox.created", "exec.started", "exec.ended"]
        assert [event.seq for event in found] == sorted({event.seq for event in found})
        assert found[2].data["exit_code"] == 3
        async with edge.lines(Event, "GET", f"/v1/events?sandbox_id={box_id(box)}&after={found[1].seq}") as events:
            assert [event async for event in events] == found[2:]


# --- commands --------------------------------------------------------------------------------------------------------------


@check
async def runs_a_command(edge: Edge) -> None:
    async with edge.box(env={"FROM_SPEC": "s"}) as box:
        result = await edge.run(box, 'printf "%s %s" "$FROM_SPEC" "$GIVEN"; printf oops >&2; exit 3', env={"GIVEN": "a b'\"$x"})
        assert (result.outcome, result.exit_code) == ("exited", 3)
        assert (result.stdout.head, result.stderr.head) == (b"s a b'\"$x", b"oops")
        result = await edge.call(ExecResult, "POST", f"{box}/run", {"argv": ["printf", "%s\\n", "a b", "$HOME"]})
        assert result.stdout.head == b"a b\n$HOME\n"
        result = await edge.run(box, "cat", stdin=b64encode(b"\xff\x00in").decode())
        assert result.stdout.head == b"\xff\x00in"
        result = await edge.call(ExecResult, "POST", f"{box}/run", {"argv": ["/no/such/program"]})
        assert result.outcome == "not_started" and result.message
        result = await edge.run(box, "sleep 60", timeout_s=0.2)
        assert result.outcome == "timed_out" and "time" in result.limits_hit


@check
async def runs_once_for_one_action_id(edge: Edge) -> None:
    async with edge.box() as box:
        action = new_id("edge")
        body = {"shell": "echo x >>count; wc -l <count; sleep 0.2; exit 7", "cwd": WORK, "action_id": action}
        results = await asyncio.gather(*(edge.call(ExecResult, "POST", f"{box}/run", body) for _ in range(3)))
        results.append(await edge.call(ExecResult, "POST", f"{box}/run", body))
        assert all(result == results[0] for result in results)
        assert (results[0].exit_code, results[0].stdout.head.strip(), results[0].action_id) == (7, b"1", action)
        error = await edge.refuse(409, "POST", f"{box}/run", {**body, "shell": "true"})
        assert error.field == "action_id"
        large = {"shell": "head -c 700000 /dev/zero", "cwd": WORK, "action_id": action + "-large"}
        first = await edge.call(ExecResult, "POST", f"{box}/run", large)
        assert first.stdout.head + first.stdout.tail == bytes(700_000)
        assert await edge.call(ExecResult, "POST", f"{box}/run", large) == first


@check
async def streams_a_command(edge: Edge) -> None:
    async with edge.box() as box:
        action = new_id("edge")
        body = {"shell": "echo one; echo two >&2; read line; echo $line", "cwd": WORK, "stdin_mode": "stream", "action_id": action}
        async with edge.lines(ExecEvent, "POST", f"{box}/stream", body) as events:
            started = await anext(events)
            assert started.kind == "started"
            process = f"{box}/processes/{started.process_id}"
            response = await edge.client.post(f"{process}/stdin?close=1", content=b"three\n")
            assert response.status_code == 204, response.text
            found = [event async for event in events]
        assert output(found, "stdout") == b"one\nthree\n" and output(found, "stderr") == b"two\n"
        last = found[-1]
        assert last.kind == "exit" and last.result is not None and last.result.exit_code == 0
        async with edge.lines(ExecEvent, "POST", f"{box}/stream", body) as events:
            again = [event async for event in events]
        assert again[0].process_id == started.process_id and output(again, "stdout") == b"one\nthree\n"


def output(events: list[ExecEvent], stream: str) -> bytes:
    return b"".join(event.data for event in events if event.kind == "output" and event.stream == stream)


@check
async def a_command_outlives_its_reader(edge: Edge) -> None:
    async with edge.box() as box:
        async with edge.lines(
            ExecEvent, "POST", f"{box}/stream", {"shell": "echo one; read x; echo two", "stdin_mode": "stream"}
        ) as events:
            process = f"{box}/processes/{(await anext(events)).process_id}"
        info = await edge.call(ProcessInfo, "GET", process)
        assert info.state == "running"
        async with edge.lines(ExecEvent, "GET", f"{process}/stream?stdout_offset=1") as events:
            assert (await anext(events)).data == b"ne\n"
            await edge.client.post(f"{process}/stdin", content=b"\n")
            rest = [event async for event in events]
        assert output(rest, "stdout") == b"two\n"
        assert (await edge.call(ExecResult, "GET", f"{process}/wait")).stdout.head == b"one\ntwo\n"


@check
async def keeps_background_commands(edge: Edge) -> None:
    async with edge.box() as box:
        info = await edge.call(ProcessInfo, "POST", f"{box}/processes", {"argv": ["sleep", "1000"]})
        listed = await edge.call(ProcessList, "GET", f"{box}/processes")
        assert [one.id for one in listed.processes if one.state == "running"] == [info.id]
        process = f"{box}/processes/{info.id}"
        error = await edge.refuse(503, "GET", f"{process}/wait?timeout_s=0.05")
        assert error.code == "unavailable"
        await edge.call(ProcessInfo, "POST", f"{process}/signal", {"signal": 15})
        result = await edge.call(ExecResult, "GET", f"{process}/wait")
        assert (result.outcome, result.signal) == ("killed", 15)


@check
async def gives_a_terminal(edge: Edge) -> None:
    async with edge.box() as box:
        body = {"shell": "stty size; read x; stty size", "pty": {"rows": 11, "cols": 22}, "stdin_mode": "stream"}
        async with edge.lines(ExecEvent, "POST", f"{box}/stream", body) as events:
            process = f"{box}/processes/{(await anext(events)).process_id}"
            seen = b""
            while b"11 22" not in seen:
                seen += (await anext(events)).data
            await edge.call(ProcessInfo, "POST", f"{process}/resize", {"rows": 33, "cols": 44})
            await edge.client.post(f"{process}/stdin", content=b"\n")
            rest = [event async for event in events]
        assert b"33 44" in output(rest, "stdout")


@check
async def a_kill_ends_what_runs(edge: Edge) -> None:
    async with edge.box() as box:
        info = await edge.call(ProcessInfo, "POST", f"{box}/processes", {"argv": ["sleep", "1000"]})
        waiting = asyncio.ensure_future(edge.client.get(f"{box}/processes/{info.id}/wait"))
        running = asyncio.ensure_future(edge.run(box, "sleep 1000"))
        await edge.wait_event("exec.started", box_id(box), count=2)
        await edge.client.delete(box)
        result = await running
        assert result.outcome == "killed", result
        assert wire.decode((await waiting).content, ExecResult).outcome == "killed"
        error = await edge.refuse(409, "POST", f"{box}/run", {"argv": ["true"]})
        assert (error.code, error.data["state"]) == ("conflict", "stopped")


@check
async def sessions_keep_their_state(edge: Edge) -> None:
    async with edge.box() as box:
        action = new_id("edge")
        body = {"cwd": WORK, "env": {"A": "1"}, "action_id": action}
        session = await edge.call(SessionInfo, "POST", f"{box}/sessions", body)
        assert await edge.call(SessionInfo, "POST", f"{box}/sessions", body) == session and session.state == "open"
        path = f"{box}/sessions/{session.id}"
        await edge.call(ExecResult, "POST", f"{path}/run", {"shell": "mkdir d; cd d; f() { echo $A-$B; }; B=2"})
        once = {"shell": "echo x >>count; f; pwd | tail -c 3; wc -l <count; (exit 4)", "action_id": action + "-run"}
        result = await edge.call(ExecResult, "POST", f"{path}/run", once)
        assert (result.stdout.head.split(), result.exit_code) == ([b"1-2", b"/d", b"1"], 4)
        assert await edge.call(ExecResult, "POST", f"{path}/run", once) == result
        assert result.process_id in [one.id for one in (await edge.call(ProcessList, "GET", f"{box}/processes")).processes]
        waiting = asyncio.ensure_future(edge.call(ExecResult, "POST", f"{path}/run", {"shell": "sleep 1000"}))
        await edge.wait_event("exec.started", box_id(box), count=3)
        assert (await edge.call(SessionInfo, "GET", path)).state == "busy"
        busy = {"shell": "true", "action_id": action + "-busy"}
        await edge.refuse(409, "POST", f"{path}/run", busy)
        (running,) = [one for one in (await edge.call(ProcessList, "GET", f"{box}/processes")).processes if one.state == "running"]
        while not waiting.done():  # a signal reaches what the shell has started, and it may not have got that far
            await edge.call(ProcessInfo, "POST", f"{box}/processes/{running.id}/signal", {"signal": 9})
            await asyncio.wait({waiting}, timeout=0.1)
        assert (await waiting).outcome == "killed"
        assert (await edge.call(ExecResult, "POST", f"{path}/run", busy)).exit_code == 0  # the refusal was no result
        assert (await edge.call(SessionInfo, "DELETE", path)).state == "closed"
        await edge.refuse(409, "POST", f"{path}/run", {"shell": "true"})


# --- files -----------------------------------------------------------------------------------------------------------------


@check
async def writes_and_reads_files(edge: Edge) -> None:
    async with edge.box() as box:
        files = f"{box}/files?path={WORK}"
        content = bytes(range(256)) * 3
        written = await edge.call(Written, "PUT", f"{files}/a.bin&mode=640", content=content)
        assert written.size_bytes == len(content)
        info = await edge.call(FileInfo, "GET", f"{box}/files/stat?path={WORK}/a.bin")
        assert (info.name, info.kind, info.size_bytes, info.mode) == ("a.bin", "file", len(content), 0o640)
        assert (await edge.client.get(f"{files}/a.bin")).content == content
        assert (await edge.client.get(f"{files}/a.bin&offset=5&length=7")).content == content[5:12]
        assert (await edge.client.get(f"{files}/a.bin&offset=5000")).content == b""
        assert (await edge.call(Written, "PUT", f"{files}/a.bin&append=1", content=b"end")).size_bytes == len(content) + 3
        assert (await edge.call(Written, "PUT", f"{files}/empty", content=b"")).size_bytes == 0
        await edge.refuse(404, "PUT", f"{files}/no/such/dir")
        await edge.call(Written, "PUT", f"{files}/d/e/f&parents=1", content=b"deep")
        assert (await edge.run(box, "cat d/e/f")).stdout.head == b"deep"
        moved = await edge.call(FileInfo, "POST", f"{box}/files/move?path={WORK}/a.bin&to={WORK}/b.bin")
        assert moved.name == "b.bin"
        changed = await edge.call(FileInfo, "POST", f"{box}/files/chmod?path={WORK}/b.bin&mode=4755")
        assert changed.mode == 0o4755
        listed = await edge.call(FileList, "GET", f"{box}/files/list?path={WORK}")
        assert sorted(entry.name for entry in listed.entries) == ["b.bin", "d", "empty"]
        await edge.refuse(409, "DELETE", f"{files}/d")
        for name in ("b.bin", "empty", "d&recursive=1"):
            assert (await edge.client.delete(f"{files}/{name}")).status_code == 204
        assert (await edge.call(FileList, "GET", f"{box}/files/list?path={WORK}")).entries == ()


@check
async def takes_any_bytes_in_names(edge: Edge) -> None:
    async with edge.box() as box:
        name = b"caf\xe9 \n+%&="
        path = quote_from_bytes(WORK.encode() + b"/" + name)
        await edge.call(Written, "PUT", f"{box}/files?path={path}", content=b"x")
        (entry,) = (await edge.call(FileList, "GET", f"{box}/files/list?path={WORK}")).entries
        assert entry.raw_name == name
        assert (await edge.client.get(f"{box}/files?path={path}")).content == b"x"


@check
async def streams_large_files(edge: Edge) -> None:
    async with edge.box() as box:
        piece = bytes(range(256)) * 1024
        pieces = 40

        async def body() -> AsyncIterator[bytes]:
            for _ in range(pieces):
                yield piece

        url = f"{box}/files?path={WORK}/large"
        response = await edge.client.put(url, content=body())
        assert wire.decode(response.content, Written).size_bytes == pieces * len(piece)
        async with edge.client.stream("GET", url) as answer:
            assert int(answer.headers["content-length"]) == pieces * len(piece)
            got = b"".join([chunk async for chunk in answer.aiter_bytes()])
        assert got == piece * pieces


@check
async def an_upload_cut_short_leaves_nothing(edge: Edge) -> None:
    async with edge.box() as box:
        action = new_id("edge")
        url = f"{box}/files?path={WORK}/cut&action_id={action}"

        async def body() -> AsyncIterator[bytes]:
            yield bytes(2 << 20)
            raise ConnectionAbortedError

        try:
            await edge.client.put(url, content=body())
        except ConnectionAbortedError:
            pass
        while (await edge.client.put(url, content=b"whole")).status_code != 200:
            await asyncio.sleep(0.001)  # the edge has yet to notice that the first one is gone
        assert (await edge.client.get(f"{box}/files?path={WORK}/cut")).content == b"whole"
        assert len((await edge.call(FileList, "GET", f"{box}/files/list?path={WORK}")).entries) == 1


@check
async def writes_once_for_one_action_id(edge: Edge) -> None:
    async with edge.box() as box:
        url = f"{box}/files?path={WORK}/log&append=1&action_id={new_id('edge')}"
        for _ in range(2):
            assert (await edge.call(Written, "PUT", url, content=b"line\n")).size_bytes == 5
        response = await edge.client.put(url, content=b"other\n")
        assert response.status_code == 409
        assert (await edge.client.get(f"{box}/files?path={WORK}/log")).content == b"line\n"


@check
async def moves_trees_as_tar(edge: Edge) -> None:
    async with edge.box() as box:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name, data in (("tree/a", b"aa"), ("tree/b/c", b"ccc")):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        written = await edge.call(Written, "PUT", f"{box}/archive?path={WORK}", content=buffer.getvalue())
        assert written.size_bytes == 5
        response = await edge.client.get(f"{box}/archive?path={WORK}/tree")
        with tarfile.open(fileobj=io.BytesIO(response.content)) as tar:
            found = {member.name.removeprefix("tree/"): member.size for member in tar if member.isreg()}
        assert found == {"a": 2, "b/c": 3}
        await edge.refuse(404, "GET", f"{box}/archive?path={WORK}/nothing")
        response = await edge.client.put(f"{box}/archive?path={WORK}", content=b"this is no tar stream" * 100)
        assert response.status_code == 400, response.text


@check
async def watches_a_directory(edge: Edge) -> None:
    async with edge.box() as box, edge.lines(WatchEvent, "GET", f"{box}/files/watch?path={WORK}") as events:
        assert (await anext(events)).kind == "ready"
        await edge.call(Written, "PUT", f"{box}/files?path={WORK}/seen", content=b"x")
        async for event in events:
            if event.name == "seen":
                break


# --- access and restarts ---------------------------------------------------------------------------------------------------


@check
async def lets_in_over_tcp_only_with_the_token(edge: Edge) -> None:
    for token, status in ((None, 401), ("wrong", 401), (edge.token + "x", 401), (edge.token, 200)):
        async with edge.tcp(token) as client:
            response = await client.get("/v1/info")
            assert response.status_code == status, token
            if status == 401:
                assert wire.decode(response.content, wire.ErrorResponse).error.code == "unauthorized"
    async with edge.tcp(edge.token) as client:
        body = {"name": "x", "source": {"type": "directory", "path": "/etc"}}
        response = await client.post("/v1/images/build", content=json.dumps(body).encode())
        assert response.status_code == 403, response.text
        for path, name in (("pull", ""), ("push", "x")):
            for reference in ("oci:/etc/x", "docker-archive:/etc/x"):
                body = {"name": name, "reference": reference}
                response = await client.post(f"/v1/images/{path}", content=json.dumps(body).encode())
                assert response.status_code == 403, response.text
        body = {"name": "x", "source": {"type": "dockerfile", "context": "/etc"}}
        response = await client.post("/v1/images/build", content=json.dumps(body).encode())
        assert response.status_code == 403, response.text


@check
async def survives_a_restart(edge: Edge) -> None:
    async with edge.box(ttl_idle_s=3600) as box:
        action = new_id("edge")
        body = {"shell": "echo once >>log; cat log", "cwd": WORK, "action_id": action}
        first = await edge.call(ExecResult, "POST", f"{box}/run", body)
        background = await edge.call(ProcessInfo, "POST", f"{box}/processes", {"argv": ["sleep", "1000"], "action_id": action + "b"})
        shown = await edge.call(SandboxInfo, "GET", box)
        await edge.restart()
        again = await edge.call(SandboxInfo, "GET", box)
        assert (again.state, again.created_at, again.limits, again.spec) == ("running", shown.created_at, shown.limits, shown.spec)
        assert again.idle_expires_at is not None
        assert await edge.call(ExecResult, "POST", f"{box}/run", body) == first
        assert (await edge.run(box, "cat log")).stdout.head == b"once\n"
        ended = await edge.call(ProcessInfo, "GET", f"{box}/processes/{background.id}")
        assert ended.state == "ended" and ended.result is not None and ended.result.outcome == "unknown"
        repeated = await edge.call(ProcessInfo, "POST", f"{box}/processes", {"argv": ["sleep", "1000"], "action_id": action + "b"})
        assert repeated.id == background.id and repeated.result is not None and repeated.result.outcome == "unknown"
        listed = await edge.call(ProcessList, "GET", f"{box}/processes")
        assert background.id in [one.id for one in listed.processes]


@check
async def keeps_deadlines_over_a_restart(edge: Edge) -> None:
    async with edge.box(ttl_s=2 * edge.ttl_s) as box:
        shown = await edge.call(SandboxInfo, "GET", box)
        await edge.restart()
        assert (await edge.call(SandboxInfo, "GET", box)).expires_at == shown.expires_at
        await edge.wait_event("sandbox.stopped", box_id(box))
        assert box_id(box) not in edge.occupied()


@check
async def drains(edge: Edge) -> None:
    async with edge.box() as box:
        info = await edge.call(EdgeInfo, "POST", "/v1/drain")
        assert info.state == "draining"
        error = await edge.refuse(503, "POST", "/v1/sandboxes", {"spec": edge.spec()})
        assert error.code == "unavailable"
        assert (await edge.run(box, "echo on")).stdout.head == b"on\n"
        await edge.restart()
        assert (await edge.call(EdgeInfo, "GET", "/v1/info")).state == "ready"
        assert (await edge.run(box, "echo on")).stdout.head == b"on\n"
