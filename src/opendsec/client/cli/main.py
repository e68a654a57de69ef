# SPDX-License-Identifier: Apache-2.0
"""The way in. Start-up time is an interface: a command's module is loaded only if the command is the one asked for."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

# Command, module, function; a dot in the command makes a group.
COMMANDS = (
    ("doctor", "doctor", "doctor"),
    ("up", "up", "up"),
    ("down", "down", "down"),
    ("run", "run", "run"),
    ("create", "create", "create"),
    ("exec", "exec", "exec_"),
    ("shell", "shell", "shell"),
    ("cp", "cp", "cp"),
    ("ls", "ls", "ls"),
    ("logs", "logs", "logs"),
    ("kill", "kill", "kill"),
    ("pause", "pause", "pause"),
    ("resume", "pause", "resume"),
    ("fork", "fork", "fork"),
    ("snapshot.create", "snapshot", "create"),
    ("snapshot.ls", "snapshot", "ls"),
    ("snapshot.rm", "snapshot", "rm"),
    ("screenshot", "screenshot", "screenshot"),
    ("vnc", "vnc", "vnc"),
    ("pack", "pack", "pack"),
    ("image.build", "image_build", "build"),
    ("image.build-disk", "image_disk", "build_disk"),
    ("image.import-disk", "image_disk", "import_disk"),
    ("image.pull", "image_pull", "pull"),
    ("image.push", "image_push", "push"),
    ("image.ls", "image_ls", "ls"),
    ("image.inspect", "image_inspect", "inspect"),
    ("image.diff", "image_diff", "diff"),
    ("image.lint", "image_lint", "lint"),
    ("image.verify", "image_verify", "verify"),
    ("image.warm", "image_warm", "warm"),
    ("image.trace", "image_trace", "trace"),
    ("image.compose", "image_compose", "compose"),
    ("image.rm", "image_rm", "rm"),
    ("image.gc", "image_gc", "gc"),
    ("image.stores", "image_stores", "stores"),
    ("fn.run", "fn_run", "run"),
    ("fn.pools", "fn_pools", "pools"),
    ("fn.pool.set", "fn_pools", "set_"),
    ("fn.pool.resize", "fn_pools", "resize"),
    ("fn.pool.rm", "fn_pools", "rm"),
    ("fn.languages", "fn_pools", "languages"),
    ("judge", "judge", "judge"),
    ("rollout", "rollout", "rollout"),
    ("bench", "bench", "bench"),
)
GROUPS = {
    "image": "Images and layers: what sandboxes are made of.",
    "snapshot": "Snapshots: what machines were at one moment, to make others of.",
    "fn": "Function calls: programs that run in warm pools and leave nothing behind.",
    "fn.pool": "Pools of members that are kept warm.",
}
PASS_THROUGH = {"run", "exec", "shell", "up", "bench", "image.trace"}  # what follows their first argument belongs to another program
FAILED, INTERRUPTED = 125, 130

HELP = """Throw-away computers for AI agents.

Talks to the edge of this machine, which is started if none runs, or to `--address`.

Exit codes: the command's own; 128 + signal; 124 out of time; 126, 127 could not start; 125 dsec itself failed; 2 wrong usage.
"""


def main() -> None:
    """The console script `dsec`."""
    arguments = sys.argv[1:]
    wanted = arguments[0] if arguments else ""
    if wanted in ("--version", "-V"):
        from opendsec import __version__

        print(f"dsec {__version__}")
        return
    if wanted in ("-h",):
        arguments = ["--help"]
    chosen = [one for one in COMMANDS if one[0].split(".")[0] == wanted] or list(COMMANDS)
    if wanted in GROUPS and len(arguments) > 1:
        under = f"{wanted}.{arguments[1]}"
        chosen = [one for one in chosen if one[0] == under or one[0].startswith(f"{under}.")] or chosen
    _open_standard_streams()
    try:
        try:
            _app(chosen)(arguments, prog_name="dsec")
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:  # before a command had begun; later it is theirs
        sys.exit(INTERRUPTED)
    except OSError as error:  # such as of a full disk, to which the output should go
        with suppress(OSError):
            print(f"dsec: {error}", file=sys.stderr, flush=True)
        sys.stdout = None  # not to be tried again at exit
        sys.exit(FAILED)


def _open_standard_streams() -> None:
    """A standard descriptor that is closed would become the next socket's, and output would be written into that."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False, encoding="utf-8")
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False, encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False, encoding="utf-8")


def _app(commands: list[tuple[str, str, str]] | tuple[tuple[str, str, str], ...] = COMMANDS) -> typer.Typer:
    import typer

    from opendsec.client.cli.words import RunsACommand

    options = {"no_args_is_help": True, "add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}
    app = typer.Typer(help=HELP, **options)  # type: ignore[arg-type]
    groups: dict[str, typer.Typer] = {"": app}
    app.callback()(_no_options)

    def group(name: str) -> typer.Typer:
        if name not in groups:
            groups[name] = typer.Typer(help=GROUPS[name], **options)  # type: ignore[arg-type]
            groups[name].callback()(_no_options)
            above, _, own = name.rpartition(".")
            group(above).add_typer(groups[name], name=own)
        return groups[name]

    for name, module, function in commands:
        above, _, leaf = name.rpartition(".")
        target = group(above)
        settings: dict[str, object] = {"help_option_names": ["--help", "-h"]}
        if name in PASS_THROUGH:
            settings["allow_interspersed_args"] = False
        if name in ("up", "bench"):
            settings["ignore_unknown_options"] = True
        target.command(leaf, cls=RunsACommand if name in ("run", "exec", "shell") else None, context_settings=settings)(
            getattr(import_module(f"opendsec.client.cli.{module}"), function)
        )
    return app


def _no_options() -> None:
    """Typer turns an app with one command into that command; a callback keeps it a group."""


if __name__ == "__main__":
    main()
