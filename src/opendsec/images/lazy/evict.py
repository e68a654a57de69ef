# SPDX-License-Identifier: Apache-2.0
"""What is dropped when the cache is larger than it may be: first layers that nobody has mounted, the longest unused first; then chunks of
mounted ones that nobody has asked for in a while, coldest first.

Not dropped are complete layers that are mounted: they have been unmarked, and whoever has them open never asks. Nor what is being read.
So the limit is exceeded by what is in use at once, if that is more; nothing is ever refused for the limit's sake.
"""

from __future__ import annotations

from opendsec.images.lazy.registry import Registry

LOW_WATER = 0.9  # of the limit: down to there, so that it is not done for each chunk
QUIET_S = 30.0


def trim(registry: Registry, limit_bytes: int, *, need_bytes: int = 0, quiet_s: float = QUIET_S) -> int:
    """Blocking, in the registry's thread. How many bytes were freed; 0 at once if there is room for `need_bytes`."""
    if registry.local_bytes() + need_bytes <= limit_bytes:
        return 0
    target = int(limit_bytes * LOW_WATER) - need_bytes
    return drop(registry, registry.local_bytes() - target, quiet_s=quiet_s)


def drop(registry: Registry, wanted_bytes: int, *, quiet_s: float = QUIET_S) -> int:
    """Free so many bytes, if possible."""
    freed = 0
    in_use = []
    for layer in sorted(registry.all(), key=lambda layer: layer.used_at):
        if freed >= wanted_bytes:
            return freed
        if layer.in_use():
            in_use.append(layer)
        else:
            freed += registry.drop_whole(layer)
    for layer in in_use:
        if freed >= wanted_bytes:
            break
        if layer.marked and not layer.was_unmarked:
            cold = layer.droppable(quiet_s)
            count = -(-(wanted_bytes - freed) // layer.table.chunk_bytes)
            freed += layer.drop(cold[:count], quiet_s)
    return freed
