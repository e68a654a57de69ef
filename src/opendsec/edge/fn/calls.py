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

from opendsec.api.errors import Denied, InvalidRequest, OpenDSecError, Unavailable
from opendsec.api.fn import FnCall, FnInput, FnLimits, FnResult, JudgeTask, Language, Reuse
from opendsec.api.fn_check import Bounds, check_call, check_limits, memory_bytes
from opendsec.api.units import format_bytes
from opendsec.edge.fn import languages as definitions
from opendsec.edge.fn.holding import Call, Done
from opendsec.edge.fn.languages import Languages
from opendsec.edge.fn.pools import Pools
from opendsec.edge.fn.serving import LivePool
from opendsec.runtime.fncall.interface import File, Job, JobLimits

PYTHON = "python3"  # kept warm in pools that nobody declared
COMPILE_LIMITS: FnLimits = JudgeTask(source="").compile_limits


class Target:
    """Where calls of one kind run: resolved once, used by each."""

    __slots__ = ("__weakref__", "bounds", "fresh", "job_limits", "language", "pool", "tenant")

    def __init__(self, pool: LivePool, language: Language | None, tenant: str, fresh: bool, bounds: Bounds) -> None:
        self.pool, self.language, self.tenant, self.fresh, self.bounds = pool, language, tenant, fresh, bounds
        overhead = 0 if language is None else memory_bytes(language.memory_overhead)
        self.job_limits = job_limits(bounds, overhead)
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


def job_limits(bounds: Bounds, overhead_bytes: int = 0) -> JobLimits:
    return JobLimits(
        cpu_time_s=bounds.cpu_time_s,
        wall_time_s=bounds.wall_time_s,
        memory_bytes=bounds.memory_bytes + overhead_bytes,
        output_bytes=bounds.output_bytes,
        pids=bounds.pids,
        disk_bytes=bounds.disk_bytes,
    )


def check_fits(pool: LivePool, bounds: Bounds, language: Language | None, field: str = "limits.memory") -> None:
    """Raises InvalidRequest if no member of the pool could ever give a call so much."""
    needed = bounds.memory_bytes + (0 if language is None else memory_bytes(language.memory_overhead))
    if needed > pool.memory_bytes:
        raise InvalidRequest(
            f"members of pool {pool.spec.name!r} have {format_bytes(pool.memory_bytes)}, the call needs {format_bytes(needed)}", field=field
        )


class Calls:
    """Resolves and submits."""

    def __init__(self, pools: Pools, languages: Languages) -> None:
        self.pools, self.languages = pools, languages

    # --- where ------------------------------------------------------------------------------------------------------------

    def target(
        self, *, language: str, needs_python: bool, pool: str, image: str, tenant: str, reuse: Reuse | None, bounds: Bounds, source: bool
    ) -> Target:
        """Where such calls run. `needs_python`: in a warm interpreter and no other way. Raises what the request did wrong."""
        if self.pools.node.phase != "ready":
            raise Unavailable(f"this edge is {self.pools.node.phase} and takes no new calls")
        definition = self.languages.get(language)
        used = definition if source else None
        if pool:
            live = self.pools.get(pool)
            if live.spec.tenant and live.spec.tenant != tenant:
                raise Denied(f"pool {pool!r} belongs to another tenant", field="pool")
            if live.spec.reuse == "never" and reuse == "fork":
                raise InvalidRequest(f"pool {pool!r} uses each member once: a call may ask for more than that, not for less", field="reuse")
            if needs_python and not live.spec.python:
                raise InvalidRequest(f"pool {pool!r} keeps no interpreter warm (its `python` is empty)", field="pool")
            check_fits(live, bounds, used)
        else:
            warm = needs_python or (source and definition.warm)
            needed = bounds.memory_bytes + (0 if used is None else memory_bytes(used.memory_overhead))
            live = self.pools.for_call(image or definition.image, PYTHON if warm else "", needed)
        return Target(live, used, tenant, reuse == "never", bounds)

    def target_of(self, call: FnCall) -> Target:
        bounds = check_call(call)
        return self.target_for(call, bounds)

    def target_for(self, call: FnCall, bounds: Bounds) -> Target:
        """For a call that was checked."""
        return self.target(
            language=call.language,
            needs_python=call.function is not None,
            pool=call.pool,
            image=call.image,
            tenant=call.tenant,
            reuse=call.reuse,
            bounds=bounds,
            source=call.argv is None and call.function is None,
        )

    def compile_target(self, target: Target, bounds: Bounds, image: str = "") -> Target:
        """Where the program is compiled: with the call, but not where a device would idle meanwhile."""
        assert target.language is not None
        pool, spec = target.pool, target.pool.spec
        if pool.implicit or spec.device != "none":
            overhead = memory_bytes(target.language.memory_overhead)
            live = self.pools.for_call(spec.image, spec.python if pool.implicit else "", bounds.memory_bytes + overhead)
            return Target(live, target.language, target.tenant, target.fresh, bounds)
        most = pool.memory_bytes - memory_bytes(target.language.memory_overhead)
        if bounds.memory_bytes > most:  # the pool's size is the tighter limit
            bounds = Bounds(
                cpu_time_s=bounds.cpu_time_s,
                wall_time_s=bounds.wall_time_s,
                memory_bytes=max(most, 0),
                output_bytes=bounds.output_bytes,
                pids=bounds.pids,
                disk_bytes=bounds.disk_bytes,
            )
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

    def submit(self, target: Target, job: Job, done: Done, *, caller: Hashable, index: int = 0, once: bool = False) -> Call:
        call = Call(job, target.bounds, caller=caller, tenant=target.tenant, fresh=target.fresh, done=done, index=index, once=once)
        target.pool.submit(call)
        return call

    async def run(self, target: Target, job: Job, *, caller: Hashable, once: bool = False) -> FnResult:
        """The result of one job. Cancelled, it kills the call. Raises why it could not be made."""
        ended: asyncio.Future[FnResult] = asyncio.get_running_loop().create_future()
        call = self.submit(target, job, partial(_settle, ended), caller=caller, once=once)
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
