# SPDX-License-Identifier: Apache-2.0
"""The contract of function calls through the SDK: named checks like those of client.py.

They need of the image: python3, /bin/sh, cat. `Setup.image` "" leaves the choice to the edge.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from opendsec.api.errors import CommandFailed, InvalidRequest, NotFound, OpenDSecError, Unsupported
from opendsec.api.fn import FnCall, FnInput, FnLimits, JudgeTask, PoolSpec, Test
from opendsec.client._core import new_action_id
from opendsec.client.aio import Client
from opendsec.client.batch import Inputs
from opendsec.client.results import FnResult

TIMEOUT_S = 90.0
ECHO = "import sys; print(sys.stdin.read().upper(), end='')"
FOREVER = "import time\nwhile True: time.sleep(60)"


@dataclass(frozen=True)
class Setup:
    """What a check works on."""

    make: Callable[[], Client]
    image: str = ""

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with self.make() as client, asyncio.timeout(TIMEOUT_S):
            yield client

    @asynccontextmanager
    async def pool(self, client: Client, most: int = 1) -> AsyncIterator[str]:
        """A pool of its own, and no more of it afterwards."""
        name = f"contract-{new_action_id()[-8:]}"
        await client.pools.set(PoolSpec(name=name, image=self.image or "debian", size=1, max=most))
        try:
            yield name
        finally:
            await client.pools.remove(name)

    def program(self, source: str, **limits: float) -> FnCall:
        return FnCall(source=source, image=self.image, limits=FnLimits(**limits))  # type: ignore[arg-type]  # numbers all


Check = Callable[[Setup], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


async def _refused(work: Awaitable[object], kind: type[OpenDSecError], field: str | None) -> None:
    try:
        await work
    except kind as error:
        assert error.field == field, (error.field, field)
        assert error.message
    else:
        raise AssertionError(f"not refused: {field}")


async def _all(client: Client, call: FnCall, inputs: Inputs, window: int = 8) -> dict[int, FnResult]:
    results = [result async for result in client.map(call, inputs, window=window)]
    assert len({result.index for result in results}) == len(results)
    return {result.index: result for result in results}


# --- one call


@check
async def runs_a_program(setup: Setup) -> None:
    async with setup.client() as client:
        result = await client.call(setup.program("print('é'); import sys; print('no', file=sys.stderr)"))
        assert result.ok and result.exit_code == 0 and result.outcome == "ok", result
        assert result.stdout == "é\n" and result.stderr == "no\n"
        assert result.check() is result and not result.truncated and result.wall_ms > 0


@check
async def a_program_that_fails_is_a_result(setup: Setup) -> None:
    async with setup.client() as client:
        result = await client.call(setup.program("raise SystemExit(3)"))
        assert result.outcome == "runtime_error" and result.exit_code == 3 and result.shell_code() == 3
        raised = await client.call(setup.program("1 / 0"))
        assert raised.outcome == "runtime_error" and "ZeroDivisionError" in raised.stderr
        try:
            await client.call(setup.program("1 / 0"), check=True)
        except CommandFailed as error:
            assert "ZeroDivisionError" in str(error.data["stderr_tail"])
        else:
            raise AssertionError("check did not raise")


@check
async def a_signal_is_told(setup: Setup) -> None:
    async with setup.client() as client:
        result = await client.call(setup.program("import os; os.kill(os.getpid(), 15)"))
        # In a pid namespace of its own a program may be process 1, which ignores what it does not handle: then it ends well.
        assert (result.outcome, result.signal) in (("runtime_error", 15), ("ok", None)), result


@check
async def calls_a_function(setup: Setup) -> None:
    async with setup.client() as client:
        mean = await client.call(function="statistics:mean", args=[[1, 2, 6]], image=setup.image)
        assert mean.ok and mean.value == 3, mean
        text = await client.call(function="textwrap:shorten", args=["a b c"], kwargs={"width": 4, "placeholder": ""}, image=setup.image)
        assert text.value == "a b"
        failed = await client.call(function="statistics:mean", args=[[]], image=setup.image)
        assert failed.outcome == "runtime_error" and failed.value is None and "StatisticsError" in failed.stderr


@check
async def runs_an_argv_with_files(setup: Setup) -> None:
    async with setup.client() as client:
        call = FnCall(argv=("/bin/sh", "-c", 'cat; cat in/a; printf "$WORD" > out.txt'), image=setup.image)
        result = await client.call(
            call, stdin="typed ", files={"in/a": b"filed", "b": "x"}, env={"WORD": "said"}, outputs=["*.txt", "in/a", "absent"]
        )
        assert result.ok, result
        assert result.stdout == "typed filed" and result.files == {"out.txt": b"said", "in/a": b"filed"}


@check
async def limits_hold(setup: Setup) -> None:
    async with setup.client() as client:
        late = await client.call(setup.program(FOREVER, wall_time_s=0.5))
        assert late.outcome == "time_limit" and "wall_time" in late.limits_hit and late.shell_code() == 124, late
        loud = await client.call(setup.program("print('x' * 100_000)", output_bytes=1000))
        assert loud.outcome == "output_limit" and loud.stdout == "x" * 1000 and loud.truncated, loud


@check
async def cancelling_a_call_ends_it(setup: Setup) -> None:
    async with setup.client() as client, setup.pool(client) as pool:
        calling = asyncio.ensure_future(client.call(source=FOREVER, pool=pool))
        while not any(one.busy for one in await client.pools.list() if one.spec.name == pool):
            assert not calling.done(), calling
        calling.cancel()
        await asyncio.wait((calling,))
        assert calling.cancelled()
        assert (await client.call(source="print(1)", pool=pool)).ok  # the only member is free again
        while any(one.busy for one in await client.pools.list() if one.spec.name == pool):
            pass


@check
async def refuses_what_it_cannot_run(setup: Setup) -> None:
    async with setup.client() as client:
        await _refused(client.call(), InvalidRequest, "source")
        await _refused(client.call(source="1", argv=["true"]), InvalidRequest, "argv")
        await _refused(client.call(source="1", colour="red"), InvalidRequest, "colour")  # type: ignore[call-arg]
        await _refused(client.call(function="math:sqrt", args=[float("nan")]), InvalidRequest, "args")
        await _refused(client.call(function="math:sqrt", args={1, 2}), InvalidRequest, "args")  # type: ignore[arg-type]
        await _refused(client.call(function="sqrt"), InvalidRequest, "function")
        await _refused(client.call(source="1", stdin=5), InvalidRequest, "stdin")  # type: ignore[arg-type]
        await _refused(client.call(source="1", files={"../x": b""}), InvalidRequest, "files")
        await _refused(client.call(source="1", limits=FnLimits(pids=0)), InvalidRequest, "limits.pids")
        await _refused(client.call("print(1)"), InvalidRequest, "call")  # type: ignore[arg-type]
        await _refused(client.call(source="1", language="klingon"), InvalidRequest, "language")
        await _refused(client.call(source="1", pool="no-such-pool"), NotFound, "pool")
        await _refused(client.create(FnCall(source="1")), InvalidRequest, "spec")  # type: ignore[arg-type]


# --- batches


@check
async def maps_over_texts(setup: Setup) -> None:
    async with setup.client() as client:
        results = await _all(client, setup.program(ECHO), [f"text {number}" for number in range(40)])
        assert [results[number].stdout for number in range(40)] == [f"TEXT {number}" for number in range(40)]


@check
async def maps_over_arguments(setup: Setup) -> None:
    async with setup.client() as client:
        call = FnCall(function="builtins:int", image=setup.image)
        results = await _all(client, call, ["7", ["8"], ["11", 2], FnInput(args=["9"]), 10, ["no number"]])  # type: ignore[arg-type]
        assert [results[number].value for number in range(5)] == [7, 8, 3, 9, 10]
        assert results[5].outcome == "runtime_error" and "ValueError" in results[5].stderr
        named = await _all(client, FnCall(function="builtins:dict", image=setup.image), [{"a": 1}, {"b": "é"}])
        assert [named[number].value for number in range(2)] == [{"a": 1}, {"b": "é"}]


@check
async def maps_over_programs(setup: Setup) -> None:
    async with setup.client() as client:
        sources = [f"print({number})" if number != 3 else "raise SystemExit(5)" for number in range(6)]
        results = await _all(client, FnCall(image=setup.image), [FnInput(source=source) for source in sources])
        assert [results[number].stdout for number in (0, 1, 2, 4, 5)] == ["0\n", "1\n", "2\n", "4\n", "5\n"]
        assert results[3].outcome == "runtime_error" and results[3].exit_code == 5


@check
async def maps_over_what_comes_late(setup: Setup) -> None:
    """Each input is made of the result before: nothing may wait for more inputs than there are."""
    async with setup.client() as client:
        last = asyncio.Queue[str]()
        last.put_nowait("a")

        async def inputs() -> AsyncGenerator[str, None]:
            for _ in range(4):
                yield await last.get()

        async with aclosing(client.map(setup.program(ECHO.replace("upper()", "upper() * 2")), inputs())) as results:
            said = []
            async for result in results:
                said.append(result.stdout)
                last.put_nowait(result.stdout)
        assert said == ["AA", "AAAA", "A" * 8, "A" * 16]


@check
async def maps_over_nothing(setup: Setup) -> None:
    async with setup.client() as client:
        assert await _all(client, setup.program(ECHO), []) == {}


@check
async def maps_over_large_inputs(setup: Setup) -> None:
    async with setup.client() as client:
        size = 5 << 20
        call = FnCall(argv=("cat",), image=setup.image, limits=FnLimits(output_bytes=2 * size))
        async with asyncio.timeout(20):
            results = await _all(client, call, [bytes([65 + number]) * size for number in range(4)], window=2)
        assert [len(results[number].stdout_bytes) for number in range(4)] == [size] * 4
        assert [results[number].stdout_bytes[-1] for number in range(4)] == [65, 66, 67, 68]


@check
async def inputs_wait_for_the_reader(setup: Setup) -> None:
    async with setup.client() as client:
        taken = 0

        def inputs() -> Iterator[str]:
            nonlocal taken
            for _ in range(30):
                taken += 1
                yield "x"

        read = 0
        async for _result in client.map(setup.program(ECHO), inputs(), window=2):
            assert taken <= read + 5, (taken, read)  # twice the window, and the one in hand
            read += 1
        assert read == taken == 30


@check
async def leaving_a_batch_ends_it(setup: Setup) -> None:
    async with setup.client() as client, setup.pool(client) as pool:
        call = FnCall(source=f"import sys\nif sys.stdin.read() == 'stay':\n  {FOREVER.replace(chr(10), chr(10) + '  ')}", pool=pool)
        async with aclosing(client.map(call, ["go", "stay", "stay", "stay"], window=1)) as results:
            assert (await anext(results)).ok
        after = await client.call(call, stdin="go")  # the only member is free again
        assert after.ok, after


@check
async def errors_of_inputs_are_the_callers(setup: Setup) -> None:
    async with setup.client() as client:

        def broken() -> Iterator[str]:
            yield "x"
            raise KeyError("mine")

        async def broken_later() -> AsyncGenerator[str, None]:
            yield "x"
            await asyncio.sleep(0)
            raise KeyError("mine")

        for inputs in (broken(), broken_later()):
            try:
                await _all(client, setup.program(ECHO), inputs)
            except KeyError:
                pass
            else:
                raise AssertionError("the error of the inputs was lost")
        call = setup.program(ECHO)
        await _refused(_all(client, call, ["x", 5]), InvalidRequest, "inputs[1]")
        await _refused(_all(client, call, ["x", FnInput(files={"a": 1})]), InvalidRequest, "inputs[1].files['a']")  # type: ignore[dict-item]
        await _refused(_all(client, call, ["x", FnInput(argv=("true",))]), InvalidRequest, "inputs[1].argv")
        await _refused(_all(client, FnCall(function="math:sqrt"), [[float("inf")]]), InvalidRequest, "inputs[0]")
        await _refused(_all(client, call, "text"), InvalidRequest, "inputs")
        await _refused(_all(client, call, ["x"], window=0), InvalidRequest, "window")
        await _refused(_all(client, FnCall(source="1", pool="no-such-pool"), ["x"]), NotFound, "pool")


# --- the judge, languages, pools


@check
async def judges(setup: Setup) -> None:
    async with setup.client() as client:
        tests = tuple(Test(name=f"t{number}", stdin=f"{number}".encode(), expected=f"{number * 2}\n".encode()) for number in range(4))
        source = "n = int(input()); print(n * 2 if n != 2 else 5)"
        result = await client.judge(JudgeTask(source=source, tests=tests, id="mine", image=setup.image))
        assert (result.outcome, result.id, result.passed, result.total) == ("wrong_answer", "mine", 3, 4), result
        assert [one.outcome for one in result.tests] == ["ok", "ok", "wrong_answer", "ok"]
        assert [one.name for one in result.tests] == ["t0", "t1", "t2", "t3"]
        good = await client.judge(JudgeTask(source="print(int(input()) * 2)", tests=tests, image=setup.image))
        assert good.outcome == "ok" and good.passed == 4
        first = await client.judge(JudgeTask(source="1 / 0", tests=tests, stop_at_first_failure=True, image=setup.image))
        assert first.outcome == "runtime_error" and first.passed == 0 and first.tests[0].outcome == "runtime_error"
        text = Test(stdin="5", expected="10")  # type: ignore[arg-type]  # text stands for its bytes
        assert (await client.judge(JudgeTask(source="print(int(input()) * 2)", tests=(text,), image=setup.image))).outcome == "ok"
        await _refused(client.judge(JudgeTask(source="1")), InvalidRequest, "tests")
        await _refused(client.judge(JudgeTask(source="1", tests=(Test(name=5),))), InvalidRequest, "tests[0].name")  # type: ignore[arg-type]


@check
async def knows_languages(setup: Setup) -> None:
    async with setup.client() as client:
        languages = {language.name: language for language in await client.languages()}
        assert languages["python"].warm and languages["python"].run and languages["python"].file == "main.py"


@check
async def keeps_pools(setup: Setup) -> None:
    async with setup.client() as client:
        async with setup.pool(client, most=2) as name:
            spec = next(pool.spec for pool in await client.pools.list() if pool.spec.name == name)
            assert (spec.size, spec.max) == (1, 2)
            assert (await client.pools.resize(name, size=0, max=1)).spec.max == 1
            assert (await client.call(source="print(1)", pool=name)).stdout == "1\n"
            await _refused(client.pools.resize(name, size=3), InvalidRequest, "size")
            await _refused(client.pools.set(name, image=spec.image, max=0), InvalidRequest, "max")
            await _refused(client.pools.set(name, image=spec.image, device="exclusive"), Unsupported, "device")
            changed = await client.pools.set(name, image=spec.image, size=0, max=1, idle_s=5)
            assert changed.spec.idle_s == 5
        assert name not in [pool.spec.name for pool in await client.pools.list()]
        await _refused(client.pools.remove(name), NotFound, "name")
        await _refused(client.pools.set("Not A Name", image="debian"), InvalidRequest, "name")
