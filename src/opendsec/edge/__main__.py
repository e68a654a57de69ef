# SPDX-License-Identifier: Apache-2.0
"""`python -m opendsec.edge`: settings, locks, parts, then requests until SIGTERM. Sandboxes outlive it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sys
from collections.abc import Sequence

import uvloop

from opendsec.api import wire
from opendsec.api.errors import OpenDSecError
from opendsec.edge import config
from opendsec.edge.assemble import assemble, doctor
from opendsec.edge.config import BadSettings, Settings
from opendsec.edge.journal import NewerFormat
from opendsec.edge.listen import AlreadyRunning, locked
from opendsec.edge.log import Log, open_log
from opendsec.edge.serve import Assemble, serve


async def _serve_until_signalled(settings: Settings, log: Log, assembling: Assemble) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(settings, log, assembling, stop=stop, ready=lambda serving: _tell_ready(settings.ready_fd))


def _tell_ready(fd: int | None) -> None:
    if fd is not None:
        with contextlib.suppress(OSError):
            os.write(fd, b"ready\n")
            os.close(fd)


def main(arguments: Sequence[str] | None = None, assembling: Assemble = assemble) -> int:
    """The command `dsec-edge`. 0: stopped as told; 1: cannot run; 2: a setting is wrong.

    With `--doctor` alone it prints, as JSON, what this machine can do, and starts nothing.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) == ["--doctor"]:
        print(wire.encode(doctor()).decode())
        return 0
    try:
        settings = config.load(arguments, os.environ)
        for directory in (settings.state_dir, settings.run_dir):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700 if directory == settings.state_dir else 0o755)
        log = open_log(level=settings.log_level, path=settings.log_file)
    except BadSettings as error:
        print(f"dsec-edge: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"dsec-edge: {error}", file=sys.stderr)
        return 1
    # Each sandbox and each running command is some descriptors of ours.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with locked(settings.state_dir), locked(settings.run_dir), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve_until_signalled(settings, log, assembling))
    except (AlreadyRunning, NewerFormat, BadSettings, ValueError, OpenDSecError, OSError) as error:
        print(f"dsec-edge: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
