# SPDX-License-Identifier: Apache-2.0
"""Function calls: what a caller may say about one, and the pools that serve them. A batch of calls is in batch.py.

A call leaves nothing behind, so it is sent again after a broken connection like a request that only reads; with an action id of the
caller's the edge gives back the recorded result instead of running it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypedDict, TypeVar, Unpack

import msgspec

from opendsec.api import fn, routes, wire
from opendsec.api.errors import InvalidRequest
from opendsec.api.fn import Device, FnCall, FnLimits, JudgeTask, MapRequest, PoolInfo, PoolList, PoolResize, PoolSpec, Reuse, Test
from opendsec.api.fn_check import check_call, check_map, check_pool, check_task
from opendsec.client import _core
from opendsec.client.link import Link
from opendsec.client.results import FnResult

T = TypeVar("T", bound=msgspec.Struct)
Content = Mapping[str, str | bytes]
_json = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


class CallOptions(TypedDict, total=False):
    """What may be said about a call; see FnCall. Text stands for its bytes in UTF-8."""

    source: str  # a program in `language`; exactly one of `source`, `argv` and `function`
    language: str
    argv: Sequence[str]  # a program of the image
    function: str  # `package.module:name`
    args: Sequence[object]  # JSON values
    kwargs: Mapping[str, object]
    stdin: str | bytes
    files: Content  # relative to the working directory
    outputs: Sequence[str]  # files to bring back
    env: Mapping[str, str]
    limits: FnLimits
    pool: str
    image: str
    reuse: Reuse | None
    tenant: str
    action_id: str | None


class PoolOptions(TypedDict, total=False):
    """What may be said about a pool besides its name; see PoolSpec."""

    image: str
    layers: Sequence[str]
    size: int
    max: int
    preload: Sequence[str]
    warmup: str
    python: str
    reuse: Reuse
    tenant: str
    idle_s: float
    memory: int | str
    cpu: float
    user: str
    device: Device
    labels: Mapping[str, str]


# --- building ---------------------------------------------------------------------------------------------------------


def json_raw(value: object, field: str) -> msgspec.Raw:
    """The JSON of a value. Raises InvalidRequest for what JSON has no word for: bytes, sets, NaN, things that contain themselves."""
    if isinstance(value, msgspec.Raw):
        return value
    try:
        return msgspec.Raw(_json.encode(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"must be made of JSON values: {error}", field=field) from None


def content_bytes(files: Content, field: str) -> dict[str, bytes]:
    if not isinstance(files, Mapping):
        raise InvalidRequest(f"must be a mapping of names to content, not {type(files).__name__}", field=field)
    return {name: _core.text_bytes(data, f"{field}[{name!r}]") for name, data in files.items()}


def _fields(given: Mapping[str, object], field: str = "") -> dict[str, object]:
    """Fields as a caller gave them, ready for JSON: text in the place of bytes would be taken for base64, and NaN would become null."""
    fields = dict(given)
    for name in ("stdin", "expected"):
        value = fields.get(name)
        if isinstance(value, (str, bytes)):
            fields[name] = _core.text_bytes(value, field + name)
    files = fields.get("files")
    if isinstance(files, Mapping):
        fields["files"] = content_bytes(files, f"{field}files")
    for name in ("args", "kwargs"):
        if name in fields:
            fields[name] = json_raw(fields[name], field + name)
    return fields


def fields_of(value: msgspec.Struct) -> dict[str, object]:
    return {name: getattr(value, name) for name in value.__struct_fields__}


def checked(kind: type[T], given: Mapping[str, object], field: str = "") -> T:
    """A struct of the contract with the types of all its fields verified. Raises InvalidRequest with the field."""
    unknown = [name for name in given if name not in kind.__struct_fields__]
    if unknown:
        raise InvalidRequest(f"{kind.__name__} has no such field; it has {', '.join(kind.__struct_fields__)}", field=field + unknown[0])
    try:
        made = kind(**_fields(given, field))
    except TypeError as error:
        raise InvalidRequest(str(error), field=field or kind.__name__) from None
    # Through JSON and back: a constructor does not look at types.
    return wire.decode(_core.encode(made), kind)


def made_call(call: FnCall | None, options: Mapping[str, object]) -> FnCall:
    """A checked call: `call`, with `options` in the place of its own fields."""
    if call is not None and not isinstance(call, FnCall):
        raise InvalidRequest(f"must be an FnCall, not {type(call).__name__}", field="call")
    made = checked(FnCall, {**(fields_of(call) if call is not None else {}), **options})
    check_call(made)
    return made


def made_batch(call: FnCall, window: int) -> MapRequest:
    """The checked head of a batch."""
    if not isinstance(call, FnCall):
        raise InvalidRequest(f"must be an FnCall, not {type(call).__name__}", field="call")
    made = wire.convert({"call": checked(FnCall, fields_of(call), "call."), "window": window}, MapRequest)
    check_map(made)
    return made


def made_task(task: JudgeTask) -> JudgeTask:
    """A checked task for the judge."""
    if not isinstance(task, JudgeTask):
        raise InvalidRequest(f"must be a JudgeTask, not {type(task).__name__}", field="task")
    fields = fields_of(task)
    if not isinstance(task.tests, (list, tuple)):
        raise InvalidRequest(f"must be a list of Test, not {type(task.tests).__name__}", field="tests")
    tests = []
    for number, one in enumerate(task.tests):
        if not isinstance(one, Test):
            raise InvalidRequest(f"must be a Test, not {type(one).__name__}", field=f"tests[{number}]")
        tests.append(Test(**_fields(fields_of(one), f"tests[{number}].")))  # type: ignore[arg-type]  # verified with the whole
    made = checked(JudgeTask, {**fields, "tests": tests})
    check_task(made)
    return made


# --- sending ----------------------------------------------------------------------------------------------------------


async def call(link: Link, body: FnCall) -> FnResult:
    return FnResult(await link.call(routes.FN, fn.FnResult, body=body, repeatable=True))


class Pools:
    """Members kept warm for function calls."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def list(self) -> Sequence[PoolInfo]:
        """All pools, also those that the edge made by itself."""
        return (await self._link.call(routes.POOLS, PoolList)).pools

    async def set(self, spec: PoolSpec | str, /, *, action_id: str | None = None, **options: Unpack[PoolOptions]) -> PoolInfo:
        """Make the pool `spec` (or of that name, with `options`), or change it to this. Members that no longer fit it are replaced.

        It comes back while it fills: calls need not wait for that.
        """
        if not isinstance(spec, (PoolSpec, str)):
            raise InvalidRequest(f"must be a PoolSpec or a name, not {type(spec).__name__}", field="pool")
        fields = {"name": spec} if isinstance(spec, str) else fields_of(spec)
        body = checked(PoolSpec, {**fields, **options})
        check_pool(body)
        return await self._link.call(routes.POOL_SET, PoolInfo, body=body, query={"action_id": action_id})

    async def resize(self, name: str, *, size: int | None = None, max: int | None = None, action_id: str | None = None) -> PoolInfo:
        """Change how many members are kept ready, and how many there may be; busy ones end their call first."""
        body = checked(PoolResize, {"size": size, "max": max, "action_id": _core.check_action(action_id) or _core.new_action_id()})
        return await self._link.call(routes.POOL_RESIZE, PoolInfo, {"name": name}, body=body, repeatable=True)

    async def remove(self, name: str, *, action_id: str | None = None) -> Sequence[PoolInfo]:
        """Drain a pool and forget it; the pools that are left."""
        answer = await self._link.call(routes.POOL_REMOVE, PoolList, {"name": name}, query={"action_id": action_id})
        return answer.pools
