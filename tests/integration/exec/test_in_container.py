# SPDX-License-Identifier: Apache-2.0
"""Commands and sessions in real sandboxes: what the stand-in of the other tests here cannot show."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from opendsec.api.errors import InvalidRequest, SandboxLost, Unsupported
from opendsec.api.exec import Command, ExecResult, Pty, SessionRequest, SessionRun
from opendsec.edge.processes import Defaults, Execution, ProcessTable
from opendsec.edge.session import ANSWER_S
from opendsec.edge.sessions import SessionTable
from opendsec.testing.fakes.timing import ManualClock
from tests.boxes import Box, Node
from tests.integration.exec.bench import collect, data_of, eventually
from tests.support import running

T = TypeVar("T")


class Table:
    """The commands of one box."""

    def __init__(self, box: Box, execution: Execution, clock: ManualClock) -> None:
        self.box, self.execution, self.clock = box, execution, clock
        self.processes = ProcessTable(execution, box.handle, Defaults(env={"FROM": "sandbox"}))
        self.sessions = SessionTable(self.processes)

    def wait(self, work: Coroutine[None, None, T]) -> T:
        return self.box.node.wait(work)

    def sh(self, text: str, **fields: object) -> ExecResult:
        return self.wait(self.processes.run(Command(shell=text, **fields)))  # type: ignore[arg-type]

    def open(self, request: SessionRequest | None = None) -> str:
        return self.wait(self.sessions.open(request or SessionRequest())).id

    def run(self, session_id: str, text: str) -> ExecResult:
        return self.wait(self.sessions.run(session_id, SessionRun(shell=text)))


@contextmanager
def table_of(box: Box) -> Iterator[Table]:
    clock = ManualClock()

    async def make() -> Execution:
        return Execution(clock=clock)

    table = Table(box, box.node.wait(make()), clock)
    try:
        yield table
    finally:
        table.processes.begin_kill("the test is over")
        box.destroy()
        table.sessions.close()
        table.processes.close()
        table.processes.forget_all()
        box.node.wait(table.execution.close())


@pytest.fixture
def table(box: Box) -> Iterator[Table]:
    with table_of(box) as table:
        yield table


# --- commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", ["root", "nobody", "1234"])
def test_the_streams_by_name(table: Table, user: str) -> None:
    result = table.sh("id -u; echo x > /dev/stdout; echo y > /dev/stderr; cat /dev/stdin", user=user, stdin=b"z")
    uid = {"root": b"0", "nobody": b"65534"}.get(user, user.encode())
    assert (result.outcome, result.stdout.head, result.stderr.head) == ("exited", uid + b"\nx\nz", b"y\n")


def test_nothing_but_the_streams_is_open(table: Table) -> None:
    assert table.sh("ls /proc/self/fd").stdout.head == b"0\n1\n2\n3\n"
    assert table.sh("ls /proc/self/fd", stdin=b"x").stdout.head == b"0\n1\n2\n3\n"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (Command(argv=("no-such-program",)), "cannot execute"),
        (Command(argv=("/etc/passwd",)), "Permission denied"),
        (Command(argv=("true",), cwd="/no/such"), "working directory"),
        (Command(argv=("true",), user="stranger"), "no user"),
        (Command(argv=("no-such-program",), pty=Pty()), "cannot execute"),
    ],
)
def test_not_started(table: Table, command: Command, message: str) -> None:
    result = table.wait(table.processes.run(command))
    assert result.outcome == "not_started" and message in result.message
    table.wait(eventually(lambda: table.execution.poller.watched() == 0))  # what was forked for it has its pipes open until it is gone


def test_timeout_kills_all_that_hides(table: Table) -> None:
    text = """trap '' TERM; sleep 1000 & setsid sleep 1000 & (setsid sh -c 'trap "" TERM; (sleep 1000 &); exec sleep 1000' &)
              setsid sh -c 'sleep 1000 & echo detached; exec sleep 1000' & wait"""
    process = table.wait(table.processes.start(Command(shell=text, timeout_s=5)))
    table.wait(eventually(lambda: process.stdout.total and table.box.handle.processes() >= 7))
    table.clock.advance(5)
    result = table.wait(process.wait())
    assert (result.outcome, result.stdout.head, result.limits_hit) == ("timed_out", b"detached\n", ("time",))
    table.wait(eventually(lambda: table.box.handle.processes() == 0))


def test_a_background_child_outlives_its_command(table: Table) -> None:
    result = table.sh("mkfifo /tmp/gate; (read x < /tmp/gate; echo late) & echo now")
    assert result.stdout.head == b"now\n"
    assert table.sh("echo > /tmp/gate").exit_code == 0
    table.wait(eventually(lambda: table.processes.info(result.process_id).stdout_bytes == 9))
    assert data_of(table.wait(collect(table.processes.attach(result.process_id)))) == b"now\nlate\n"


def test_terminal(table: Table) -> None:
    result = table.sh("tty; stty size; stty -echo; cat", pty=Pty(rows=7, cols=9), stdin=b"typed\n", user="nobody")
    assert result.stdout.head.replace(b"typed\r\n", b"", 1) in (b"/dev/pts/0\r\n7 9\r\ntyped\r\n", b"/dev/pts/0\r\n7 9\r\n")


def test_each_limit_is_named(node: Node) -> None:
    with node.box(memory="48MiB", pids=12, disk="4MiB", inodes=100) as box, table_of(box) as table:
        assert table.sh("true").limits_hit == ()
        result = table.sh("exec python3 -c 'x = bytearray(200 << 20)'")
        assert (result.outcome, result.signal, result.limits_hit) == ("memory_limit", signal.SIGKILL, ("memory",))
        assert "48MiB" in result.message
        result = table.sh("python3 -c 'x = bytearray(200 << 20)'; echo coped")
        assert (result.outcome, result.exit_code, result.limits_hit) == ("exited", 0, ("memory",))
        result = table.sh("for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do sleep 1000 & done; exit 0")
        assert "pids" in result.limits_hit and "12 processes" in result.message
        table.processes.kill_all()
        table.wait(eventually(lambda: box.handle.processes() == 0))
        result = table.sh("head -c 100M /dev/zero > /root/big")
        assert result.exit_code != 0 and result.limits_hit == ("disk",) and "4MiB" in result.message
        assert table.sh("true").limits_hit == ()  # still full, and no concern of this one
        assert table.sh("echo x > /root/other").limits_hit == ("disk",)
        assert table.sh("rm /root/big").limits_hit == ()
        result = table.sh("for i in $(seq 200); do : > /root/f$i || exit 1; done")
        assert result.exit_code != 0 and "inodes" in result.limits_hit and "100 files" in result.message


def test_the_sandbox_dies_under_its_commands(table: Table) -> None:
    async def scenario() -> list[BaseException | ExecResult]:
        runs = [asyncio.ensure_future(table.processes.run(Command(shell="echo started; exec sleep 1000"))) for _ in range(5)]
        await eventually(lambda: sum(info.stdout_bytes for info in table.processes.list()) == 40)
        os.kill(table.box.pid, signal.SIGKILL)
        return await asyncio.gather(*runs, return_exceptions=True)

    for ended in table.wait(scenario()):
        assert isinstance(ended, SandboxLost), ended
    with pytest.raises(SandboxLost):
        table.sh("true")
    table.wait(eventually(lambda: table.execution.poller.watched() == 0))


def test_a_kill_of_its_own_is_no_death_of_the_sandbox(table: Table) -> None:
    assert table.sh("kill -9 $$").outcome == "signalled"
    assert table.sh("kill -9 -1; echo spared").stdout.head == b"spared\n"
    assert table.sh("echo fine").stdout.head == b"fine\n"


def test_killed_with_the_sandbox(table: Table) -> None:
    async def scenario() -> ExecResult:
        run = asyncio.ensure_future(table.processes.run(Command(shell="echo started; exec sleep 1000")))
        await eventually(lambda: any(info.stdout_bytes for info in table.processes.list()))
        table.processes.begin_kill("killed by the caller")
        await table.box.handle.destroy()
        return await run

    result = table.wait(scenario())
    assert (result.outcome, result.message, result.stdout.head) == ("killed", "killed by the caller", b"started\n")


# --- sessions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", ["root", "nobody"])
def test_session(table: Table, user: str) -> None:
    session = table.open(SessionRequest(user=user, env={"A": "1"}, cwd="/tmp"))
    result = table.run(session, "pwd; id -un; echo $A$FROM; f() { echo f$x; }; x=2; cd /; echo e > /dev/stderr; false")
    assert (result.exit_code, result.stderr.head) == (1, b"e\n")
    assert result.stdout.head == f"/tmp\n{user}\n1sandbox\n".encode()
    assert table.run(session, "echo $?; f; pwd").stdout.head == b"1\nf2\n/\n"
    assert table.run(session, "ls /proc/self/fd; sh -c 'ls /proc/self/fd'").stdout.head == b"0\n1\n2\n3\n" * 2
    assert table.run(session, "cat; python3; cat <<E\nx").stdout.head == b"x\n"
    result = table.run(session, "exit 3")
    assert result.exit_code == 3 and table.sessions.info(session).state == "closed"


def test_session_timeout(table: Table) -> None:
    session = table.open()
    table.run(session, "sleep 1000 & kept=1")

    async def scenario() -> ExecResult:
        text = "echo started; setsid sleep 1000 & while :; do sleep 1000; echo never; done; echo never"
        run = asyncio.ensure_future(table.sessions.run(session, SessionRun(shell=text, timeout_s=5)))
        group = table.box.node.container(table.box).group
        await eventually(lambda: len(running(group.procs(), "sleep")) == 3)  # then the shell waits, and one round of killing does
        table.clock.advance(5)
        await eventually(lambda: table.box.handle.processes() == 2)
        return await run

    result = table.wait(scenario())
    assert (result.outcome, result.stdout.head) == ("timed_out", b"started\n")
    assert table.run(session, "jobs -r; echo $kept").stdout.head.endswith(b"Running                 sleep 1000 &\n1\n")


def test_session_that_does_not_answer(table: Table) -> None:
    session = table.open()

    async def scenario() -> ExecResult:
        text = "trap '' 47; echo started; while :; do :; done"
        run = asyncio.ensure_future(table.sessions.run(session, SessionRun(shell=text, timeout_s=5)))
        await eventually(lambda: any(info.stdout_bytes for info in table.processes.list()))
        table.clock.advance(5 + ANSWER_S + 1)
        return await run

    assert table.wait(scenario()).outcome == "timed_out" and table.sessions.info(session).state == "closed"


def test_session_out_of_memory(table: Table) -> None:
    session = table.open()
    result = table.run(session, "python3 -c 'x = bytearray(200 << 20)'")
    assert (result.outcome, result.exit_code, result.limits_hit) == ("memory_limit", 137, ("memory",))
    assert table.run(session, "echo alive").stdout.head == b"alive\n"


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        (SessionRequest(cwd="/no/such"), InvalidRequest, "cwd"),
        (SessionRequest(user="stranger"), InvalidRequest, "user"),
        (SessionRequest(user="root:strangers"), InvalidRequest, "user"),
        (SessionRequest(env={"PATH": "/nowhere"}), Unsupported, None),
    ],
)
def test_session_refused(table: Table, request_: SessionRequest, error: type[Exception], field: str | None) -> None:
    with pytest.raises(error) as caught:
        table.open(request_)
    assert getattr(caught.value, "field", None) == field


def test_session_dies_with_the_sandbox(table: Table) -> None:
    session = table.open()

    async def scenario() -> None:
        run = asyncio.ensure_future(table.sessions.run(session, SessionRun(shell="echo started; sleep 1000")))
        await eventually(lambda: any(info.stdout_bytes for info in table.processes.list()))
        os.kill(table.box.pid, signal.SIGKILL)
        with pytest.raises(SandboxLost):
            await run

    table.wait(scenario())
    assert table.sessions.info(session).state == "closed"
