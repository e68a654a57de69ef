# SPDX-License-Identifier: Apache-2.0
"""Which OCI layers become one of ours. Pure.

One each, since layers are what images share. But builders leave layers that hold a file or nothing at all, and each of ours is a
mount in every sandbox. So neighbours that are each small as stored (up to 1 MiB) are made one, up to 4 MiB in all. A small layer
between large ones stays alone, and the lowest layer is always alone: it is what images have in common.
"""

from __future__ import annotations

from collections.abc import Sequence

SMALL_BYTES = 1 << 20
TOGETHER_BYTES = 4 << 20


def groups(sizes: Sequence[int]) -> list[list[int]]:
    """Numbers of layers, lowest first, those of one group together. An image without layers gets one that is empty."""
    if not sizes:
        return [[]]
    found: list[list[int]] = [[0]]
    room = 0
    for number, size in enumerate(sizes[1:], 1):
        if size <= SMALL_BYTES and size <= room:
            found[-1].append(number)
            room -= size
        else:
            found.append([number])
            room = TOGETHER_BYTES - size if size <= SMALL_BYTES else 0
    return found
