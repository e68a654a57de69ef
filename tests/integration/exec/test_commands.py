# SPDX-License-Identifier: Apache-2.0
"""What a command gets and what its result says, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from opendsec.api.errors import Conflict, NotFound
from opendsec.api.exec import Command, Pty
from tests.integration.exec.bench import Bench, eventually


async def test_exit_code_and_streams_apart(bench: Bench) -> None:
    result = await bench.sh("echo out; echo err >&2; exit 3")
    assert (result.outcome, result.exit_code, result.signal) == ("exited", 3, None)
    assert (result.stdout.head, result.stderr.head) == (b"out\n", b"err\n")
    assert result.limits_hit == () and result.message == ""
    assert result.max_rss_bytes > 0 and result.cpu_ms > 0


async def test_argv_is_no_shell_text(bench: Bench) -> None:
    result = await bench.table.run(Command(argv=("printf", "%s|", "a b", "$HOME", "`id`", "é", "\udcff")))
    assert result.stdout.head == b"a b|$HOME|`id`|\xc3\xa9|\xff|"


async def test_env_is_data_and_comes_on_top_of_the_sandboxs(bench: Bench) -> None:
    hostile = "$(touch /tmp/never) `id` ; echo 'x\n"
    result = await bench.table.run(Command(argv=("env", "-0"), env={"BOTH": "command", "A.B-C d": hostile, "RAW": "\udcfe"}))
    env = dict(entry.split(b"=", 1) for entry in result.stdout.head.rstrip(b"\0").split(b"\0"))
    assert env[b"FROM"] == b"sandbox" and env[b"BOTH"] == b"command" and env[b"RAW"] == b"\xfe"
    assert env[b"A.B-C d"].decode() == hostile
    assert b"LANG" not in env and set(env) >= {b"PATH", b"HOME", b"USER", b"LOGNAME"}


async def test_cwd(bench: Bench, tmp_path: Path) -> None:
    assert (await bench.sh("pwd", cwd=str(tmp_path))).stdout.head == os.fsencode(tmp_path) + b"\n"
    assert (await bench.sh("pwd")).stdout.head == b"/\n"


@pytest.mark.parametrize("user", ["nobody", "65534"])
async def test_user_may_open_the_streams_by_name(bench: Bench, user: str) -> None:
    result = await bench.sh("id -un; echo x > /dev/stdout; echo y > /dev/stderr; cat /dev/stdin", user=user, stdin=b"z")
    assert (result.stdout.head, result.stderr.head) == (b"nobody\nx\nz", b"y\n")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (Command(argv=("no-such-program",)), "no-such-program"),
        (Command(argv=("true",), cwd="/no/such/directory"), "/no/such/directory"),
        (Command(argv=("true",), user="stranger"), "stranger"),
    ],
)
async def test_not_started(bench: Bench, command: Command, message: str) -> None:
    result = await bench.table.run(command)
    assert (result.outcome, result.exit_code, result.signal) == ("not_started", None, None)
    assert message in result.message


# --- standard input ----------------------------------------------------------------------------------------------------


async def test_stdin_is_empty_unless_given(bench: Bench) -> None:
    result = await bench.sh("cat; readlink /proc/self/fd/0")
    assert result.stdout.head == b"/dev/null\n"


async def test_stdin_larger_than_a_pipe(bench: Bench) -> None:
    data = os.urandom(3 << 20)
    result = await bench.table.run(Command(argv=("cat",), stdin=data))
    assert result.stdout.data() == data


async def test_stdin_that_nobody_reads(bench: Bench) -> None:
    result = await bench.sh("exec <&-; echo closed; exit 4", stdin=bytes(1 << 20))
    assert (result.exit_code, result.stdout.head) == (4, b"closed\n")


async def test_stdin_streamed(bench: Bench) -> None:
    process = await bench.start("while read -r line; do echo got $line; done; echo end", stdin=b"first\n", stdin_mode="stream")
    await bench.output(process, b"got first\n")
    await bench.table.stdin(process.id, b"second\n")
    await bench.output(process, b"got second\n")
    await bench.table.stdin(process.id, b"last\n", close=True)
    assert (await process.wait()).stdout.head == b"got first\ngot second\ngot last\nend\n"
    with pytest.raises(Conflict, match="closed"):
        await bench.table.stdin(process.id, b"more")


async def test_stdin_waits_for_the_reader(bench: Bench, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    process = await bench.start(f"read x < {gate}; wc -c", stdin_mode="stream")
    writes = [asyncio.ensure_future(bench.table.stdin(process.id, bytes(100_000))) for _ in range(3)]
    await eventually(lambda: process.stdin is not None and bench.execution.poller.watched() == 3)  # it waits for room
    assert not any(write.done() for write in writes)
    with gate.open("w") as gate_end:
        gate_end.write("\n")
    await asyncio.gather(*writes)
    await bench.table.stdin(process.id, b"", close=True)
    assert (await process.wait()).stdout.head == b"300000\n"


async def test_stdin_write_that_can_not_end(bench: Bench) -> None:
    process = await bench.start("exec sleep 1000", stdin_mode="stream")
    write = asyncio.ensure_future(bench.table.stdin(process.id, bytes(1 << 20)))
    await eventually(lambda: bench.execution.poller.watched() == 3)
    process.signal(signal.SIGKILL, tree=False)
    with pytest.raises(Conflict, match=r"has ended|nothing reads"):
        await write


async def test_stdin_closed_by_the_command(bench: Bench) -> None:
    process = await bench.start("exec <&-; echo closed; exec sleep 1000", stdin_mode="stream")
    await bench.output(process, b"closed")
    with pytest.raises(Conflict, match="nothing reads its standard input"):
        await bench.table.stdin(process.id, b"x")


async def test_stdin_pending_when_the_command_closes_it(bench: Bench, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    process = await bench.start(f"read x < {gate}; exec <&-; exec sleep 1000", stdin_mode="stream")
    write = asyncio.ensure_future(bench.table.stdin(process.id, bytes(1 << 20)))
    await eventually(lambda: bench.execution.poller.watched() == 3)
    with gate.open("w") as gate_end:
        gate_end.write("\n")
    with pytest.raises(Conflict, match="nothing reads its standard input"):  # an event that uvloop alone would never tell
        await write


async def test_stdin_is_no_stream(bench: Bench) -> None:
    process = await bench.start("exec sleep 1000")
    with pytest.raises(Conflict, match="not a stream"):
        await bench.table.stdin(process.id, b"x")
    with pytest.raises(NotFound):
        await bench.table.stdin("proc_0000000000000000", b"x")


# --- output ------------------------------------------------------------------------------------------------------------


async def test_head_and_tail(bench: Bench) -> None:
    result = await bench.sh("seq 1 100000", capture_bytes=1000)
    everything = "".join(f"{n}\n" for n in range(1, 100_001)).encode()
    assert result.stdout.truncated and result.stdout.total_bytes == len(everything)
    assert (result.stdout.head, result.stdout.tail) == (everything[:500], everything[-500:])
    assert f"{len(everything) - 1000} bytes omitted" in result.stdout.text()
    assert result.limits_hit == ("output",) and (result.outcome, result.exit_code) == ("exited", 0)


async def test_cut_between_characters(bench: Bench) -> None:
    result = await bench.sh("yes 🙂 | head -n 10000 | tr -d '\\n'", capture_bytes=1002)
    assert result.stdout.total_bytes == 40_000
    assert (result.stdout.head.decode(), result.stdout.tail.decode()) == ("🙂" * 125, "🙂" * 125)
    assert "\ufffd" not in result.stdout.text()


async def test_nothing_captured(bench: Bench) -> None:
    result = await bench.sh("echo hello", capture_bytes=0)
    assert result.stdout.truncated and (result.stdout.total_bytes, result.stdout.head) == (6, b"")


async def test_large_output_is_complete(bench: Bench) -> None:
    result = await bench.sh("head -c 8000000 /dev/zero; head -c 3000000 /dev/zero >&2")
    assert (len(result.stdout.data()), len(result.stderr.data())) == (8_000_000, 3_000_000)
    assert not result.stdout.truncated and not result.stderr.truncated


async def test_output_limit_ends_the_tree(bench: Bench) -> None:
    result = await bench.sh("sleep 1000 & (trap '' TERM; yes) & yes >&2; echo never", output_limit_bytes=300_000, capture_bytes=1000)
    assert result.outcome == "output_limit" and result.limits_hit == ("output",)
    assert "300000" in result.message
    assert result.stdout.total_bytes + result.stderr.total_bytes > 300_000
    await eventually(lambda: bench.handle.running[-1].members() == ())


async def test_output_up_to_the_limit(bench: Bench) -> None:
    assert (await bench.sh("head -c 300000 /dev/zero", output_limit_bytes=300_000)).outcome == "exited"
    assert (await bench.sh("head -c 300001 /dev/zero", output_limit_bytes=300_000)).outcome == "output_limit"


# --- ends --------------------------------------------------------------------------------------------------------------


async def test_signalled_by_itself(bench: Bench) -> None:
    result = await bench.sh("kill -TERM $$")
    assert (result.outcome, result.exit_code, result.signal) == ("signalled", None, signal.SIGTERM)
    assert (await bench.sh("kill -KILL $$")).outcome == "signalled"


async def test_killed_by_a_caller(bench: Bench) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        process = await bench.start("exec sleep 1000")
        bench.table.signal(process.id, number)
        result = await process.wait()
        assert (result.outcome, result.signal) == ("killed", number)


async def test_a_signal_that_is_handled(bench: Bench) -> None:
    process = await bench.start("trap 'echo bye; exit 7' TERM; echo ready; sleep 1000 & wait")
    await bench.output(process, b"ready")
    bench.table.signal(process.id, signal.SIGTERM)
    result = await process.wait()
    assert (result.outcome, result.exit_code, result.stdout.head) == ("exited", 7, b"ready\nbye\n")


async def test_signal_to_the_tree(bench: Bench) -> None:
    process = await bench.start("trap : USR1; sh -c 'trap \"echo child; exit\" USR1; echo ready; while :; do :; done'; echo parent")
    await bench.output(process, b"ready")
    bench.table.signal(process.id, signal.SIGUSR1, tree=True)
    assert (await process.wait()).stdout.head == b"ready\nchild\nparent\n"


DETACHED = """
trap '' TERM INT HUP
sleep 1000 &
setsid sleep 1000 &
setsid sh -c 'trap "" TERM; (sleep 1000 &) & echo detached; exec sleep 1000' &
(setsid sh -c 'sleep 1000 & exec sleep 1000' &)
echo started
wait
"""


async def test_timeout_kills_all_that_hides(bench: Bench) -> None:
    process = await bench.start(DETACHED, timeout_s=30)
    await bench.output(process, b"started")
    await bench.output(process, b"detached")
    await eventually(lambda: len(bench.handle.running[0].members()) >= 7)
    assert 30.0 in bench.clock.waiting()
    bench.clock.advance(29.5)
    assert process.cause is None
    bench.clock.advance(0.5)
    result = await process.wait()
    assert (result.outcome, result.exit_code, result.signal) == ("timed_out", None, signal.SIGKILL)
    assert result.limits_hit == ("time",) and "30 s" in result.message
    assert sorted(result.stdout.head.split()) == [b"detached", b"started"]
    assert result.duration_ms == 30_000
    await eventually(lambda: bench.handle.running[0].members() == ())
    assert bench.clock.waiting() == []


async def test_in_time(bench: Bench) -> None:
    assert (await bench.sh("exit 1", timeout_s=5)).outcome == "exited"
    assert bench.clock.waiting() == []


async def test_background_child_does_not_delay_and_goes_on(bench: Bench, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    process = await bench.start(f"(read x < {gate}; echo late; echo late >&2) & echo now", timeout_s=30)
    result = await process.wait()
    assert (result.outcome, result.exit_code, result.stdout.head) == ("exited", 0, b"now\n")
    assert bench.clock.waiting() == []  # the time-out was the command's, not its children's
    with gate.open("w") as gate_end:
        gate_end.write("\n")
    await eventually(lambda: bench.execution.poller.watched() == 0)  # it has closed both pipes
    assert await process.wait() == result
    info = bench.table.info(process.id)
    assert (info.stdout_bytes, info.stderr_bytes, info.state) == (9, 5, "ended")


async def test_background_children_can_be_killed(bench: Bench) -> None:
    process = await bench.start("sleep 1000 & exit 0")
    assert (await process.wait()).outcome == "exited"
    assert bench.execution.poller.watched() == 2
    bench.table.signal(process.id, signal.SIGKILL, tree=True)
    await eventually(lambda: bench.execution.poller.watched() == 0)
    bench.table.signal(process.id, signal.SIGKILL, tree=True)  # nobody is left: nothing happens
    assert process.result().outcome == "exited"


async def test_a_flooding_child_does_not_delay(bench: Bench) -> None:
    result = await bench.sh("yes & echo now >&2", capture_bytes=10_000)
    assert (result.outcome, result.stderr.head) == ("exited", b"now\n")
    bench.table.kill_all()
    await eventually(lambda: bench.execution.poller.watched() == 0)


async def test_a_flooding_child_hits_the_output_limit(bench: Bench) -> None:
    result = await bench.sh("(sleep 0; exec yes) & echo now >&2", capture_bytes=10_000, output_limit_bytes=1 << 20)
    assert result.stderr.head == b"now\n"
    await eventually(lambda: bench.execution.poller.watched() == 0)


# --- terminals ---------------------------------------------------------------------------------------------------------


async def test_terminal(bench: Bench) -> None:
    process = await bench.start(
        "test -t 0 && test -t 1 && test -t 2 && stty size; trap 'stty size; exit' WINCH; echo ready >&2; while :; do read x; done",
        pty=Pty(rows=10, cols=20),
        stdin_mode="stream",
    )
    await bench.output(process, b"10 20\r\nready\r\n")
    bench.table.resize(process.id, Pty(rows=33, cols=44))
    result = await process.wait()
    assert result.stdout.head == b"10 20\r\nready\r\n33 44\r\n" and result.stderr.total_bytes == 0
    with pytest.raises(Conflict, match="ended"):
        bench.table.resize(process.id, Pty(rows=1, cols=1))


async def test_terminal_input(bench: Bench) -> None:
    process = await bench.start("stty -echo; echo ready; cat; echo end", pty=Pty(), stdin_mode="stream")
    await bench.output(process, b"ready")
    await bench.table.stdin(process.id, b"typed\n")
    await bench.output(process, b"typed")
    await bench.table.stdin(process.id, b"", close=True)
    assert (await process.wait()).stdout.head == b"ready\r\ntyped\r\nend\r\n"


async def test_terminal_interrupt(bench: Bench) -> None:
    process = await bench.start("echo ready; exec sleep 1000", pty=Pty(), stdin_mode="stream")
    await bench.output(process, b"ready")
    await bench.table.stdin(process.id, b"\x03")
    assert (await process.wait()).signal == signal.SIGINT


async def test_terminal_without_input_is_at_its_end(bench: Bench) -> None:
    assert (await bench.sh("cat; echo $?", pty=Pty())).stdout.head == b"0\r\n"


async def test_terminal_output_is_complete(bench: Bench) -> None:
    result = await bench.sh("stty -onlcr; seq 1 50000", pty=Pty())
    assert result.stdout.head == "".join(f"{n}\n" for n in range(1, 50_001)).encode()


async def test_terminal_left_open_by_a_child(bench: Bench) -> None:
    result = await bench.sh("trap '' HUP; (trap '' HUP; exec sleep 1000) & echo now", pty=Pty())
    assert result.stdout.head == b"now\r\n"
    bench.table.kill_all()
    await eventually(lambda: bench.execution.poller.watched() == 0)


async def test_terminal_and_no_start(bench: Bench) -> None:
    result = await bench.table.run(Command(argv=("no-such-program",), pty=Pty(rows=2, cols=2)))
    assert result.outcome == "not_started"


async def test_no_terminal(bench: Bench) -> None:
    process = await bench.start("exec sleep 1000")
    with pytest.raises(Conflict, match="no terminal"):
        bench.table.resize(process.id, Pty(rows=1, cols=1))
