# SPDX-License-Identifier: Apache-2.0
"""`origin.json`: where the data of a layer that is not, or not all, here can be had. In the envelope of `records`.

Stores are given by the name that the operator's configuration has for them, never by address: addresses move, and may come with
credentials.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from opendsec.images import records
from opendsec.images.records import Damaged

MAGIC, VERSION = "opendsec-origin", 1
ORIGIN = "origin.json"

_STORE_NAME = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,62})")
_KEY = re.compile(r"[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*")


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Stores are tried in order. Below `prefix` lie `meta.erofs.zst`, `data.chunks` and `data.blob`, see `remote.layout`."""

    stores: tuple[str, ...]
    prefix: str  # layers/sha256-…/<packing>

    def key(self, file: str) -> str:
        return f"{self.prefix}/{file}"


def is_store_name(text: str) -> bool:
    return _STORE_NAME.fullmatch(text) is not None


def is_key(text: str) -> bool:
    """Whether `text` may be a key in a store: relative, of plain characters, without `.` and `..`."""
    return len(text) <= 900 and _KEY.fullmatch(text) is not None and not {".", ".."} & set(text.split("/"))


def read(directory: Path) -> Origin | None:
    """The origin of the layer in `directory`; None if it has none. Raises Damaged."""
    try:
        origin = records.read(directory / ORIGIN, MAGIC, VERSION, Origin)
    except FileNotFoundError:
        return None
    if not origin.stores or not all(map(is_store_name, origin.stores)) or not is_key(origin.prefix):
        raise Damaged(f"{ORIGIN} names no store or no key")
    return origin


def write(directory: Path, origin: Origin, *, temporary: Path) -> None:
    records.write(directory / ORIGIN, MAGIC, VERSION, origin, temporary=temporary)
