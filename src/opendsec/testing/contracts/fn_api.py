# SPDX-License-Identifier: Apache-2.0
"""The contract of function calls on the wire: named checks over a connected HTTP client.

    @pytest.mark.parametrize("name", fn_api.CHECKS)
    async def test_contract(name, edge):          # edge: an FnEdge, see below
        await fn_api.CHECKS[name](edge)

Each check removes the pools that it declares. They need of an image: python3, bash and the usual small programs; `copied` is a language
of the edge's operator whose compiler is `sh -n {file} && cp {file} main`, so that no compiler is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import httpx
import msgspec

from opendsec.api import wire
from opendsec.api.errors import ErrorBody
from opendsec.api.fn import FnResult, JudgeResult, LanguageList, PoolInfo, PoolList
from opendsec.api.ids import new_id
from opendsec.api.sandboxes import Capabilities, EdgeInfo, Event

TIMEOUT_S = 60.0
COMPILED = "copied"
COMPILED_TOML = """# SPDX-License-Identifier: Apache-2.0
image = "{image}"
file = "main.sh"
compile = ["sh", "-c", "sh -n {{file}} && (echo '#!/bin/sh'; cat {{file}}) > main"]
run = ["./main"]
artifacts = ["main"]
"""
S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True)
class FnEdge:
    """An edge under test. Languages python and bash are in `image`, and so is COMPILED."""

    client: httpx.AsyncClient
    image: str
    restart: Callable[[], Awaitable[None]]  # stop it gracefully, start another on the same state
    members: Callable[[], set[str]]  # of which anything is left on the machine, by its own evidence
    memory: str = "256MiB"

    async def call(self, kind: type[S], method: str, path: str, body: object = None) -> S:
        """A call that must succeed."""
        response = await self.client.request(method, path, content=None if body is None else json.dumps(body).encode())
        assert response.status_code == 200, f"{method} {path}: {response.status_code} {response.text[:2000]}"
        return wire.decode(response.content, kind)

    async def refuse(self, status: int, method: str, path: str, body: object = None) -> ErrorBody:
        """A call that must fail with this status."""
        response = await self.client.request(method, path, content=None if body is None else json.dumps(body).encode())
        assert response.status_code == status, f"{method} {path}: {response.status_code} {response.text[:2000]}"
        return wire.decode(response.content, wire.ErrorResponse).error

    async def fn(self, source: str | None = None, **fields: object) -> FnResult:
        return await self.call(FnResult, "POST", "/v1/fn", {**({} if source is None else {"source": source}), **fields})

    async def judge(self, source: str, *tests: Mapping[str, object], **fields: object) -> JudgeResult:
        return await self.call(JudgeResult, "POST", "/v1/fn/judge", {"source": source, "tests": tests, **fields})

    async def pools(self) -> dict[str, PoolInfo]:
        return {pool.spec.name: pool for pool in (await self.call(PoolList, "GET", "/v1/fn/pools")).pools}

    @contextlib.asynccontextmanager
    async def pool(self, **fields: object) -> AsyncIterator[str]:
        """A declared pool of this image."""
        name = str(fields.pop("name", "")) or f"p{new_id('x')[-8:]}"
        body = {"name": name, "image": self.image, "size": 1, "max": 2, "memory": "512MiB", **fields}
        await self.call(PoolInfo, "PUT", "/v1/fn/pools", body)
        try:
            yield name
        finally:
            if name in await self.pools():
                await self.call(PoolList, "DELETE", f"/v1/fn/pools/{name}")

    async def map(self, call: dict[str, object], items: list[dict[str, object]], window: int = 8) -> list[FnResult]:
        """All results of a batch, in the order in which they came."""
        lines = [json.dumps({"call": call, "window": window}), *(json.dumps(item) for item in items)]
        response = await self.client.post("/v1/fn/map", content="\n".join(lines).encode())
        assert response.status_code == 200, response.text[:2000]
        return [wire.decode(line, FnResult) for line in response.content.splitlines()]

    async def eventually(self, holds: Callable[[], Awaitable[bool]]) -> None:
        """Until `holds`, which nothing announces."""
        async with asyncio.timeout(TIMEOUT_S):
            while not await holds():
                await asyncio.sleep(0.02)

    async def settled(self, name: str, **counts: int) -> PoolInfo:
        """A pool, once it has these counts."""
        info: PoolInfo | None = None

        async def holds() -> bool:
            nonlocal info
            info = (await self.pools())[name]
            return all(getattr(info, key) == value for key, value in counts.items())

        await self.eventually(holds)
        assert info is not None
        return info


def b64(text: str | bytes) -> str:
    return b64encode(text.encode() if isinstance(text, str) else text).decode()


def out(result: FnResult | None) -> bytes:
    assert result is not None
    return result.stdout.data


# --- calls -------------------------------------------------------------------------------------------------------------


async def check_source_argv_and_function(edge: FnEdge) -> None:
    result = await edge.fn("print(6 * 7)")
    assert (result.outcome, result.exit_code, out(result)) == ("ok", 0, b"42\n")
    result = await edge.fn(argv=["cat"], stdin=b64("through"))
    assert (result.outcome, out(result)) == ("ok", b"through")
    result = await edge.fn(function="math:hypot", args=[3, 4])
    assert (result.outcome, json.loads(bytes(result.value))) == ("ok", 5.0)
    result = await edge.fn(function="json:dumps", args=[{"b": 1}], kwargs={"indent": None})
    assert json.loads(bytes(result.value)) == '{"b": 1}'


async def check_a_first_call_is_cold_and_the_next_is_warm(edge: FnEdge) -> None:
    async with edge.pool(size=0) as pool:
        assert (await edge.fn("print(1)", pool=pool)).cold
        assert not (await edge.fn("print(1)", pool=pool)).cold


async def check_files_in_and_out(edge: FnEdge) -> None:
    text = "import os, sys\nopen('copy', 'w').write(open('given/in').read() + os.environ['X'] + sys.stdin.read())"
    result = await edge.fn(text, files={"given/in": b64("a")}, env={"X": "b"}, stdin=b64("c"), outputs=["cop*"])
    assert (result.outcome, result.files) == ("ok", {"copy": b"abc"})


async def check_outcomes(edge: FnEdge) -> None:
    for source, limits, outcome, hit in (
        ("import sys; sys.exit(3)", {}, "runtime_error", ()),
        ("1/0", {}, "runtime_error", ()),
        ("import os; os.abort()", {}, "runtime_error", ()),
        ("import time; time.sleep(100)", {"wall_time_s": 0.3}, "time_limit", ("wall_time",)),
        ("while True: pass", {"cpu_time_s": 1.0}, "time_limit", ("cpu_time",)),
        ("while True: print('x' * 4096)", {"output_bytes": 10_000}, "output_limit", ("output",)),
        ("x = b'x' * (150 << 20)\nimport time; time.sleep(9)", {"memory": "64MiB"}, "memory_limit", ("memory",)),
    ):
        result = await edge.fn(source, limits=limits)
        assert (result.outcome, result.limits_hit) == (outcome, hit), (source, result)
        assert result.message
    result = await edge.fn(argv=["no-such-program"])
    assert result.outcome == "runtime_error" and result.message


async def check_languages(edge: FnEdge) -> None:
    languages = {language.name: language for language in (await edge.call(LanguageList, "GET", "/v1/fn/languages")).languages}
    assert {"python", "c", "cpp", "java", "javascript", "go", "rust", "bash", COMPILED} <= set(languages)
    assert languages["cpp"].compile and languages["python"].warm
    result = await edge.fn("read x; echo got $x", language="bash", stdin=b64("it\n"))
    assert (result.outcome, out(result)) == ("ok", b"got it\n")


async def check_compiled_programs_are_compiled_once(edge: FnEdge) -> None:
    source = f"echo compiled $1; cat # {new_id('x')}"
    first = await edge.fn(source, language=COMPILED, stdin=b64("in"))
    assert (first.outcome, out(first)) == ("ok", b"compiled\nin"), first
    assert first.compile is not None and first.compile.outcome == "ok"
    again = await edge.fn(source, language=COMPILED, stdin=b64("other"))
    assert out(again) == b"compiled\nother" and again.compile == first.compile, "not compiled again"
    other = await edge.fn(source + "x", language=COMPILED)
    assert other.compile is not None and other.compile.wall_ms != first.compile.wall_ms


async def check_a_program_that_does_not_compile(edge: FnEdge) -> None:
    result = await edge.fn("if then fi (", language=COMPILED)
    assert result.outcome == "compile_error" and result.compile is not None
    assert result.exit_code is None and result.compile.exit_code not in (0, None) and result.compile.stderr.data


# --- action ids --------------------------------------------------------------------------------------------------------


async def check_a_repeated_action_id_returns_what_was_recorded(edge: FnEdge) -> None:
    body = {"source": "import os; print(os.urandom(8).hex())", "action_id": new_id("fn")}
    first = await edge.call(FnResult, "POST", "/v1/fn", body)
    assert await edge.call(FnResult, "POST", "/v1/fn", body) == first
    assert (await edge.refuse(409, "POST", "/v1/fn", {**body, "source": "print(1)"})).field == "action_id"
    await edge.restart()
    assert await edge.call(FnResult, "POST", "/v1/fn", body) == first


async def check_large_results_are_recorded_without_their_output(edge: FnEdge) -> None:
    body = {
        "source": "print('x' * 3_000_000, flush=True)\nraise SystemExit(5)",
        "limits": {"output_bytes": 4_000_000},
        "action_id": new_id("fn"),
    }
    first = await edge.call(FnResult, "POST", "/v1/fn", body)
    assert len(first.stdout.data) == 3_000_001
    again = await edge.call(FnResult, "POST", "/v1/fn", body)
    assert (again.outcome, again.exit_code, again.stdout.data, again.stdout.total_bytes) == ("runtime_error", 5, b"", 3_000_001)
    assert "too large to be kept" in again.message


async def check_a_wrong_call_leaves_its_action_id_free(edge: FnEdge) -> None:
    action_id = new_id("fn")
    await edge.refuse(400, "POST", "/v1/fn", {"source": "print(1)", "language": "cobol", "action_id": action_id})
    assert (await edge.fn("print(1)", action_id=action_id)).outcome == "ok"


# --- pools -------------------------------------------------------------------------------------------------------------


async def check_pools_are_filled_resized_and_removed(edge: FnEdge) -> None:
    async with edge.pool(size=2, max=3, labels={"for": "test"}) as pool:
        info = await edge.settled(pool, idle=2)
        assert info.state == "ready" and info.spec.labels == {"for": "test"} and not info.implicit
        assert not (await edge.fn("print(1)", pool=pool)).cold
        resized = await edge.call(PoolInfo, "PATCH", f"/v1/fn/pools/{pool}", {"size": 3, "action_id": new_id("a")})
        assert resized.spec.size == 3
        await edge.settled(pool, idle=3)
        await edge.call(PoolInfo, "PATCH", f"/v1/fn/pools/{pool}", {"size": 1, "max": 1})
        await edge.settled(pool, idle=1)
    assert pool not in await edge.pools()
    assert (await edge.refuse(404, "POST", "/v1/fn", {"source": "print(1)", "pool": pool})).field == "pool"


async def check_pools_survive_a_restart_and_members_do_not(edge: FnEdge) -> None:
    async with edge.pool(size=2, preload=["json"]) as pool:
        await edge.settled(pool, idle=2)
        before = edge.members()
        await edge.restart()
        info = await edge.settled(pool, idle=2)
        assert info.spec.preload == ("json",) and info.calls == 0
        assert not before & edge.members()
        assert out(await edge.fn("print(1)", pool=pool)) == b"1\n"
    await edge.restart()
    assert pool not in await edge.pools()


async def check_members_that_are_used_once(edge: FnEdge) -> None:
    async with edge.pool(size=2, max=3, reuse="never") as pool:
        await edge.settled(pool, idle=2)
        seen = edge.members()
        for _ in range(3):
            assert (await edge.fn("print(1)", pool=pool)).outcome == "ok"
            await edge.settled(pool, idle=2)
            seen |= edge.members()
        assert len(seen) == 5, "each call had a member of its own, and another has taken its place"
        refusal = await edge.refuse(400, "POST", "/v1/fn", {"source": "print(1)", "pool": pool, "reuse": "fork"})
        assert refusal.field == "reuse"


async def check_a_pool_that_cannot_be_warmed_fails_its_calls_with_the_reason(edge: FnEdge) -> None:
    async with edge.pool(size=1, preload=["no_such_module_at_all"]) as pool:
        error = await edge.refuse(400, "POST", "/v1/fn", {"source": "print(1)", "pool": pool})
        assert error.field == "pool" and "no_such_module_at_all" in error.message
        info = (await edge.pools())[pool]
        assert info.state == "failing" and "no_such_module_at_all" in info.message
        results = await edge.map({"source": "print(1)", "pool": pool}, [{"index": 1}])
        assert [result.outcome for result in results] == ["denied"]


async def check_tenants_of_pools(edge: FnEdge) -> None:
    async with edge.pool(tenant="one") as pool:
        assert (await edge.fn("print(1)", pool=pool, tenant="one")).outcome == "ok"
        await edge.refuse(403, "POST", "/v1/fn", {"source": "print(1)", "pool": pool, "tenant": "two"})
        await edge.refuse(403, "POST", "/v1/fn", {"source": "print(1)", "pool": pool})


async def check_members_count_as_promised_memory(edge: FnEdge) -> None:
    before = (await edge.call(EdgeInfo, "GET", "/v1/info")).memory_promised_bytes
    async with edge.pool(size=2, memory="512MiB") as pool:
        await edge.settled(pool, idle=2)
        assert (await edge.call(EdgeInfo, "GET", "/v1/info")).memory_promised_bytes >= before + (1 << 30)
    error = await edge.refuse(429, "PUT", "/v1/fn/pools", {"name": "huge", "image": edge.image, "memory": "900GiB"})
    assert error.field == "memory"


async def check_devices_are_refused_with_a_reason(edge: FnEdge) -> None:
    for device in ("shared", "exclusive", "mig"):
        error = await edge.refuse(422, "PUT", "/v1/fn/pools", {"name": "gpu", "image": edge.image, "device": device})
        assert error.field == "device" and "no devices" in error.message


async def check_events_and_capabilities_tell_of_it(edge: FnEdge) -> None:
    async with edge.pool() as pool:
        response = await edge.client.get("/v1/events")
        kinds = {
            event.kind for event in (wire.decode(line, Event) for line in response.content.splitlines()) if event.data.get("pool") == pool
        }
        assert "pool.declared" in kinds
    assert "fncall" in (await edge.call(Capabilities, "GET", "/v1/capabilities")).backends


# --- batches -----------------------------------------------------------------------------------------------------------


async def check_a_batch_answers_each_item(edge: FnEdge) -> None:
    items: list[dict[str, object]] = [{"index": index, "stdin": b64(str(index))} for index in range(40)]
    results = await edge.map({"source": "print(int(input()) * 2)"}, items)
    assert sorted(result.index for result in results) == list(range(40))
    assert all(out(result) == b"%d\n" % (result.index * 2) for result in results)


async def check_items_fail_alone(edge: FnEdge) -> None:
    items: list[dict[str, object]] = [
        {"index": 0},
        {"index": 1, "files": {"../x": ""}},
        {"index": 2, "source": "raise SystemExit(9)"},
        {"index": 3, "args": [1]},
        {"index": 4, "env": {"X": "y"}, "source": "import os; print(os.environ['X'])"},
    ]
    results = {result.index: result for result in await edge.map({"source": "print('all')"}, items)}
    assert [results[index].outcome for index in range(5)] == ["ok", "denied", "runtime_error", "denied", "ok"]
    assert results[1].message.startswith("files") and results[2].exit_code == 9 and out(results[4]) == b"y\n"


async def check_batches_of_functions_and_compiled_programs(edge: FnEdge) -> None:
    results = await edge.map({"function": "math:sqrt"}, [{"index": index, "args": [index * index]} for index in range(5)])
    assert {result.index: json.loads(bytes(result.value)) for result in results} == {index: float(index) for index in range(5)}
    items: list[dict[str, object]] = [{"index": 0, "stdin": b64("x")}, {"index": 1, "source": "echo own"}, {"index": 2, "source": "if ("}]
    mixed = {result.index: result for result in await edge.map({"source": "cat", "language": COMPILED}, items)}
    assert [mixed[index].outcome for index in range(3)] == ["ok", "ok", "compile_error"]
    assert (out(mixed[0]), out(mixed[1])) == (b"x", b"own\n")


async def check_results_come_as_they_end(edge: FnEdge) -> None:
    async with edge.pool(max=2, size=2) as pool:
        await edge.settled(pool, idle=2)
        items: list[dict[str, object]] = [{"index": 0, "source": "import time; time.sleep(1.5)"}, {"index": 1}]
        results = await edge.map({"source": "print(1)", "pool": pool}, items)
        assert [result.index for result in results] == [1, 0]


async def check_bad_batches(edge: FnEdge) -> None:
    for content, field in (
        (b"", "body"),
        (b"{}", "call"),
        (b'{"call": {"source": "x"}, "window": 0}', "window"),
        (b'{"call": {"source": "x", "language": "cobol"}}', "language"),
        (b'{"call": {"source": "x", "action_id": "a"}}', "call.action_id"),
        (b"x\n", "body"),
    ):
        response = await edge.client.post("/v1/fn/map", content=content)
        assert response.status_code == 400, (content, response.text)
        error = wire.decode(response.content, wire.ErrorResponse).error
        assert (error.field or "").startswith(field) or field in error.message, (content, error)
    response = await edge.client.post("/v1/fn/map", content=b'{"call": {"source": "print(1)"}}\n{"index": 1}\nno json\n{"index": 2}\n')
    lines = response.content.splitlines()
    assert wire.decode(lines[0], FnResult).index == 1
    assert wire.decode(lines[-1], wire.ErrorResponse).error.field == "line 3" and len(lines) == 2


async def check_a_client_that_goes_away_ends_its_batch(edge: FnEdge) -> None:
    async with edge.pool(size=1, max=2) as pool:
        await edge.settled(pool, idle=1)
        head = json.dumps({"call": {"source": "import time; time.sleep(1000)", "pool": pool, "limits": {"wall_time_s": 2000}}, "window": 8})
        lines = "\n".join([head, *(json.dumps({"index": index}) for index in range(50))])

        async def batch() -> None:
            await edge.client.post("/v1/fn/map", content=lines.encode(), timeout=None)

        task = asyncio.ensure_future(batch())
        await edge.settled(pool, busy=2)
        task.cancel()
        await asyncio.wait((task,))
        await edge.settled(pool, busy=0, waiting=0)
        assert out(await edge.fn("print(1)", pool=pool)) == b"1\n"


async def check_a_caller_that_goes_away_ends_its_call(edge: FnEdge) -> None:
    async with edge.pool(size=1, max=1) as pool:
        await edge.settled(pool, idle=1)
        body = {"source": "import time; time.sleep(1000)", "pool": pool, "limits": {"wall_time_s": 2000}}
        task = asyncio.ensure_future(edge.client.post("/v1/fn", content=json.dumps(body).encode(), timeout=None))
        await edge.settled(pool, busy=1)
        task.cancel()
        await asyncio.wait((task,))
        await edge.settled(pool, busy=0)


async def check_a_single_call_does_not_wait_for_a_batch(edge: FnEdge) -> None:
    async with edge.pool(size=1, max=1) as pool:
        await edge.settled(pool, idle=1)
        items: list[dict[str, object]] = [{"index": index} for index in range(20)]
        batch = asyncio.ensure_future(edge.map({"source": "import time; time.sleep(0.1)", "pool": pool}, items, window=20))
        await edge.settled(pool, busy=1)
        await edge.fn("print(1)", pool=pool)
        assert not batch.done() and (await edge.pools())[pool].waiting > 5
        assert len(await batch) == 20


# --- the judge ---------------------------------------------------------------------------------------------------------


async def check_the_judge_runs_all_tests(edge: FnEdge) -> None:
    tests: list[dict[str, object]] = [
        {"name": "right", "stdin": b64("2"), "expected": b64("4\n")},
        {"name": "wrong", "stdin": b64("3"), "expected": b64("7")},
        {"name": "crash", "stdin": b64("x"), "expected": b64("")},
        {"name": "code alone", "stdin": b64("1")},
    ]
    result = await edge.judge("print(int(input()) * 2)", *tests, id="task")
    assert (result.outcome, result.id, result.passed, result.total) == ("wrong_answer", "task", 2, 4)
    assert [test.outcome for test in result.tests] == ["ok", "wrong_answer", "runtime_error", "ok"]
    assert [test.name for test in result.tests] == ["right", "wrong", "crash", "code alone"]
    assert "7" not in result.tests[1].message and out(result.tests[1].result) == b"6\n"


async def check_the_judge_stops_at_the_first_failure(edge: FnEdge) -> None:
    tests: list[dict[str, object]] = [{"stdin": b64(str(index)), "expected": b64("ok")} for index in range(12)]
    source = "import time\nn = int(input())\ntime.sleep(0 if n < 4 else 30)\nprint('ok' if n != 3 else 'no')"
    result = await edge.judge(source, *tests, stop_at_first_failure=True, limits={"wall_time_s": 60})
    assert (result.outcome, result.passed) == ("wrong_answer", 3)
    assert [test.outcome for test in result.tests] == ["ok"] * 3 + ["wrong_answer"] + ["cancelled"] * 8
    assert all(test.result is None for test in result.tests[4:])


async def check_checkers(edge: FnEdge) -> None:
    for kind, source, expected, passed in (
        ("exact", "print('a  b')", "a b", 0),
        ("tokens", "print('a  b')", "a b", 1),
        ("float", "print(1.0000001)", "1", 1),
        ("float", "print(1.1)", "1", 0),
    ):
        result = await edge.judge(source, {"expected": b64(expected)}, checker={"kind": kind})
        assert result.passed == passed, (kind, source, result)


async def check_a_checker_may_be_a_program(edge: FnEdge) -> None:
    checker = {
        "kind": "program",
        "source": "import sys\nn = int(open('input').read())\no = open('output').read().split()\n"
        "assert open('expected').read() == 'hint'\n"
        "sys.exit(0 if len(o) == 2 and int(o[0]) + int(o[1]) == n else 1)",
    }
    tests = ({"stdin": b64("10"), "expected": b64("hint")}, {"stdin": b64("7"), "expected": b64("hint")})
    result = await edge.judge("n = int(input())\nprint(n // 2, n // 2)", *tests, checker=checker)
    assert [test.outcome for test in result.tests] == ["ok", "wrong_answer"], result
    for source in ("raise ValueError", "import sys; sys.exit(2)", "while True: pass"):
        broken = {"kind": "program", "source": source, "limits": {"cpu_time_s": 1.0}}
        result = await edge.judge("print(1)", {"expected": b64("1")}, checker=broken)
        assert result.outcome == "platform_error", (source, result)


async def check_the_judged_program_finds_nothing_of_what_is_expected(edge: FnEdge) -> None:
    secret = new_id("secret")
    source = "import os\nfor folder, _, files in os.walk('.'):\n    print(folder, files)\nprint(dict(os.environ), input())"
    result = await edge.judge(source, {"stdin": b64("given\n"), "expected": b64(secret)})
    assert result.outcome == "wrong_answer" and secret.encode() not in out(result.tests[0].result)


async def check_the_judge_compiles_once(edge: FnEdge) -> None:
    source = f"cat; true {new_id('x')}"
    tests: list[dict[str, object]] = [{"stdin": b64(str(index)), "expected": b64(str(index))} for index in range(6)]
    result = await edge.judge(source, *tests, language=COMPILED)
    assert (result.outcome, result.passed) == ("ok", 6) and result.compile is not None
    result = await edge.judge("if (", *tests, language=COMPILED)
    assert (result.outcome, result.passed) == ("compile_error", 0)
    assert result.compile is not None and all(test.outcome == "cancelled" for test in result.tests)


async def check_tests_have_limits_of_their_own(edge: FnEdge) -> None:
    tests = ({"stdin": b64("0")}, {"stdin": b64("5"), "limits": {"wall_time_s": 0.3}})
    result = await edge.judge("import time; time.sleep(float(input()))", *tests)
    assert [test.outcome for test in result.tests] == ["ok", "time_limit"]


async def check_a_judged_action_is_recorded(edge: FnEdge) -> None:
    fields: dict[str, object] = {"action_id": new_id("judge")}
    first = await edge.judge("import os; print(os.urandom(8).hex())", {"stdin": ""}, **fields)
    assert await edge.judge("import os; print(os.urandom(8).hex())", {"stdin": ""}, **fields) == first


# --- SandboxFusion -----------------------------------------------------------------------------------------------------


async def check_run_code(edge: FnEdge) -> None:
    async def run(**fields: object) -> dict[str, object]:
        response = await edge.client.post("/run_code", content=json.dumps(fields).encode())
        assert response.status_code == 200 and response.headers["content-type"] == "application/json", response.text
        answer: dict[str, object] = response.json()
        assert set(answer) == {"status", "message", "compile_result", "run_result", "executor_pod_name", "files"}
        return answer

    def ran(answer: dict[str, object], key: str = "run_result") -> dict[str, object]:
        part = answer[key]
        assert isinstance(part, dict) and set(part) == {"status", "execution_time", "return_code", "stdout", "stderr"}
        return part

    answer = await run(code="print(input())", language="python", stdin="hi")
    assert answer["status"] == "Success" and answer["compile_result"] is None
    assert (ran(answer)["status"], ran(answer)["return_code"], ran(answer)["stdout"]) == ("Finished", 0, "hi\n")
    answer = await run(code="raise ValueError('x')", language="python")
    assert answer["status"] == "Failed" and ran(answer)["return_code"] == 1 and "ValueError" in str(ran(answer)["stderr"])
    answer = await run(code="import time; time.sleep(99)", language="python", run_timeout=0.5)
    assert answer["status"] == "Failed"
    assert (ran(answer)["status"], ran(answer)["return_code"]) == ("TimeLimitExceeded", None)
    answer = await run(code="cat a > b", language="bash", files={"a": b64("content"), "none": None}, fetch_files=["b"])
    files = answer["files"]
    assert isinstance(files, dict) and b64decode(files["b"]) == b"content"
    answer = await run(code="if (", language=COMPILED)
    assert answer["status"] == "Failed" and answer["run_result"] is None and ran(answer, "compile_result")["return_code"] != 0
    answer = await run(code="echo yes", language=COMPILED, memory_limit_MB=-1, unknown_field=1)
    assert answer["status"] == "Success" and ran(answer)["stdout"] == "yes\n" and ran(answer, "compile_result")["return_code"] == 0
    for bad in ({"code": "x"}, {"code": "x", "language": "cobol"}, {"code": "x", "language": "python", "files": {"a": "?"}}):
        assert (await edge.client.post("/run_code", content=json.dumps(bad).encode())).status_code == 400


# --- bad input ---------------------------------------------------------------------------------------------------------


async def check_bad_input_names_the_field(edge: FnEdge) -> None:
    plain: dict[str, object] = {"source": "print(1)"}
    for body, field in (
        ({}, "source"),
        ({**plain, "argv": ["x"]}, "argv"),
        ({**plain, "language": "cobol"}, "language"),
        ({**plain, "limits": {"pids": 0}}, "limits.pids"),
        ({**plain, "limits": {"memory": "x"}}, "limits.memory"),
        ({**plain, "stdin": "?"}, "stdin"),
        ({**plain, "files": {"/x": ""}}, "files"),
        ({**plain, "surprise": 1}, "body"),
        ({**plain, "reuse": "always"}, "reuse"),
        ({**plain, "outputs": ["../x"]}, "outputs[0]"),
        ({"function": "x"}, "function"),
    ):
        assert (await edge.refuse(400, "POST", "/v1/fn", body)).field == field, body
    assert (await edge.refuse(400, "POST", "/v1/fn/judge", {"source": "x"})).field == "tests"
    nothing_to_check_with = {"source": "x", "tests": [{}], "checker": {"kind": "program"}}
    assert (await edge.refuse(400, "POST", "/v1/fn/judge", nothing_to_check_with)).field == "checker.source"
    assert (await edge.refuse(404, "POST", "/v1/fn", {**plain, "pool": "none"})).field == "pool"
    assert (await edge.refuse(404, "PUT", "/v1/fn/pools", {"name": "x", "image": "no-such-image"})).field == "image"
    for _ in range(2):
        error = await edge.refuse(404, "POST", "/v1/fn", {**plain, "image": "no-such-image"})
        assert error.field == "image" and "no-such-image" in error.message
    assert (await edge.refuse(400, "PUT", "/v1/fn/pools", {"name": "X", "image": edge.image})).field == "name"
    assert (await edge.refuse(404, "PATCH", "/v1/fn/pools/none", {"size": 1})).field == "name"
    assert (await edge.refuse(404, "DELETE", "/v1/fn/pools/none")).field == "name"
    async with edge.pool(memory="64MiB", size=0) as pool:
        refusal = await edge.refuse(400, "POST", "/v1/fn", {**plain, "pool": pool, "limits": {"memory": "1GiB"}})
        assert refusal.field == "limits.memory"


CHECKS: Mapping[str, Callable[[FnEdge], Awaitable[None]]] = {
    name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")
}
