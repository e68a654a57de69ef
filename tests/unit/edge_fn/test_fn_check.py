# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a call, a task, a batch or a pool is said by field and rule."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest

from opendsec.api.errors import InvalidRequest
from opendsec.api.fn import Checker, FnCall, FnInput, FnLimits, JudgeTask, MapRequest, PoolResize, PoolSpec, Test
from opendsec.api.fn_check import check_call, check_input, check_map, check_pool, check_resize, check_task

RAW = msgspec.Raw


def call(**fields: object) -> FnCall:
    return msgspec.structs.replace(FnCall(source="pass"), **fields)


def limits(**fields: object) -> FnCall:
    return call(limits=msgspec.structs.replace(FnLimits(), **fields))


def task(**fields: object) -> JudgeTask:
    return msgspec.structs.replace(JudgeTask(source="pass", tests=(Test(),)), **fields)


def pool(**fields: object) -> PoolSpec:
    return msgspec.structs.replace(PoolSpec(name="p", image="debian"), **fields)


BAD_CALLS: dict[str, tuple[FnCall, str]] = {
    "nothing": (call(source=None), "source"),
    "two things": (call(argv=("true",)), "argv"),
    "three things": (call(argv=("true",), function="a:b"), "argv"),
    "source with NUL": (call(source="a\0b"), "source"),
    "source with half a character": (call(source="\ud800"), "source"),
    "empty argv": (call(source=None, argv=()), "argv"),
    "empty program": (call(source=None, argv=("", "x")), "argv"),
    "argument with NUL": (call(source=None, argv=("a", "b\0")), "argv[1]"),
    "argument too long": (call(source=None, argv=("a" * 140_000,)), "argv[0]"),
    "all arguments too long": (call(source=None, argv=("a" * 130_000,) * 9), "argv"),
    "function without module": (call(source=None, function="name"), "function"),
    "function with code": (call(source=None, function="os:system('x')"), "function"),
    "function with two colons": (call(source=None, function="a:b:c"), "function"),
    "args no array": (call(source=None, function="a:b", args=RAW(b'{"a":1}')), "args"),
    "kwargs no object": (call(source=None, function="a:b", kwargs=RAW(b"[1]")), "kwargs"),
    "args without function": (call(args=RAW(b"[1]")), "args"),
    "kwargs without function": (call(kwargs=RAW(b'{"a":1}')), "kwargs"),
    "stdin too long": (call(stdin=bytes(65 << 20)), "stdin"),
    "absolute file": (call(files={"/etc/passwd": b""}), "files"),
    "file above": (call(files={"../x": b""}), "files"),
    "file above in the middle": (call(files={"a/../../x": b""}), "files"),
    "file without name": (call(files={"": b""}), "files"),
    "file with NUL": (call(files={"a\0": b""}), "files"),
    "file with a long name": (call(files={"a" * 256: b""}), "files"),
    "file that is a folder": (call(files={"a": b"", "a/b": b""}), "files"),
    "too many files": (call(files={str(number): b"" for number in range(1025)}), "files"),
    "files too large": (call(files={"a": bytes(65 << 20)}), "files"),
    "output above": (call(outputs=("../*",)), "outputs[0]"),
    "absolute output": (call(outputs=("x", "/etc/*")), "outputs[1]"),
    "too many outputs": (call(outputs=("a",) * 257), "outputs"),
    "environment name with =": (call(env={"a=b": ""}), "env"),
    "environment value with NUL": (call(env={"A": "\0"}), "env.A"),
    "language": (call(language="C++"), "language"),
    "no language": (call(language=""), "language"),
    "pool": (call(pool="../x"), "pool"),
    "pool and image": (call(pool="p", image="debian"), "image"),
    "image": (call(image="Debian"), "image"),
    "tenant": (call(tenant="a b"), "tenant"),
    "tenant of ours": (call(tenant="a#checker"), "tenant"),
    "action id": (call(action_id=""), "action_id"),
    "no CPU time": (limits(cpu_time_s=0.0), "limits.cpu_time_s"),
    "endless CPU time": (limits(cpu_time_s=math.inf), "limits.cpu_time_s"),
    "no number": (limits(wall_time_s=math.nan), "limits.wall_time_s"),
    "negative time": (limits(wall_time_s=-1.0), "limits.wall_time_s"),
    "no memory": (limits(memory=0), "limits.memory"),
    "memory in no unit": (limits(memory="1 parsec"), "limits.memory"),
    "negative output": (limits(output_bytes=-1), "limits.output_bytes"),
    "too much output": (limits(output_bytes=1 << 40), "limits.output_bytes"),
    "no processes": (limits(pids=0), "limits.pids"),
    "no disk": (limits(disk=0), "limits.disk"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_names_the_field(name: str) -> None:
    bad, field = BAD_CALLS[name]
    with pytest.raises(InvalidRequest) as caught:
        check_call(bad)
    assert caught.value.field == field
    assert caught.value.message


BAD_TASKS: dict[str, tuple[JudgeTask, str]] = {
    "no tests": (task(tests=()), "tests"),
    "too many tests": (task(tests=(Test(),) * 10_001), "tests"),
    "source": (task(source="\0"), "source"),
    "file of a test": (task(tests=(Test(), Test(files={"/x": b""}))), "tests[1].files"),
    "limits of a test": (task(tests=(Test(limits=FnLimits(pids=0)),)), "tests[0].limits.pids"),
    "limits of compiling": (task(compile_limits=FnLimits(pids=0)), "compile_limits.pids"),
    "checker without source": (task(checker=Checker(kind="program")), "checker.source"),
    "source without checker": (task(checker=Checker(source="x")), "checker.source"),
    "negative tolerance": (task(checker=Checker(kind="float", abs_tol=-1.0)), "checker.abs_tol"),
    "tolerance that is no number": (task(checker=Checker(kind="float", rel_tol=math.nan)), "checker.rel_tol"),
    "limits of the checker": (task(checker=Checker(kind="program", source="x", limits=FnLimits(memory=1))), "checker.limits.memory"),
    "language of the checker": (task(checker=Checker(kind="program", source="x", language="?")), "checker.language"),
    "long id": (task(id="x" * 257), "id"),
    "action id": (task(action_id="a b"), "action_id"),
}


@pytest.mark.parametrize("name", BAD_TASKS)
def test_a_bad_task_names_the_field(name: str) -> None:
    bad, field = BAD_TASKS[name]
    with pytest.raises(InvalidRequest) as caught:
        check_task(bad)
    assert caught.value.field == field


BAD_POOLS: dict[str, tuple[PoolSpec, str]] = {
    "no name": (pool(name=""), "name"),
    "a name of ours": (pool(name="~debian"), "name"),
    "a path as name": (pool(name="a/b"), "name"),
    "image": (pool(image=""), "image"),
    "layer": (pool(layers=("x y",)), "layers[0]"),
    "negative size": (pool(size=-1), "size"),
    "no members": (pool(size=0, max=0), "max"),
    "more than the most": (pool(size=5, max=4), "size"),
    "preload": (pool(preload=("os", "os; import sys")), "preload[1]"),
    "preload without an interpreter": (pool(preload=("os",), python=""), "preload"),
    "warmup without an interpreter": (pool(warmup="x = 1", python=""), "warmup"),
    "interpreter with NUL": (pool(python="a\0"), "python"),
    "negative idle time": (pool(idle_s=-1.0), "idle_s"),
    "little memory": (pool(memory="1MiB"), "memory"),
    "no CPU": (pool(cpu=0.0), "cpu"),
    "user": (pool(user="Root!"), "user"),
    "label": (pool(labels={"a b": ""}), "labels"),
    "tenant": (pool(tenant="#"), "tenant"),
}


@pytest.mark.parametrize("name", BAD_POOLS)
def test_a_bad_pool_names_the_field(name: str) -> None:
    bad, field = BAD_POOLS[name]
    with pytest.raises(InvalidRequest) as caught:
        check_pool(bad)
    assert caught.value.field == field


def test_a_resize_is_checked_as_the_pool_that_it_makes() -> None:
    assert check_resize(PoolResize(size=2, max=8), pool()) == pool(size=2, max=8)
    with pytest.raises(InvalidRequest, match="give size, max or both"):
        check_resize(PoolResize(), pool())
    with pytest.raises(InvalidRequest, match="at most max"):
        check_resize(PoolResize(size=5), pool())


BAD_ITEMS: dict[str, tuple[FnInput, FnCall, str]] = {
    "source for an argv": (FnInput(source="x"), call(source=None, argv=("a",)), "source"),
    "argv for source": (FnInput(argv=("a",)), call(), "argv"),
    "argv for a function": (FnInput(argv=("a",)), call(source=None, function="a:b"), "argv"),
    "args for source": (FnInput(args=RAW(b"[1]")), call(), "args"),
    "args that are a number": (FnInput(args=RAW(b"1")), call(source=None, function="a:b"), "args"),
    "file": (FnInput(files={"..": b""}), call(), "files"),
    "environment": (FnInput(env={"": ""}), call(), "env"),
    "stdin": (FnInput(stdin=bytes(65 << 20)), call(), "stdin"),
}


@pytest.mark.parametrize("name", BAD_ITEMS)
def test_a_bad_item_names_the_field(name: str) -> None:
    item, of, field = BAD_ITEMS[name]
    with pytest.raises(InvalidRequest) as caught:
        check_input(item, of)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "head, field",
    [
        (MapRequest(call=call(), window=0), "window"),
        (MapRequest(call=call(), window=5000), "window"),
        (MapRequest(call=call(action_id="a")), "call.action_id"),
        (MapRequest(call=call(pool="?")), "call.pool"),
        (MapRequest(call=call(argv=("a",))), "call.argv"),
    ],
)
def test_a_bad_head_names_the_field(head: MapRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_map(head)
    assert caught.value.field == field


GOOD: list[Callable[[], object]] = [
    lambda: check_call(call()),
    lambda: check_call(call(source=None, function="a.b:C.d", args=RAW(b" [1]"), kwargs=RAW(b'{"x": 2}'))),
    lambda: check_call(call(files={"a/b": b"", "a/c": b"", "ab": b""}, outputs=("*.txt", "out/*"))),
    lambda: check_map(MapRequest(call=FnCall())),  # each item brings its own source
    lambda: check_input(FnInput(), call()),
    lambda: check_task(task()),
    lambda: check_pool(pool(size=0, python="")),
]


@pytest.mark.parametrize("check", GOOD)
def test_what_is_right_passes(check: Callable[[], object]) -> None:
    check()
