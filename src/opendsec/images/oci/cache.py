# SPDX-License-Identifier: Apache-2.0
"""Which OCI layers have been converted already: `<store>/oci/`, a record for each, in the envelope of `records`.

The key is the layer's diff_id, or those of several that were made one. What a layer becomes may depend on the layers below it (see
`nodes`): what was asked about those, and how it was answered, is part of the record, and the record is of use only where the answers
would be the same. Nothing is lost with a record but the time to convert a layer again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from opendsec.api.errors import Internal, NotFound
from opendsec.images import records
from opendsec.images.oci.nodes import Answers, Below, Question
from opendsec.images.records import Damaged
from opendsec.images.store import ImageStore

_MAGIC, _VERSION = "opendsec-oci-layer", 1
_RULES = 1  # raise it when the same layer would become another one


class Converted(msgspec.Struct, frozen=True, kw_only=True):
    diff_ids: tuple[str, ...]  # lowest first
    digest: str  # of our layer
    alone: bool  # nothing below it shows through
    notes: tuple[str, ...]
    asked: tuple[tuple[Question, Below | None], ...]


class Cache:
    def __init__(self, store: ImageStore, temporary: Path) -> None:
        self._store, self._root, self._temporary = store, store.root / "oci", temporary
        self._root.mkdir(mode=0o700, exist_ok=True)

    def find(self, diff_ids: Sequence[str], answers: Answers | None) -> Converted | None:
        """What these layers became, if it is still there. `answers` None: what lies below is not known."""
        for path in sorted(self._root.glob(_key(diff_ids) + "-*.json")):
            try:
                found = records.read(path, _MAGIC, _VERSION, Converted)
            except (Damaged, FileNotFoundError):
                path.unlink(missing_ok=True)
                continue
            if found.diff_ids != tuple(diff_ids):
                continue
            if found.asked and (
                answers is None or answers([question for question, _ in found.asked]) != [answer for _, answer in found.asked]
            ):
                continue
            try:
                self._store.renew(found.digest)
            except (NotFound, Internal):
                path.unlink(missing_ok=True)
                continue
            return found
        return None

    def add(self, found: Converted) -> None:
        variant = hashlib.sha256(msgspec.json.encode(found.asked)).hexdigest()[:16]
        path = self._root / f"{_key(found.diff_ids)}-{variant}.json"
        if len(records.encode(_MAGIC, _VERSION, found)) <= records.MAX_BYTES:
            records.write(path, _MAGIC, _VERSION, found, temporary=self._temporary)


def _key(diff_ids: Sequence[str]) -> str:
    return hashlib.sha256(" ".join((str(_RULES), *diff_ids)).encode()).hexdigest()
