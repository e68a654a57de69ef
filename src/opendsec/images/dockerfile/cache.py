# SPDX-License-Identifier: Apache-2.0
"""Which layer a step made before: a record for each key, in `<store>/build-cache/`.

The key is a digest of all that the step depends on: the layers below, the instruction as planned, and what it copies. A record counts
while its layer is stored; garbage collection takes layers that no image names, and the step then runs again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time

import msgspec

from opendsec.api.errors import Internal, NotFound
from opendsec.images import records
from opendsec.images.dockerfile.plan import Action
from opendsec.images.records import Damaged
from opendsec.images.store import ImageStore

_MAGIC, _VERSION = "opendsec-build-step", 1
MAX_RECORDS = 10_000


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    digest: str  # "": the step changed nothing
    created_at: float


def key(below: tuple[str, ...], action: Action, content: str = "") -> str:
    """`content`: a digest of what a copy copies."""
    total = hashlib.sha256(b"opendsec-build-step-1\n")
    for part in (*below, content, msgspec.json.encode(action, order="deterministic").decode()):
        total.update(b"%d:" % len(part.encode("utf-8", "surrogateescape")) + part.encode("utf-8", "surrogateescape"))
    return total.hexdigest()


class StepCache:
    """Of one store. Blocking."""

    def __init__(self, store: ImageStore) -> None:
        self._store, self._folder = store, store.root / "build-cache"

    def get(self, key: str) -> str | None:
        """The digest of the layer, which is kept from now on as if it were new; "" for no layer; None if it is not known."""
        path = self._folder / f"{key}.json"
        try:
            record = records.read(path, _MAGIC, _VERSION, _Record)
            if record.digest:
                self._store.renew(record.digest)
        except (FileNotFoundError, NotFound, Internal, Damaged):
            return None
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
        return record.digest

    def put(self, key: str, digest: str) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        record = _Record(digest=digest, created_at=time.time())
        records.write(self._folder / f"{key}.json", _MAGIC, _VERSION, record, temporary=self._folder)
        self._prune()

    def _prune(self) -> None:
        entries = list(os.scandir(self._folder))
        if len(entries) > MAX_RECORDS:
            with contextlib.suppress(FileNotFoundError):
                for entry in sorted(entries, key=lambda entry: entry.stat().st_mtime)[: len(entries) - MAX_RECORDS * 9 // 10]:
                    os.unlink(entry.path)
