# SPDX-License-Identifier: Apache-2.0
"""What the edge makes of commands in a guest: output whole and in order, sessions, terminals, readers that take their time."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from opendsec.api.exec import Pty
from opendsec.runtime.backend import ExecPlan
from opendsec.runtime.guest import Channel, wire
from opendsec.testing.waiting import eventually
from tests.integration.guest.conftest import GuestBench
from tests.support import running

LINES = 40_000
NUMBERS = b"".join(b"%d\n" % number for number in range(1, LINES + 1))


async def written(bench: GuestBench, text: bytes, process_id: str) -> None:
    process = bench.table.get(process_id)
    await eventually(lambda: text in process.stdout.read_from(0, 1 << 20)[0])


async def test_output_is_whole(bench: GuestBench) -> None:
    result = await bench.sh(f"seq {LINES}; echo oops >&2; exit 3", capture_bytes=1 << 20)
    assert (result.outcome, result.exit_code, result.stderr.data()) == ("exited", 3, b"oops\n")
    assert result.stdout.data() == NUMBERS


async def test_input_goes_through(bench: GuestBench) -> None:
    data = os.urandom(1 << 20)
    result = await bench.sh("cat", stdin=data, capture_bytes=2 << 20)
    assert result.stdout.data() == data


async def test_who_stops_reading_ends_the_writer(bench: GuestBench) -> None:
    reading, writing = os.pipe()
    plan = ExecPlan(process_id="proc_yes", argv=("yes",), env={}, cwd="/", user="root")
    command = await bench.handle.exec(plan, stdin=None, stdout=writing, stderr=None)
    os.close(writing)
    assert await asyncio.to_thread(os.read, reading, 2) == b"y\n"
    os.close(reading)
    assert (await command.exited).signal == signal.SIGPIPE
    await command.release()


async def test_a_reader_that_holds_the_command(bench: GuestBench) -> None:
    """It takes nothing for a while: the command waits, its end comes all the same, and nothing is missing."""
    process = await bench.start(f"seq {LINES}")
    events = bench.table.attach(process.id, hold=True)
    first = await anext(events)
    await bench.handle.channel.ping()
    got = first.data
    async for event in events:
        assert event.kind != "gap"
        got += event.data
    assert got == NUMBERS


async def test_a_child_that_writes_on(bench: GuestBench) -> None:
    await bench.sh("mkfifo /tmp/gate")
    process = await bench.start("(read x < /tmp/gate; echo late) & echo early")
    assert (await process.wait()).stdout.data() == b"early\n"
    assert process.lingers
    await bench.sh("echo > /tmp/gate")
    await eventually(lambda: not process.lingers)
    assert process.stdout.total == len(b"early\nlate\n")


async def test_a_time_out_ends_the_tree(bench: GuestBench) -> None:
    process = await bench.start("setsid sleep 1000 & echo ready; sleep 1000", timeout_s=5)
    await written(bench, b"ready", process.id)
    bench.clock.advance(6)
    assert (await process.wait()).outcome == "timed_out"
    await eventually(lambda: not bench.handle.processes())


async def test_terminals(bench: GuestBench) -> None:
    result = await bench.sh(f"stty -onlcr; seq {LINES}", pty=Pty(), capture_bytes=1 << 20)
    assert result.stdout.data() == NUMBERS
    process = await bench.start(
        "stty -echo; stty size; trap 'stty size; exit 4' WINCH; echo set; while :; do read x; done", pty=Pty(rows=7, cols=9)
    )
    await written(bench, b"set", process.id)
    bench.table.resize(process.id, Pty(rows=21, cols=43))
    result = await process.wait()
    assert (result.exit_code, result.stdout.data()) == (4, b"7 9\r\nset\r\n21 43\r\n")


async def test_sessions_keep_order(bench: GuestBench) -> None:
    """The status of a command never overtakes its output, nor the output of one command that of the next."""
    shell = await bench.shell()
    for number in range(6):
        result = await shell(f"seq {LINES}; a={number}; echo end$a", capture_bytes=1 << 20)
        assert result.stdout.data() == NUMBERS + b"end%d\n" % number
        assert (await shell("echo $a")).stdout.data() == b"%d\n" % number


async def test_a_time_out_in_a_session_spares_earlier_jobs(bench: GuestBench) -> None:
    shell = await bench.shell()
    assert (await shell("sleep 1000 & a=5; echo $!")).exit_code == 0
    under_way = shell("(setsid sleep 1000 &); sleep 1000", timeout_s=5)
    # Not before the shell waits for the last of them: the rounds of killing that follow one another in time are one moment of this clock.
    await eventually(lambda: len(running(bench.handle.guest.group.procs(), "sleep")) == 3)
    bench.clock.advance(6)
    result = await under_way
    assert result.outcome == "timed_out" and "the session goes on" in result.message
    assert (await shell("echo $a; jobs -r | wc -l")).stdout.data() == b"5\n1\n"
    await eventually(lambda: bench.handle.processes() <= 2)


async def test_any_user_may_open_the_streams_by_name(bench: GuestBench) -> None:
    result = await bench.sh("id -un; echo x >/dev/stdout; echo y >/dev/stderr", user="nobody")
    assert (result.stdout.data(), result.stderr.data()) == (b"nobody\nx\n", b"y\n")


@pytest.mark.parametrize("text", [f"seq {LINES}", f"for i in $(seq 200); do seq {LINES // 200}; done >/dev/null; seq {LINES}"])
async def test_standing_still_loses_nothing(bench: GuestBench, text: str) -> None:
    channel = bench.handle.channel
    process = await bench.start(text, capture_bytes=1 << 20)
    for _ in range(5):
        await channel.park()
        waiting = asyncio.ensure_future(channel.ping())
        await asyncio.sleep(0)
        assert not waiting.done()
        channel.unpark()
        await waiting
    assert (await process.wait()).stdout.data() == NUMBERS


async def test_commands_of_a_former_host(bench: GuestBench) -> None:
    channel = bench.handle.channel
    process = await bench.start("sleep 1000")
    assert [row.name for row in await channel.commands()] == [process.id]
    assert await channel.cut([process.id, "proc_none"]) == 1
    async with asyncio.timeout(30):
        while await channel.commands():  # its group is empty a moment after its processes have died
            pass
        await eventually(lambda: not bench.handle.processes())


async def test_another_host(bench: GuestBench) -> None:
    """As after a restart of the edge: what runs lives on, can be found and cut, and its end surprises nobody."""
    former = bench.handle.channel
    living, ended = await bench.start("sleep 1000"), await bench.start("sleep 1000 & echo started")
    await ended.wait()
    former.close()
    channel = await Channel.open(bench.handle.guest.sock.dup())
    try:
        rows = {row.name: row.flags for row in await channel.commands()}
        tree = wire.COMMAND_TREE | wire.COMMAND_RELEASED
        assert rows == {living.id: wire.COMMAND_RUNS | tree, ended.id: tree}
        assert await channel.cut([living.id]) == 1
        await eventually(lambda: bench.handle.processes() <= 1)
        bench.handle.guest.group.kill()  # what was left running ends by itself
        while await channel.commands():
            pass
        assert not channel.lost
    finally:
        channel.close()


async def test_names_and_numbers_of_the_machine(bench: GuestBench) -> None:
    channel = bench.handle.channel
    renewed = [await channel.identity(hostname=f"box-{number}", wall_clock_ns=0) for number in range(2)]
    assert renewed[0].fresh != renewed[1].fresh
    assert (await bench.sh("uname -n")).stdout.data() == b"box-1\n"
    used = await channel.usage()
    assert used.memory_total_bytes > used.memory_bytes > 0
    assert channel.usage_nowait() == used


async def test_a_guest_that_is_killed(bench: GuestBench) -> None:
    process = await bench.start("echo ready; sleep 1000")
    await written(bench, b"ready", process.id)
    bench.handle.guest.kill()
    with pytest.raises(Exception, match="lost"):
        await process.wait()
