# SPDX-License-Identifier: Apache-2.0
"""From what a caller asks for to jobs in a pool: languages, images, tenants and trust are decided here, once a call or once a batch.

source in a language that is kept warm   → a fork of the member's interpreter
source in another language               → its command, with the source as a file; compiled first if need be
argv, function                           → as they are
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping
from functools import partial

import msgspec

from opendsec.api.errors import Denied, InvalidRequest, OpenDSecError, Unavailable
from opendsec.api.fn import COMPILE_LIMITS, FnCall, FnInput, FnLimits, FnResult, Language
from opendsec.api.fn_check import Bounds, check_limits
from opendsec.api.units import format_bytes, parse_bytes
from opendsec.edge.fn import languages as definitions
from opendsec.edge.fn.holding import Call
from opendsec.edge.fn.languages import Languages
from opendsec.edge.fn.pools import Pools
from opendsec.edge.fn.serving import LivePool
from opendsec.runtime.fncall.interface import File, Job, JobLimits

PYTHON = "python3"  # kept warm in pools that nobody declared


class Target:
    """Where calls of one kind run: resolved once, used by each."""

    __slots__ = ("__weakref__", "bounds", "fresh", "job_limits", "language", "pool", "tenant")

    def __init__(self, pool: LivePool, language: Language | None, tenant: str, fresh: bool, bounds: Bounds) -> None:
        self.pool, self.language, self.tenant, self.fresh, self.bounds = pool, language, tenant, fresh, bounds
        self.job_limits = JobLimits(
            cpu_time_s=bounds.cpu_time_s,
            wall_time_s=bounds.wall_time_s,
            memory_bytes=bounds.memory_bytes + overhead_bytes(language),
            output_bytes=bounds.output_bytes,
            pids=bounds.pids,
            disk_bytes=bounds.disk_bytes,
        )
        pool.users.add(self)

    def with_bounds(self, bounds: Bounds) -> Target:
        """The same with other limits. Raises InvalidRequest if the members are too small for them."""
        if bounds == self.bounds:
            return self
        check_fits(self.pool, bounds, self.language)
        return Target(self.pool, self.language, self.tenant, self.fresh, bounds)

    @property
    def compiled(self) -> bool:
        return self.language is not None and bool(self.language.compile)


def overhead_bytes(language: Language | None) -> int:
    return 0 if language is None else parse_bytes(language.memory_overhead, field="memory_overhead")


def check_fits(pool: LivePool, bounds: Bounds, language: Language | None) -> None:
    """Raises InvalidRequest if no member of the pool could ever give a call so much."""
    needed = bounds.memory_bytes + overhead_bytes(language)
    if needed > pool.memory_bytes:
        raise InvalidRequest(
            f"members of pool {pool.spec.name!r} have {format_bytes(pool.memory_bytes)}, the call needs {format_bytes(needed)}",
            field="limits.memory",
        )


class Calls:
    """Resolves and submits."""

    def __init__(self, pools: Pools, languages: Languages) -> None:
        self.pools, self.languages = pools, languages

    # --- where ------------------------------------------------------------------------------------------------------------

    def target(self, call: FnCall, bounds: Bounds) -> Target:
        """Where calls like this one, which was checked, run. Raises what the request did wrong."""
        if self.pools.node.phase != "ready":
            raise Unavailable(f"this edge is {self.pools.node.phase} and takes no new calls")
        definition = self.languages.get(call.language)
        source = call.argv is None and call.function is None
        used = definition if source else None
        if call.pool:
            live = self.pools.get(call.pool)
            if live.spec.tenant and live.spec.tenant != call.tenant:
                raise Denied(f"pool {call.pool!r} belongs to another tenant", field="pool")
            if live.spec.reuse == "never" and call.reuse == "fork":
                raise InvalidRequest(
                    f"pool {call.pool!r} uses each member once: a call may ask for more than that, not for less", field="reuse"
                )
            if call.function is not None and not live.spec.python:
                raise InvalidRequest(f"pool {call.pool!r} keeps no interpreter warm (its `python` is empty)", field="pool")
            check_fits(live, bounds, used)
        else:
            warm = call.function is not None or (source and definition.warm)
            live = self.pools.for_call(call.image or definition.image, PYTHON if warm else "", bounds.memory_bytes + overhead_bytes(used))
        return Target(live, used, call.tenant, call.reuse == "never", bounds)

    def compile_target(self, target: Target, bounds: Bounds) -> Target:
        """Where the program is compiled: with the call, but not where a device would idle meanwhile."""
        assert target.language is not None
        pool, spec, overhead = target.pool, target.pool.spec, overhead_bytes(target.language)
        if pool.implicit or spec.device != "none":
            live = self.pools.for_call(spec.image, spec.python if pool.implicit else "", bounds.memory_bytes + overhead)
            return Target(live, target.language, target.tenant, target.fresh, bounds)
        most = max(pool.memory_bytes - overhead, 0)
        if bounds.memory_bytes > most:  # the pool's size is the tighter limit
            bounds = msgspec.structs.replace(bounds, memory_bytes=most)
        return Target(pool, target.language, target.tenant, target.fresh, bounds)

    # --- what -------------------------------------------------------------------------------------------------------------

    def job(self, call: FnCall, target: Target, item: FnInput | None = None, *, artifacts: Mapping[str, bytes] | None = None) -> Job:
        """The job of a call, or of one item of a batch. `artifacts`: of a language that is compiled, what the compiler made."""
        source, argv, stdin, env = call.source, call.argv, call.stdin, call.env
        args, kwargs, given = call.args, call.kwargs, call.files
        if item is not None:
            source = source if item.source is None else item.source
            argv = argv if item.argv is None else item.argv
            stdin = stdin if item.stdin is None else item.stdin
            args = args if bytes(item.args) == b"null" else item.args
            kwargs = kwargs if bytes(item.kwargs) == b"null" else item.kwargs
            if item.env:
                env = {**env, **item.env}
            if item.files:
                given = {**given, **item.files}
        files = tuple([File(name, data) for name, data in given.items()]) if given else ()
        if call.function is not None:
            return Job(
                kind="function",
                limits=target.job_limits,
                function=call.function,
                args=bytes(args),
                kwargs=bytes(kwargs),
                stdin=stdin,
                files=files,
                outputs=call.outputs,
                env=env,
            )
        if argv is not None:
            return Job(kind="exec", limits=target.job_limits, argv=argv, stdin=stdin, files=files, outputs=call.outputs, env=env)
        assert source is not None
        return program(target, source, files, stdin=stdin, outputs=call.outputs, env=env, artifacts=artifacts)

    async def run(self, target: Target, job: Job, *, caller: Hashable, once: bool = False) -> FnResult:
        """The result of one job. Cancelled, it kills the call. Raises why it could not be made."""
        ended: asyncio.Future[FnResult] = asyncio.get_running_loop().create_future()
        done = partial(_settle, ended)
        call = Call(job, target.bounds, caller=caller, tenant=target.tenant, fresh=target.fresh, done=done, once=once)
        target.pool.submit(call)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            if not ended.done():
                target.pool.cancel(call)
                await asyncio.wait((ended,))
            if not ended.cancelled():
                ended.exception()
            raise


def program(
    target: Target,
    source: str,
    files: tuple[File, ...] = (),
    *,
    stdin: bytes = b"",
    outputs: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
    artifacts: Mapping[str, bytes] | None = None,
) -> Job:
    """The job that runs a program's source, or what was compiled of it."""
    language = target.language
    assert language is not None
    env = {**language.env, **(env or {})} if language.env else (env or {})
    if language.warm and target.pool.spec.python:
        return Job(
            kind="source",
            limits=target.job_limits,
            source=source,
            filename=language.file,
            stdin=stdin,
            files=files,
            outputs=outputs,
            env=env,
        )
    if artifacts is not None:
        files += tuple(File(name, data, executable=True) for name, data in artifacts.items())
    else:
        files += (File(language.file, encode_source(source)),)
    argv = definitions.command(language.run, language, target.bounds.memory_bytes)
    return Job(kind="exec", limits=target.job_limits, argv=argv, stdin=stdin, files=files, outputs=outputs, env=env)


def encode_source(source: str) -> bytes:
    return source.encode("utf-8", "surrogateescape")


def compile_bounds(limits: FnLimits = COMPILE_LIMITS) -> Bounds:
    return check_limits(limits, "compile_limits")


def _settle(ended: asyncio.Future[FnResult], call: Call, result: FnResult | OpenDSecError) -> None:
    if ended.done():
        return
    if isinstance(result, OpenDSecError):
        ended.set_exception(result)
    else:
        ended.set_result(result)
