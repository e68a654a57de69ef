# SPDX-License-Identifier: Apache-2.0
"""What happens when connections break: nothing runs twice, nothing is lost that need not be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from opendsec.api import wire
from opendsec.api.errors import InvalidRequest, NotFound, SandboxLost, Unavailable
from opendsec.api.exec import Command, ExecEvent, ExecResult
from opendsec.api.files import FileInfo, Written
from opendsec.api.sandboxes import Event, SandboxList
from opendsec.api.spec import Container
from opendsec.client._core import Request, RetryPolicy
from opendsec.client.aio import Client
from opendsec.client.processes import STDIN_CHUNK_BYTES
from opendsec.client.transport import ConnectionBroken, Streamed
from opendsec.testing.fakes.edge import FakeEdge

RESULT = ExecResult(outcome="exited", process_id="proc_1", exit_code=0)
NO_DELAY = RetryPolicy(attempts=4, first_delay_s=0.0, max_delay_s=0.0)

Answer = ConnectionBroken | msgspec.Struct | list[msgspec.Struct | ConnectionBroken] | Exception


class _Chunks:
    def __init__(self, items: list[msgspec.Struct | ConnectionBroken]) -> None:
        self.status, self.length = 200, None
        self._items = items

    async def chunks(self) -> AsyncIterator[bytes]:
        for item in self._items:
            if isinstance(item, ConnectionBroken):
                raise item
            yield wire.encode(item) + b"\n"


class Scripted:
    """A transport that gives prepared answers and remembers what it was asked."""

    local = True

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.requests: list[Request] = []

    async def call(self, request: Request) -> tuple[int, bytes]:
        self.requests.append(request)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, msgspec.Struct)
        return 200, wire.encode(answer)

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[Streamed]:
        self.requests.append(request)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, list)
        yield _Chunks(answer)

    async def aclose(self) -> None: ...


def broken(*, sent: bool) -> ConnectionBroken:
    return ConnectionBroken("it broke", sent=sent)


def client_over(*answers: Answer) -> tuple[Client, Scripted]:
    transport = Scripted(*answers)
    return Client(transport=transport, retry=NO_DELAY), transport


async def test_a_command_is_sent_again_under_the_same_action_id() -> None:
    client, transport = client_over(broken(sent=True), broken(sent=False), RESULT)
    assert (await client.sandbox("sb_1").run("true")).ok
    bodies = [wire.decode(request.body, Command) for request in transport.requests if isinstance(request.body, bytes)]
    assert len(bodies) == 3 and len({body.action_id for body in bodies}) == 1


async def test_retries_end() -> None:
    client, transport = client_over(*[broken(sent=True)] * 4)
    with pytest.raises(Unavailable, match="it broke"):
        await client.list()
    assert len(transport.requests) == 4


@pytest.mark.parametrize(
    "act",
    [
        lambda client: client.sandbox("sb_1").process("proc_1").signal(9),
        lambda client: client.sandbox("sb_1").process("proc_1").write("x"),
        lambda client: client.sandbox("sb_1").process("proc_1").resize(1, 2),
        lambda client: client.sandbox("sb_1").files.move("/a", "/b"),
        lambda client: client.sandbox("sb_1").files.mkdir("/a"),
        lambda client: client.sandbox("sb_1").files.remove("/a"),
        lambda client: client.sandbox("sb_1").files.chmod("/a", 0o600),
        lambda client: client.images.compose("a", "b", []),
        lambda client: client.images.remove("a"),
        lambda client: client.shutdown(),
    ],
)
async def test_what_could_act_twice_is_sent_again_under_the_same_action_id(act: Callable[[Client], object]) -> None:
    client, transport = client_over(broken(sent=True), NotFound("as it happens"))
    with pytest.raises(NotFound):
        await act(client)  # type: ignore[misc]
    first, second = transport.requests
    assert first == second and "action_id=auto-" in first.target


async def test_long_input_has_an_action_id_for_each_piece() -> None:
    client, transport = client_over(*[Written(0)] * 3)
    process = client.sandbox("sb_1").process("proc_1")
    await process.write(bytes(2 * STDIN_CHUNK_BYTES + 1), action_id="mine")
    ids = [request.target.partition("action_id=")[2] for request in transport.requests]
    assert ids == ["mine", "mine%401048576", "mine%402097152"]
    with pytest.raises(InvalidRequest, match="128"):
        await process.write(bytes(2 * STDIN_CHUNK_BYTES), action_id="x" * 125)
    assert len(transport.requests) == 3


async def test_a_directory_is_packed_again_when_it_is_sent_again(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"data")
    info = FileInfo(name="x", raw_name=b"x", kind="directory", size_bytes=0, mode=0o755, uid=0, gid=0, modified_at=0.0)
    client, transport = client_over(info, broken(sent=True), Written(4))
    assert await client.sandbox("sb_1").files.upload(tmp_path, "/x", action_id="mine") == 4
    _, first, second = transport.requests
    assert first.target == second.target and first.target.endswith("action_id=mine") and first.body is not second.body


async def test_what_never_left_is_sent_again() -> None:
    client, transport = client_over(broken(sent=False), Written(1))
    await client.sandbox("sb_1").process("proc_1").close_stdin()
    assert len(transport.requests) == 2


async def test_a_write_of_bytes_is_repeatable_and_a_streamed_one_is_not() -> None:
    client, transport = client_over(broken(sent=True), Written(3))
    assert await client.sandbox("sb_1").files.write("/a", "abc") == 3
    assert transport.requests[0] == transport.requests[1]

    async def body() -> AsyncIterator[bytes]:
        yield b"abc"

    client, transport = client_over(broken(sent=True), Written(3))
    with pytest.raises(Unavailable):
        await client.sandbox("sb_1").files.write("/a", body())


async def test_a_short_write_is_not_taken_for_done() -> None:
    client, _ = client_over(Written(2))
    with pytest.raises(Unavailable, match="wrote 3 bytes"):
        await client.sandbox("sb_1").files.write("/a", "abc")


async def test_answers_are_never_retried() -> None:
    client, transport = client_over(SandboxLost("gone"), RESULT)
    with pytest.raises(SandboxLost):
        await client.sandbox("sb_1").run("true")
    assert len(transport.requests) == 1


def output(offset: int, data: bytes, stream: str = "stdout") -> ExecEvent:
    return ExecEvent(kind="output", process_id="proc_1", stream=stream, offset=offset, data=data)  # type: ignore[arg-type]


STARTED, EXIT = ExecEvent(kind="started", process_id="proc_1"), ExecEvent(kind="exit", process_id="proc_1", result=RESULT)


async def test_a_stream_goes_on_where_it_broke() -> None:
    client, transport = client_over(
        [STARTED, output(0, b"caf\xc3"), output(0, b"e1", "stderr"), broken(sent=True)],
        broken(sent=False),
        [STARTED, output(4, b"\xa9!")],  # ends without an exit: broken as well
        [STARTED, EXIT],
    )
    events = [event async for event in client.sandbox("sb_1").stream("x")]
    assert [event.kind for event in events] == ["started", "output", "output", "output", "exit"]
    assert "".join(event.text for event in events if event.stream == "stdout") == "café!"
    targets = [request.target for request in transport.requests]
    assert targets[0] == "/v1/sandboxes/sb_1/stream"
    assert targets[1] == targets[2] == "/v1/sandboxes/sb_1/processes/proc_1/stream?stdout_offset=4&stderr_offset=2"
    assert targets[3].endswith("stdout_offset=6&stderr_offset=2")


async def test_a_stream_that_broke_before_it_began_is_asked_for_again() -> None:
    client, transport = client_over([broken(sent=True)], [STARTED, EXIT])
    events = [event async for event in client.sandbox("sb_1").stream("x", action_id="one")]
    assert [event.kind for event in events] == ["started", "exit"]
    assert transport.requests[0] == transport.requests[1]


async def test_gaps_and_unfinished_characters() -> None:
    gap = ExecEvent(kind="gap", process_id="proc_1", stream="stdout", offset=2, missing_bytes=10)
    client, _ = client_over([STARTED, output(0, b"a\xc3"), gap, output(12, b"b\xe2\x82"), EXIT])
    events = [event async for event in client.sandbox("sb_1").stream("x")]
    assert [(event.kind, event.text) for event in events[1:-1]] == [
        ("output", "a"),
        ("gap", "\ufffd"),
        ("output", "b"),
        ("output", "\ufffd"),
    ]


async def test_events_are_followed_across_breaks() -> None:
    first, second = (Event(seq=seq, at=0.0, kind="x") for seq in (4, 5))
    client, transport = client_over([first, broken(sent=True)], [second])
    seen = []
    async for event in client.events(after=3, follow=True):
        seen.append(event.seq)
        if event.seq == 5:
            break
    assert seen == [4, 5]
    assert [request.target for request in transport.requests] == ["/v1/events?after=3&follow=1", "/v1/events?after=4&follow=1"]


async def test_listing_by_several_labels_filters_here() -> None:
    client, transport = client_over(SandboxList(sandboxes=()))
    assert await client.list(labels={"a": "1", "b": "2"}, state="running") == []
    assert transport.requests[0].target == "/v1/sandboxes?label=a%3D1&state=running"


async def test_what_a_cancelled_create_made_is_ended(client: Client, edge: FakeEdge) -> None:
    """The edge may have made them by the time the caller loses interest, and only the caller would have known their ids."""
    edge.requests.clear()
    creating = asyncio.ensure_future(client.create_many(Container(image="debian"), 3))
    while "CREATE" not in edge.requests:
        await asyncio.sleep(0)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert edge.boxes == {}
