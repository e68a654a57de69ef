# SPDX-License-Identifier: Apache-2.0
"""Sessions with a real bash: what stays between commands, what cannot poison them, how they end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from opendsec.api.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded, SandboxLost, Unavailable, Unsupported
from opendsec.api.exec import ExecResult, SessionRequest, SessionRun
from opendsec.edge import session as session_module
from opendsec.edge import sessions as sessions_module
from opendsec.edge.session import AGAIN_S, ANSWER_S, BETWEEN_BYTES, READY_S
from opendsec.edge.sessions import SessionTable
from opendsec.runtime.backend import Exit
from opendsec.testing.fakes.local_handle import LocalRunning
from tests.integration.exec.bench import Bench, collect, data_of, eventually, small_bench
from tests.support import running


class Shell:
    """A session and the means to use it."""

    def __init__(self, bench: Bench, table: SessionTable, session_id: str) -> None:
        self.bench, self.table, self.id = bench, table, session_id

    async def run(self, text: str, **fields: object) -> ExecResult:
        request = SessionRun(shell=text, **fields)  # type: ignore[arg-type]
        request.check()
        return await self.table.run(self.id, request)

    async def out(self, text: str) -> str:
        """What a command that succeeds prints."""
        result = await self.run(text)
        assert (result.outcome, result.exit_code, result.stderr.text()) == ("exited", 0, ""), result
        return result.stdout.text()

    async def begin(self, text: str, ready: bytes, **fields: object) -> asyncio.Task[ExecResult]:
        """A command under way, that has written `ready`."""
        task = asyncio.ensure_future(self.run(text, **fields))
        await eventually(lambda: self.process is not None)
        process = self.process
        assert process is not None
        await self.bench.output(process, ready)
        return task

    @property
    def session(self) -> session_module.Session:
        return self.table.get(self.id)

    @property
    def process(self) -> session_module.Process | None:
        return self.session.process

    @property
    def state(self) -> str:
        return self.table.info(self.id).state

    async def sleeping(self, count: int) -> None:
        """Until that many processes of the session are `sleep`. From then on the shell waits, and one round of killing does."""
        await eventually(lambda: len(running(self.members(), "sleep")) >= count)

    def members(self) -> set[int]:
        running = self.session.running
        assert isinstance(running, LocalRunning)
        return set(running.members())


@pytest.fixture
async def shell(bench: Bench) -> Shell:
    info = await bench.sessions.open(SessionRequest())
    assert info.state == "open" and info.sandbox_id == bench.table.sandbox_id
    return Shell(bench, bench.sessions, info.id)


# --- what stays --------------------------------------------------------------------------------------------------------


async def test_state_stays(shell: Shell, tmp_path: Path) -> None:
    await shell.run(
        f"cd {tmp_path}; local=1; export EXPORTED=2; f() {{ echo f:$1; }}; alias ll='echo alias'; a=(x y z); declare -A m=([k]=v)"
    )
    assert await shell.out("pwd") == f"{tmp_path}\n"
    assert await shell.out("echo $local $EXPORTED ${a[2]} ${m[k]}; sh -c 'echo $EXPORTED-$local'") == "1 2 z v\n2-\n"
    assert await shell.out("f 3; ll") == "f:3\nalias\n"
    await shell.run("umask 027; set -o pipefail; shopt -s nullglob; declare -r constant=4; i=1; ((i += 2))")
    assert (
        await shell.out("umask; shopt -o pipefail; shopt nullglob; echo $constant $i")
        == "0027\npipefail       \ton\nnullglob       \ton\n4 3\n"
    )


async def test_exit_status_stays(shell: Shell) -> None:
    assert (await shell.run("(exit 42)")).exit_code == 42
    assert await shell.out("echo $?") == "42\n"
    assert await shell.out("echo $?") == "0\n"


async def test_env_cwd_user(bench: Bench, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    info = await bench.sessions.open(SessionRequest(env={"BOTH": "session", "A": "$x `y`"}, cwd="/tmp", user="nobody"))
    shell = Shell(bench, bench.sessions, info.id)
    assert await shell.out('echo "$FROM $BOTH $A"; pwd; id -un; echo x > /dev/stdout') == "sandbox session $x `y`\n/tmp\nnobody\nx\n"


async def test_background_jobs_stay_and_their_output_is_shown(shell: Shell, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    first = await shell.run(f"(read x < {tmp_path}/gate; echo late; echo late >&2; exit 9) & pid=$!; echo started")
    assert first.stdout.head == b"started\n"
    assert "Running" in await shell.out("jobs")
    with (tmp_path / "gate").open("w") as gate:
        gate.write("\n")
    await eventually(lambda: len(shell.members()) == 1 and shell.session._between[1].total)
    result = await shell.run("echo next; wait $pid; echo $?")
    assert (result.stdout.head, result.stderr.head) == (b"late\nnext\n9\n", b"late\n")


async def test_background_floods_are_bounded(shell: Shell) -> None:
    await shell.run("yes & pid=$!")
    await eventually(lambda: shell.session._between[0].total > 2 * BETWEEN_BYTES)
    result = await shell.run("kill $pid; wait $pid; echo; echo end", output_limit_bytes=64 << 20)
    assert result.stdout.data().endswith(b"\nend\n") and "were not kept" in result.message
    assert await shell.out("echo quiet") == "quiet\n"


# --- what cannot poison it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code", "out"),
    [
        ("cat", 0, b""),
        ("python3", 0, b""),
        ("read x; echo $?", 0, b"1\n"),
        ("head -c 1 /dev/stdin | wc -c", 0, b"0\n"),
        ("cat <<EOF\ntext $HOME\nEOF", 0, b"text /root\n"),
        ("cat <<'EOF'\n$HOME", 0, b"$HOME\n"),  # unterminated
        ("echo 'unbalanced", 2, b""),
        ('echo "unbalanced', 2, b""),
        ("echo $(", 2, b""),
        ("if true; then", 2, b""),
        ("}", 2, b""),
        ("return 5", 2, b""),
        ("break; echo never", 0, b""),
        ("continue; echo never", 0, b""),
        ("break 3; echo never", 0, b""),
        ("exec no-such-program", 127, b""),
        ("echo $((1 / 0)); echo never", 1, b""),
        ("(exit 3)", 3, b""),
        ("sh -c 'kill -9 $$'", 137, b""),
        ("set -e; false || true; set +e", 0, b""),
        ("set -u; echo ok; set +u", 0, b"ok\n"),
        ("(set -e; false; echo never)", 1, b""),
        ("set -o posix; echo ok; set +o posix", 0, b"ok\n"),
        ("trap 'echo int' INT USR1; kill -USR1 $$; trap - INT USR1", 0, b"int\n"),
        ("IFS=xyz; set -f; PS1=x; PROMPT_COMMAND='echo never'; TMOUT=1", 0, b""),
        ("LC_ALL=xx_YY.nonsense", 0, b""),
        ("exec 3<&- 4>&- 5</dev/null 9>&1 10>/dev/null 11>&1; exec 5<&- 9>&- 10>&- 11>&-", 0, b""),
        ("sleep 1000 </dev/null >/dev/null 2>&1 & disown; kill $!", 0, b""),
        ("printf '0 0\\0'; printf '1 0\\0'; printf '2 0\\0'", 0, b"0 0\0001 0\0002 0\0"),
        ("printf '\\0\\377\\n'", 0, b"\0\xff\n"),
        ("printf 'no newline'", 0, b"no newline"),
        ("# only a comment", 0, b""),
        ("", 0, b""),
        ("\n\n", 0, b""),
        ("echo 'é🙂'", 0, "é🙂\n".encode()),
        ("printf %s '\udcff'", 0, b"\xff"),
        ("builtin() { :; }; unset -f builtin", 0, b""),
        ("f() { local x=1; return 7; }; f", 7, b""),
        ("declare x=outer; echo $x", 0, b"outer\n"),
        ("! true", 1, b""),
        ("coproc cat; echo in >&${COPROC[1]}; read y <&${COPROC[0]}; echo $y; kill $COPROC_PID", 0, b"in\n"),
        ("exec 2>/dev/null; echo gone >&2; exec 2>&1", 0, b""),
        ("cat <(echo substituted)", 0, b"substituted\n"),
        ("stty -a; tty; true", 0, b"not a tty\n"),
    ],
)
async def test_not_poisoned(shell: Shell, text: str, code: int, out: bytes) -> None:
    result = await shell.run(text)
    assert (result.outcome, result.exit_code, result.stdout.head) == ("exited", code, out), result
    assert shell.state == "open"
    assert (await shell.run("echo alive $?")).stdout.head == b"alive %d\n" % code


async def test_traces_show_the_command_alone(shell: Shell) -> None:
    await shell.run("set -x")
    result = await shell.run("echo one\nfalse")
    assert (result.exit_code, result.stdout.head, result.stderr.head) == (1, b"one\n", b"++ echo one\n++ false\n")
    assert (await shell.run("( syntax")).exit_code == 2
    assert (await shell.run(": still traced")).stderr.head == b"++ : still traced\n"
    await shell.run("set +x")
    assert (await shell.run("set -v; echo v; set +v")).stdout.head == b"v\n"
    await shell.run("trap 'echo DEBUG' DEBUG; trap 'echo ERR' ERR")
    assert (await shell.run("false")).exit_code == 1
    await shell.run("trap - DEBUG ERR")
    await shell.run("true")
    assert await shell.out("echo quiet") == "quiet\n"


async def test_messages_give_the_lines_of_the_text(shell: Shell) -> None:
    result = await shell.run("true\n\nno-such-program")
    assert result.stderr.head == b"bash: line 3: no-such-program: command not found\n" and result.exit_code == 127


async def test_the_channels_are_not_inherited(shell: Shell) -> None:
    assert await shell.out("ls /proc/self/fd; sh -c 'ls /proc/self/fd' & wait") == "0\n1\n2\n3\n" * 2
    assert await shell.out("python3 -c 'import os; print(sorted(map(int, os.listdir(\"/proc/self/fd\"))))'") == "[0, 1, 2, 3]\n"
    assert "opendsec" not in await shell.out("set -a; v=1; env; set +a")


async def test_large_commands_and_outputs(shell: Shell) -> None:
    text = "x='" + "0123456789" * 10_000 + "'; echo ${#x}"
    assert await shell.out(text) == "100000\n"
    result = await shell.run("head -c 5000000 /dev/urandom; echo err >&2")
    assert result.stdout.total_bytes == 5_000_000 and not result.stdout.truncated and result.stderr.head == b"err\n"
    result = await shell.run("seq 1 100000", capture_bytes=100)
    assert result.stdout.truncated and result.limits_hit == ("output",) and result.stdout.tail.endswith(b"\n100000\n")
    assert await shell.out("echo next") == "next\n"


async def test_many_in_a_row(shell: Shell) -> None:
    for n in range(200):
        result = await shell.run(f"echo {n}; (exit {n % 5})")
        assert (result.stdout.head, result.exit_code) == (b"%d\n" % n, n % 5)


# --- like any command --------------------------------------------------------------------------------------------------


async def test_its_commands_are_processes(shell: Shell) -> None:
    bench = shell.bench
    run = await shell.begin("echo started; sleep 1000; echo never", b"started", action_id="a7")
    await shell.sleeping(1)
    (info,) = bench.table.list()
    assert (info.state, info.action_id, info.command) == ("running", "a7", "echo started; sleep 1000; echo never")
    assert shell.state == "busy" and bench.table.active == 1
    with pytest.raises(Conflict, match="busy"):
        await shell.run("true")
    with pytest.raises(Conflict, match="not a stream"):
        await bench.table.stdin(info.id, b"x")
    reader = asyncio.ensure_future(collect(bench.table.attach(info.id)))
    await asyncio.sleep(0)
    bench.table.signal(info.id, signal.SIGINT)
    result = await run
    assert (result.outcome, result.exit_code, result.process_id, result.action_id) == ("exited", 0, info.id, "a7")
    assert data_of(await reader) == b"started\nnever\n"  # the shell goes on after its child, as shells do
    assert await bench.table.wait(info.id) == result
    assert bench.table.active == 0 and bench.events.kinds() == ["exec.started", "exec.ended"]


async def test_a_signal_is_no_end_of_the_session(shell: Shell) -> None:
    run = await shell.begin("echo started; sleep 1000", b"started")
    await shell.sleeping(1)
    assert shell.process is not None
    shell.bench.table.signal(shell.process.id, signal.SIGTERM)
    assert (await run).outcome == "killed"
    assert await shell.out("echo alive") == "alive\n"


async def test_a_client_that_goes_away(shell: Shell, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    run = await shell.begin(f"echo started; read x < {tmp_path}/gate; echo done", b"started")
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    (info,) = shell.bench.table.list()
    assert shell.state == "busy"
    with (tmp_path / "gate").open("w") as gate:
        gate.write("\n")
    assert (await shell.bench.table.wait(info.id)).stdout.head == b"started\ndone\n"
    assert shell.state == "open"


# --- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sleeps"),
    [
        ("echo started; sleep 1000; echo never", 1),
        ("echo started; sleep 1000\necho never\necho never", 1),
        ("echo started; while :; do sleep 1000; echo never; done; echo never", 1),
        ("echo started; for i in 1 2; do for j in 1 2; do sleep 1000; echo never; done; done\necho never", 1),
        ("f() { sleep 1000; echo never; }; g() { while :; do f; echo never; done; }; echo started; g; echo never", 1),
        ("echo started; while :; do :; done; echo never", 0),
        ("echo started; x=$(sleep 1000; echo never); echo never$x", 1),
        ("echo started; (sleep 1000; echo never); echo never", 1),
        ("echo started; sleep 1000 | cat; echo never", 1),
        ("echo started; sleep 1000 || echo never", 1),
        ("echo started; if sleep 1000; then echo never; else echo never; fi", 1),
        ("echo started; sleep 1000 & wait; echo never", 1),
        ("echo started; setsid sh -c 'trap \"\" TERM; (sleep 1000 &); exec sleep 1000' & setsid -w sleep 1000; echo never", 3),
        ("echo started; (trap '' TERM INT; while :; do sleep 1000; done); echo never", 1),
        ("echo started; eval 'sleep 1000; echo never'; echo never", 1),
        ("echo started; {\nsleep 1000\necho never\n} 2>/dev/null\necho never", 1),
    ],
)
async def test_timeout_gives_up_the_command_and_keeps_the_session(shell: Shell, text: str, sleeps: int) -> None:
    await shell.run("kept=1; sleep 2000 & job=$!")
    before = shell.members()
    assert len(before) == 2
    run = await shell.begin(text, b"started\n", timeout_s=30)
    await shell.sleeping(sleeps + 1)
    shell.bench.clock.advance(30)
    result = await run
    assert (result.outcome, result.exit_code, result.limits_hit) == ("timed_out", None, ("time",))
    assert result.stdout.head == b"started\n"
    assert result.message == "killed with all it had started, after 30 s; the session goes on"
    await eventually(lambda: shell.members() == before)
    assert shell.state == "open"
    result = await shell.run("kill -0 $job && echo $kept; trap -p DEBUG; f() { echo f; }; f; for i in 1 2; do echo $i; done")
    assert result.stdout.head == b"1\nf\n1\n2\n"
    assert shell.bench.clock.waiting() == []


async def test_timeout_in_a_sourced_file(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "script").write_text("echo started\nsleep 1000\necho never\n")
    run = await shell.begin(f". {tmp_path}/script; echo never", b"started\n", timeout_s=30)
    await shell.sleeping(1)
    shell.bench.clock.advance(30)
    assert (await run).stdout.head == b"started\n" and shell.state == "open"


@pytest.mark.parametrize("text", ["trap '' 47; echo started; while :; do :; done", "echo started; trap '' 47; read x < {gate}"])
async def test_timeout_of_a_shell_that_does_not_answer(shell: Shell, text: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    await shell.run("sleep 1000 &")
    job = shell.members() - {shell.session.running.pid if shell.session.running else 0}
    run = await shell.begin(text.format(gate=tmp_path / "gate"), b"started\n", timeout_s=30)
    shell.bench.clock.advance(30)
    assert shell.state == "busy"
    shell.bench.clock.advance(ANSWER_S + AGAIN_S)
    result = await run
    assert result.outcome == "timed_out" and "did not answer" in result.message and "closed the session" in result.message
    assert shell.state == "closed" and shell.members() == job  # the job of an earlier command lives on
    with pytest.raises(Conflict, match="closed: its shell did not answer"):
        await shell.run("true")
    assert shell.bench.clock.waiting() == []


async def test_timeout_after_exec(shell: Shell) -> None:
    run = await shell.begin("echo started; exec sleep 1000", b"started\n", timeout_s=30)
    await shell.sleeping(1)
    shell.bench.clock.advance(30)
    result = await run
    assert result.outcome == "timed_out" and shell.state == "closed"


async def test_fork_bombs_end(shell: Shell) -> None:
    run = await shell.begin("b() { b & b & wait; }; echo started; b", b"started\n", timeout_s=30)
    await eventually(lambda: len(shell.members()) > 50)
    shell.bench.clock.advance(30 + ANSWER_S + 1)
    assert (await run).outcome == "timed_out"
    await eventually(lambda: shell.members() <= {shell.session.running.pid if shell.session.running else 0})


async def test_output_limit(shell: Shell) -> None:
    result = await shell.run("yes; echo never >&2", output_limit_bytes=200_000, capture_bytes=1000)
    assert result.outcome == "output_limit" and result.limits_hit == ("output",) and b"never" not in result.stderr.head
    assert await shell.out("echo alive") == "alive\n"


async def test_kill_all(shell: Shell) -> None:
    run = await shell.begin("echo started; sleep 1000; echo never", b"started\n")
    await shell.sleeping(1)
    shell.bench.table.kill_all("enough")
    result = await run
    assert (result.outcome, result.message) == ("killed", "enough; the session goes on")


# --- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "outcome", "code", "number", "reason"),
    [
        ("echo bye; exit 3", "exited", 3, None, "its shell ended with exit code 3"),
        ("echo bye; set -e; false; echo never", "exited", 1, None, "its shell ended with exit code 1"),
        ("echo bye; set -u; echo $unset", "exited", 127, None, "its shell ended with exit code 127"),
        ("exec sh -c 'echo bye; exit 5'", "exited", 5, None, "its shell ended with exit code 5"),
        ("trap 'echo bye' EXIT; exit 4", "exited", 4, None, "its shell ended with exit code 4"),
        ("echo bye; kill -9 $$; echo never", "signalled", None, 9, "its shell was killed by signal 9"),
        ("echo bye; exit", "exited", 0, None, "its shell ended with exit code 0"),
    ],
)
async def test_the_shell_ends(shell: Shell, text: str, outcome: str, code: int | None, number: int | None, reason: str) -> None:
    result = await shell.run(text)
    assert (result.outcome, result.exit_code, result.signal, result.stdout.head) == (outcome, code, number, b"bye\n")
    assert "closed the session" in result.message
    info = shell.table.info(shell.id)
    assert (info.state, info.message) == ("closed", reason)
    with pytest.raises(Conflict, match=reason):
        await shell.run("true")
    await eventually(lambda: shell.bench.execution.poller.watched() == 0)


async def test_the_shell_ends_between_commands(shell: Shell, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    await shell.run(f"(read x < {tmp_path}/gate; kill -9 $$) &")
    with (tmp_path / "gate").open("w") as gate:
        gate.write("\n")
    await eventually(lambda: shell.state == "closed")
    with pytest.raises(Conflict):
        await shell.run("true")


async def test_jobs_outlive_the_shell_but_not_the_close(shell: Shell) -> None:
    await shell.run("sleep 1000 &")
    assert (await shell.run("exit 0")).exit_code == 0
    assert len(shell.members()) == 1
    shell.table.end(shell.id)
    await eventually(lambda: shell.members() == set() and shell.bench.execution.poller.watched() == 0)


async def test_close(shell: Shell) -> None:
    await shell.run("sleep 1000 &")
    run = await shell.begin("echo started; sleep 1000", b"started")
    info = shell.table.end(shell.id)
    assert (info.state, info.message) == ("closed", "closed by the caller")
    result = await run
    assert result.outcome == "killed" and "closed by the caller" in result.message
    assert shell.table.end(shell.id) == info
    await eventually(lambda: shell.members() == set() and shell.bench.execution.poller.watched() == 0)
    with pytest.raises(NotFound):
        shell.table.info("sess_0000000000000000")


@pytest.mark.parametrize(
    "meddling",
    [
        "printf '7 0\\0' >&{status}",
        "printf 'nonsense\\0' >&{status}",
        "printf '{many}' >&{status}",
        "exec {status}>&-",
    ],
)
async def test_meddling_with_the_status_closes_the_session(shell: Shell, meddling: str) -> None:
    text = meddling.format(status=min(shell.bench.handle.record.limits.open_files, 1000) - 1, many="x" * 200)
    run = asyncio.ensure_future(shell.run(f"{text}; sleep 1000"))

    def closed() -> bool:
        shell.bench.clock.advance(0.01)
        return shell.state == "closed"

    await eventually(closed)
    result = await run
    assert result.outcome == "killed" and "channel" in result.message
    await eventually(lambda: shell.bench.execution.poller.watched() == 0)


async def test_a_forged_status_is_found_out(shell: Shell) -> None:
    result = await shell.run("printf '1 0\\0' >&999; (exit 3)")
    assert result.outcome == "exited"  # it is the command's own lie about itself
    await eventually(lambda: shell.state == "closed")  # but its true status came after it


async def test_closing_the_command_channel_ends_the_shell(shell: Shell) -> None:
    assert (await shell.run("exec 998<&-; echo closed")).stdout.head == b"closed\n"
    await eventually(lambda: shell.state == "closed")


async def test_the_sandbox_dies(shell: Shell) -> None:
    run = await shell.begin("echo started; sleep 1000", b"started")
    shell.bench.handle.die("its first process ended")
    with pytest.raises(SandboxLost):
        await run
    await eventually(lambda: shell.state == "closed")


async def test_the_sandbox_is_killed(shell: Shell) -> None:
    run = await shell.begin("echo started; sleep 1000", b"started")
    shell.bench.table.begin_kill("the sandbox was killed by the caller")
    shell.bench.handle.die("destroyed")
    result = await run
    assert (result.outcome, result.stdout.head) == ("killed", b"started\n") and "by the caller" in result.message


async def test_the_edge_goes(shell: Shell) -> None:
    run = await shell.begin("echo started; sleep 1000", b"started")
    shell.table.close()
    shell.bench.table.close()
    assert (await run).outcome == "unknown"
    assert shell.bench.execution.poller.watched() == 0


async def test_the_spawner_dies(shell: Shell) -> None:
    run = await shell.begin("echo started; sleep 1000", b"started")
    shell.bench.handle.running[0].exited.set_result(Exit(lost=True))
    assert (await run).outcome == "unknown" and shell.state == "closed"


# --- opening -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        (SessionRequest(cwd="/no/such"), InvalidRequest, "cwd"),
        (SessionRequest(user="stranger"), InvalidRequest, "user"),
        (SessionRequest(env={"PATH": "/nowhere"}), Unsupported, None),
    ],
)
async def test_refused(bench: Bench, request_: SessionRequest, error: type[Exception], field: str | None) -> None:
    with pytest.raises(error) as caught:
        await bench.sessions.open(request_)
    assert getattr(caught.value, "field", None) == field
    assert bench.sessions.list() == () and bench.execution.poller.watched() == 0 and bench.table.shells == 0


@pytest.mark.parametrize(("body", "advance"), [("exit 0", 0.0), ("exec sleep 1000", READY_S), ("printf 'hi\\0' >&4; exec sleep 1000", 0.0)])
async def test_another_program_by_the_name_of_bash(bench: Bench, tmp_path: Path, body: str, advance: float) -> None:
    fake = tmp_path / "bash"
    fake.write_text(f"#!/bin/sh\n{body}\n")
    fake.chmod(0o755)
    opening = asyncio.ensure_future(bench.sessions.open(SessionRequest(env={"PATH": f"{tmp_path}:/usr/bin:/bin"})))
    await eventually(lambda: bench.handle.running)
    await asyncio.sleep(0)
    bench.clock.advance(advance)
    with pytest.raises(Unsupported, match="bash"):
        await opening
    await eventually(lambda: bench.execution.poller.watched() == 0)
    assert bench.sessions.list() == ()


async def test_a_start_that_fails(bench: Bench) -> None:
    bench.handle.fail_exec = Unavailable("the spawner died")
    with pytest.raises(Unavailable):
        await bench.sessions.open(SessionRequest())
    assert bench.sessions.list() == ()


async def test_a_client_that_goes_away_while_it_opens(bench: Bench) -> None:
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    bench.handle.before_exec = lambda: gate
    opening = asyncio.ensure_future(bench.sessions.open(SessionRequest()))
    await eventually(bench.sessions.list)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    assert bench.sessions.list() == ()
    gate.set_result(None)
    await eventually(lambda: bench.handle.running and bench.handle.running[0].exited.done())
    await eventually(lambda: bench.execution.poller.watched() == 0)


async def test_a_bounded_number(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 2)
    monkeypatch.setattr(sessions_module, "MAX_CLOSED", 1)
    first, _ = [await bench.sessions.open(SessionRequest()) for _ in range(2)]
    with pytest.raises(QuotaExceeded, match="at most 2"):
        await bench.sessions.open(SessionRequest())
    for _ in range(3):
        session = bench.sessions.get(first.id)
        bench.sessions.end(first.id)
        await eventually(lambda session=session: not session.lingers)
        first = await bench.sessions.open(SessionRequest())
    states = sorted(info.state for info in bench.sessions.list())
    assert states == ["closed", "open", "open"]


async def test_few_open_files() -> None:
    async with small_bench(open_files=16) as bench:
        info = await bench.sessions.open(SessionRequest())
        shell = Shell(bench, bench.sessions, info.id)
        assert await shell.out("ulimit -n; ls /proc/self/fd") == "16\n0\n1\n2\n3\n"
