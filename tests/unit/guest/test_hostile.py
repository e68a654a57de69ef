# SPDX-License-Identifier: Apache-2.0
"""Guests that lie: each loses its own channel at most, and costs no memory beyond what credit allows."""

from __future__ import annotations

import asyncio
import os
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opendsec.api.errors import SandboxLost, Unavailable
from opendsec.api.exec import Pty
from opendsec.api.spec import Limits
from opendsec.runtime.backend import ExecPlan, Running
from opendsec.runtime.guest import channel as channel_module
from opendsec.runtime.guest import wire
from opendsec.runtime.guest.channel import Channel, Refused
from opendsec.runtime.guest.running import GuestRunning
from opendsec.runtime.poller import Poller
from opendsec.testing.fakes.guest import FakeGuest, Frame, answer, error, exit_payload, frame

LIMITS = Limits(cpu=1.0, cpu_weight=100, memory_bytes=64 << 20, disk_bytes=16 << 20, inodes=4096, pids=64, open_files=256)
PLAN = ExecPlan(process_id="proc_1", argv=("true",), env={"A": "b"}, cwd="/", user="root")
CREDIT = wire.INITIAL_CREDIT


class Line:
    """A channel and the fake at its other end."""

    def __init__(self, channel: Channel, guest: FakeGuest) -> None:
        self.channel, self.guest = channel, guest
        self.fds: list[int] = []

    async def command(self, plan: ExecPlan = PLAN, *, stdin: bool = False) -> tuple[GuestRunning, Frame, list[int]]:
        """A command that runs, what was asked for it, and our ends: [stdin,] stdout, stderr."""
        count = sum(one.type == wire.EXEC for one in self.guest.received)
        ours, theirs = [], []
        for flip in ([True] if stdin else []) + [False, False]:
            reading, writing = os.pipe()
            ours.append(writing if flip else reading)
            theirs.append(reading if flip else writing)
        self.fds += ours
        given = [*theirs] if stdin else [None, *theirs]
        running = await self.channel.exec(plan, [] if plan.pty else given, LIMITS)
        for fd in theirs:
            os.close(fd)
        assert isinstance(running, GuestRunning)
        if running.terminal is not None:
            self.fds.append(running.terminal)
        return running, await self.guest.hear(wire.EXEC, count + 1), ours

    async def breaks(self, said: bytes) -> str:
        """Why the channel is broken after the guest has said that."""
        await self.guest.say(said)
        async with asyncio.timeout(10):
            return await asyncio.shield(self.channel.broken)


async def connect(poller: Poller | None = None) -> Line:
    ours, theirs = socket.socketpair()
    guest = FakeGuest(theirs)
    return Line(await Channel.open(ours, poller=poller), guest)


async def close(line: Line) -> None:
    line.channel.close()
    await line.guest.close()
    for fd in line.fds:
        os.close(fd)


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    made = await connect()
    yield made
    await close(made)


# --- the greeting ----------------------------------------------------------------------------------------------------------


async def test_what_a_former_connection_left_is_skipped() -> None:
    ours, theirs = socket.socketpair()
    guest = FakeGuest(theirs)
    left = b"half a frame" + frame(wire.DATA, 5, bytes(60_000), 1) * 20 + frame(wire.HELLO | wire.ANSWER, 5, bytes(44)) + b"DSG1"
    await guest.say(left[:1000])
    usual = guest.replies
    usual[wire.HELLO] = lambda asked: (
        left[1000:] + answer(asked, wire.u32(1) + wire.u32(9) + asked.payload[8:] + wire.u64(1) + wire.string(b""))
    )
    channel = await Channel.open(ours)
    assert channel.welcome.features == 9
    await channel.ping()
    await close(Line(channel, guest))


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (lambda asked: answer(asked, wire.u32(1) + wire.u32(0) + bytes(16) + wire.u64(1) + wire.string(b"")), "as this host's guest would"),
        (lambda asked: answer(asked, wire.u32(2) + wire.u32(0) + asked.payload[8:] + wire.u64(1) + wire.string(b"")), "as this host's"),
        (lambda asked: answer(asked, b"short"), "too short"),
        (lambda asked: error(asked, 93, "1"), "refused the host"),
        (lambda asked: bytes(1 << 20), "closed"),
    ],
)
async def test_greetings_that_are_none(reply: Callable[[Frame], bytes], why: str) -> None:
    ours, theirs = socket.socketpair()
    guest = FakeGuest(theirs)

    def then_leave(asked: Frame) -> bytes:
        asyncio.get_running_loop().call_soon(lambda: theirs.shutdown(socket.SHUT_WR) if why == "closed" else None)
        return reply(asked)

    guest.replies[wire.HELLO] = then_leave
    with pytest.raises(SandboxLost, match=why):
        await Channel.open(ours)
    await guest.close()


async def test_a_guest_that_says_nothing() -> None:
    ours, theirs = socket.socketpair()
    guest = FakeGuest(theirs)
    guest.replies[wire.HELLO] = lambda asked: b"DSG1"  # the beginning of a frame that never ends
    with pytest.raises(Unavailable, match="did not answer within"):
        await Channel.open(ours, timeout_s=0.05)
    await guest.close()


# --- frames that no guest sends --------------------------------------------------------------------------------------------

NONSENSE = {
    "no magic": b"x" * 24,
    "zeros": bytes(24),
    "too long": wire.header(wire.DATA, 1, 0)[:4] + wire.u32(65_537) + bytes(16),
    "a field that is not zero": frame(wire.DATA, 1, b"x")[:12] + b"\1" + frame(wire.DATA, 1, b"x")[13:],
    "an unknown type": frame(0x7000, 1),
    "a request": frame(wire.EXEC, 1, bytes(100)),
    "an answer to nothing": frame(wire.PING | wire.ANSWER, 1, b"x"),
    "an error about nothing": frame(wire.ERROR, 0, wire.u32(71) + wire.string(b"out of step")),
    "data of nothing": frame(wire.DATA, 1, b"x"),
    "the end of nothing": frame(wire.EOF, 1),
    "an event of nothing": frame(wire.EXIT, 1, exit_payload()),
    "credit without a number": frame(wire.CREDIT, 1, b"x"),
    "an end with a payload": frame(wire.EOF, 1, b"x"),
    "a close with too much": frame(wire.CLOSE, 1, bytes(5)),
}


@pytest.mark.parametrize("what", NONSENSE)
async def test_nonsense_breaks_the_channel(line: Line, what: str) -> None:
    line.guest.replies[wire.PING] = lambda asked: None
    waiting = asyncio.ensure_future(line.channel.ping())
    await line.guest.hear(wire.PING)
    assert "broke the protocol" in await line.breaks(NONSENSE[what])
    with pytest.raises(SandboxLost):
        await waiting
    with pytest.raises(SandboxLost):
        await line.channel.ping()
    assert line.channel.lost


COMMAND_NONSENSE: dict[str, Callable[[int], bytes]] = {
    "more than the credit": lambda n: frame(wire.DATA, n, bytes(65_536), 1) * 4,
    "no data": lambda n: frame(wire.DATA, n, b"", 1),
    "data on stdin": lambda n: frame(wire.DATA, n, b"x", 0),
    "data on a stream that there is not": lambda n: frame(wire.DATA, n, b"x", 7),
    "data after the end": lambda n: frame(wire.EOF, n, b"", 1) + frame(wire.DATA, n, b"x", 1),
    "two ends": lambda n: frame(wire.EOF, n, b"", 1) * 2,
    "an end of stdin": lambda n: frame(wire.EOF, n, b"", 0),
    "credit above what is allowed": lambda n: frame(wire.CREDIT, n, wire.u32(1), 0),
    "no credit": lambda n: frame(wire.CREDIT, n, wire.u32(0), 0),
    "credit for an output": lambda n: frame(wire.CREDIT, n, wire.u32(1), 1),
    "close of an output": lambda n: frame(wire.CLOSE, n, wire.u32(32), 1),
    "two exits": lambda n: frame(wire.EXIT, n, exit_payload()) * 2,
    "an exit code of 256": lambda n: frame(wire.EXIT, n, exit_payload(256)),
    "signal 65": lambda n: frame(wire.EXIT, n, exit_payload(signal=65)),
    "an exit cut short": lambda n: frame(wire.EXIT, n, exit_payload()[:-1]),
    "an exit and more": lambda n: frame(wire.EXIT, n, exit_payload() + b"x"),
    "too many ends": lambda n: frame(wire.EXIT, n, exit_payload(ends=(0,) * 17)),
    "an impossible list": lambda n: frame(wire.EXIT, n, exit_payload()[:-4] + wire.u32(0xFFFF_FFFF)),
    "an empty tree before the exit": lambda n: frame(wire.TREE_EMPTY, n),
    "a watch's event": lambda n: frame(wire.WATCHED, n, wire.u32(0)),
}


@pytest.mark.parametrize("what", COMMAND_NONSENSE)
async def test_nonsense_about_a_command(line: Line, what: str) -> None:
    running, asked, _ = await line.command(stdin=True)
    assert "broke the protocol" in await line.breaks(COMMAND_NONSENSE[what](asked.id))
    assert (await running.exited) is not None
    assert not running.alive_children()


async def test_an_answer_of_the_wrong_kind_or_size(line: Line) -> None:
    line.guest.replies[wire.PING] = lambda asked: frame(wire.MARK | wire.ANSWER, asked.id)
    with pytest.raises(SandboxLost):
        await line.channel.ping()


async def test_an_answer_without_an_end(line: Line) -> None:
    part = bytes(wire.MAX_PAYLOAD)
    line.guest.replies[wire.COMMANDS] = lambda asked: b"".join(
        frame(wire.COMMANDS | wire.ANSWER, asked.id, part, wire.MORE) for _ in range(20)
    )
    with pytest.raises(SandboxLost):
        await line.channel.ask(wire.COMMANDS, b"")
    assert "too long" in line.channel.broken.result()


async def test_empty_parts_without_an_end(line: Line) -> None:
    line.guest.replies[wire.COMMANDS] = lambda asked: frame(wire.COMMANDS | wire.ANSWER, asked.id, b"", wire.MORE) * 5000
    with pytest.raises(SandboxLost):
        await line.channel.ask(wire.COMMANDS, b"", limit=1000)


@pytest.mark.parametrize("payload", [b"", b"x", wire.u32(1), wire.u32(0xFFFF_FFFF)])
async def test_answers_that_cannot_be_read(line: Line, payload: bytes) -> None:
    line.guest.replies[wire.USAGE] = lambda asked: answer(asked, payload)
    with pytest.raises(SandboxLost):
        await line.channel.usage()
    assert "broke the protocol" in line.channel.broken.result()


async def test_errors_are_bounded(line: Line) -> None:
    line.guest.replies[wire.PING] = lambda asked: error(asked, 0xFFFF_FFFF, "x" * 60_000)
    with pytest.raises(Unavailable) as caught:
        await line.channel.ping()
    assert len(str(caught.value)) < 2000
    line.guest.replies[wire.EXEC] = lambda asked: error(asked, 2, "\x1b[2Jcannot")
    running = await line.channel.exec(PLAN, [None] * 3, LIMITS)
    assert "\x1b" not in (await running.exited).not_started


# --- floods and sloths -----------------------------------------------------------------------------------------------------


async def test_output_that_nobody_reads_is_bounded_by_credit(line: Line) -> None:
    running, asked, _ = await line.command()
    tracemalloc.start()
    try:
        for stream in (1, 2):
            for _ in range(2):
                await line.guest.say(frame(wire.DATA, asked.id, bytes(65_536), stream))
        await line.channel.ping()  # all of it has come
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 4 * CREDIT
    granted = sum(int.from_bytes(one.payload, "little") for one in line.guest.received if one.type == wire.CREDIT)
    assert granted <= 2 * (64 << 10)  # what the pipes took
    assert "more of a stream" in await line.breaks(frame(wire.DATA, asked.id, bytes(65_536), 1) * 2)
    assert (await running.exited).signal == 9


async def test_a_byte_a_frame_does_not_hold_up_the_others(line: Line) -> None:
    """However much has come, each turn of the loop takes a bounded part of it, and in order."""
    _, asked, (out, _) = await line.command()
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.ensure_future(others())
    data = bytes(number % 251 for number in range(8000))
    await line.guest.say(b"".join(frame(wire.DATA, asked.id, data[at : at + 1], 1) for at in range(len(data))))
    await line.channel.ping()
    other.cancel()
    assert turns >= len(data) // channel_module.FRAMES_A_TURN
    assert os.read(out, 10_000) == data


async def test_a_flood_about_what_is_over_is_bounded(line: Line) -> None:
    running, asked, _ = await line.command()
    await line.guest.say(
        frame(wire.EXIT, asked.id, exit_payload(3)) + frame(wire.EOF, asked.id, b"", 1) + frame(wire.EOF, asked.id, b"", 2)
    )
    assert (await running.exited).code == 3
    await running.release()
    await line.guest.hear(wire.RELEASE)
    await line.guest.say(frame(wire.TREE_EMPTY, asked.id))  # crossed
    await line.channel.ping()
    assert "nothing that is there" in await line.breaks(frame(wire.TREE_EMPTY, asked.id) * 100)


async def test_input_waits_for_credit(line: Line) -> None:
    _, asked, (stdin, *_) = await line.command(stdin=True)
    os.set_blocking(stdin, False)
    written = 0
    while True:
        try:
            written += os.write(stdin, bytes(65_536))
        except BlockingIOError:
            await line.channel.ping()
            if written > CREDIT and sum(len(one.payload) for one in line.guest.received if one.type == wire.DATA) == CREDIT:
                break
    await line.guest.say(frame(wire.CREDIT, asked.id, wire.u32(1000), 0))
    while sum(len(one.payload) for one in line.guest.received if one.type == wire.DATA) < CREDIT + 1000:
        await line.channel.ping()
    await line.channel.ping()
    assert sum(len(one.payload) for one in line.guest.received if one.type == wire.DATA) == CREDIT + 1000
    await line.guest.say(frame(wire.CLOSE, asked.id, wire.u32(32), 0))
    await line.channel.ping()
    with pytest.raises(BrokenPipeError):
        while True:
            try:
                os.write(stdin, bytes(65_536))
            except BlockingIOError:
                raise AssertionError("the pipe has a reader") from None


async def test_a_guest_that_does_not_listen(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_PENDING", 100)
    running, _, _ = await line.command()
    line.guest.replies[wire.SIGNAL] = lambda asked: None
    for _ in range(200):
        running.signal(15)
    assert "without an answer" in line.channel.broken.result()


async def test_a_guest_that_takes_nothing(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_OUT_BYTES", 1 << 20)
    running, _, _ = await line.command()
    line.guest.reading.clear()
    line.channel.send_data(running.number, 0, b"x")
    for _ in range(10_000):
        line.channel.send(bytes(1000))
        if line.channel.lost:
            break
    assert "takes nothing" in line.channel.broken.result()


async def test_a_late_answer_is_no_answer_to_nothing(line: Line) -> None:
    line.guest.replies[wire.PING] = lambda asked: None
    with pytest.raises(Unavailable, match="did not answer"):
        await line.channel.ping(timeout_s=0.01)
    asked = await line.guest.hear(wire.PING)
    await line.guest.say(answer(asked, asked.payload))
    del line.guest.replies[wire.PING]
    await line.channel.ping()


async def test_one_guest_does_not_touch_another() -> None:
    poller = Poller()
    good, bad = await connect(poller), await connect(poller)
    running, asked, _ = await good.command()
    assert "broke" in await bad.breaks(b"\xff" * 100_000)
    await good.channel.ping()
    await good.guest.say(
        frame(wire.EXIT, asked.id, exit_payload(0)) + frame(wire.EOF, asked.id, b"", 1) + frame(wire.EOF, asked.id, b"", 2)
    )
    assert (await running.exited).code == 0
    await close(good)
    await close(bad)
    assert poller.watched() == 0
    poller.close()


@pytest.mark.parametrize("how", ["closed", "killed"])
async def test_a_guest_that_dies(line: Line, how: str) -> None:
    running, _, (out, _) = await line.command()
    terminal, _, _ = await line.command(ExecPlan(process_id="proc_2", argv=("sh",), env={}, cwd="/", user="root", pty=Pty(rows=2, cols=3)))
    if how == "killed":  # with something unread: its end is a reset then
        line.guest.reading.clear()
        running.signal(1)
        await asyncio.sleep(0)
        running.signal(1)
    await line.guest.close()
    assert (await running.exited).signal == 9 and (await terminal.exited).signal == 9
    assert line.channel.lost
    assert os.read(out, 10) == b""
    await running.release()
    running.kill_tree()
    running.mark()
    with pytest.raises(SandboxLost):
        await line.channel.exec(PLAN, [None] * 3, LIMITS)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.tuples(
                st.sampled_from([*range(0x10, 0x14), *range(0x30, 0x32), 0x50, 0x8020, 0x8002, 0xFFFF]),
                st.booleans(),
                st.binary(max_size=80),
                st.integers(0, 3),
            ),
        ),
        max_size=8,
    )
)
def test_whatever_is_said(said: list[bytes | tuple[int, bool, bytes, int]]) -> None:
    """Nothing but a broken channel comes of it, and nothing is left open."""

    async def run() -> None:
        line = await connect()
        running, asked, _ = await line.command(stdin=True)
        problems: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        try:
            for one in said:
                data = one if isinstance(one, bytes) else frame(one[0], asked.id if one[1] else 77, one[2], one[3])
                await line.guest.say(data)
            await line.channel.ping(timeout_s=0.2)
        except (SandboxLost, Unavailable, OSError):
            pass
        await close(line)
        assert running.exited.done() and not problems

    asyncio.run(run())


# --- standing still --------------------------------------------------------------------------------------------------------


async def test_commands_go_on_after_a_resume(line: Line) -> None:
    running, asked, (stdin, out, _) = await line.command(stdin=True)
    await line.guest.say(frame(wire.DATA, asked.id, b"before ", 1))
    await line.channel.detach()
    os.write(stdin, b"typed while it was away")
    waiting = asyncio.ensure_future(line.channel.ping())
    await line.guest.close()
    ours, theirs = socket.socketpair()
    line.guest = FakeGuest(theirs)
    assert not line.channel.lost and not waiting.done()
    line.channel.resume(ours)
    await waiting
    assert line.guest.received[0].type == wire.UNPARK
    assert (await line.guest.hear(wire.DATA)).payload == b"typed while it was away"
    ends = frame(wire.EOF, asked.id, b"", 1) + frame(wire.EOF, asked.id, b"", 2)
    await line.guest.say(frame(wire.DATA, asked.id, b"after", 1) + frame(wire.EXIT, asked.id, exit_payload(4, ends=(0, 12, 0))) + ends)
    assert (await running.exited).code == 4
    assert os.read(out, 100) == b"before after"


async def test_parked_nothing_is_sent(line: Line) -> None:
    running, _, _ = await line.command()
    parking = asyncio.ensure_future(line.channel.park())
    await line.guest.hear(wire.PARK)
    running.signal(10)
    await parking
    count = len(line.guest.received)
    running.signal(12)
    line.channel.unpark()
    await line.channel.ping()
    kinds = [one.type for one in line.guest.received[count:]]
    assert kinds == [wire.UNPARK, wire.SIGNAL, wire.SIGNAL, wire.PING]


async def test_a_guest_that_does_not_stand_still(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "PARK_S", 0.01)
    line.guest.replies[wire.PARK] = lambda asked: None
    with pytest.raises(Unavailable, match="stop"):
        await line.channel.park()
    await line.channel.ping()
    line.guest.replies[wire.PARK] = lambda asked: error(asked, 38, "cannot")
    with pytest.raises(Unavailable, match="cannot"):
        await line.channel.detach()
    await line.channel.ping()


async def test_a_guest_that_is_closed_while_away(line: Line) -> None:
    running, _, _ = await line.command()
    await line.channel.detach()
    line.channel.close()
    assert (await running.exited).signal == 9
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(SandboxLost):
        line.channel.resume(ours)


# --- commands --------------------------------------------------------------------------------------------------------------


async def test_a_start_that_is_given_up_is_killed(line: Line) -> None:
    line.guest.replies[wire.EXEC] = lambda asked: None
    starting = asyncio.ensure_future(line.channel.exec(PLAN, [None] * 3, LIMITS))
    asked = await line.guest.hear(wire.EXEC)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    killed, released = await line.guest.hear(wire.SIGNAL), await line.guest.hear(wire.RELEASE)
    assert killed.payload == wire.u64(asked.id) + wire.u32(9) + wire.u32(wire.SIGNAL_TREE)
    assert released.payload == wire.u64(asked.id)
    await line.guest.say(answer(asked, wire.u64(7)))
    await line.channel.ping()


async def test_the_end_waits_for_output_that_is_under_way(line: Line) -> None:
    running, asked, (out, _) = await line.command()
    data = os.urandom(CREDIT)
    await line.guest.say(b"".join(frame(wire.DATA, asked.id, data[at : at + 65_536], 1) for at in range(0, CREDIT, 65_536)))
    await line.guest.say(frame(wire.EXIT, asked.id, exit_payload(0, tree_alive=True, ends=(0, CREDIT + 5, 0))))
    await line.channel.ping()
    assert not running.exited.done()  # five bytes are missing; the pipe has taken all others, though nobody reads
    await line.guest.say(frame(wire.DATA, asked.id, b"fives", 1))
    assert (await running.exited).code == 0
    got = b""
    while len(got) < CREDIT + 5:
        got += os.read(out, 1 << 20)
    assert got == data + b"fives"
    assert running.alive_children()


async def test_a_command_takes_few_turns_of_the_loop(line: Line) -> None:
    """From the question to the end, beyond what the guest takes: each turn is latency when an edge is busy."""

    def at_once(asked: Frame) -> bytes:
        ends = frame(wire.EOF, asked.id, b"", 1) + frame(wire.EOF, asked.id, b"", 2)
        return answer(asked, wire.u64(7)) + frame(wire.EXIT, asked.id, exit_payload(0)) + ends

    line.guest.replies[wire.EXEC] = at_once
    loop, turns, over = asyncio.get_running_loop(), 0, False

    def turn() -> None:
        nonlocal turns
        turns += 1
        if not over:
            loop.call_soon(turn)

    asking = asyncio.ensure_future(line.command())
    await line.guest.hear(wire.EXEC)
    turn()
    running, _, _ = await asking
    await running.exited
    over = True
    assert turns <= 8, turns


async def test_identity_must_be_confirmed(line: Line) -> None:
    line.guest.replies[wire.IDENTITY] = lambda asked: answer(asked, wire.u32(wire.DONE_SEED | wire.DONE_CLOCK) + wire.u32(0) + bytes(32))
    assert (await line.channel.identity()).fresh == bytes(32)
    with pytest.raises(Unavailable, match="did not confirm"):
        await line.channel.identity(hostname="other")
    line.guest.replies[wire.IDENTITY] = lambda asked: answer(asked, wire.u32(wire.DONE_CLOCK) + wire.u32(0) + bytes(32))
    with pytest.raises(Unavailable, match="did not confirm"):
        await line.channel.identity()
    line.guest.replies[wire.CLOCK] = lambda asked: answer(asked, wire.u32(wire.DONE_CLOCK))
    with pytest.raises(Unavailable):
        await line.channel.clock()


async def test_what_cannot_be_asked(line: Line) -> None:
    many = ExecPlan(process_id="proc_1", argv=("true", "x" * wire.MAX_REQUEST), env={}, cwd="/", user="root")
    assert "too long" in (await (await line.channel.exec(many, [None] * 3, LIMITS)).exited).not_started
    zero = ExecPlan(process_id="proc_1", argv=("true", "a\0b"), env={}, cwd="/", user="root")
    assert "zero byte" in (await (await line.channel.exec(zero, [None] * 3, LIMITS)).exited).not_started
    with pytest.raises(Refused):
        line.guest.replies[wire.MOUNT] = lambda asked: error(asked, 1, "no")
        await line.channel.ask(wire.MOUNT, b"")


def protocol(running: GuestRunning) -> Running:
    """Checked by mypy: it is one."""
    return running
