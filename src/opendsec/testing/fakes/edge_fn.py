# SPDX-License-Identifier: Apache-2.0
"""Function calls of the fake edge: plain processes of this machine in temporary directories; pools are records of what was asked for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from opendsec.api import fn, wire
from opendsec.api.errors import InvalidRequest, NotFound, OpenDSecError, Unavailable, Unsupported
from opendsec.api.fn_check import check_call, check_input, check_limits, check_map, check_pool, check_resize, check_task
from opendsec.testing.fakes.edge_parts import NDJSON, Handler, json_answer

_FUNCTION = """
import importlib, json, sys
module, _, name = sys.argv[1].partition(":")
target = importlib.import_module(module)
for part in name.split("."):
    target = getattr(target, part)
value = json.dumps(target(*json.loads(sys.argv[2]), **json.loads(sys.argv[3])))
open(sys.argv[4], "w").write(value)
"""
LANGUAGES = (
    fn.Language(name="python", image="debian", file="main.py", run=(sys.executable, "main.py"), warm=True),
    fn.Language(name="bash", image="debian", file="main.sh", run=("bash", "main.sh")),
)


class FnRoutes:
    """Handlers of the routes of function calls. `running`: calls under way; `most`: the most there were at once."""

    def __init__(self) -> None:
        self.pools: dict[str, fn.PoolInfo] = {}
        self.running = 0
        self.most = 0
        self.started = 0
        self.cut_after: list[int] = []  # the next batches break off after so many results

    def handlers(self) -> dict[str, Handler]:
        return {
            "FN": self._fn,
            "FN_MAP": self._map,
            "JUDGE": self._judge,
            "LANGUAGES": self._languages,
            "POOLS": self._pools,
            "POOL_SET": self._pool_set,
            "POOL_RESIZE": self._pool_resize,
            "POOL_REMOVE": self._pool_remove,
            "RUN_CODE": self._run_code,
        }

    async def _fn(self, request: Request) -> Response:
        call = wire.decode(await request.body(), fn.FnCall)
        check_call(call)
        running, gone = asyncio.ensure_future(self._ran(call, 0)), asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait((running, gone), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise Unavailable("the client has gone")
            return json_answer(running.result())
        finally:
            running.cancel()
            gone.cancel()
            await asyncio.gather(running, gone, return_exceptions=True)

    async def _map(self, request: Request) -> Response:
        lines = asyncio.Queue[bytes]()  # unbounded: a client of ours keeps to its window
        reading = asyncio.ensure_future(_read(request, lines))
        try:
            head = wire.decode(await lines.get(), fn.MapRequest)
            check_map(head)
            self._known_pool(head.call)
        except BaseException:
            reading.cancel()
            raise
        return _Duplex(self._results(head, lines, reading))

    async def _results(self, head: fn.MapRequest, lines: asyncio.Queue[bytes], reading: asyncio.Task[None]) -> AsyncGenerator[bytes, None]:
        running: set[asyncio.Task[fn.FnResult]] = set()
        following: asyncio.Task[bytes] | None = None
        left = self.cut_after.pop(0) if self.cut_after else -1
        ended = False
        try:
            while running or not ended:
                if following is None and not ended and len(running) < head.window:
                    following = asyncio.ensure_future(lines.get())
                await asyncio.wait({reading, *running, *([following] if following else [])}, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    return  # the client has gone
                for done in [one for one in running if one.done()]:
                    running.discard(done)
                    if left == 0:
                        raise ConnectionResetError("as a test wants it")
                    left -= 1
                    yield wire.encode(done.result()) + b"\n"
                if following is not None and following.done():
                    line, following = following.result(), None
                    ended = not line
                    if line:
                        running.add(asyncio.ensure_future(self._item(head.call, line)))
        except OpenDSecError as error:
            yield wire.encode_error(error) + b"\n"
        finally:
            others = [reading, *running, *([following] if following else [])]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    async def _item(self, call: fn.FnCall, line: bytes) -> fn.FnResult:
        item = wire.decode(line, fn.FnInput)
        check_input(item, call)
        given = {name: getattr(item, name) for name in ("source", "argv", "stdin") if getattr(item, name) is not None}
        given |= {name: getattr(item, name) for name in ("args", "kwargs") if bytes(getattr(item, name)) != b"null"}
        given |= {name: {**getattr(call, name), **getattr(item, name)} for name in ("files", "env")}
        return await self._ran(msgspec.structs.replace(call, **given), item.index)

    async def _ran(self, call: fn.FnCall, index: int) -> fn.FnResult:
        self._known_pool(call)
        self.running += 1
        self.started += 1
        self.most = max(self.most, self.running)
        try:
            with tempfile.TemporaryDirectory() as folder:
                return await _run(call, index, Path(folder))
        finally:
            self.running -= 1

    def _known_pool(self, call: fn.FnCall) -> None:
        if call.pool and call.pool not in self.pools:
            raise NotFound(f"no pool {call.pool}", field="pool")

    async def _judge(self, request: Request) -> Response:
        task = wire.decode(await request.body(), fn.JudgeTask)
        check_task(task)
        if task.checker.kind != "exact":
            raise Unsupported("the fake edge compares only byte for byte", field="checker")
        tests: list[fn.TestResult] = []
        for number, test in enumerate(task.tests):
            name = test.name or str(number)
            if task.stop_at_first_failure and any(one.outcome != "ok" for one in tests):
                tests.append(fn.TestResult(name=name, outcome="cancelled"))
                continue
            call = fn.FnCall(
                source=task.source,
                language=task.language,
                stdin=test.stdin,
                files={**task.files, **test.files},
                limits=test.limits or task.limits,
            )
            result = await self._ran(call, number)
            if result.outcome == "ok" and test.expected is not None and result.stdout.data.rstrip() != test.expected.rstrip():
                result = msgspec.structs.replace(result, outcome="wrong_answer")
            tests.append(fn.TestResult(name=name, outcome=result.outcome, result=result))
        first: fn.FnOutcome = next((one.outcome for one in tests if one.outcome != "ok"), "ok")
        passed = sum(one.outcome == "ok" for one in tests)
        return json_answer(fn.JudgeResult(outcome=first, id=task.id, passed=passed, total=len(tests), tests=tuple(tests)))

    async def _languages(self, request: Request) -> Response:
        return json_answer(fn.LanguageList(LANGUAGES))

    async def _run_code(self, request: Request) -> Response:
        raise Unsupported("the fake edge has no such route")

    # --- pools

    async def _pools(self, request: Request) -> Response:
        return json_answer(fn.PoolList(tuple(msgspec.structs.replace(pool, busy=self.running) for pool in self.pools.values())))

    async def _pool_set(self, request: Request) -> Response:
        spec = wire.decode(await request.body(), fn.PoolSpec)
        check_pool(spec)
        if spec.device != "none":
            raise Unsupported("this machine has no devices", field="device")
        return json_answer(self._kept(spec))

    async def _pool_resize(self, request: Request) -> Response:
        change = wire.decode(await request.body(), fn.PoolResize)
        return json_answer(self._kept(check_resize(change, self._pool(request).spec)))

    async def _pool_remove(self, request: Request) -> Response:
        del self.pools[self._pool(request).spec.name]
        return await self._pools(request)

    def _pool(self, request: Request) -> fn.PoolInfo:
        name = str(request.path_params["name"])
        if name not in self.pools:
            raise NotFound(f"no pool {name}", field="name")
        return self.pools[name]

    def _kept(self, spec: fn.PoolSpec) -> fn.PoolInfo:
        info = fn.PoolInfo(spec=spec, state="ready", idle=spec.size, busy=0, starting=0, calls=0, cold=0, lost=0, waiting=0)
        self.pools[spec.name] = info
        return info


class _Duplex(Response):
    """Lines while the request's body is still read: starlette's own streams read that as well, to hear of a disconnect."""

    def __init__(self, lines: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type=NDJSON)
        self._lines = lines
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for line in self._lines:
                await send({"type": "http.response.body", "body": line, "more_body": True})
        except (ClientDisconnect, ConnectionResetError):
            return  # uvicorn cuts the connection: the answer has no end
        finally:
            await self._lines.aclose()
        await send({"type": "http.response.body", "body": b""})


async def _read(request: Request, lines: asyncio.Queue[bytes]) -> None:
    """Lines of the body, and an empty one at its end. Returns when the client has gone."""
    rest = b""
    try:
        async for chunk in request.stream():
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                lines.put_nowait(line)
    except ClientDisconnect:
        return
    if rest:
        lines.put_nowait(rest)
    lines.put_nowait(b"")
    await request.receive()


async def _run(call: fn.FnCall, index: int, folder: Path) -> fn.FnResult:
    limits = check_limits(call.limits)
    argv = call.argv
    if call.function is not None:
        names = [call.function, bytes(call.args).decode(), bytes(call.kwargs).decode(), str(folder / ".value")]
        argv = (sys.executable, "-c", _FUNCTION, *names)
    elif call.source is not None:
        language = next((one for one in LANGUAGES if one.name == call.language), None)
        if language is None:
            raise InvalidRequest(f"no language {call.language!r}", field="language")
        (folder / language.file).write_text(call.source)
        argv = language.run
    assert argv is not None  # checked
    for name, data in call.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    pipe = asyncio.subprocess.PIPE
    began = time.monotonic()
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, cwd=folder, env={**os.environ, **call.env}, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except FileNotFoundError:
        return fn.FnResult(outcome="runtime_error", index=index, exit_code=127, message="no such program")
    timed_out = False
    try:
        async with asyncio.timeout(limits.wall_time_s):
            out, err = await process.communicate(call.stdin)
    except TimeoutError:
        timed_out, out, err = True, b"", b""
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    code = process.returncode
    assert code is not None
    outcome: fn.FnOutcome = "time_limit" if timed_out else "ok" if code == 0 else "runtime_error"
    if max(len(out), len(err)) > limits.output_bytes:
        outcome = "output_limit"
    value = folder / ".value"
    found = {str(path.relative_to(folder)): path.read_bytes() for pattern in call.outputs for path in folder.glob(pattern)}
    return fn.FnResult(
        outcome=outcome,
        index=index,
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        stdout=fn.FnOutput(data=out[: limits.output_bytes], total_bytes=len(out)),
        stderr=fn.FnOutput(data=err[: limits.output_bytes], total_bytes=len(err)),
        value=msgspec.Raw(value.read_bytes()) if value.exists() and outcome == "ok" else msgspec.Raw(b"null"),
        files=found,
        wall_ms=(time.monotonic() - began) * 1000,
        limits_hit=("wall_time",) if timed_out else ("output",) if outcome == "output_limit" else (),
    )
