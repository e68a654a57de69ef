# SPDX-License-Identifier: Apache-2.0
"""What the edge and the loader say to each other: JSON, a line each, over a unix socket (mode 0600, in the edge's run directory).

    loader → edge   Hello, first; with it the group's descriptor, if there is one
    edge → loader   Call: {"id": 1, "op": "ensure", …}
    loader → edge   Reply: {"id": 1, …}, in any order; Event: {"event": …} at any time to those who called `attach`

Both sides may be of different versions for as long as sandboxes live, so names are only added.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from opendsec.api.errors import ErrorBody

VERSION = 1
MAX_LINE = 1 << 20

Mechanism = Literal["fanotify", "fuse", "eager"]
Op = Literal["attach", "ensure", "warm", "trace_start", "trace_stop", "stats", "evict", "forget_lost", "shutdown"]


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    mechanism: Mechanism
    pid: int
    lost: tuple[str, ...] = ()  # digests whose mounts may have read wrong bytes: all of the last family were killed


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: int
    op: Op
    digest: str = ""
    trace: str = ""  # of trace_start and trace_stop: a name; of warm: "yes" = what the trace says only
    keep: bool = False  # of trace_stop: keep it with the layer
    force: bool = False
    limit_bytes: int = -1  # of attach: what this edge's settings say of the cache's size


class LayerStats(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    data_bytes: int
    local_bytes: int
    complete: bool
    in_use: bool
    chunks: int
    chunk_bytes: int


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    layers: tuple[LayerStats, ...]
    local_bytes: int
    limit_bytes: int  # 0 = none
    fetched_bytes: int  # by this loader
    copied_bytes: int  # from other layers here
    requests: int
    events: int  # readers that asked
    misses: int  # of these, had to wait


class TraceEntries(msgspec.Struct, frozen=True, kw_only=True):
    chunks: tuple[int, ...]
    bytes: int


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: int
    error: ErrorBody | None = None
    path: str = ""  # what to mount as the layer's data
    lasting: bool = False  # the path stays valid whatever becomes of the loader
    stats: Stats | None = None
    entries: TraceEntries | None = None
    freed_bytes: int = 0


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """load.failed     readers of the layer got EIO; the message says why
    load.damaged    a store gave a chunk that does not match its checksum
    cache.full      no disk space; something was dropped, or readers got EIO
    trace.damaged   a layer's trace cannot be read and was not replayed
    load.lost       told by `client` when the whole family was replaced while it was connected; see `Hello.lost`
    loader.restarted, loader.unreachable      told by `client`
    """

    event: str
    digest: str = ""
    message: str = ""


Line = Hello | Call | Reply | Event


def encode(line: Line) -> bytes:
    return msgspec.json.encode(line) + b"\n"
