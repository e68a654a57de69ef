# SPDX-License-Identifier: Apache-2.0
"""The contract of members of pools: named checks over a started FnBackend.

    @pytest.mark.parametrize("name", fn_members.CHECKS)
    async def test_contract(name, setup):         # setup: a Setup, see below
        await fn_members.CHECKS[name](setup)

Each check destroys what it makes. They need of an image: python3, /bin/sh and the usual small programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

import msgspec

from opendsec.api.errors import InvalidRequest, SandboxLost
from opendsec.api.ids import SANDBOX, new_id
from opendsec.api.spec import Limits
from opendsec.edge.fn.outcome import classify
from opendsec.images.layers import LayerRef
from opendsec.runtime.fncall.interface import Ended, File, FnBackend, Job, JobLimits, Member, MemberPlan

ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
MEMBER = Limits(cpu=1.0, cpu_weight=100, memory_bytes=512 << 20, disk_bytes=0, inodes=1 << 16, pids=1024, open_files=1024)
LIMITS = JobLimits(cpu_time_s=10.0, wall_time_s=20.0, memory_bytes=256 << 20, output_bytes=1 << 16, pids=64, disk_bytes=16 << 20)
TIMEOUT_S = 30.0


@dataclass
class Setup:
    """What checks work on. `murder` kills a member's process 1. `isolates`: calls have an own view of files and processes."""

    backend: FnBackend
    layers: tuple[LayerRef, ...]
    murder: Callable[[Member], None]
    isolates: bool
    uid_base: int = 0x70000000
    _made: int = 0

    def plan(self, **fields: object) -> MemberPlan:
        self._made += 1
        plain = MemberPlan(
            member_id=new_id(SANDBOX),
            uid_base=self.uid_base + 65_536 * self._made,
            limits=MEMBER,
            layers=self.layers,
            env=ENV,
            user="",
            workdir="/tmp",
            python="python3",
        )
        return msgspec.structs.replace(plain, **fields)

    @contextlib.asynccontextmanager
    async def member(self, **fields: object) -> AsyncIterator[Member]:
        member = await self.backend.create(self.plan(**fields))
        try:
            yield member
        finally:
            await member.destroy()


def source(text: str, **fields: object) -> Job:
    return msgspec.structs.replace(Job(kind="source", limits=LIMITS, source=text), **fields)


def argv(*parts: str, **fields: object) -> Job:
    return msgspec.structs.replace(Job(kind="exec", limits=LIMITS, argv=parts), **fields)


def function(name: str, *args: object, **fields: object) -> Job:
    return msgspec.structs.replace(Job(kind="function", limits=LIMITS, function=name, args=json.dumps(args).encode()), **fields)


def bounded(**fields: object) -> JobLimits:
    return msgspec.structs.replace(LIMITS, **fields)


async def call(member: Member, job: Job) -> Ended:
    async with asyncio.timeout(TIMEOUT_S):
        return await member.call(job)


async def succeeds(member: Member, job: Job) -> bytes:
    ended = await call(member, job)
    assert classify(ended) == "ok", ended
    return ended.stdout


# --- calls -------------------------------------------------------------------------------------------------------------


async def check_source_runs_and_says_what_it_prints(setup: Setup) -> None:
    async with setup.member() as member:
        ended = await call(member, source("import sys\nprint('out')\nprint('err', file=sys.stderr)"))
        assert (ended.code, ended.stdout, ended.stderr) == (0, b"out\n", b"err\n")
        assert (ended.stdout_total, ended.stderr_total) == (4, 4)
        assert ended.wall_ms > 0


async def check_source_is_the_main_module(setup: Setup) -> None:
    async with setup.member() as member:
        assert await succeeds(member, source("if __name__ == '__main__':\n    print('main')")) == b"main\n"


async def check_input_files_and_environment(setup: Setup) -> None:
    text = "import os, sys\nprint(sys.stdin.read(), open('a/b.txt').read(), os.environ['X'])"
    job = source(text, stdin=b"in", files=(File("a/b.txt", b"file"),), env={"X": "env"})
    async with setup.member() as member:
        assert await succeeds(member, job) == b"in file env\n"


async def check_files_come_back(setup: Setup) -> None:
    text = "import os\nos.mkdir('d')\nopen('d/x.bin', 'wb').write(b'\\0\\xff')\nopen('y.txt', 'w').write('y')\nopen('z', 'w')"
    async with setup.member() as member:
        ended = await call(member, source(text, outputs=("d/*", "y.txt", "missing")))
        assert dict(ended.files) == {"d/x.bin": b"\0\xff", "y.txt": b"y"}


async def check_functions_return_json(setup: Setup) -> None:
    async with setup.member() as member:
        ended = await call(member, function("math:hypot", 3, 4))
        assert ended.value is not None and json.loads(ended.value) == 5.0
        ended = await call(member, function("json:dumps", {"a": 1}, kwargs=b'{"indent": null}'))
        assert ended.value is not None and json.loads(ended.value) == '{"a": 1}'


async def check_a_function_that_fails_is_the_callers_matter(setup: Setup) -> None:
    async with setup.member() as member:
        for job in (function("math:sqrt", -1), function("math:nothing"), function("no_such_module:f"), function("builtins:object")):
            ended = await call(member, job)
            assert classify(ended) == "runtime_error" and ended.value is None, ended


async def check_commands_run(setup: Setup) -> None:
    async with setup.member() as member:
        assert await succeeds(member, argv("cat", stdin=b"through")) == b"through"
        ended = await call(member, argv("sh", "-c", "exit 7"))
        assert ended.code == 7


async def check_commands_run_without_an_interpreter(setup: Setup) -> None:
    async with setup.member(python="") as member:
        assert await succeeds(member, argv("echo", "a b")) == b"a b\n"


async def check_executable_files_can_be_run(setup: Setup) -> None:
    async with setup.member(python="") as member:
        job = argv("./run", files=(File("run", b"#!/bin/sh\necho ran\n", executable=True),))
        assert await succeeds(member, job) == b"ran\n"


async def check_a_missing_program_is_the_callers_matter(setup: Setup) -> None:
    async with setup.member(python="") as member:
        for name in ("no-such-program", "./missing"):
            assert classify(await call(member, argv(name))) == "runtime_error"
        assert await succeeds(member, argv("true")) == b""


async def check_codes_and_signals(setup: Setup) -> None:
    async with setup.member() as member:
        for text, code, number in (
            ("raise SystemExit(3)", 3, None),
            ("import os; os._exit(4)", 4, None),
            ("raise ValueError('why')", 1, None),
            ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", None, 11),
            ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", None, 9),
        ):
            ended = await call(member, source(text))
            assert (ended.code, ended.signal) == (code, number), (text, ended)
        assert b"ValueError: why" in (await call(member, source("raise ValueError('why')"))).stderr


# --- limits ------------------------------------------------------------------------------------------------------------


async def check_wall_time_ends_a_sleeper(setup: Setup) -> None:
    async with setup.member() as member:
        for job in (source("import time; time.sleep(1000)"), argv("sh", "-c", "trap '' TERM; sleep 1000 & wait")):
            ended = await call(member, msgspec.structs.replace(job, limits=bounded(wall_time_s=0.3)))
            assert classify(ended) == "time_limit" and ended.timed_out == "wall", ended
        assert await succeeds(member, source("print(1)")) == b"1\n"


async def check_cpu_time_ends_a_loop(setup: Setup) -> None:
    async with setup.member() as member:
        ended = await call(member, source("while True: pass", limits=bounded(cpu_time_s=1.0)))
        assert classify(ended) == "time_limit", ended
        assert ended.cpu_ms >= 500


async def check_memory_ends_a_hog(setup: Setup) -> None:
    async with setup.member() as member:
        ended = await call(member, source("x = b'x' * (200 << 20)\nimport time; time.sleep(5)", limits=bounded(memory_bytes=64 << 20)))
        assert classify(ended) == "memory_limit", ended
        assert await succeeds(member, source("x = b'x' * (8 << 20); print(1)")) == b"1\n"


async def check_output_ends_a_flood(setup: Setup) -> None:
    async with setup.member() as member:
        for job in (source("while True: print('x' * 1000)"), argv("sh", "-c", "yes >&2")):
            ended = await call(member, msgspec.structs.replace(job, limits=bounded(output_bytes=10_000)))
            assert classify(ended) == "output_limit", ended
            assert max(len(ended.stdout), len(ended.stderr)) == 10_000
        exact = await call(member, source("print('x' * 9999)", limits=bounded(output_bytes=10_000)))
        assert classify(exact) == "ok" and len(exact.stdout) == 10_000


# --- cleanliness -------------------------------------------------------------------------------------------------------


async def check_files_of_a_call_are_gone_after_it(setup: Setup) -> None:
    async with setup.member() as member:
        await succeeds(member, source("open('left', 'w').write('x')"))
        assert await succeeds(member, source("import os; print(os.path.exists('left'))")) == b"False\n"
        assert await succeeds(member, argv("sh", "-c", "ls left 2>/dev/null; true")) == b""


async def check_modules_and_environment_are_as_new(setup: Setup) -> None:
    async with setup.member(preload=("json",)) as member:
        await succeeds(member, source("import json, os, sys\njson.dumps = None\nos.environ['LEFT'] = '1'\nsys.modules['re'] = None"))
        text = "import json, os, re\nprint(json.dumps([]), 'LEFT' in os.environ)"
        assert await succeeds(member, source(text)) == b"[] False\n"


async def check_daemons_do_not_outlive_their_call(setup: Setup) -> None:
    mark = f"opendsec-daemon-{os.getpid()}"
    text = f"import subprocess\nsubprocess.Popen(['sh', '-c', 'while :; do sleep 1; done', {mark!r}], start_new_session=True)"
    async with setup.member() as member:
        quiet = member.processes()
        await succeeds(member, source(text.replace("start_new_session", "stdout=-3, stderr=-3, start_new_session")))
        assert member.processes() == quiet
        assert mark.encode() not in await succeeds(member, argv("sh", "-c", "ps ax 2>/dev/null; true")) or not setup.isolates


async def check_a_hundred_calls_leave_no_more_than_one(setup: Setup) -> None:
    async with setup.member() as member:
        await succeeds(member, source("print(1)"))
        processes = member.processes()
        for number in range(20):
            assert await succeeds(member, source(f"print({number})")) == b"%d\n" % number
        assert member.processes() == processes


# --- life --------------------------------------------------------------------------------------------------------------


async def check_preloading_that_fails_says_why(setup: Setup) -> None:
    for fields in ({"preload": ("no_such_module_at_all",)}, {"warmup": "raise ValueError('warmup went wrong')"}):
        plan = setup.plan(**fields)
        try:
            member = await setup.backend.create(plan)
        except InvalidRequest as error:
            wanted = "no_such_module_at_all" if "preload" in fields else "warmup went wrong"
            assert wanted in str(error), error
        else:
            await member.destroy()
            raise AssertionError(f"a member was made in spite of {fields}")
        assert plan.member_id not in setup.backend.leftovers()


async def check_cancelling_kills_and_the_member_serves_on(setup: Setup) -> None:
    async with setup.member() as member:
        quiet = member.processes()
        task = asyncio.ensure_future(member.call(argv("sh", "-c", "sleep 1000 & sleep 1000")))
        await eventually(lambda: member.processes() > quiet)
        task.cancel()
        await asyncio.wait((task,), timeout=TIMEOUT_S)
        assert task.cancelled()
        assert member.processes() == quiet
        assert await succeeds(member, source("print(1)")) == b"1\n"


async def check_a_killed_member_says_so(setup: Setup) -> None:
    async with setup.member() as member:
        task = asyncio.ensure_future(member.call(source("import time; time.sleep(1000)")))
        await asyncio.sleep(0)
        setup.murder(member)
        async with asyncio.timeout(TIMEOUT_S):
            assert await member.died
            try:
                await task
            except SandboxLost:
                pass
            else:
                raise AssertionError("a call outlived its member")
        try:
            await member.call(source("pass"))
        except SandboxLost:
            pass
        else:
            raise AssertionError("a dead member served a call")


async def check_destroying_may_be_repeated_and_leaves_nothing(setup: Setup) -> None:
    member = await setup.backend.create(setup.plan())
    assert member.member_id in setup.backend.leftovers()
    await succeeds(member, source("print(1)"))
    await member.destroy()
    await member.destroy()
    assert member.member_id not in setup.backend.leftovers()
    await setup.backend.clear(member.member_id)


async def check_members_do_not_meet(setup: Setup) -> None:
    async with setup.member() as one, setup.member() as other:
        await succeeds(one, source("open('left', 'w')"))
        results = await asyncio.gather(*(call(member, source("import os; print(os.path.exists('left'))")) for member in (one, other)))
        assert [ended.stdout for ended in results] == [b"False\n", b"False\n"]


async def eventually(holds: Callable[[], bool]) -> None:
    """Until `holds`, which nothing announces."""
    async with asyncio.timeout(TIMEOUT_S):
        while not holds():
            await asyncio.sleep(0.005)


CHECKS: Mapping[str, Callable[[Setup], Awaitable[None]]] = {
    name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")
}
