# SPDX-License-Identifier: Apache-2.0
"""The life of commands in their table: attached to, kept, lost, cancelled, many at once."""

from __future__ import annotations

import asyncio
import signal
from contextlib import aclosing
from pathlib import Path

import pytest

from opendsec.api.errors import InvalidRequest, NotFound, QuotaExceeded, SandboxLost, Unavailable
from opendsec.api.exec import Command, Pty
from opendsec.edge import processes
from opendsec.edge.retention import Retention
from opendsec.runtime.backend import Counters, Exit
from tests.integration.exec.bench import Bench, collect, data_of, eventually, small_bench

# --- attach ------------------------------------------------------------------------------------------------------------


async def test_stream(bench: Bench) -> None:
    events = await collect(await bench.table.stream(bench.command("echo out; echo err >&2; exit 3")))
    assert (events[0].kind, events[-1].kind) == ("started", "exit")
    assert (data_of(events), data_of(events, "stderr")) == (b"out\n", b"err\n")
    last = events[-1].result
    assert last is not None and (last.outcome, last.exit_code, last.stdout.head) == ("exited", 3, b"")
    assert {event.process_id for event in events} == {last.process_id}


async def test_stream_brings_everything_however_little_is_kept(bench: Bench) -> None:
    events = await collect(await bench.table.stream(bench.command("seq 1 20000", capture_bytes=0)))
    assert data_of(events) == "".join(f"{n}\n" for n in range(1, 20_001)).encode()
    assert all(event.kind != "gap" for event in events)


async def test_attach_from_an_offset_while_it_runs_and_after(bench: Bench) -> None:
    process = await bench.start("echo 0123456789; read x; echo more; echo err >&2", stdin_mode="stream")
    await bench.output(process, b"9\n")
    readers = [asyncio.ensure_future(collect(bench.table.attach(process.id, stdout_offset=start))) for start in (0, 4, 11, 50)]
    await asyncio.sleep(0)
    await bench.table.stdin(process.id, b"\n")
    everything = b"0123456789\nmore\n"
    for start, reader in zip((0, 4, 11, 50), readers, strict=True):
        events = await reader
        assert data_of(events) == everything[start:] and data_of(events, "stderr") == b"err\n"
        assert events[-1].kind == "exit"
        assert [event.offset for event in events if event.stream == "stdout"][:1] in ([start], [])
    again = await collect(bench.table.attach(process.id, stdout_offset=12, stderr_offset=2))
    assert (data_of(again), data_of(again, "stderr")) == (everything[12:], b"r\n")
    assert (await bench.table.wait(process.id)).stdout.head == everything


async def test_a_slow_reader_gets_a_gap_and_delays_nobody(bench: Bench) -> None:
    process = await bench.start("echo first; read x; seq 1 200000", stdin_mode="stream", capture_bytes=1 << 20)
    async with aclosing(bench.table.attach(process.id)) as slow:
        first = await anext(slow)
        assert first.data == b"first\n"
        await bench.table.stdin(process.id, b"\n")
        result = await process.wait()  # though the reader takes nothing
        total = result.stdout.total_bytes
        assert process.stdout.held_bytes <= 1 << 20
        rest = await collect(slow)
    gaps = [event for event in rest if event.kind == "gap"]
    assert len(gaps) == 1
    received = [event for event in rest if event.kind == "output"]
    assert len(first.data) + sum(len(event.data) for event in received) + gaps[0].missing_bytes == total
    position = len(first.data)
    for event in rest[:-1]:
        assert event.offset == position
        position += len(event.data) + event.missing_bytes
    assert position == total and data_of(rest).endswith(b"\n200000\n")


@pytest.mark.parametrize("ends", ["reads on", "goes away", "kills it"])
@pytest.mark.parametrize("capture_bytes", [0, 4 << 20])
@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
async def test_a_reader_that_holds_the_command(bench: Bench, tmp_path: Path, ends: str, capture_bytes: int, terminal: bool) -> None:
    attached = tmp_path / "attached"  # what is written before is not kept for the reader, where nothing is
    process = await bench.start(
        f"stty raw -echo 2>/dev/null; until [ -e {attached} ]; do sleep 0.01; done; echo first; read x; seq 1 300000",
        stdin_mode="stream",
        capture_bytes=capture_bytes,
        pty=Pty() if terminal else None,
    )
    idle = bench.execution.poller.watched()
    async with aclosing(bench.table.attach(process.id, hold=True)) as slow:
        coming = asyncio.ensure_future(anext(slow))
        await asyncio.sleep(0)
        attached.touch()
        first = await coming
        await bench.table.stdin(process.id, b"\n")
        await eventually(lambda: bench.execution.poller.watched() < idle)  # its output is left in the pipe: it waits
        assert not process.ended
        assert process.stdout.total < 1 << 20
        if ends == "reads on":
            rest = await collect(slow)
            data = first.data + data_of(rest)
            assert data == b"first\n" + b"".join(b"%d\n" % number for number in range(1, 300_001))
        elif ends == "kills it":
            process.stop("killed", "enough")
            assert all(event.kind != "gap" for event in await collect(slow))
    result = await process.wait()
    assert result.outcome == ("killed" if ends == "kills it" else "exited")
    assert ends == "kills it" or result.stdout.total_bytes == len("first\n") + sum(len(f"{number}\n") for number in range(1, 300_001))


async def test_attach_ends_though_a_child_floods(bench: Bench) -> None:
    process = await bench.start("yes & echo first >&2", capture_bytes=100_000)
    assert (await process.wait()).outcome == "exited"
    events = await collect(bench.table.attach(process.id))
    assert events[-1].kind == "exit" and data_of(events, "stderr") == b"first\n"
    bench.table.kill_all()
    await eventually(lambda: bench.execution.poller.watched() == 0)


async def test_a_reader_that_goes_away_leaves_nothing(bench: Bench) -> None:
    process = await bench.start("exec sleep 1000")
    for _ in range(3):
        reader = asyncio.ensure_future(collect(bench.table.attach(process.id)))
        waiter = asyncio.ensure_future(bench.table.wait(process.id))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for task in (reader, waiter):
            task.cancel()
        await asyncio.gather(reader, waiter, return_exceptions=True)
    assert not process.pinned and process.forgettable is False
    assert not process._changed and not process._done


async def test_bad_attach(bench: Bench) -> None:
    with pytest.raises(NotFound):
        bench.table.attach("proc_0000000000000000")
    process = await bench.start("true")
    with pytest.raises(InvalidRequest, match="stderr_offset"):
        bench.table.attach(process.id, stderr_offset=-1)
    await process.wait()


async def test_wait_with_a_limit(bench: Bench) -> None:
    process = await bench.start("read x", stdin_mode="stream")
    with pytest.raises(TimeoutError):
        await bench.table.wait(process.id, 0.001)
    await bench.table.stdin(process.id, b"", close=True)
    assert (await bench.table.wait(process.id, 60)).exit_code == 1
    assert (await bench.table.wait(process.id, 0)).exit_code == 1  # it has ended: the limit no longer matters


# --- listing and keeping -----------------------------------------------------------------------------------------------


async def test_list(bench: Bench) -> None:
    first = await bench.start("exec sleep 1000", action_id="a1")
    second = await bench.table.start(Command(argv=("printf", "%s", "x y", "z" * 300)))
    await second.wait()
    running, ended = bench.table.list()
    assert (running.id, running.state, running.command, running.action_id, running.result) == (
        first.id, "running", "exec sleep 1000", "a1", None,
    )  # fmt: skip
    assert (ended.id, ended.state, ended.stdout_bytes) == (second.id, "ended", 303)
    assert ended.command.startswith("printf %s 'x y' zzz") and len(ended.command) == 200
    assert ended.result is not None and ended.result.stdout.head == b""
    assert running.started_at == bench.clock.now


async def test_events_and_activity() -> None:
    counts: list[int] = []
    async with small_bench(on_active=counts.append) as bench:
        process = await bench.start("echo; exec sleep 1000", capture_bytes=0)
        assert counts == [1] and bench.table.active == 1
        await bench.sh("true")
        await eventually(lambda: process.stdout.total)
        bench.table.signal(process.id, signal.SIGKILL)
        await process.wait()
        assert counts == [1, 2, 1, 0]
        assert bench.events.kinds() == ["exec.started", "exec.started", "exec.ended", "limit.output", "exec.ended"]
        assert bench.events.seen[-1][1] == {"process_id": process.id, "outcome": "killed", "exit_code": None, "duration_ms": 0.0}


async def test_the_oldest_output_is_given_up_first() -> None:
    async with small_bench(retention=Retention(box_bytes=2500, box_count=100)) as bench:
        results = [await bench.sh("head -c 1000 /dev/zero; echo") for _ in range(4)]
        oldest, *_, newest = (process.id for process in bench.table.list())
        again = await bench.table.wait(oldest)
        assert (again.exit_code, again.stdout.total_bytes, again.stdout.omitted_bytes) == (0, 1001, 1001)
        assert "given up" in again.message
        events = await collect(bench.table.attach(oldest))
        assert [(event.kind, event.missing_bytes) for event in events] == [("gap", 1001), ("exit", 0)]
        assert await bench.table.wait(newest) == results[-1]


async def test_the_oldest_is_forgotten() -> None:
    async with small_bench(retention=Retention(box_count=2)) as bench:
        lingering = await bench.start("sleep 1000 & true")
        ids = [(await bench.sh("true")).process_id for _ in range(4)]
        assert [info.id for info in bench.table.list()] == [lingering.id, ids[-1]]
        with pytest.raises(NotFound, match="the last 2 are kept"):
            await bench.table.wait(ids[0])


async def test_a_large_result_survives_until_it_was_read() -> None:
    async with small_bench(retention=Retention(bytes=10, box_bytes=10)) as bench:
        results = await asyncio.gather(*(bench.sh("head -c 5000 /dev/zero") for _ in range(8)))
        assert all(len(result.stdout.head) == 5000 for result in results)
        assert bench.table.retention.edge.bytes <= 10


async def test_the_edge_as_a_whole_is_bounded() -> None:
    retention = Retention(count=3)
    async with small_bench(retention=retention) as one, small_bench(retention=retention, share=one) as two:
        for bench in (one, two, one, two, one):
            await bench.sh("true")
        assert (len(one.table.list()), len(two.table.list())) == (2, 1)


async def test_too_many_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MAX_OPEN", 3)
    await bench.sh("sleep 1000 & true")  # its output is still open
    running = [await bench.start("exec sleep 1000") for _ in range(2)]
    with pytest.raises(QuotaExceeded, match="at most 3"):
        await bench.sh("true")
    bench.table.signal(running[0].id, signal.SIGKILL)
    await running[0].wait()
    await bench.sh("true")


async def test_many_at_once(bench: Bench) -> None:
    results = await asyncio.gather(*(bench.sh(f"echo {n}; exit {n % 7}") for n in range(150)))
    assert [(result.stdout.head, result.exit_code) for result in results] == [(b"%d\n" % n, n % 7) for n in range(150)]
    assert bench.table.active == 0
    await eventually(lambda: bench.execution.poller.watched() == 0)  # one child may have another's pipes until it runs its program


# --- cancelled, failed, lost -------------------------------------------------------------------------------------------


async def test_a_client_that_goes_away_leaves_its_command_running(bench: Bench) -> None:
    run = asyncio.ensure_future(bench.sh("read x; echo done", stdin_mode="stream"))
    await eventually(lambda: bench.handle.running)
    await asyncio.sleep(0)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    (info,) = bench.table.list()
    await bench.table.stdin(info.id, b"", close=True)
    assert (await bench.table.wait(info.id)).stdout.head == b"done\n"


async def test_a_client_that_goes_away_during_the_start(bench: Bench) -> None:
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    bench.handle.before_exec = lambda: gate
    run = asyncio.ensure_future(bench.sh("echo done"))
    await eventually(bench.table.list)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    gate.set_result(None)
    (info,) = bench.table.list()
    assert (await bench.table.wait(info.id)).stdout.head == b"done\n"


async def test_a_start_that_fails_leaves_nothing(bench: Bench) -> None:
    bench.handle.fail_exec = Unavailable("the spawner died")
    with pytest.raises(Unavailable):
        await bench.sh("true", stdin=b"x")
    assert bench.table.list() == () and bench.table.active == 0


async def test_stopped_before_it_had_started(bench: Bench) -> None:
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    bench.handle.before_exec = lambda: gate
    run = asyncio.ensure_future(bench.sh("exec sleep 1000"))
    await eventually(bench.table.list)
    bench.table.kill_all("that is enough")
    gate.set_result(None)
    result = await run
    assert (result.outcome, result.message) == ("killed", "that is enough")


@pytest.mark.parametrize("pty", [None, Pty(rows=5, cols=5)])
async def test_t16_a_start_that_hangs_is_under_the_time_out(bench: Bench, pty: Pty | None) -> None:
    """Root inside may stop a command that is on its way in."""
    bench.handle.before_exec = asyncio.get_running_loop().create_future
    run = asyncio.ensure_future(bench.sh("exec sleep 1000", timeout_s=5.0, pty=pty))
    await eventually(bench.table.list)
    await asyncio.sleep(0)
    bench.clock.advance(5.0)
    result = await run
    assert (result.outcome, result.exit_code) == ("timed_out", None)
    assert bench.table.active == 0
    bench.handle.before_exec = None
    assert (await bench.sh("echo fine")).stdout.head == b"fine\n"


async def test_closed_before_it_had_started(bench: Bench) -> None:
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    bench.handle.before_exec = lambda: gate
    run = asyncio.ensure_future(bench.sh("exec sleep 1000"))
    await eventually(bench.table.list)
    bench.table.close()
    gate.set_result(None)
    assert (await run).outcome == "unknown"


async def test_the_sandbox_dies_under_it(bench: Bench) -> None:
    runs = [asyncio.ensure_future(bench.sh("echo started; sleep 1000")) for _ in range(2)]
    await eventually(lambda: sum(info.stdout_bytes for info in bench.table.list()) == 16)
    bench.handle.begin_to_die()
    await eventually(lambda: all(running.exited.done() for running in bench.handle.running))
    assert not any(run.done() for run in runs)  # a SIGKILL out of the blue: first the sandbox's fate has to be known
    bench.handle.die("its first process ended")
    for run in runs:
        with pytest.raises(SandboxLost, match="its first process ended"):
            await run
    info = bench.table.list()[0]
    with pytest.raises(SandboxLost):
        await bench.table.wait(info.id)
    reader = bench.table.attach(info.id)
    assert (await anext(reader)).data == b"started\n"
    with pytest.raises(SandboxLost):
        await anext(reader)
    with pytest.raises(SandboxLost):
        await bench.sh("true")


async def test_the_death_is_known_before_the_exit(bench: Bench) -> None:
    run = asyncio.ensure_future(bench.sh("exec sleep 1000"))
    await eventually(lambda: bench.handle.running)
    bench.handle.died.set_result("gone")
    bench.handle.begin_to_die()
    with pytest.raises(SandboxLost, match="gone"):
        await run


async def test_an_end_of_its_own_before_the_death_is_a_result(bench: Bench) -> None:
    process = await bench.start("read x; exit 5", stdin_mode="stream")
    bench.handle.died.set_result("gone")
    await bench.table.stdin(process.id, b"", close=True)
    assert (await process.wait()).exit_code == 5


async def test_no_exit_ever_comes(bench: Bench) -> None:
    process = await bench.start("exec sleep 1000")
    wait = asyncio.ensure_future(process.wait())
    bench.handle.died.set_result("gone")
    await asyncio.sleep(0)
    bench.clock.advance(processes.DEATH_S)
    with pytest.raises(SandboxLost):
        await wait
    assert bench.execution.poller.watched() == 0


async def test_killed_with_the_sandbox(bench: Bench) -> None:
    process = await bench.start("echo started; exec sleep 1000")
    await bench.output(process, b"started")
    bench.table.begin_kill("the sandbox was killed by the caller")
    bench.handle.die("destroyed")
    result = await process.wait()
    assert (result.outcome, result.message) == ("killed", "the sandbox was killed by the caller")
    assert result.stdout.head == b"started\n"
    with pytest.raises(SandboxLost):
        await bench.sh("true")


async def test_the_spawner_dies(bench: Bench) -> None:
    process = await bench.start("exec sleep 1000")
    bench.handle.running[0].exited.set_result(Exit(lost=True))
    result = await process.wait()
    assert (result.outcome, result.exit_code, result.signal) == ("unknown", None, None)


async def test_the_edge_goes(bench: Bench) -> None:
    process = await bench.start("echo started; exec sleep 1000")
    await bench.output(process, b"started")
    bench.table.close()
    result = await process.wait()
    assert (result.outcome, result.stdout.head) == ("unknown", b"started\n")
    assert bench.execution.poller.watched() == 0


async def test_a_process_that_can_not_die(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    process = await bench.start("exec sleep 1000", timeout_s=3)
    monkeypatch.setattr(bench.handle.running[0], "kill_tree", lambda: None)
    bench.clock.advance(3)
    assert not process.ended
    bench.clock.advance(10)
    result = await process.wait()
    assert result.outcome == "timed_out" and "has not ended it" in result.message


# --- limits ------------------------------------------------------------------------------------------------------------

HOG = "python3 -c 'x = bytearray(300 << 20)'"


async def test_memory_limit() -> None:
    async with small_bench(memory_bytes=64 << 20) as bench:
        result = await bench.sh(f"exec {HOG}")
        assert (result.outcome, result.signal, result.limits_hit) == ("memory_limit", signal.SIGKILL, ("memory",))
        assert result.message == "the kernel killed it at the sandbox's memory limit of 64MiB"
        result = await bench.sh(f"{HOG}; exit $?")
        assert (result.outcome, result.exit_code, result.limits_hit) == ("memory_limit", 137, ("memory",))
        result = await bench.sh(f"{HOG}; echo coped")
        assert (result.outcome, result.exit_code, result.limits_hit) == ("exited", 0, ("memory",))
        assert result.message == "the sandbox reached its memory limit of 64MiB"
        assert (await bench.sh("true")).limits_hit == ()


async def test_pids_limit() -> None:
    async with small_bench(pids=8) as bench:
        result = await bench.sh("for i in 1 2 3 4 5 6 7 8 9 10; do sleep 1000 & done; exit 1")
        assert result.limits_hit == ("pids",) and "limit of 8 processes" in result.message
        bench.table.kill_all()


async def test_counters_are_read_once_a_command_when_nothing_else_runs(bench: Bench) -> None:
    bench.handle.counters_now = Counters()
    for _ in range(5):
        await bench.sh("true")
    assert bench.handle.counters_read == 6
    background = await bench.start("sleep 1000 > /dev/null 2>&1 & true")
    await background.wait()
    before = bench.handle.counters_read
    await bench.sh("true")
    assert bench.handle.counters_read == before + 2  # what a background child does in between is not the next one's doing
