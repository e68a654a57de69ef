# SPDX-License-Identifier: Apache-2.0
"""The judge: compile once, run each test, check what came out.

What is expected stays in the edge: the judged program gets a test's input and files and nothing else. A checker that is a program runs
in a member that never serves the judged side (a tenant of its own), after the judged call has ended.

Tests run side by side, as many as the pool has members. With `stop_at_first_failure` the first failure in the order of the tests
counts: those after it are killed or not begun, those before it are finished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from opendsec.api.errors import OpenDSecError
from opendsec.api.fn import FnCall, FnOutcome, FnResult, JudgeResult, JudgeTask, Test, TestResult
from opendsec.api.fn_check import check_limits, check_task
from opendsec.edge.fn import checkers, outcome
from opendsec.edge.fn.calls import Calls, Target, compile_bounds, program
from opendsec.edge.fn.compiled import Compiler
from opendsec.runtime.fncall.interface import File

AT_ONCE = 32  # tests of one task in the pool's queue
SAID = 200  # characters of a checker's own words


class Judging:
    """One task. What is wrong with it is raised at once; what is wrong with the program is its result."""

    def __init__(self, calls: Calls, compiler: Compiler, task: JudgeTask) -> None:
        self._calls, self._compiler, self._task = calls, compiler, task
        bounds = check_task(task)
        call = FnCall(source=task.source, language=task.language, pool=task.pool, image=task.image, reuse=task.reuse, tenant=task.tenant)
        self._target = calls.target(call, bounds)
        self._targets = [
            self._target if test.limits is None else self._target.with_bounds(check_limits(test.limits, f"tests[{index}].limits"))
            for index, test in enumerate(task.tests)
        ]
        self._checker: Target | None = None
        self._checker_artifacts: Mapping[str, bytes] | None = None
        if task.checker.kind == "program":
            limits = check_limits(task.checker.limits, "checker.limits")
            # An image that was chosen for the program serves a checker in the same language, too.
            own = self._target.pool.spec.image if task.pool and task.checker.language == task.language else task.image
            checking = FnCall(
                source=task.checker.source, language=task.checker.language, image=own, reuse=task.reuse, tenant=_checker_tenant(task.tenant)
            )
            self._checker = calls.target(checking, limits)
        self._artifacts: Mapping[str, bytes] | None = None

    async def run(self) -> JudgeResult:
        task = self._task
        compiled: FnResult | None = None
        if self._target.compiled:
            made = await self._compiler.compile(self._target, task.source, task.files, compile_bounds(task.compile_limits), caller=id(self))
            compiled = made.result
            if compiled.outcome != "ok":
                tests = tuple(_not_run(task, index) for index in range(len(task.tests)))
                message = compiled.message or "the compiler refused it"
                return JudgeResult(outcome=compiled.outcome, id=task.id, total=len(tests), tests=tests, compile=compiled, message=message)
            self._artifacts = made.artifacts
        if self._checker is not None and self._checker.compiled:
            built = await self._compiler.compile(self._checker, task.checker.source, {}, compile_bounds(), caller=id(self))
            if built.result.outcome != "ok":
                message = f"the checker cannot be compiled: {built.result.message or built.result.stderr.data.decode('utf-8', 'replace')}"
                tests = tuple(_not_run(task, index) for index in range(len(task.tests)))
                return JudgeResult(
                    outcome="platform_error", id=task.id, total=len(tests), tests=tests, compile=compiled, message=message[:2000]
                )
            self._checker_artifacts = built.artifacts
        results = await self._tests()
        passed = sum(result.outcome == "ok" for result in results)
        first = next((result for result in results if result.outcome != "ok"), None)
        return JudgeResult(
            outcome="ok" if first is None else first.outcome,
            id=task.id,
            passed=passed,
            total=len(results),
            tests=tuple(results),
            compile=compiled,
            message="" if first is None else f"test {first.name}: {first.message or first.outcome}",
        )

    async def _tests(self) -> list[TestResult]:
        task = self._task
        results: list[TestResult | None] = [None] * len(task.tests)
        most = min(AT_ONCE, self._target.pool.spec.max) if task.stop_at_first_failure else AT_ONCE
        following = iter(range(len(task.tests)))
        under_way: dict[int, asyncio.Task[TestResult]] = {}
        stop_at = len(task.tests)

        async def worker() -> None:
            nonlocal stop_at
            for index in following:
                if index >= stop_at:
                    return
                under_way[index] = running = asyncio.ensure_future(self._test(index))
                try:
                    await asyncio.wait((running,))
                finally:
                    if not running.done():
                        running.cancel()
                        await asyncio.wait((running,))
                    del under_way[index]
                if running.cancelled():
                    continue
                results[index] = running.result()
                failed = running.result().outcome != "ok"
                del running
                if task.stop_at_first_failure and failed and index < stop_at:
                    stop_at = index
                    for later, other in under_way.items():
                        if later > index:
                            other.cancel()

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(most, len(task.tests))):
                    workers.create_task(worker())
        except BaseException:
            results.clear()  # the exception's frames hold them, in a circle, and they may be large
            raise
        for index in range(stop_at + 1, len(results)):
            results[index] = None
        return [result if result is not None else _not_run(task, index) for index, result in enumerate(results)]

    async def _test(self, index: int) -> TestResult:
        task, test, target = self._task, self._task.tests[index], self._targets[index]
        name = test.name or str(index + 1)
        given = {**task.files, **test.files} if test.files else task.files
        files = tuple(File(path, data) for path, data in given.items())
        job = program(target, task.source, files, stdin=test.stdin, artifacts=self._artifacts)
        try:
            result = await self._calls.run(target, job, caller=id(self))
        except OpenDSecError as error:
            result = outcome.failed(error)
        if result.outcome != "ok":
            return TestResult(name=name, outcome=result.outcome, result=result, message=result.message)
        verdict, message = await self._check(test, result.stdout.data)
        return TestResult(name=name, outcome=verdict, result=result, message=message)

    async def _check(self, test: Test, output: bytes) -> tuple[FnOutcome, str]:
        checker = self._task.checker
        if checker.kind == "program":
            return await self._check_by_program(test, output)
        if test.expected is None:
            return "ok", ""
        if len(test.expected) + len(output) > checkers.LARGE_BYTES:
            wrong = await asyncio.to_thread(checkers.check, checker, test.expected, output)
        else:
            wrong = checkers.check(checker, test.expected, output)
        return ("wrong_answer", wrong) if wrong else ("ok", "")

    async def _check_by_program(self, test: Test, output: bytes) -> tuple[FnOutcome, str]:
        assert self._checker is not None
        files = (File("input", test.stdin), File("expected", test.expected or b""), File("output", output))
        job = program(self._checker, self._task.checker.source, files, artifacts=self._checker_artifacts)
        try:
            result = await self._calls.run(self._checker, job, caller=id(self))
        except OpenDSecError as error:
            return "platform_error", f"the checker could not be run: {error}"
        said = (result.stdout.data.strip() or result.stderr.data.strip()).decode("utf-8", "replace")[:SAID]
        if result.outcome == "ok":
            return "ok", ""
        if result.outcome == "runtime_error" and result.exit_code == 1 and not _traceback(result):
            return "wrong_answer", said or "the checker refuses it"
        return "platform_error", f"the checker failed ({result.outcome}, {result.message}): {said}"


def _traceback(result: FnResult) -> bool:
    """An uncaught exception of a Python checker ends with exit code 1, too, and is no verdict."""
    return b"Traceback (most recent call last):" in result.stderr.data


def _checker_tenant(tenant: str) -> str:
    """A tenant that nobody can name in a request: '#' is in no name."""
    return f"{tenant}#checker"


def _not_run(task: JudgeTask, index: int) -> TestResult:
    return TestResult(name=task.tests[index].name or str(index + 1), outcome="cancelled", message="not run")


def recorded(result: JudgeResult) -> JudgeResult | None:
    """As `outcome.recorded`, of all tests together."""
    size = sum(len(test.result.stdout.data) + len(test.result.stderr.data) for test in result.tests if test.result is not None)
    if size <= outcome.RECORDED_BYTES:
        return None
    tests = tuple(msgspec.structs.replace(test, result=None) for test in result.tests)
    message = "; ".join(filter(None, (result.message, "the outputs were too large to be kept for a repetition")))
    return msgspec.structs.replace(result, tests=tests, message=message)
