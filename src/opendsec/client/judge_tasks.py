# SPDX-License-Identifier: Apache-2.0
"""Tasks of the judge as lines of a file: one JSON object a line, where content is text, or `{"base64": …}` for what is none.

The fields are those of JudgeTask and Test. Another one, `expect`, says which verdict is right: `pass` unless given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import msgspec

from opendsec.api import wire
from opendsec.api.errors import InvalidRequest
from opendsec.api.fn import COMPILE_LIMITS, Checker, FnLimits, FnOutcome, JudgeTask, Reuse, Test
from opendsec.client.fn import made_task

Verdict = Literal["pass", "fail", "none"]
_NO_VERDICT = frozenset({"platform_error", "cancelled"})


class Encoded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    base64: bytes


Content = str | Encoded


class TestLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    __test__ = False  # for pytest

    name: str = ""
    stdin: Content = ""
    expected: Content | None = None
    files: dict[str, Content] = {}
    limits: FnLimits | None = None


class TaskLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str = ""
    source: str
    language: str = "python"
    tests: tuple[TestLine, ...] = ()
    files: dict[str, Content] = {}
    checker: Checker = Checker()
    stop_at_first_failure: bool = False
    limits: FnLimits = FnLimits()
    compile_limits: FnLimits = COMPILE_LIMITS
    pool: str = ""
    image: str = ""
    reuse: Reuse | None = None
    tenant: str = ""
    expect: Literal["pass", "fail"] = "pass"


class Expected(NamedTuple):
    """A task, and the verdict that would be right."""

    task: JudgeTask
    expect: Literal["pass", "fail"]


def read_tasks(lines: Iterable[bytes]) -> Iterator[Expected]:
    """The tasks of a file, those without an id named by their line. Raises InvalidRequest that begins with the line's number."""
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = wire.decode(text, TaskLine)
            yield Expected(made_task(_task(line, line.id or f"line-{number}")), line.expect)
        except InvalidRequest as error:
            raise InvalidRequest(f"line {number}: {error.message}", field=error.field) from None


def verdict(outcome: FnOutcome) -> Verdict:
    """What an outcome says about a program; a failure of the platform says nothing."""
    if outcome in _NO_VERDICT:
        return "none"
    return "pass" if outcome == "ok" else "fail"


def _task(line: TaskLine, task_id: str) -> JudgeTask:
    tests = tuple(
        Test(
            name=test.name,
            stdin=_bytes(test.stdin),
            expected=None if test.expected is None else _bytes(test.expected),
            files=_files(test.files),
            limits=test.limits,
        )
        for test in line.tests
    )
    return JudgeTask(
        id=task_id,
        source=line.source,
        language=line.language,
        tests=tests,
        files=_files(line.files),
        checker=line.checker,
        stop_at_first_failure=line.stop_at_first_failure,
        limits=line.limits,
        compile_limits=line.compile_limits,
        pool=line.pool,
        image=line.image,
        reuse=line.reuse,
        tenant=line.tenant,
    )


def _bytes(content: Content) -> bytes:
    return content.base64 if isinstance(content, Encoded) else content.encode()


def _files(files: dict[str, Content]) -> dict[str, bytes]:
    return {name: _bytes(content) for name, content in files.items()}
