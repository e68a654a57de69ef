# SPDX-License-Identifier: Apache-2.0
"""Handlers of the routes about function calls, and what stands behind them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from opendsec.api import wire
from opendsec.api.errors import OpenDSecError, Unsupported
from opendsec.api.fn import FnCall, FnResult, JudgeResult, JudgeTask, LanguageList, PoolInfo, PoolList, PoolResize, PoolSpec
from opendsec.api.fn_check import Bounds, check_call
from opendsec.api.ids import check_action_id
from opendsec.api.sandboxes import Capability
from opendsec.edge.actions import Action, request_digest
from opendsec.edge.fn import devices, fusion, judge, outcome
from opendsec.edge.fn.batch import Batch
from opendsec.edge.fn.calls import Calls, compile_bounds
from opendsec.edge.fn.compiled import Compiler, refused
from opendsec.edge.fn.parts import NAME, FnParts
from opendsec.edge.fn.pools import Pools
from opendsec.edge.http import Answer, Duplex, Handler, Request
from opendsec.edge.node import Node


class Functions:
    """All about function calls of one node; without `parts` every call is refused."""

    def __init__(self, node: Node, parts: FnParts | None, state_dir: Path) -> None:
        self.node, self.parts = node, parts
        self.pools: Pools | None = None
        if parts is not None:
            self.pools = Pools(node, parts.backend, devices=parts.devices, members=parts.members)
            self.calls = Calls(self.pools, parts.languages)
            self.compiler = Compiler(self.calls, state_dir / "fn" / "compiled", parts.cache_bytes, node.log)

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
        result = await self._run(call, compile_bounds(), action.begin, once=call.action_id is not None)
        if action.action_id is not None and (kept := outcome.recorded(result)) is not None:
            action.end(kept, self.node.clock.time())
        return result

    async def run_code(self, request: fusion.RunCodeRequest) -> fusion.RunCodeResponse:
        call, compile_limits = fusion.parse(request)
        try:
            return fusion.answer(await self._run(call, compile_bounds(compile_limits)), self.node.edge_id)
        except OpenDSecError as error:
            return fusion.refusal(error, self.node.edge_id)

    async def _run(self, call: FnCall, bounds: Bounds, begin: Callable[[], None] = lambda: None, *, once: bool = False) -> FnResult:
        """Compile it within `bounds` if need be, then run it. `begin`: what was wrong with the call has been found."""
        target = self.calls.target(call, check_call(call))
        caller = ("single", call.tenant)
        compiled = None
        if target.compiled:
            assert call.source is not None
            compiled = await self.compiler.compile(target, call.source, call.files, bounds, caller=caller)
            if compiled.result.outcome != "ok":
                begin()
                return refused(compiled)
        job = self.calls.job(call, target, artifacts=None if compiled is None else compiled.artifacts)
        begin()
        result = await self.calls.run(target, job, caller=caller, once=once)
        return result if compiled is None else msgspec.structs.replace(result, compile=compiled.result)

    async def judged(self, task: JudgeTask) -> JudgeResult:
        if task.action_id is not None:
            check_action_id(task.action_id)

        async def work(action: Action[JudgeResult]) -> JudgeResult:
            judging = judge.Judging(self.calls, self.compiler, task)
            action.begin()
            result = await judging.run()
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
        return await request.while_wanted(self._fn.call(call))

    async def map(self, request: Request) -> Answer:
        self._fn.needed()
        batch = Batch(self._fn.calls, self._fn.compiler, request)
        await batch.open()
        return Duplex(batch.answer())

    async def judge(self, request: Request) -> JudgeResult:
        self._fn.needed()
        task = await request.json(JudgeTask)
        return await request.while_wanted(self._fn.judged(task))

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

    async def run_code(self, request: Request) -> fusion.RunCodeResponse:
        self._fn.needed()
        wanted = await request.json(fusion.RunCodeRequest)
        return await request.while_wanted(self._fn.run_code(wanted))
