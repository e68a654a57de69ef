# SPDX-License-Identifier: Apache-2.0
"""Images to remote stores, see `transfer`."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import msgspec
import zstandard

from opendsec.api.errors import Conflict
from opendsec.images import layers, names, records
from opendsec.images.chunks import ChunkTable
from opendsec.images.download import download, each
from opendsec.images.layers import LayerRecord
from opendsec.images.process import Progress
from opendsec.images.remote import layout
from opendsec.images.remote.common import AT_ONCE, Meter, layer_record_of, told
from opendsec.images.remote.config import Stores
from opendsec.images.remote.layout import RemoteImage, TraceFile
from opendsec.images.remote.store import RemoteStore, StoreError, exists
from opendsec.images.store import ImageStore
from opendsec.images.waiting import in_thread

_ZSTD_LEVEL = 9


async def push_image(
    store: ImageStore, image: str, remote: RemoteStore, *, progress: Progress, name: str = "", stores: Stores | None = None
) -> None:
    """Make `image` an image of the remote store, called `name` there ("" = the same). `stores`: where layers are fetched from that are
    neither there nor here; without it they must be here. Raises InvalidRequest, NotFound, Conflict, Unavailable, Internal."""
    ref = await in_thread(store.image, image)
    name = names.check_image_name(name or image, "reference")
    meter = Meter(progress, "pushing", "layers")
    with told("reference", store):
        await each(dict.fromkeys(ref.layers), partial(_push_layer, store, remote, meter, stores), at_once=AT_ONCE)
        traces: list[TraceFile] = []
        for digest in dict.fromkeys(ref.layers):
            traces += await _push_traces(store, digest, remote)
        record = RemoteImage(
            name=name,
            layers=ref.layers,
            config=ref.config,
            created_at=ref.created_at,
            notes=ref.notes,
            traces=tuple(traces[-layout.MAX_TRACES :]),
        )
        await remote.put(layout.image_record(name), _encoded(record))
    meter.end()


def _encoded(record: RemoteImage) -> bytes:
    try:
        return records.encode(layout.IMAGE_MAGIC, layout.IMAGE_VERSION, record)
    except records.TooLarge:  # traces only make a start faster
        return records.encode(layout.IMAGE_MAGIC, layout.IMAGE_VERSION, msgspec.structs.replace(record, traces=()))


async def _push_layer(store: ImageStore, remote: RemoteStore, meter: Meter, stores: Stores | None, digest: str) -> None:
    if await _is_there(remote, digest):
        return
    table = await in_thread(store.chunk_table, digest)  # gives a layer of the first format its table
    record, directory = await in_thread(store.record, digest), await in_thread(store.directory, digest)
    prefix = layout.layer_prefix(record)
    part = meter.part(digest, record.data_bytes)
    async with _whole_data(store, record, table, stores) as data:
        await _put_unless_there(remote, f"{prefix}/{layout.DATA}", data, record.data_bytes, part)
    await remote.put(f"{prefix}/{layout.TABLE}", await in_thread((directory / layers.TABLE).read_bytes))
    await remote.put(f"{prefix}/{layout.META_ZST}", await in_thread(_compress, directory / layers.META))
    await remote.put(layout.layer_record(digest), records.encode(layers.MAGIC, layers.VERSION, record))


async def _is_there(remote: RemoteStore, digest: str) -> bool:
    """Whether the store has the layer with all its files, of this or another packing."""
    try:
        record = await layer_record_of(remote, digest)
        prefix = layout.layer_prefix(record)
        right = await remote.size(f"{prefix}/{layout.DATA}") == record.data_bytes
        return right and await exists(remote, f"{prefix}/{layout.TABLE}") and await exists(remote, f"{prefix}/{layout.META_ZST}")
    except StoreError as error:
        if error.kind in ("missing", "damaged"):
            return False
        raise


async def _put_unless_there(remote: RemoteStore, key: str, path: Path, size: int, progress: Callable[[int], None]) -> None:
    """A key has one content for ever, so what a push that was cut short has left is as good as new."""
    try:
        if await remote.size(key) == size:
            progress(size)
            return
    except StoreError as error:
        if error.kind != "missing":
            raise
    await remote.put(key, path, progress=progress)


@contextlib.asynccontextmanager
async def _whole_data(store: ImageStore, record: LayerRecord, table: ChunkTable, stores: Stores | None) -> AsyncIterator[Path]:
    """The data file, complete; fetched for the time being if it is not here."""
    origin = await in_thread(store.origin, record.digest)
    if origin is None:
        yield await in_thread(store.directory, record.digest) / layers.DATA
        return
    if stores is None:
        raise Conflict(
            f"the data of layer {record.digest} is not here, and not in the store it is pushed to", data={"digest": record.digest}
        )
    workspace = contextlib.ExitStack()
    try:
        work, _ = workspace.enter_context(store.workspace())
        with open(work / layers.DATA, "xb") as file:
            await download([stores.get(name) for name in origin.stores], origin.key(layout.DATA), table, file.fileno())
        yield work / layers.DATA
    finally:
        await in_thread(workspace.close)  # removing a large file takes its time


async def _push_traces(store: ImageStore, digest: str, remote: RemoteStore) -> list[TraceFile]:
    def found() -> list[tuple[str, bytes]]:
        folder = store.traces / layers.directory_name(digest)
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        usable = [file for file in files if layout.is_trace_name(file.name) and 0 < file.stat().st_size <= layout.MAX_TRACE_BYTES]
        return [(file.name, file.read_bytes()) for file in usable]

    sent: list[TraceFile] = []
    for name, data in await in_thread(found):
        record, sha256 = await in_thread(store.record, digest), hashlib.sha256(data).hexdigest()
        key = layout.trace(record, sha256)
        if not await exists(remote, key):
            await remote.put(key, data)
        sent.append(TraceFile(layer=digest, name=name, bytes=len(data), sha256=sha256, packing=layout.packing(record)))
    return sent


def _compress(path: Path) -> bytes:
    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True).compress(path.read_bytes())
