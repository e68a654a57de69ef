# SPDX-License-Identifier: Apache-2.0
"""What pushing and pulling share."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from opendsec.api.errors import Unavailable
from opendsec.api.images import BuildEvent
from opendsec.images import chunks, layers, records
from opendsec.images.layers import LayerRecord
from opendsec.images.process import Progress
from opendsec.images.records import Damaged
from opendsec.images.remote import layout
from opendsec.images.remote.store import RemoteStore, StoreError
from opendsec.images.store import ImageStore

T = TypeVar("T")

MAX_META_BYTES = 2 << 30
AT_ONCE = 4  # layers


async def layer_record_of(remote: RemoteStore, digest: str) -> LayerRecord:
    key = layout.layer_record(digest)
    data = await remote.get(key, limit=records.MAX_BYTES)
    try:
        record = records.decode(data, layers.MAGIC, layers.VERSION, LayerRecord)
    except Damaged as error:
        raise StoreError("damaged", remote.name, key, f"the layer's record {error}") from None
    sizes = chunks.is_chunk_bytes(record.chunk_bytes) and 0 < record.meta_bytes <= MAX_META_BYTES
    sizes = sizes and 0 <= record.data_bytes <= chunks.MAX_CHUNKS * record.chunk_bytes
    if record.digest != digest or not record.chunks_sha256 or not sizes:
        raise StoreError("damaged", remote.name, key, "the layer's record is of another layer, or out of bounds")
    return record


async def again_if_damaged(work: Callable[[], Awaitable[T]]) -> T:
    """Bytes that came wrong once may come right: what is small is simply asked for once more."""
    try:
        return await work()
    except StoreError as error:
        if error.kind != "damaged":
            raise
    return await work()


@contextlib.contextmanager
def told(field: str, store: ImageStore) -> Iterator[None]:
    """Errors of stores and of the disk, as the caller of the edge is to see them."""
    try:
        yield
    except StoreError as error:
        raise error.to_api(field) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        store.drop_partial()  # the last thing a full disk needs
        raise Unavailable("no space left on this machine for the image", data={"kind": "full"}) from None


class Meter:
    """Bytes of all layers together, a few times a second."""

    def __init__(self, progress: Progress, message: str, what: str) -> None:
        self._progress, self._message, self._what = progress, message, what
        self._done: dict[str, int] = {}
        self._total: dict[str, int] = {}
        self._next = 0.0

    def part(self, digest: str, total: int) -> Callable[[int], None]:
        self._total[digest] = total

        def at(done: int) -> None:
            self._done[digest] = done
            if (now := time.monotonic()) >= self._next:
                self._next = now + 0.2
                self._tell()

        return at

    def end(self) -> None:
        if self._total:
            self._tell()

    def _tell(self) -> None:
        done, total = sum(self._done.values()), sum(self._total.values())
        what = f"{len(self._total)} {self._what}" if len(self._total) > 1 else next(iter(self._total))[:19]
        self._progress(BuildEvent(kind="progress", message=self._message, done_bytes=done, total_bytes=total, what=what))
