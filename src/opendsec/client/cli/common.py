# SPDX-License-Identifier: Apache-2.0
"""What the commands share: options, connecting, output, errors."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer

if TYPE_CHECKING:
    import msgspec

    from opendsec.api.errors import OpenDSecError
    from opendsec.api.images import Finding
    from opendsec.api.spec import AnySpec
    from opendsec.client._core import CommandOptions
    from opendsec.client.aio import Client, Sandbox
    from opendsec.client.results import Result

T = TypeVar("T")

FAILED = 125  # dsec itself failed
INTERRUPTED = 130
ABANDONED_S = 60.0  # after so long without use goes a sandbox that a command of ours made for itself, should that be killed

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Address = Annotated[
    str | None,
    typer.Option("--address", envvar="OPENDSEC_ADDRESS", metavar="URL", help="unix:/path, http://… or https://…; default: this machine."),
]
Image = Annotated[str, typer.Argument(help="Name of an image; `dsec image ls` lists them.")]
Token = Annotated[
    str,
    typer.Option("--token", envvar="OPENDSEC_REGISTRY_TOKEN", show_default=False, help="USER:PASSWORD or a bearer token of the registry."),
]
SandboxId = Annotated[str, typer.Argument(metavar="SANDBOX", help="Id of a sandbox; `dsec ls` lists them.")]

# Options of a sandbox
Cpu = Annotated[float, typer.Option("--cpu", help="Cores.")]
Memory = Annotated[str, typer.Option("--memory", "-m", help="Such as 512MiB.")]
Disk = Annotated[str, typer.Option("--disk", help="Writable bytes, such as 1GiB.")]
Pids = Annotated[int, typer.Option("--pids", help="Processes at once.")]
Layers = Annotated[list[str] | None, typer.Option("--layer", "-l", help="workspace:NAME@VERSION or toolkit:NAME@VERSION; repeat for more.")]
Labels = Annotated[list[str] | None, typer.Option("--label", help="KEY=VALUE; repeat for more.")]
Policy = Annotated[str, typer.Option("--policy", help="Name of a policy; there is only `default` so far.")]
Hostname = Annotated[str, typer.Option("--hostname", help="Name of the machine inside.")]
Ttl = Annotated[float | None, typer.Option("--ttl", help="Seconds to live.")]


class BackendName(StrEnum):
    container = "container"
    microvm = "microvm"
    vm = "vm"


Backend = Annotated[BackendName, typer.Option("--backend", "-b", help="What runs it: namespaces, a small machine, or a whole one.")]
Snapshot = Annotated[str, typer.Option("--snapshot", help="Name of a snapshot to begin as; its image and sizes must be those given.")]
Hardware = Annotated[bool, typer.Option("--hardware", help="Of a machine: refuse to emulate the processor.")]
TtlIdle = Annotated[float | None, typer.Option("--ttl-idle", help="Seconds to live without use.")]

# Options of a command
Env = Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE, or NAME to pass on your own; repeat for more.")]
User = Annotated[str | None, typer.Option("--user", "-u", help="Name or number, optionally :group.")]
Cwd = Annotated[str | None, typer.Option("--workdir", "-w", help="Directory inside.")]
Timeout = Annotated[float | None, typer.Option("--timeout", help="Seconds, then the whole process tree is killed; exit code 124.")]
Interactive = Annotated[bool, typer.Option("--interactive", "-i", help="Pass on standard input.")]
Tty = Annotated[bool, typer.Option("--tty", "-t", help="Give it a terminal.")]


def connect(address: str | None) -> Client:
    from opendsec.client.aio import Client

    return Client(address)


def execute(work: Coroutine[None, None, T], *, json: bool = False) -> T:
    """The result of `work`; its errors become a message and an exit code."""
    from opendsec.api.errors import OpenDSecError

    try:
        return asyncio.run(work)
    except OpenDSecError as error:
        fail(error, json=json)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # whoever read our output went away
        sys.stdout = None
        raise typer.Exit(141) from None


def fail(error: Exception, *, json: bool = False) -> NoReturn:
    """Say what went wrong and end with 125."""
    from opendsec.api import wire
    from opendsec.api.errors import OpenDSecError

    if json and isinstance(error, OpenDSecError):
        print(wire.encode_error(error).decode())
    else:
        print(f"dsec: {error}", file=sys.stderr)
    raise typer.Exit(FAILED)


def refuse(message: str, field: str) -> NoReturn:
    from opendsec.api.errors import InvalidRequest

    raise InvalidRequest(message, field=field)


def print_json(value: object) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def show(value: msgspec.Struct, json: bool, human: Callable[[], None]) -> None:
    if json:
        print_json(value)
    else:
        human()


def show_slots(slots: Sequence[Sandbox | OpenDSecError], json: bool) -> int:
    """The ids of sandboxes that were made, one a line, and on standard error why others were not. The exit code."""
    from opendsec.api.errors import OpenDSecError

    failed = [slot for slot in slots if isinstance(slot, OpenDSecError)]
    if json:
        print_json([{"error": slot.body()} if isinstance(slot, OpenDSecError) else {"sandbox": slot.info} for slot in slots])
        return FAILED if failed else 0
    for slot in slots:
        if not isinstance(slot, OpenDSecError):
            print(slot.id)
    for text in sorted({str(error) for error in failed}):
        print(f"dsec: {sum(str(error) == text for error in failed)} of {len(slots)} failed: {text}", file=sys.stderr)
    return FAILED if failed else 0


def tell_failed(failed: Mapping[str, BaseException], *, quiet: bool) -> int:
    """Say of each sandbox why it failed. What is no error of ours is raised. The exit code."""
    from opendsec.api.errors import OpenDSecError

    for sandbox_id, error in failed.items():
        if not isinstance(error, OpenDSecError):
            raise error
        if not quiet:
            print(f"dsec: {sandbox_id}: {error}", file=sys.stderr)
    return FAILED if failed else 0


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as their content; nothing is cut. Plain text, so that it is quick and other programs can read it."""
    lines = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def printable(text: str) -> str:
    """What comes out of an image may be meant for the terminal: control characters as escapes."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def findings(found: Sequence[Finding], report: msgspec.Struct, *, json: bool) -> None:
    """What a linter found, one line each."""
    if json:
        print_json(report)
        return
    for one in found:
        print(f"{one.rule:<24} {printable(one.path)}: {printable(one.message)}")


def local_reference(reference: str) -> str:
    """A reference with a relative path made absolute: the edge has another working directory."""
    import os

    for transport in ("oci:", "docker-archive:"):
        if reference.startswith(transport):
            path, colon, rest = reference.removeprefix(transport).partition(":")
            return f"{transport}{os.path.abspath(path)}{colon}{rest}" if path else reference
    return reference


def rich_table(title: str, headers: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> None:
    """A table with a title: drawn on a terminal, plain columns elsewhere. `numbers`: all columns but the first hold numbers."""
    if not sys.stdout.isatty():
        print(f"\n{title}")
        table(headers, rows)
        return
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(title=escape(title), box=box.SIMPLE_HEAD, title_justify="left")
    for index, heading in enumerate(headers):
        drawn.add_column(heading, justify="right" if index and numbers else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(escape(cell) for cell in row))
    Console().print(drawn)


def raise_descriptor_limit() -> None:
    """Each request under way is a connection: allow as many as we may."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def ago(at: float) -> str:
    return duration(max(0.0, time.time() - at))


def duration(seconds: float) -> str:
    """Two significant units at most: 45s, 12m, 3h05m, 2d04h."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"


def pairs(words: list[str] | None, field: str) -> dict[str, str]:
    """KEY=VALUE words as a mapping."""
    made = {}
    for word in words or []:
        key, equals, value = word.partition("=")
        if not equals:
            refuse(f"must look like KEY=VALUE; got {word[:80]!r}", field)
        made[key] = value
    return made


def environment(words: list[str] | None) -> dict[str, str]:
    """NAME=VALUE words, and NAME words with the caller's own value."""
    import os

    return pairs([word if "=" in word else f"{word}={os.environ.get(word, '')}" for word in words or []], "env")


def spec(
    image: str,
    *,
    cpu: float,
    memory: str,
    disk: str,
    pids: int,
    layers: list[str] | None,
    labels: list[str] | None,
    policy: str,
    hostname: str,
    ttl: float | None,
    ttl_idle: float | None,
    env: list[str] | None = None,
    user: str | None = None,
    backend: BackendName = BackendName.container,
    snapshot: str = "",
    hardware: bool = False,
) -> AnySpec:
    from opendsec.api import wire
    from opendsec.api.spec import VM, Container, MicroVM

    fields: dict[str, object] = {
        "image": image,
        "cpu": cpu,
        "memory": memory,
        "disk": disk,
        "pids": pids,
        "layers": tuple(layers or ()),
        "labels": pairs(labels, "labels"),
        "policy": policy,
        "hostname": hostname,
        "ttl_s": ttl,
        "ttl_idle_s": ttl_idle,
        "env": environment(env),
        "user": user or "",
    }
    if backend is BackendName.container:
        for field, given in (("snapshot", snapshot), ("hardware", hardware)):
            if given:
                refuse("containers have none: choose another --backend", field)
        return wire.convert({**fields, "backend": "container"}, Container)
    machine: type[MicroVM | VM] = MicroVM if backend is BackendName.microvm else VM
    return wire.convert({**fields, "backend": backend.value, "snapshot": snapshot, "hardware_virtualization": hardware}, machine)


async def run_in(box: Sandbox, words: list[str], options: CommandOptions, *, interactive: bool, tty: bool, json: bool) -> int:
    """Run a command for the user; the exit code to end with. One word is shell text, several are a program and its arguments."""
    command = words[0] if len(words) == 1 else words
    if json:
        if interactive:
            options["stdin"] = await asyncio.to_thread(sys.stdin.buffer.read)
        options["pty"] = tty
        result = await box.run(command, **options)
        print_json(result_fields(result))
        return result.shell_code()
    from opendsec.client.cli.terminal import joined

    result, lost = await joined(box, command, options, interactive=interactive, terminal=tty)
    # How much of the output the edge keeps is nothing to whoever got all of it.
    limits = [limit for limit in result.limits_hit if limit != "output" or result.outcome == "output_limit"]
    if result.outcome not in ("exited", "signalled") or limits:
        hit = f" (limits hit: {', '.join(limits)})" if limits else ""
        print(f"dsec: the command {result.describe()}{hit}", file=sys.stderr)
    if lost:
        print(f"dsec: {lost} bytes of its output are missing here: it wrote faster than they were read", file=sys.stderr)
        return result.shell_code() or (0 if tty else FAILED)  # whoever reads a pipe must not take what came for all of it
    return result.shell_code()


def layers_of(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def result_fields(result: Result) -> dict[str, object]:
    """A result as JSON shows it."""
    return {
        "outcome": result.outcome,
        "exit_code": result.exit_code,
        "signal": result.signal,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "truncated": result.truncated,
        "duration_ms": result.duration_ms,
        "cpu_ms": result.cpu_ms,
        "max_rss_bytes": result.max_rss_bytes,
        "limits_hit": result.limits_hit,
        "message": result.message,
        "process_id": result.process_id,
        "action_id": result.action_id,
    }
