# SPDX-License-Identifier: Apache-2.0
"""One edge from its first read of the journal to its last write: the order in which parts are made, and undone."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

from opendsec.api import ids
from opendsec.edge import config
from opendsec.edge.actions import Actions
from opendsec.edge.asgi import App
from opendsec.edge.assemble import Parts
from opendsec.edge.clock import SystemClock
from opendsec.edge.config import Settings
from opendsec.edge.fn.routes import Functions
from opendsec.edge.images import Catalog
from opendsec.edge.journal import Journal
from opendsec.edge.listen import Listener
from opendsec.edge.loading import heard
from opendsec.edge.log import Log
from opendsec.edge.node import Node
from opendsec.edge.reconcile import reconcile
from opendsec.edge.server import Routes
from opendsec.edge.uids import UidRanges, parse_subids
from opendsec.observe.events import EventSink

Assemble: TypeAlias = Callable[[Settings, str, Log], Awaitable[Parts]]


class Serving(NamedTuple):
    """An edge that answers."""

    node: Node
    tcp_port: int | None
    functions: Functions


async def serve(settings: Settings, log: Log, assembling: Assemble, *, stop: asyncio.Event, ready: Callable[[Serving], None]) -> None:
    """Run one edge until `stop` is set, which the shutdown route does too. The locks are held by the caller."""
    token = config.read_token(settings.token_file) if settings.token_file is not None else None
    async with contextlib.AsyncExitStack() as stack:
        journal = Journal(settings.journal)
        stack.callback(journal.close)
        edge_id = _identity(journal, settings.state_dir / "edge.id")
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
        stack.push_async_callback(parts.close)
        node = Node(
            edge_id=edge_id,
            journal=journal,
            actions=Actions(journal, results, clock.time, log),
            backends=parts.backends,
            images=Catalog(parts.images, stores=parts.stores, loading=parts.loading, emit=events.emit),
            policy=parts.policy(settings),
            uids=UidRanges(settings.uid_base, settings.uid_ranges, excluded=_foreign_uids()),
            events=events,
            clock=clock,
            log=log,
            retention=settings.retention(),
            scratch_driver=parts.scratch_driver,
        )
        stack.push_async_callback(node.close)
        for backend in parts.backends.values():
            await backend.start()
        parts.started()
        functions = Functions(node, parts.fn, settings.state_dir)
        stack.push_async_callback(functions.close)
        await reconcile(node, parts.boot_id)
        await functions.start()
        if parts.loading is not None:
            watched = node
            parts.loading.on_event.to(lambda event: heard(watched, event))
            await parts.loading.forget_lost()
        node.on_shutdown = stop.set
        served = Routes(node, parts.features, functions)
        stack.push_async_callback(served.close)
        node.ready()
        unix = Listener(App(served.router, log, local=True, turns=node.actions.turns))
        stack.push_async_callback(unix.close)
        port = None
        if settings.tcp is not None:
            assert token is not None  # config refuses tcp without a token file
            tcp = Listener(App(served.router, log, local=False, token=token, turns=node.actions.turns))
            stack.push_async_callback(tcp.close)
            port = await tcp.open_tcp(*settings.tcp)
            log.info("edge.listening", host=settings.tcp[0], port=port)
        await unix.open_unix(settings.socket)
        log.info("edge.ready", edge_id=edge_id, socket=str(settings.socket), pid=os.getpid(), sandboxes=node.info().sandboxes)
        ready(Serving(node, port, functions))
        await stop.wait()
        log.info("edge.stopping", edge_id=edge_id)


def _identity(journal: Journal, beside: Path) -> str:
    """The edge's id, which the journal holds. A file `beside` it does too, so that a journal that is gone or empty is told from a first
    start: what it knew may still run, under uids that would be given out again. Raises ValueError then."""
    known = beside.read_text().strip() if beside.exists() else ""
    edge_id = journal.meta("edge_id")
    if edge_id is None:
        if known:
            raise ValueError(
                f"{journal.path} is gone or empty, but this is the state of {known}, whose sandboxes may still run: put the journal back, "
                f"or restart the machine and remove {beside}"
            )
        edge_id = ids.new_id(ids.EDGE)
        journal.set_meta("edge_id", edge_id)
    if edge_id != known:
        beside.write_text(f"{edge_id}\n")
    return edge_id


def _foreign_uids() -> list[tuple[int, int]]:
    spans = []
    for path in ("/etc/subuid", "/etc/subgid"):
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            spans += parse_subids(file.read())
    return spans
