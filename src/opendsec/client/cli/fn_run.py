# SPDX-License-Identifier: Apache-2.0
"""`dsec fn run`: one function call."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opendsec.client.cli import common as c

if TYPE_CHECKING:
    from opendsec.client.aio import Client
    from opendsec.client.fn import CallOptions
    from opendsec.client.results import FnResult


class Reuse(StrEnum):
    fork = "fork"
    never = "never"


def run(
    program: Annotated[str, typer.Argument(metavar="FILE|MODULE:FUNCTION", help="A program's source, or a Python function.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[JSON]...", help="Arguments of the function.")] = None,
    language: Annotated[str | None, typer.Option("--language", "-l", help="Default: by the file's name.")] = None,
    stdin: Annotated[str | None, typer.Option("--stdin", metavar="FILE", help="Its standard input; - for our own.")] = None,
    file: Annotated[list[str] | None, typer.Option("--file", "-f", metavar="NAME=PATH", help="A file for it; repeat for more.")] = None,
    output: Annotated[
        list[str] | None, typer.Option("--output", "-o", metavar="PATTERN", help="Files to bring back; repeat for more.")
    ] = None,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Where they go.")] = Path("."),
    env: c.Env = None,
    cpu_time: Annotated[float, typer.Option("--cpu-time", help="Seconds of CPU.")] = 10.0,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds in all; exit code 124.")] = 20.0,
    memory: Annotated[str, typer.Option("--memory", "-m", help="Such as 256MiB.")] = "256MiB",
    output_bytes: Annotated[int, typer.Option("--output-bytes", help="Of standard output, and again of standard error.")] = 1 << 20,
    pids: c.Pids = 64,
    disk: Annotated[str, typer.Option("--disk", help="Bytes it may write, such as 64MiB.")] = "64MiB",
    pool: Annotated[str, typer.Option("--pool", help="Name of a pool; `dsec fn pools` lists them.")] = "",
    image: Annotated[str, typer.Option("--image", help="Instead of the language's.")] = "",
    reuse: Annotated[Reuse | None, typer.Option("--reuse", help="Whether its member may serve other calls; default: the pool's.")] = None,
    tenant: Annotated[str, typer.Option("--tenant", help="Whose call it is: tenants never share a member.")] = "",
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Run a program or a Python function in a warm pool. The exit code is the program's."""
    import sys

    from opendsec.api.fn import FnLimits

    async def work() -> FnResult:
        options: CallOptions = {
            "env": c.environment(env),
            "outputs": output or [],
            "limits": FnLimits(cpu_time_s=cpu_time, wall_time_s=timeout, memory=memory, output_bytes=output_bytes, pids=pids, disk=disk),
            "pool": pool,
            "image": image,
            "reuse": reuse.value if reuse is not None else None,
            "tenant": tenant,
            "files": {name: _read(path, "file") for name, path in c.pairs(file, "file").items()},
        }
        if stdin is not None:
            options["stdin"] = sys.stdin.buffer.read() if stdin == "-" else _read(stdin, "stdin")
        async with c.connect(address) as client:
            await _program(client, options, program, arguments or [], language)
            return await client.call(**options)

    result = c.execute(work(), json=json)
    saved = _save(result, to)
    if json:
        c.print_json({**fn_fields(result), "files": saved})
    else:
        _show(result, function=result.outcome == "ok" and ":" in program)
    raise typer.Exit(result.shell_code())


async def _program(client: Client, options: CallOptions, program: str, arguments: list[str], language: str | None) -> None:
    from opendsec.api.fn_check import FUNCTION

    path = Path(program)
    if FUNCTION.fullmatch(program) and not path.exists():
        import json

        try:
            options["args"] = [json.loads(word) for word in arguments]
        except ValueError as error:
            c.refuse(f"must be JSON, such as 5, '\"text\"' or '[1, 2]': {error}", "arguments")
        options["function"] = program
        return
    if arguments:
        c.refuse("a program's file takes its input by --stdin and --file; only a function takes arguments", "arguments")
    try:
        options["source"] = _read(program, "program").decode()
    except UnicodeDecodeError:
        c.refuse(f"is not text: {program}", "program")
    if language is None:
        known = {Path(one.file).suffix: one.name for one in await client.languages()}
        language = known.get(path.suffix)
        if language is None:
            c.refuse(f"cannot be told from the name {path.name!r}; give one of {', '.join(sorted(known.values()))}", "language")
    options["language"] = language


def _read(path: str, field: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        c.refuse(f"cannot read {path}: {error.strerror}", field)


def _save(result: FnResult, to: Path) -> dict[str, str]:
    """Write what came back. The names are the program's: they are checked again before they become paths."""
    from opendsec.api.errors import OpenDSecError
    from opendsec.api.fn_check import check_relative

    saved = {}
    for name, data in result.files.items():
        try:
            path = to / check_relative(name, "output")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except (OSError, OpenDSecError) as error:
            c.fail(error)
        saved[name] = str(path)
    return saved


def _show(result: FnResult, *, function: bool) -> None:
    import json
    import sys

    for stream, data in ((sys.stdout, result.stdout_bytes), (sys.stderr, result.stderr_bytes)):
        stream.flush()
        stream.buffer.write(data)
        stream.flush()
    if function:
        print(json.dumps(result.value, ensure_ascii=False))
    if result.compile is not None and result.outcome == "compile_error":
        print(result.compile.stderr or result.compile.stdout, end="", file=sys.stderr)
    if result.outcome not in ("ok", "runtime_error") or (result.outcome == "runtime_error" and result.exit_code is None):
        hit = f" (limits hit: {', '.join(result.limits_hit)})" if result.limits_hit else ""
        print(f"dsec: the call {result.describe()}{hit}", file=sys.stderr)


def fn_fields(result: FnResult) -> dict[str, object]:
    """A result as JSON shows it."""
    return {
        "outcome": result.outcome,
        "exit_code": result.exit_code,
        "signal": result.signal,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "value": result.value,
        "truncated": result.truncated,
        "cpu_ms": result.cpu_ms,
        "wall_ms": result.wall_ms,
        "peak_memory_bytes": result.peak_memory_bytes,
        "limits_hit": result.limits_hit,
        "message": result.message,
        "cold": result.cold,
        "compile": fn_fields(result.compile) if result.compile is not None else None,
    }
