# SPDX-License-Identifier: Apache-2.0
"""Handlers of the routes about function calls, and what stands behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from pathlib import Path
from typing import TypeVar

import msgspec

from opendsec.api import wire
from opendsec.api.errors import InvalidRequest, OpenDSecError, Unsupported
from opendsec.api.fn import FnCall, FnResult, JudgeResult, JudgeTask, LanguageList, PoolInfo, PoolList, PoolResize, PoolSpec
from opendsec.api.ids import check_action_id
from opendsec.api.sandboxes import Capability
from opendsec.edge.actions import Action, request_digest
from opendsec.edge.fn import devices, fusion, judge, outcome
from opendsec.edge.fn.batch import Batch
from opendsec.edge.fn.calls import Calls, compile_bounds
from opendsec.edge.fn.compiled import Compiler, refused
from opendsec.edge.fn.parts import NAME, FnParts
from opendsec.edge.fn.pools import Pools
from opendsec.edge.http import Answer, Disconnected, Duplex, Handler, Raw, Request
from opendsec.edge.node import Node

RUN_CODE_BYTES = wire.MAX_BODY_BYTES
T = TypeVar("T")


class Functions:
    """All about function calls of one node; without `parts` every call is refused."""

    def __init__(self, node: Node, parts: FnParts | None, state_dir: Path) -> None:
        self.node, self.parts = node, parts
        self.pools: Pools | None = None
        if parts is not None:
            self.pools = Pools(node, parts.backend, devices=parts.devices, members=parts.members)
            self.calls = Calls(self.pools, parts.languages)
            self.compiler = Compiler(self.calls, state_dir / "fn" / "compiled", parts.cache_bytes, node.log)
            self.judge = judge.Judge(self.calls, self.compiler)

    def capabilities(self) -> dict[str, tuple[Capability, ...]]:
        if self.parts is None:
            return {}
        return {NAME: (*self.parts.backend.capabilities(), devices.capability(self.parts.devices))}

    async def start(self) -> None:
        if self.pools is not None and self.parts is not None:
            await self.parts.backend.start()
            await self.pools.start()

    async def close(self) -> None:
        if self.pools is not None:
            await self.pools.close()

    def needed(self) -> Pools:
        if self.pools is None:
            raise Unsupported(f"this edge has no backend {NAME!r}", field="backend")
        return self.pools

    async def call(self, call: FnCall) -> FnResult:
        """One call, compiled first if need be. Raises what kept it from running."""
        if call.action_id is not None:
            check_action_id(call.action_id)
        return await self.node.actions.once(
            call.action_id,
            lambda action: self._call(call, action),
            result=FnResult,
            kind="fn",
            digest=lambda: request_digest("fn", wire.encode(call)),
        )

    async def _call(self, call: FnCall, action: Action[FnResult]) -> FnResult:
        target = self.calls.target_of(call)
        caller = ("single", call.tenant)
        compiled = None
        if target.compiled:
            assert call.source is not None
            compiled = await self.compiler.compile(target, call.source, call.files, compile_bounds(), caller=caller)
            if compiled.result.outcome != "ok":
                action.begin()
                return refused(compiled)
        job = self.calls.job(call, target, artifacts=None if compiled is None else compiled.artifacts)
        action.begin()
        result = await self.calls.run(target, job, caller=caller, once=call.action_id is not None)
        if compiled is not None:
            result = msgspec.structs.replace(result, compile=compiled.result)
        if action.action_id is not None and (kept := outcome.recorded(result)) is not None:
            action.end(kept, self.node.clock.time())
        return result

    async def run_code(self, body: bytes) -> fusion.RunCodeResponse:
        call, compile_limits = fusion.parse(body)
        pod = self.node.edge_id
        try:
            target = self.calls.target_of(call)
            compiled = None
            if target.compiled:
                assert call.source is not None
                bounds = compile_bounds(compile_limits)
                compiled = await self.compiler.compile(target, call.source, call.files, bounds, caller=("single", ""))
                if compiled.result.outcome != "ok":
                    return fusion.answer(refused(compiled), pod)
            job = self.calls.job(call, target, artifacts=None if compiled is None else compiled.artifacts)
            result = await self.calls.run(target, job, caller=("single", ""))
        except OpenDSecError as error:
            return fusion.refusal(error, pod)
        if compiled is not None:
            result = msgspec.structs.replace(result, compile=compiled.result)
        return fusion.answer(result, pod)

    async def judged(self, task: JudgeTask) -> JudgeResult:
        if task.action_id is not None:
            check_action_id(task.action_id)

        async def work(action: Action[JudgeResult]) -> JudgeResult:
            self.judge.check(task)
            action.begin()
            result = await self.judge.judge(task)
            if action.action_id is not None and (kept := judge.recorded(result)) is not None:
                action.end(kept, self.node.clock.time())
            return result

        digest = request_digest("judge", wire.encode(task)) if task.action_id is not None else b""
        return await self.node.actions.once(task.action_id, work, result=JudgeResult, kind="judge", digest=lambda: digest)


class FnRoutes:
    """Handlers for one node."""

    def __init__(self, functions: Functions) -> None:
        self._fn = functions

    def handlers(self) -> dict[str, Handler]:
        return {
            "FN": self.call,
            "FN_MAP": self.map,
            "JUDGE": self.judge,
            "LANGUAGES": self.languages,
            "POOLS": self.pools,
            "POOL_SET": self.set_pool,
            "POOL_RESIZE": self.resize_pool,
            "POOL_REMOVE": self.remove_pool,
            "RUN_CODE": self.run_code,
        }

    async def call(self, request: Request) -> FnResult:
        self._fn.needed()
        call = await request.json(FnCall)
        return await _while_wanted(request, self._fn.call(call))

    async def map(self, request: Request) -> Answer:
        self._fn.needed()
        batch = Batch(self._fn.calls, self._fn.compiler, request)
        await batch.open()
        return Duplex(batch.answer())

    async def judge(self, request: Request) -> JudgeResult:
        self._fn.needed()
        task = await request.json(JudgeTask)
        return await _while_wanted(request, self._fn.judged(task))

    async def languages(self, request: Request) -> LanguageList:
        self._fn.needed()
        known = self._fn.calls.languages.all
        return LanguageList(tuple(known[name] for name in sorted(known)))

    async def pools(self, request: Request) -> PoolList:
        return self._fn.needed().list()

    async def set_pool(self, request: Request) -> PoolInfo:
        pools = self._fn.needed()
        return await pools.set(await request.json(PoolSpec), request.intent.begin)

    async def resize_pool(self, request: Request) -> PoolInfo:
        pools, name = self._fn.needed(), request.params[0]
        change = await request.json(PoolResize)

        async def work(action: Action[PoolInfo]) -> PoolInfo:
            return await pools.resize(name, change, action.begin)

        return await self._fn.node.actions.once(
            change.action_id,
            work,
            result=PoolInfo,
            kind="pool_resize",
            digest=lambda: request_digest("pool_resize", name.encode(), wire.encode(change)),
        )

    async def remove_pool(self, request: Request) -> PoolList:
        await request.no_body()
        return await self._fn.needed().remove(request.params[0], request.intent.begin)

    async def run_code(self, request: Request) -> Raw:
        self._fn.needed()
        parts, size = [], 0
        async for chunk in request.chunks():
            size += len(chunk)
            if size > RUN_CODE_BYTES:
                raise InvalidRequest(f"must be at most {RUN_CODE_BYTES} bytes", field="body")
            parts.append(chunk)
        answer = wire.encode(await _while_wanted(request, self._fn.run_code(b"".join(parts))))

        async def chunks() -> AsyncGenerator[bytes, None]:
            yield answer

        return Raw(chunks(), len(answer), lambda: None, content_type=b"application/json")


async def _while_wanted(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is killed when nobody waits for it any more."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(request.gone())
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Disconnected
        return working.result()
    finally:
        gone.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
