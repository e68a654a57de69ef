# SPDX-License-Identifier: Apache-2.0
"""Sizes as people write them (`"512MiB"`) to bytes, and back."""

from __future__ import annotations

import re

from opendsec.api.errors import InvalidRequest

_SIZE = re.compile(r"(\d{1,18})(?:\.(\d{1,6}))?\s*([A-Za-z]*)")
_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def parse_bytes(value: int | str, *, field: str) -> int:
    """Bytes in `value`: an int, or text such as `"1.5GiB"` (powers of 1024) or `"2GB"` (powers of 1000).

    Raises InvalidRequest naming `field`.
    """
    if isinstance(value, int):
        if isinstance(value, bool) or value < 0:
            raise InvalidRequest("must be a size of at least 0 bytes", field=field)
        return value
    match = _SIZE.fullmatch(value.strip())
    unit = _UNITS.get(match[3].lower()) if match else None
    if match is None or unit is None:
        raise InvalidRequest(f"{value[:40]!r} is not a size; write for example 536870912, '512MiB' or '2GB'", field=field)
    fraction = int(match[2]) * unit // 10 ** len(match[2]) if match[2] else 0
    return int(match[1]) * unit + fraction


def format_bytes(count: int) -> str:
    """`count` in the largest binary unit that keeps it at least 1, with at most one decimal."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.1f}{units[0]}" if size % 1 else f"{int(size)}{units[0]}"
