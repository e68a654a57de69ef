# SPDX-License-Identifier: Apache-2.0
"""SandboxFusion's `POST /run_code`: its request and its answer, so that trainers which use it can switch by changing an address.

As there: any program that ran is an answer with status 200; `status` is `Success` if all went well, `Failed` if a process ended
with another exit code than 0 or for its time, `SandboxError` if the sandbox is to blame; `files` are base64 both ways. A request that
does not fit is refused with status 422 there, with 400 and our error body here. Names of languages are theirs (`nodejs` is our
`javascript`).
"""

from __future__ import annotations

import base64
import binascii

import msgspec

from opendsec.api.errors import CallerError, InvalidRequest, OpenDSecError
from opendsec.api.fn import COMPILE_LIMITS, FnCall, FnLimits, FnResult
from opendsec.api.fn_check import TIME_S
from opendsec.api.spec import MIB, check_number

NAMES = {"nodejs": "javascript", "js": "javascript", "c++": "cpp", "golang": "go", "sh": "bash", "python3": "python"}
KILLED = -9  # what it says of a process that it ended


class RunCodeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Unknown fields are passed over, as there."""

    code: str
    language: str
    compile_timeout: float = 10.0
    run_timeout: float = 10.0
    memory_limit_MB: float = -1
    stdin: str | None = None
    files: dict[str, str | None] = {}
    fetch_files: list[str] = []


class CommandRunResult(msgspec.Struct, frozen=True, kw_only=True):
    status: str  # Finished, Error, TimeLimitExceeded
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeResponse(msgspec.Struct, frozen=True, kw_only=True):
    status: str  # Success, Failed, SandboxError
    message: str = ""
    compile_result: CommandRunResult | None = None
    run_result: CommandRunResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}


def parse(request: RunCodeRequest) -> tuple[FnCall, FnLimits]:
    """The call, and the limits of its compilation. Raises InvalidRequest."""
    check_number(request.run_timeout, "run_timeout", TIME_S)
    check_number(request.compile_timeout, "compile_timeout", TIME_S)
    check_number(request.memory_limit_MB, "memory_limit_MB", (-1, 1 << 20))
    memory = "512MiB" if request.memory_limit_MB <= 0 else max(4, int(request.memory_limit_MB)) * MIB
    files: dict[str, bytes] = {}
    for name, text in request.files.items():
        if text is None:
            continue
        try:
            files[name] = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidRequest(f"is not base64: {error}", field=f"files.{name[:80]}") from None
    language = request.language.lower()
    call = FnCall(
        source=request.code,
        language=NAMES.get(language, language),
        stdin=(request.stdin or "").encode("utf-8", "surrogateescape"),
        files=files,
        outputs=tuple(request.fetch_files),
        limits=FnLimits(
            cpu_time_s=request.run_timeout, wall_time_s=request.run_timeout, memory=memory, pids=256, output_bytes=8 * MIB, disk="256MiB"
        ),
    )
    compile_limits = msgspec.structs.replace(
        COMPILE_LIMITS,
        cpu_time_s=min(request.compile_timeout * 4, TIME_S[1]),  # it measures wall time, and compilers use more than one core
        wall_time_s=request.compile_timeout,
    )
    return call, compile_limits


def answer(result: FnResult, pod: str) -> RunCodeResponse:
    """What became of it, in its words."""
    compiled = None if result.compile is None else _command(result.compile)
    ran = None if result.outcome == "compile_error" or (result.compile is not None and result.compile.outcome != "ok") else _command(result)
    status, message = "Success", ""
    parts = [part for part in (compiled, ran) if part is not None]
    if result.outcome in ("platform_error", "cancelled"):
        status, message = "SandboxError", result.message
    elif any(part.status == "TimeLimitExceeded" or part.return_code != 0 for part in parts):
        status = "Failed"
    files = {name: base64.b64encode(data).decode() for name, data in result.files.items()}
    return RunCodeResponse(status=status, message=message, compile_result=compiled, run_result=ran, executor_pod_name=pod, files=files)


def refusal(error: OpenDSecError, pod: str) -> RunCodeResponse:
    """A call that could not be made, though the request was right. Raises what the caller did wrong."""
    if isinstance(error, CallerError) and error.code not in ("quota_exceeded", "unsupported"):
        raise error
    return RunCodeResponse(status="SandboxError", message=str(error), executor_pod_name=pod)


def _command(result: FnResult) -> CommandRunResult:
    if result.outcome == "time_limit" or "wall_time" in result.limits_hit or "cpu_time" in result.limits_hit:
        status, code = "TimeLimitExceeded", None
    elif result.outcome == "platform_error":
        status, code = "Error", None
    else:
        status = "Finished"
        code = result.exit_code if result.exit_code is not None else -(result.signal or -KILLED)
        if code == 0 and result.outcome not in ("ok", "compile_error"):
            code = KILLED
    return CommandRunResult(
        status=status,
        execution_time=result.wall_ms / 1000,
        return_code=code,
        stdout=result.stdout.data.decode("utf-8", "replace"),
        stderr=result.stderr.data.decode("utf-8", "replace"),
    )
