# SPDX-License-Identifier: Apache-2.0
"""`python -m opendsec.edge`: settings, locks, parts, then requests until SIGTERM. Sandboxes outlive it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence

import uvloop

from opendsec.api import ids
from opendsec.edge import config
from opendsec.edge.actions import Actions
from opendsec.edge.asgi import App
from opendsec.edge.assemble import Parts, assemble
from opendsec.edge.clock import SystemClock
from opendsec.edge.config import BadSettings, Settings
from opendsec.edge.images import Catalog
from opendsec.edge.journal import Journal, NewerFormat
from opendsec.edge.listen import AlreadyRunning, Listener, locked
from opendsec.edge.log import Log, open_log
from opendsec.edge.node import Node
from opendsec.edge.reconcile import reconcile
from opendsec.edge.server import Routes
from opendsec.edge.uids import UidRanges, parse_subids
from opendsec.observe.events import EventSink

Assemble = Callable[[Settings, str, Log], Awaitable[Parts]]


async def serve(settings: Settings, log: Log, assembling: Assemble = assemble, ready: Callable[[], None] = lambda: None) -> None:
    """Run one edge until it is told to stop (SIGTERM, SIGINT, the shutdown route). The locks are held by the caller."""
    token = config.read_token(settings.token_file) if settings.token_file is not None else None
    async with contextlib.AsyncExitStack() as stack:
        journal = Journal(settings.journal)
        stack.callback(journal.close)
        edge_id = journal.meta("edge_id")
        if edge_id is None:
            edge_id = ids.new_id(ids.EDGE)
            journal.set_meta("edge_id", edge_id)
        clock = SystemClock()
        node: Node | None = None
        events = EventSink(
            clock=clock.time,
            store=journal.add_events,
            schedule=lambda: node.flush_soon() if node is not None else None,
            last_seq=journal.last_event(),
        )
        results = settings.state_dir / "results"
        results.mkdir(mode=0o700, exist_ok=True)
        parts = await assembling(settings, edge_id, log)
        node = Node(
            edge_id=edge_id,
            journal=journal,
            actions=Actions(journal, results, clock.time, log),
            backends=parts.backends,
            images=Catalog(parts.images),
            policy=parts.policy(settings),
            uids=UidRanges(settings.uid_base, settings.uid_ranges, excluded=_foreign_uids()),
            events=events,
            clock=clock,
            log=log,
            retention=settings.retention(),
            scratch_driver=parts.scratch_driver,
        )
        stack.push_async_callback(parts.close)
        stack.push_async_callback(node.close)
        for backend in parts.backends.values():
            await backend.start()
        await reconcile(node, parts.boot_id)
        stopped = asyncio.Event()
        node.on_shutdown = stopped.set
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        served = Routes(node, parts.features)
        stack.push_async_callback(served.close)
        node.ready()
        unix = Listener(App(served.router, log, local=True))
        stack.push_async_callback(unix.close)
        if settings.tcp is not None:
            assert token is not None  # config refuses tcp without a token file
            tcp = Listener(App(served.router, log, local=False, token=token))
            stack.push_async_callback(tcp.close)
            port = await tcp.open_tcp(*settings.tcp)
            log.info("edge.listening", host=settings.tcp[0], port=port)
        await unix.open_unix(settings.socket)
        log.info("edge.ready", edge_id=edge_id, socket=str(settings.socket), pid=os.getpid(), sandboxes=node.info().sandboxes)
        ready()
        await stopped.wait()
        log.info("edge.stopping", edge_id=edge_id)


def _foreign_uids() -> list[tuple[int, int]]:
    spans = []
    for path in ("/etc/subuid", "/etc/subgid"):
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            spans += parse_subids(file.read())
    return spans


def _tell_ready(fd: int | None) -> None:
    if fd is not None:
        with contextlib.suppress(OSError):
            os.write(fd, b"ready\n")
            os.close(fd)


def main(arguments: Sequence[str] | None = None, assembling: Assemble = assemble) -> int:
    """The command `dsec-edge`. 0: stopped as told; 1: cannot run; 2: a setting is wrong."""
    try:
        settings = config.load(sys.argv[1:] if arguments is None else arguments, os.environ)
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
            runner.run(serve(settings, log, assembling, lambda: _tell_ready(settings.ready_fd)))
    except (AlreadyRunning, NewerFormat, BadSettings, ValueError) as error:
        print(f"dsec-edge: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
