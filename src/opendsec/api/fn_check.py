# SPDX-License-Identifier: Apache-2.0
"""What a function call, a judge task or a pool may ask for: pure checks, each naming the field and the rule.

Both ends use them: the client before anything is sent, the edge because it believes nobody.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from opendsec.api.errors import InvalidRequest
from opendsec.api.fn import Checker, FnCall, FnInput, FnLimits, JudgeTask, MapRequest, PoolResize, PoolSpec
from opendsec.api.ids import check_action_id
from opendsec.api.spec import CPU, MAX_LAYERS, MIB, Container, check_env, check_integer, check_number, check_text, check_user
from opendsec.api.units import format_bytes, parse_bytes

TIME_S = (0.01, 86_400.0)
MEMORY_BYTES = (4 * MIB, 1 << 40)  # of a call
MEMBER_BYTES = (32 * MIB, 1 << 40)
DISK_BYTES = (4096, 1 << 40)
OUTPUT_BYTES = (0, 64 * MIB)
PIDS = (1, 32_768)
MEMBERS = (0, 4096)
WINDOW = (1, 4096)
IDLE_S = (0.0, 1e7)
SOURCE_BYTES = 16 * MIB
STDIN_BYTES = 64 * MIB
FILES_BYTES = 64 * MIB
FILES = 1024
OUTPUTS = 256
ARGV_BYTES = 1 << 20
TESTS = (1, 10_000)

POOL_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62})")
TENANT = re.compile(r"[A-Za-z0-9._@:/+-]{0,128}")
LANGUAGE = re.compile(r"[a-z0-9][a-z0-9+#._-]{0,31}")
FUNCTION = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)
MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)
_SPACE = b" \t\r\n"


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """`FnLimits` in base units."""

    cpu_time_s: float
    wall_time_s: float
    memory_bytes: int
    output_bytes: int
    pids: int
    disk_bytes: int


def check_limits(limits: FnLimits, field: str = "limits") -> Bounds:
    """The limits in base units. Raises InvalidRequest."""
    return Bounds(
        cpu_time_s=check_number(limits.cpu_time_s, f"{field}.cpu_time_s", TIME_S),
        wall_time_s=check_number(limits.wall_time_s, f"{field}.wall_time_s", TIME_S),
        memory_bytes=_size(limits.memory, f"{field}.memory", MEMORY_BYTES),
        output_bytes=check_integer(limits.output_bytes, f"{field}.output_bytes", OUTPUT_BYTES),
        pids=check_integer(limits.pids, f"{field}.pids", PIDS),
        disk_bytes=_size(limits.disk, f"{field}.disk", DISK_BYTES),
    )


def check_call(call: FnCall) -> Bounds:
    """A call as it is; of a batch that gives `source` or `argv` with each item, see `check_map`."""
    return _check_call(call, in_batch=False)


def check_map(request: MapRequest) -> Bounds:
    """The head of a batch. Its call need not name what runs if each item does: `source` and `argv` may then be empty."""
    check_integer(request.window, "window", WINDOW)
    try:
        if request.call.action_id is not None:
            raise InvalidRequest("a batch takes no action id: it may be repeated as it is", field="action_id")
        return _check_call(request.call, in_batch=True)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, field=f"call.{error.field}", data=error.data) from None


def check_input(item: FnInput, call: FnCall) -> None:
    """One item of a batch of `call`."""
    if item.source is not None:
        if call.argv is not None or call.function is not None:
            raise InvalidRequest(f"the batch calls {'an argv' if call.function is None else 'a function'}", field="source")
        check_text(item.source, "source", limit=SOURCE_BYTES)
    if item.argv is not None:
        if call.source is not None or call.function is not None:
            raise InvalidRequest(f"the batch calls {'source text' if call.function is None else 'a function'}", field="argv")
        check_argv(item.argv)
    if bytes(item.args) != b"null":
        _check_json(item.args, "args", b"[", "a JSON array", call.function)
    if bytes(item.kwargs) != b"null":
        _check_json(item.kwargs, "kwargs", b"{", "a JSON object", call.function)
    if item.stdin is not None:
        check_length(item.stdin, "stdin", STDIN_BYTES)
    if item.files:
        check_files(item.files)
    if item.env:
        check_env(item.env, "env")


def _check_call(call: FnCall, *, in_batch: bool) -> Bounds:
    given = [name for name in ("source", "argv", "function") if getattr(call, name) is not None]
    if len(given) != 1 and not (in_batch and not given):
        got = ", ".join(given) or "none"
        raise InvalidRequest(f"give exactly one of source, argv and function; got {got}", field=given[1] if given else "source")
    if call.source is not None:
        check_text(call.source, "source", limit=SOURCE_BYTES)
    if call.argv is not None:
        check_argv(call.argv)
    if call.function is not None and not FUNCTION.fullmatch(call.function):
        raise InvalidRequest(f"must be 'package.module:name'; got {call.function[:80]!r}", field="function")
    _check_json(call.args, "args", b"[", "a JSON array", call.function)
    _check_json(call.kwargs, "kwargs", b"{", "a JSON object", call.function)
    check_length(call.stdin, "stdin", STDIN_BYTES)
    check_files(call.files)
    check_outputs(call.outputs)
    check_env(call.env, "env")
    _check_place(call.language, call.pool, call.image, call.tenant)
    if call.action_id is not None:
        check_action_id(call.action_id)
    return check_limits(call.limits)


def check_argv(argv: tuple[str, ...], field: str = "argv") -> None:
    """A program and its arguments, as the kernel takes them."""
    if not argv or not argv[0]:
        raise InvalidRequest("must name a program", field=field)
    if sum(len(check_text(part, f"{field}[{index}]", limit=131_000)) + 1 for index, part in enumerate(argv)) > ARGV_BYTES:
        raise InvalidRequest(f"must be at most {ARGV_BYTES} bytes in all", field=field)


def check_files(files: Mapping[str, bytes], field: str = "files") -> None:
    """Names relative to the working directory and beneath it, none the folder of another."""
    if not files:
        return
    if len(files) > FILES:
        raise InvalidRequest(f"at most {FILES} files", field=field)
    if sum(map(len, files.values())) > FILES_BYTES:
        raise InvalidRequest(f"must be at most {FILES_BYTES} bytes in all", field=field)
    for name in files:
        check_relative(name, field)
        parts = name.split("/")
        for end in range(1, len(parts)):
            if "/".join(parts[:end]) in files:
                raise InvalidRequest(f"{name[:80]!r} lies in a folder of the name of another file", field=field)


def check_relative(name: str, field: str) -> str:
    """`name` if it is a plain relative path."""
    check_text(name, field, limit=4095)
    if any(part in ("", ".", "..") or len(part.encode("utf-8", "surrogateescape")) > 255 for part in name.split("/")):
        raise InvalidRequest(f"must be plain names relative to the working directory; got {name[:80]!r}", field=field)
    return name


def check_outputs(patterns: tuple[str, ...]) -> None:
    if len(patterns) > OUTPUTS:
        raise InvalidRequest(f"at most {OUTPUTS} patterns", field="outputs")
    for index, pattern in enumerate(patterns):
        check_relative(pattern, f"outputs[{index}]")


def check_length(data: bytes, field: str, limit: int) -> None:
    if len(data) > limit:
        raise InvalidRequest(f"must be at most {limit} bytes; got {len(data)}", field=field)


def check_task(task: JudgeTask) -> Bounds:
    """A judge task; the bounds of its tests that have none of their own."""
    check_text(task.source, "source", limit=SOURCE_BYTES)
    check_files(task.files)
    _check_place(task.language, task.pool, task.image, task.tenant)
    check_text(task.id, "id", limit=256)
    check_integer(len(task.tests), "tests", TESTS)
    for index, test in enumerate(task.tests):
        field = f"tests[{index}]"
        check_text(test.name, f"{field}.name", limit=256)
        check_length(test.stdin, f"{field}.stdin", STDIN_BYTES)
        check_length(test.expected or b"", f"{field}.expected", STDIN_BYTES)
        check_files(test.files, f"{field}.files")
        if test.limits is not None:
            check_limits(test.limits, f"{field}.limits")
    check_checker(task.checker)
    check_limits(task.compile_limits, "compile_limits")
    if task.action_id is not None:
        check_action_id(task.action_id)
    return check_limits(task.limits)


def check_checker(checker: Checker) -> None:
    if checker.kind == "program":
        if not checker.source:
            raise InvalidRequest("a checker of kind 'program' needs its source", field="checker.source")
        check_text(checker.source, "checker.source", limit=SOURCE_BYTES)
        _match(LANGUAGE, checker.language, "checker.language", "must be the name of a language")
        check_limits(checker.limits, "checker.limits")
    elif checker.source:
        raise InvalidRequest(f"a checker of kind {checker.kind!r} has no source", field="checker.source")
    for name, value in (("abs_tol", checker.abs_tol), ("rel_tol", checker.rel_tol)):
        check_number(value, f"checker.{name}", (0.0, 1e300))


def check_pool(spec: PoolSpec) -> int:
    """A pool; its members' memory in bytes."""
    _match(POOL_NAME, spec.name, "name", "must be 1 to 63 of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit")
    # The same rules as for containers: images, layers, users and labels mean the same there.
    Container(image=spec.image, layers=spec.layers, user=spec.user, labels=spec.labels).check()
    if len(spec.layers) > MAX_LAYERS:
        raise InvalidRequest(f"at most {MAX_LAYERS} layers", field="layers")
    check_integer(spec.size, "size", MEMBERS)
    check_integer(spec.max, "max", (1, MEMBERS[1]))
    if spec.size > spec.max:
        raise InvalidRequest(f"must be at most max, which is {spec.max}; got {spec.size}", field="size")
    check_integer(len(spec.preload), "preload", (0, 64))
    for index, module in enumerate(spec.preload):
        _match(MODULE, module, f"preload[{index}]", "must be the name of a module")
    check_text(spec.warmup, "warmup", limit=MIB)
    check_text(spec.python, "python", limit=4095)
    if not spec.python and (spec.preload or spec.warmup):
        field = "preload" if spec.preload else "warmup"
        raise InvalidRequest("needs an interpreter that is kept warm: name one in python", field=field)
    _match(TENANT, spec.tenant, "tenant", "must be at most 128 letters, digits or any of . _ @ : / + -")
    check_number(spec.idle_s, "idle_s", IDLE_S)
    check_number(spec.cpu, "cpu", CPU)
    check_user(spec.user, "user")
    return _size(spec.memory, "memory", MEMBER_BYTES)


def check_resize(change: PoolResize, before: PoolSpec) -> PoolSpec:
    """`before` with its new numbers of members."""
    if change.size is None and change.max is None:
        raise InvalidRequest("give size, max or both", field="size")
    if change.action_id is not None:
        check_action_id(change.action_id)
    most = before.max if change.max is None else change.max
    size = before.size if change.size is None else change.size
    after = msgspec.structs.replace(before, size=size, max=most)
    check_pool(after)
    return after


def _check_place(language: str, pool: str, image: str, tenant: str) -> None:
    _match(LANGUAGE, language, "language", "must be the name of a language")
    if pool:
        _match(POOL_NAME, pool, "pool", "must be the name of a pool")
    if pool and image:
        raise InvalidRequest("give a pool or an image: a pool has its image", field="image")
    if image:
        Container(image=image).check()
    _match(TENANT, tenant, "tenant", "must be at most 128 letters, digits or any of . _ @ : / + -")


def _check_json(raw: msgspec.Raw, field: str, opening: bytes, what: str, function: str | None) -> None:
    # A Raw that came over the wire is valid JSON: its first character tells its type.
    text = bytes(raw).lstrip(_SPACE)
    if text[:1] != opening:
        raise InvalidRequest(f"must be {what}", field=field)
    if function is None and text.translate(None, _SPACE) not in (b"[]", b"{}"):
        raise InvalidRequest("only a function takes arguments", field=field)


def _match(pattern: re.Pattern[str], value: str, field: str, rule: str) -> None:
    if not pattern.fullmatch(value):
        raise InvalidRequest(f"{rule}; got {value[:80]!r}", field=field)


def _size(value: int | str, field: str, bounds: tuple[int, int]) -> int:
    size = parse_bytes(value, field=field)
    if not bounds[0] <= size <= bounds[1]:
        raise InvalidRequest(f"must be from {format_bytes(bounds[0])} to {format_bytes(bounds[1])}; got {str(value)[:40]!r}", field=field)
    return size
