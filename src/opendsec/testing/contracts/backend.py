# SPDX-License-Identifier: Apache-2.0
"""The contract of a backend: named checks over a factory of started backends on one machine.

    @pytest.mark.parametrize("name", backend.CHECKS)
    async def test_contract(name, setup):         # setup: a Setup, see below
        await backend.CHECKS[name](setup)

Each check destroys what it makes. Commands work in /tmp by relative names, so that a backend that does not isolate can take part; they
need of an image: /bin/sh, setsid and the usual small programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from opendsec.api.errors import SandboxLost, Unsupported
from opendsec.api.exec import Pty
from opendsec.api.ids import PROCESS, SANDBOX, SNAPSHOT, new_id
from opendsec.api.images import ImageConfig
from opendsec.api.spec import Limits
from opendsec.runtime.backend import Backend, ExecPlan, Exit, Handle, LayerRef, Placement, Record, Running, SnapshotRecord
from opendsec.testing.waiting import eventually

ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
LIMITS = Limits(cpu=1.0, cpu_weight=100, memory_bytes=64 << 20, disk_bytes=16 << 20, inodes=4096, pids=64, open_files=256)
TIMEOUT_S = 60.0  # an emulated machine on a busy one takes its time


@dataclass
class Setup:
    """What checks work on. `make`: another started backend of the same edge, as after a restart (the one before is closed first)."""

    make: Callable[[], Awaitable[Backend]]
    layers: tuple[LayerRef, ...]
    murder: Callable[[Handle], None]  # kill PID 1 of a sandbox, as a hostile or unlucky inside would
    uid_base: int = 0x70000000
    limits: Limits = LIMITS
    timeout_s: float = TIMEOUT_S  # of a sandbox's life in a check; more where something boots a whole system
    backend: Backend = field(init=False)
    _made: int = 0

    async def start(self) -> None:
        self.backend = await self.make()

    async def restart(self) -> Backend:
        await self.backend.close()
        self.backend = await self.make()
        return self.backend

    def placement(self, **fields: object) -> Placement:
        self._made += 1
        sandbox_id = new_id(SANDBOX)
        plain = Placement(
            sandbox_id=sandbox_id,
            uid_base=self.uid_base + 65_536 * self._made,
            limits=self.limits,
            layers=self.layers,
            config=ImageConfig(),
            env=ENV,
            user="root",
            workdir="/",
            hostname=sandbox_id.replace("_", "-"),
        )
        return msgspec.structs.replace(plain, **fields)

    def can(self, name: str) -> bool:
        return any(one.name == name and one.available for one in self.backend.capabilities())

    @contextlib.asynccontextmanager
    async def box(self, **fields: object) -> AsyncIterator[Handle]:
        """A sandbox, destroyed afterwards."""
        async with asyncio.timeout(self.timeout_s):
            handle = await self.backend.create(self.placement(**fields))
            try:
                yield handle
            finally:
                await handle.destroy()


def plan(*argv: str, env: dict[str, str] | None = None, cwd: str = "/tmp", user: str = "root", pty: Pty | None = None) -> ExecPlan:
    return ExecPlan(process_id=new_id(PROCESS), argv=argv, env=ENV if env is None else env, cwd=cwd, user=user, pty=pty)


class Started:
    """A command with its output in a pipe."""

    def __init__(self, running: Running, out: int) -> None:
        self.running, self.out = running, out

    async def read(self, count: int = 1 << 16) -> bytes:
        return await asyncio.to_thread(os.read, self.out, count)

    async def end(self) -> Exit:
        ended = await self.running.exited
        await self.running.release()
        return ended


@contextlib.asynccontextmanager
async def started(handle: Handle, wanted: ExecPlan, *, stdin: bytes = b"") -> AsyncIterator[Started]:
    """A command with `stdin`; killed with its tree at the end."""
    given, give = os.pipe2(os.O_CLOEXEC)
    out, into = os.pipe2(os.O_CLOEXEC)
    try:
        os.write(give, stdin)  # less than a pipe holds
        os.close(give)
        running = await handle.exec(wanted, stdin=given, stdout=into, stderr=into)
    except BaseException:
        os.close(out)
        raise
    finally:
        os.close(given)
        os.close(into)
    command = Started(running, out)
    try:
        yield command
    finally:
        running.kill_tree()
        await command.end()
        await eventually(lambda: not running.alive_children())
        os.close(out)


async def output(
    handle: Handle, *argv: str, env: dict[str, str] | None = None, cwd: str = "/tmp", stdin: bytes = b""
) -> tuple[bytes, Exit]:
    """What a command writes, and how it ends."""
    async with started(handle, plan(*argv, env=env, cwd=cwd), stdin=stdin) as command:
        parts = []
        while part := await command.read():
            parts.append(part)
        return b"".join(parts), await command.end()


Check = Callable[[Setup], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


# --- life --------------------------------------------------------------------------------------------------------------------


@check
async def says_what_it_can(setup: Setup) -> None:
    assert setup.backend.name
    assert all(one.available or one.reason for one in setup.backend.capabilities())


@check
async def a_sandbox_lives_until_it_is_destroyed(setup: Setup) -> None:
    placement = setup.placement()
    handle = await setup.backend.create(placement)
    assert handle.sandbox_id == placement.sandbox_id
    assert handle.alive() and not handle.died.done()
    assert placement.sandbox_id in setup.backend.leftovers()
    record = handle.record
    assert (record.sandbox_id, record.backend, record.uid_base) == (placement.sandbox_id, setup.backend.name, placement.uid_base)
    assert record.layers == tuple(layer.digest for layer in setup.layers)
    assert msgspec.json.decode(msgspec.json.encode(record), type=Record) == record
    assert handle.usage().memory_bytes >= 0
    assert handle.counters().oom_kills == 0
    await handle.destroy()
    await handle.destroy()
    assert placement.sandbox_id not in setup.backend.leftovers()
    assert await handle.died
    assert not handle.alive()
    try:
        await handle.exec(plan("true"), stdin=None, stdout=None, stderr=None)
    except SandboxLost:
        return
    raise AssertionError("a command in a destroyed sandbox")


@check
async def many_are_made_side_by_side(setup: Setup) -> None:
    placements = [setup.placement() for _ in range(12)]
    made = await setup.backend.create_many(placements)
    handles = [handle for handle in made if not isinstance(handle, BaseException)]
    assert [handle.sandbox_id for handle in handles] == [placement.sandbox_id for placement in placements]
    names = [await output(handle, "sh", "-c", "echo $0 >name; cat name", handle.sandbox_id) for handle in handles]
    assert [name.decode().strip() for name, _ in names] == [handle.sandbox_id for handle in handles]
    await asyncio.gather(*(handle.destroy() for handle in handles))
    assert not {placement.sandbox_id for placement in placements} & set(setup.backend.leftovers())


@check
async def a_death_is_told(setup: Setup) -> None:
    async with setup.box() as handle, started(handle, plan("sleep", "1000")) as command:
        setup.murder(handle)
        assert await handle.died
        assert not handle.alive()
        ended = await command.end()
        assert ended.signal == signal.SIGKILL or ended.lost


# --- after a restart ---------------------------------------------------------------------------------------------------------


@check
async def a_sandbox_outlives_the_backend(setup: Setup) -> None:
    handle = await setup.backend.create(setup.placement())
    await output(handle, "sh", "-c", "echo kept >file")
    record = handle.record
    backend = await setup.restart()
    assert record.sandbox_id in backend.leftovers()
    again = await backend.adopt(record)
    assert again.record == record and again.alive()
    assert (await output(again, "cat", "file"))[0] == b"kept\n"
    assert again.processes() == 0
    await again.destroy()
    assert record.sandbox_id not in backend.leftovers()


@check
async def commands_under_way_do_not_outlive_the_backend(setup: Setup) -> None:
    """Nobody could hear of their end any more. What a command left running that had ended is the sandbox's own, and stays."""
    handle = await setup.backend.create(setup.placement())
    null, cut = os.open(os.devnull, os.O_RDWR), []
    try:
        ended = await handle.exec(plan("sh", "-c", "setsid sleep 1000 &"), stdin=null, stdout=null, stderr=null)
        await ended.exited
        await ended.release()
        for text in ("sleep 1000", "setsid sleep 1000 & sleep 1000"):
            command = plan("sh", "-c", text)
            await handle.exec(command, stdin=null, stdout=null, stderr=null)
            cut.append(command.process_id)
    finally:
        os.close(null)
    await eventually(lambda: handle.processes() >= 4)
    backend = await setup.restart()
    again = await backend.adopt(handle.record, cut=cut)
    await eventually(lambda: again.processes() <= 1)
    assert again.processes() == 1
    await again.destroy()


@check
async def what_is_gone_cannot_be_adopted(setup: Setup) -> None:
    async with setup.box() as handle:
        record = handle.record
    for gone in (record, msgspec.structs.replace(record, boot_id="another-boot")):
        try:
            await setup.backend.adopt(gone)
        except SandboxLost:
            continue
        raise AssertionError("adopted a sandbox that is gone")


@check
async def remains_are_cleared_by_id(setup: Setup) -> None:
    handle = await setup.backend.create(setup.placement())
    await handle.exec(plan("sleep", "1000"), stdin=None, stdout=None, stderr=None)
    backend = await setup.restart()
    await backend.clear(handle.sandbox_id, None)
    assert handle.sandbox_id not in backend.leftovers()
    await backend.clear(handle.sandbox_id, handle.record)
    await backend.clear(new_id(SANDBOX), None)


# --- commands ----------------------------------------------------------------------------------------------------------------


@check
async def a_command_runs_as_planned(setup: Setup) -> None:
    async with setup.box() as handle:
        text, ended = await output(
            handle, "sh", "-c", 'cat; printf "%s|%s" "$0" "$A"; exit 7', "a b$x", env={**ENV, "A": "1 '2\"$A"}, stdin=b"in "
        )
        assert text == b"in a b$x|1 '2\"$A"
        assert (ended.code, ended.signal, ended.not_started, ended.lost) == (7, None, "", False)
        assert ended.max_rss_bytes > 0
        assert (await output(handle, "printenv", "HOSTNAME_OF_THE_EDGE", env=ENV))[1].code == 1
        assert (await output(handle, "sh", "-c", 'printf "\\377%s" "$B"', env={**ENV, "B": "caf\udce9"}))[0] == b"\xffcaf\xe9"


@check
async def standard_streams_may_be_none(setup: Setup) -> None:
    async with setup.box() as handle:
        running = await handle.exec(plan("sh", "-c", "cat && echo out && echo err >&2"), stdin=None, stdout=None, stderr=None)
        assert (await running.exited).code == 0
        await running.release()


@check
async def further_descriptors_arrive(setup: Setup) -> None:
    async with setup.box() as handle:
        out, into = os.pipe2(os.O_CLOEXEC)
        try:
            running = await handle.exec(plan("sh", "-c", "echo three >&3"), stdin=None, stdout=None, stderr=None, extra=(into,))
        finally:
            os.close(into)
        assert await asyncio.to_thread(os.read, out, 100) == b"three\n"
        os.close(out)
        assert (await running.exited).code == 0
        await running.release()


@check
async def what_cannot_start_says_why(setup: Setup) -> None:
    async with setup.box() as handle:
        for wanted in (
            plan("no-such-program"),
            plan("/no/such/program"),
            plan("true", cwd="/no/such/directory"),
            plan("true", user="nobodyhere"),
        ):
            running = await handle.exec(wanted, stdin=None, stdout=None, stderr=None)
            ended = await running.exited
            assert ended.not_started and ended.code is None and ended.signal is None
            assert not running.alive_children()
            running.kill_tree()
            await running.release()
        assert (await output(handle, "echo", "well"))[0] == b"well\n"


@check
async def a_signal_is_told(setup: Setup) -> None:
    async with (
        setup.box() as handle,
        started(handle, plan("sh", "-c", "trap 'echo got; exit 5' USR1; echo ready; while :; do sleep 0.01; done")) as command,
    ):
        assert await command.read() == b"ready\n"
        command.running.signal(signal.SIGUSR1)
        assert (await command.end()).code == 5
        command.running.signal(signal.SIGUSR1)  # nothing is there to get it
    async with setup.box() as handle, started(handle, plan("sleep", "1000")) as command:
        command.running.signal(signal.SIGTERM)
        ended = await command.end()
        assert (ended.signal, ended.code) == (signal.SIGTERM, None)


@check
async def a_tree_dies_whole(setup: Setup) -> None:
    """Children that ignore signals, leave the session or have lost their parent."""
    text = "trap '' TERM HUP; (setsid sh -c 'trap \"\" TERM; sleep 1000; :' &); (sleep 1000 &); echo ready; sleep 1000; :"
    async with setup.box() as handle, started(handle, plan("sh", "-c", text)) as command:
        assert await command.read() == b"ready\n"
        running = command.running
        await eventually(lambda: handle.processes() >= 4)
        assert running.alive_children()
        running.signal(signal.SIGTERM, tree=True)
        running.kill_tree()
        assert (await command.end()).signal == signal.SIGKILL
        await eventually(lambda: not running.alive_children())
        await eventually(lambda: not handle.processes())


@check
async def what_came_after_the_mark_is_signalled_apart(setup: Setup) -> None:
    """As a session does it: its shell and earlier jobs are spared."""
    text = "sleep 1000 & echo ready; read x; (setsid sleep 1000 &); sleep 1000 & echo $!; wait $!; echo $?; read x"
    given, give = os.pipe2(os.O_CLOEXEC)
    out, into = os.pipe2(os.O_CLOEXEC)
    async with setup.box() as handle:
        running = await handle.exec(plan("sh", "-c", text), stdin=given, stdout=into, stderr=into)
        os.close(given)
        os.close(into)
        try:
            assert await asyncio.to_thread(os.read, out, 100) == b"ready\n"
            running.mark()
            running.signal(signal.SIGKILL, tree=True, since_mark=True)
            os.write(give, b"\n")
            assert int(await asyncio.to_thread(os.read, out, 100)) > 0
            await eventually(lambda: handle.processes() >= 4)
            running.signal(signal.SIGTERM, tree=True, since_mark=True)
            said = b""
            while not said.endswith(b"143\n"):  # some shells say what ended it, too
                said += await asyncio.to_thread(os.read, out, 100)
            await eventually(lambda: handle.processes() <= 2)
            running.kill_since_mark()
            assert handle.processes() == 2 and not running.exited.done()
            running.mark()
            running.kill_since_mark()
            os.write(give, b"\n")
            assert (await running.exited).code == 0
            assert running.alive_children()  # the job from before
        finally:
            os.close(give)
            os.close(out)
            running.kill_tree()
            await running.exited
            await running.release()


@check
async def a_child_that_holds_the_pipe_does_not_delay_the_end(setup: Setup) -> None:
    async with setup.box() as handle, started(handle, plan("sh", "-c", "sleep 1000 & exit 3")) as command:
        assert (await command.running.exited).code == 3
        assert command.running.alive_children()


@check
async def many_commands_run_at_once(setup: Setup) -> None:
    async with setup.box() as handle:
        found = await asyncio.gather(*(output(handle, "sh", "-c", f"echo {number}") for number in range(12)))
        assert [int(text) for text, _ in found] == list(range(12))


@check
async def a_terminal_is_one(setup: Setup) -> None:
    async with setup.box() as handle:
        running = await handle.exec(
            plan("sh", "-c", "tty >/dev/null && stty size </dev/tty; read x; stty size", pty=Pty(rows=11, cols=22)),
            stdin=None,
            stdout=None,
            stderr=None,
        )
        terminal = running.terminal
        assert terminal is not None
        try:
            text = b""
            while not text.endswith(b"\n"):
                text += await asyncio.to_thread(os.read, terminal, 100)
            assert text == b"11 22\r\n"
            running.resize(33, 44)
            os.write(terminal, b"\n")
            text = b""
            while b"33 44" not in text:
                text += await asyncio.to_thread(os.read, terminal, 100)
            assert (await running.exited).code == 0
        finally:
            os.close(terminal)
            await running.release()


# --- standing still ----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def echoing(handle: Handle) -> AsyncIterator[tuple[int, int]]:
    """A command that gives back what it gets: (to it, from it)."""
    given, to_it = os.pipe2(os.O_CLOEXEC)
    from_it, into = os.pipe2(os.O_CLOEXEC)
    try:
        running = await handle.exec(plan("cat"), stdin=given, stdout=into, stderr=into)
    finally:
        os.close(given)
        os.close(into)
    try:
        yield to_it, from_it
    finally:
        os.close(to_it)
        running.kill_tree()
        await running.exited
        await running.release()
        os.close(from_it)


async def answers(to_it: int, from_it: int, within_s: float) -> bool:
    os.write(to_it, b"x")
    return await answered(from_it, within_s)


async def answered(from_it: int, within_s: float) -> bool:
    """While the loop turns: it may be what carries the answer."""

    def wait() -> bool:
        ready, _, _ = select.select([from_it], [], [], within_s)
        return bool(ready) and os.read(from_it, 1) == b"x"

    return await asyncio.to_thread(wait)


@check
async def a_frozen_sandbox_stands_still_until_it_is_thawed(setup: Setup) -> None:
    async with setup.box() as handle:
        async with echoing(handle) as (to_it, from_it):
            assert await answers(to_it, from_it, TIMEOUT_S)
            await handle.freeze()
            await handle.freeze()
            assert handle.alive() and not await answers(to_it, from_it, 0.05)
            await handle.thaw()
            await handle.thaw()
            assert await answered(from_it, TIMEOUT_S)
        await handle.freeze()  # and it can be destroyed so


@check
async def whoever_adopts_a_frozen_sandbox_thaws_it(setup: Setup) -> None:
    handle = await setup.backend.create(setup.placement())
    record = handle.record
    await handle.freeze()
    again = await (await setup.restart()).adopt(record)
    assert (await output(again, "echo", "on"))[0] == b"on\n"
    await again.destroy()


@check
async def a_disk_snapshot_is_a_copy_and_the_sandbox_goes_on(setup: Setup) -> None:
    async with setup.box() as handle, echoing(handle) as (to_it, from_it):
        await output(handle, "sh", "-c", "echo before >file")
        try:
            snapshot = await handle.snapshot_disk()
        except Unsupported:
            assert await answers(to_it, from_it, TIMEOUT_S)
            return
        try:
            assert await answers(to_it, from_it, TIMEOUT_S)
            await output(handle, "sh", "-c", "echo after >file")
            copy = snapshot.upper / "tmp/file"
            assert copy.read_bytes() == b"before\n" and copy.stat().st_uid == snapshot.uid_base
            assert snapshot.frozen_ms > 0 and list(snapshot.aside.iterdir()) == []
            os.rename(copy, snapshot.aside / "file")
        finally:
            await snapshot.release()
            await snapshot.release()
        assert not snapshot.upper.exists()
        assert (await output(handle, "cat", "file"))[0] == b"after\n"


# --- saved and brought back --------------------------------------------------------------------------------------------------


@check
async def what_cannot_be_saved_runs_on(setup: Setup) -> None:
    async with setup.box() as handle, echoing(handle) as (to_it, from_it):
        if not setup.can("pause"):
            await unsupported(handle.pause())
            await unsupported(setup.backend.resume(handle.record))
        if not setup.can("snapshot"):
            await unsupported(handle.snapshot(new_id(SNAPSHOT), memory=True))
            await unsupported(handle.snapshot(new_id(SNAPSHOT), memory=False))
        if not setup.can("screen"):
            assert handle.screen is None
        assert await answers(to_it, from_it, TIMEOUT_S)


async def leave_running(handle: Handle, text: str) -> None:
    """Run a command that ends, and let what it leaves behind live."""
    running = await handle.exec(plan("sh", "-c", text), stdin=None, stdout=None, stderr=None)
    assert (await running.exited).code == 0
    await running.release()


async def unsupported(asked: Awaitable[object]) -> None:
    try:
        await asked
    except Unsupported:
        return
    raise AssertionError("it is said to be unsupported")


@check
async def a_paused_sandbox_goes_on_where_it_was(setup: Setup) -> None:
    if not setup.can("pause"):
        return
    async with setup.box() as handle, echoing(handle) as (to_it, from_it):
        await output(handle, "sh", "-c", "echo kept >file")
        record = handle.record
        for _ in range(2):
            os.write(to_it, b"x")
            paused = await handle.pause()
            assert paused.sandbox_id == record.sandbox_id and paused.vm is not None and paused.vm.state == "paused"
            assert msgspec.json.decode(msgspec.json.encode(paused), type=Record) == paused
            assert not handle.died.done() and handle.sandbox_id in setup.backend.leftovers()
            assert await setup.backend.resume(paused) is handle
            assert handle.alive() and handle.record.vm is not None and handle.record.vm.state == "running"
            assert await answered(from_it, TIMEOUT_S)
            assert (await output(handle, "cat", "file"))[0] == b"kept\n"


@check
async def a_paused_sandbox_outlives_the_backend(setup: Setup) -> None:
    if not setup.can("pause"):
        return
    handle = await setup.backend.create(setup.placement())
    await leave_running(handle, "echo kept >file; setsid sleep 1000 & echo $! >pid")
    command = plan("sleep", "1000")
    await handle.exec(command, stdin=None, stdout=None, stderr=None)
    paused = await handle.pause()
    backend = await setup.restart()
    assert handle.sandbox_id in backend.leftovers()
    again = await backend.resume(paused, cut=(command.process_id,))
    assert (await output(again, "sh", "-c", "cat file; kill -0 $(cat pid) && echo runs"))[0] == b"kept\nruns\n"
    assert (await backend.resume(paused)).sandbox_id == again.sandbox_id  # as by an edge that died before it could note that it runs
    last = await (await setup.restart()).adopt(again.record)
    assert (await output(last, "cat", "file"))[0] == b"kept\n"
    await last.destroy()


@check
async def a_paused_sandbox_can_be_destroyed(setup: Setup) -> None:
    if not setup.can("pause"):
        return
    handle = await setup.backend.create(setup.placement())
    await handle.pause()
    await handle.destroy()
    assert handle.sandbox_id not in setup.backend.leftovers()
    handle = await setup.backend.create(setup.placement())
    paused = await handle.pause()
    backend = await setup.restart()
    await backend.clear(handle.sandbox_id, paused)
    assert handle.sandbox_id not in backend.leftovers()
    try:
        await backend.resume(paused)
    except SandboxLost:
        return
    raise AssertionError("resumed a sandbox that is gone")


@check
async def others_are_made_of_a_snapshot(setup: Setup) -> None:
    """With memory: what ran goes on in each. Without: they have its files."""
    if not setup.can("snapshot"):
        return
    for memory in (True, False):
        async with setup.box() as source, echoing(source) as (to_it, from_it):
            await leave_running(source, "echo before >file; setsid sleep 1000 &")
            snapshot = await source.snapshot(new_id(SNAPSHOT), memory=memory)
            assert snapshot.memory == memory and snapshot.snapshot_id in setup.backend.snapshots()
            assert msgspec.json.decode(msgspec.json.encode(snapshot), type=SnapshotRecord) == snapshot
            assert await answers(to_it, from_it, TIMEOUT_S)
            await output(source, "sh", "-c", "echo after >file")
            async with setup.box(snapshot=snapshot) as one, setup.box(snapshot=snapshot) as two:
                await setup.backend.remove_snapshot(snapshot)
                await setup.backend.remove_snapshot(snapshot)
                assert snapshot.snapshot_id not in setup.backend.snapshots()
                for box in (one, two):
                    assert (await output(box, "sh", "-c", "cat file; echo $0 >file", box.sandbox_id))[0] == b"before\n"
                for box in (one, two):
                    assert (await output(box, "cat", "file"))[0] == box.sandbox_id.encode() + b"\n"
                    sleeping, _ = await output(box, "sh", "-c", "cd /proc; cat [0-9]*/cmdline 2>/dev/null | tr '\\0' ' '")
                    assert (b"sleep 1000" in sleeping) == memory
                names = {(await output(box, "hostname"))[0] for box in (source, one, two)}
                assert len(names) == 3
            assert (await output(source, "cat", "file"))[0] == b"after\n"


@check
async def many_cycles_lose_nothing(setup: Setup) -> None:
    if not setup.can("pause") or not setup.can("snapshot"):
        return
    handle = await setup.backend.create(setup.placement())
    taken = []
    async with asyncio.timeout(4 * TIMEOUT_S):
        for number in range(10):
            await output(handle, "sh", "-c", f"echo {number} >>all; echo {number} >file{number}")
            if number % 2:
                await setup.backend.resume(await handle.pause())
            else:
                taken.append(await handle.snapshot(new_id(SNAPSHOT), memory=number % 4 == 0))
        everything = "".join(f"{number}\n" for number in range(10)).encode()
        assert (await output(handle, "sh", "-c", "cat all; cat file?"))[0] == everything * 2
        async with setup.box(snapshot=taken[2]) as early:
            assert (await output(early, "cat", "all"))[0] == everything[:10]
        await handle.destroy()
        for snapshot in taken:
            await setup.backend.remove_snapshot(snapshot)
        assert setup.backend.snapshots() == [] or not set(setup.backend.snapshots()) & {one.snapshot_id for one in taken}


# --- files -------------------------------------------------------------------------------------------------------------------


@check
async def files_and_commands_see_the_same(setup: Setup) -> None:
    async with setup.box() as handle:
        writer = await asyncio.to_thread(
            lambda: handle.files.open_write(b"/tmp/from-outside", mode=0o640, user=None, append=False, parents=False)
        )
        await asyncio.to_thread(writer.write, b"hello\n")
        assert await asyncio.to_thread(writer.commit) == 6
        assert (await output(handle, "sh", "-c", "cat from-outside; echo bye >from-inside"))[0] == b"hello\n"
        reader = await asyncio.to_thread(handle.files.open_read, b"/tmp/from-inside")
        try:
            assert await asyncio.to_thread(reader.read, 0, 100) == b"bye\n"
            assert await asyncio.to_thread(reader.read, 1, 2) == b"ye"
            assert await asyncio.to_thread(reader.size_bytes) == 4
        finally:
            await asyncio.to_thread(reader.close)
        info = await asyncio.to_thread(lambda: handle.files.stat(b"/tmp/from-outside"))
        assert (info.mode, info.uid, info.size_bytes) == (0o640, 0, 6)
