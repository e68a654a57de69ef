# SPDX-License-Identifier: Apache-2.0
"""The edge's hold on the loader of layers: started when first needed, adopted after a restart, let go at the end.

The loader is a family of processes of its own (`images.lazy`): it survives the edge as sandboxes do. What it has to tell becomes events.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from opendsec.api.errors import OpenDSecError
from opendsec.api.sandboxes import Feature
from opendsec.edge import lifecycle
from opendsec.edge.log import Log
from opendsec.images.lazy import client
from opendsec.images.lazy.client import Loader
from opendsec.images.lazy.protocol import Event, LayerStats
from opendsec.images.store import ImageStore

if TYPE_CHECKING:
    from opendsec.edge.box import Box
    from opendsec.edge.node import Node

# What the loader says → kinds of our events.
KINDS = {
    "load.failed": "layer.fetch_failed",
    "load.damaged": "layer.damaged",
    "load.lost": "layer.lost",
    "cache.full": "cache.full",
    "loader.restarted": "loader.restarted",
    "trace.damaged": "trace.damaged",
}


class Emit:
    """Where events go; until the node is made, into a list."""

    def __init__(self) -> None:
        self._waiting: list[Event] = []
        self._to: Callable[[Event], None] = self._waiting.append

    def __call__(self, event: Event) -> None:
        self._to(event)

    def to(self, receiver: Callable[[Event], None]) -> None:
        self._to = receiver
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            receiver(event)


class Loading:
    """`settings.mechanism` is what is used here, `why` says why. Use from the event loop."""

    def __init__(self, settings: client.Settings, why: str, log: Log) -> None:
        self.settings, self.why = settings, why
        self.on_event = Emit()
        self._log = log
        self._loader: Loader | None = None
        self._starting = asyncio.Lock()

    @property
    def mechanism(self) -> str:
        return self._loader.settings.mechanism if self._loader is not None else self.settings.mechanism

    async def start_if_needed(self, store: ImageStore) -> None:
        """At the edge's start: layers that are not here, or a loader that lives, need us now. Raises Unavailable."""
        if (self.settings.run_dir / client.SOCKET).exists() or await asyncio.to_thread(_any_elsewhere, store):
            await self.loader()

    async def loader(self) -> Loader:
        """The loader, started if there is none. Raises Unavailable."""
        async with self._starting:
            if self._loader is None:
                self._loader = await Loader.start(self.settings, self._heard)
                self._log.info("loader.ready", mechanism=self._loader.settings.mechanism, reason=self.why)
                for digest in self._loader.lost:
                    self.on_event(Event(event="load.lost", digest=digest, message="nobody watched its readers for a while"))
            return self._loader

    async def forget_lost(self) -> None:
        """Whoever used a lost layer has been ended, in the journal at least."""
        if self._loader is not None and self._loader.lost:
            await self._loader.forget_lost()

    def _heard(self, event: Event) -> None:
        self._log.warning(event.event, digest=event.digest, reason=event.message)
        self.on_event(event)

    async def layers(self) -> dict[str, LayerStats]:
        """What the loader knows of layers, by digest; nothing if there is no loader."""
        if self._loader is None:
            return {}
        return {layer.digest: layer for layer in (await self._loader.stats()).layers}

    async def close(self, *, unneeded: bool) -> None:
        """Let go; the loader lives on for the sandboxes that are left, and ends now if there are none (`unneeded`)."""
        if self._loader is None:
            return
        loader, self._loader = self._loader, None
        if unneeded:
            with contextlib.suppress(OpenDSecError):  # what still needs it, for a moment, may have it: it ends by itself soon
                await loader.shutdown()
        await loader.close()


def heard(node: Node, event: Event) -> None:
    """An event of the loader as one of the edge. What can no longer be trusted ends the sandboxes that use it."""
    node.events.emit(KINDS.get(event.event, event.event), digest=event.digest, message=event.message)
    if event.event != "load.lost":
        return
    why = f"the content of layer {event.digest[:19]} can no longer be trusted: {event.message}"
    with node.transaction():
        for box in list(node.boxes.values()):
            if box.state.phase in ("running", "paused") and any(layer.startswith(event.digest) for layer in box.template.layers):
                if box.turn is not None:  # what becomes of that does not matter
                    box.turn.add_done_callback(partial(_lost, node, box, why))
                else:
                    node.apply(box, lifecycle.Died(node.clock.time(), why))


def _lost(node: Node, box: Box, why: str, turn: object) -> None:
    node.apply(box, lifecycle.Died(node.clock.time(), why))


def _any_elsewhere(store: ImageStore) -> bool:
    for layer in store.list().layers:
        with contextlib.suppress(OpenDSecError):
            if store.origin(layer.digest) is not None:
                return True
    return False


def feature(mechanism: str, why: str) -> Feature:
    """How images are loaded on this machine, for `dsec doctor`."""
    return Feature(
        name="image_loading",
        present=mechanism != "eager",
        reason=why,
        needed_for=f"starting images before they are downloaded: by {mechanism} ({why})"
        if mechanism != "eager"
        else "starting images before they are downloaded",
        without_it="images are downloaded whole before their first use",
    )
