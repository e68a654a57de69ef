# SPDX-License-Identifier: Apache-2.0
"""Images from remote stores, see `transfer`."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

import zstandard

from opendsec.api.errors import Conflict, Internal, InvalidRequest, NotFound
from opendsec.api.images import ImageInfo
from opendsec.images import chunks, layers, names, records
from opendsec.images.build import check_config
from opendsec.images.download import download, each
from opendsec.images.layers import LayerRecord
from opendsec.images.origins import Origin
from opendsec.images.process import Progress
from opendsec.images.records import Damaged
from opendsec.images.remote import layout
from opendsec.images.remote.common import AT_ONCE, Meter, again_if_damaged, layer_record_of, told
from opendsec.images.remote.config import Stores
from opendsec.images.remote.layout import RemoteImage, TraceFile
from opendsec.images.remote.store import RemoteStore, StoreError
from opendsec.images.store import MAX_LAYERS, ImageStore
from opendsec.images.waiting import in_thread

_TRIES = 3
_BLOCK = 1 << 20

_pulling: WeakValueDictionary[tuple[Path, str], asyncio.Lock] = WeakValueDictionary()


async def pull_image(
    store: ImageStore,
    image: str,
    remote: RemoteStore,
    *,
    progress: Progress,
    name: str = "",
    lazy: bool = True,
    stores: Stores | None = None,
) -> ImageInfo:
    """Make the remote store's `image` one of this store, called `name` here ("" = the same). `stores`: for layers that are here with
    their data in another store than this. Raises InvalidRequest, NotFound, Conflict, Unavailable, Internal."""
    name = names.check_image_name(name or image, "name")
    with told("reference", store):
        ref = await again_if_damaged(lambda: _image_record(remote, image))
        for tries_left in reversed(range(_TRIES)):
            meter = Meter(progress, "pulling", "layers")
            pull = partial(_pull_layer, store, remote, meter, lazy=lazy, stores=stores)
            await each(dict.fromkeys(ref.layers), pull, at_once=AT_ONCE)
            await each(ref.traces, partial(_pull_trace, store, remote), at_once=AT_ONCE)
            meter.end()
            try:
                source = f"store:{remote.name}/{image}"
                return await in_thread(store.name_image, name, ref.layers, ref.config, notes=ref.notes, source=source)
            except NotFound:  # collected since, which takes a grace period of next to nothing
                if not tries_left:
                    raise
    raise AssertionError


async def _image_record(remote: RemoteStore, image: str) -> RemoteImage:
    names.check_image_name(image, "reference")
    key = layout.image_record(image)
    try:
        data = await remote.get(key, limit=records.MAX_BYTES)
    except StoreError as error:
        if error.kind != "missing":
            raise
        data = None
    if data is None:
        raise NotFound(f"the store {remote.name} has no image {image!r}", field="reference", data={"store": remote.name, "image": image})
    try:
        ref = records.decode(data, layout.IMAGE_MAGIC, layout.IMAGE_VERSION, RemoteImage)
    except Damaged as error:
        raise StoreError("damaged", remote.name, key, f"the image's record {error}") from None
    why = ""
    if ref.name != image or not 0 < len(ref.layers) <= MAX_LAYERS or not all(map(names.is_digest, ref.layers)):
        why = "is of another image, or names no layers"
    if len(ref.traces) > layout.MAX_TRACES:
        why = "has too many traces"
    try:
        check_config(ref.config)
    except InvalidRequest as error:
        why = f"is wrong: {error}"
    if why:
        raise StoreError("damaged", remote.name, key, f"the image's record {why}")
    return ref


async def _pull_layer(store: ImageStore, remote: RemoteStore, meter: Meter, digest: str, *, lazy: bool, stores: Stores | None) -> None:
    lock = _pulling.setdefault((store.root, digest), asyncio.Lock())
    async with lock:  # two pulls of one layer: the second finds it here
        try:
            await in_thread(store.renew, digest)
        except (NotFound, Internal):  # not here, or damaged, which publishing repairs
            await again_if_damaged(lambda: _fetch_layer(store, digest, remote, meter, lazy=lazy))
            return
        origin = await in_thread(store.origin, digest)
        if origin is None:
            return
        if lazy:
            if remote.name not in origin.stores:
                prefix = layout.layer_prefix(await again_if_damaged(lambda: layer_record_of(remote, digest)))
                await in_thread(store.add_origin, digest, Origin(stores=(remote.name,), prefix=prefix))
            return
        record, table = await in_thread(store.record, digest), await in_thread(store.chunk_table, digest)
        remotes = [remote] if remote.name in origin.stores else [stores.get(name) for name in origin.stores] if stores else []
        if not remotes:
            raise Conflict(f"the data of layer {digest} is in the store {origin.stores[0]}; pull it from there", data={"digest": digest})
        async with _partial(store, record) as (fd, path):
            await download(remotes, origin.key(layout.DATA), table, fd, progress=meter.part(digest, record.data_bytes))
            await in_thread(store.add_data, digest, path)


async def _fetch_layer(store: ImageStore, digest: str, remote: RemoteStore, meter: Meter, *, lazy: bool) -> None:
    try:
        record = await layer_record_of(remote, digest)
    except StoreError as error:
        if error.kind == "missing":
            raise StoreError("damaged", remote.name, error.key, "an image needs this layer, but it is not there") from None
        raise
    prefix = layout.layer_prefix(record)
    lazy = lazy and record.data_bytes > 0
    data_bytes, table_data, packed = await asyncio.gather(
        remote.size(f"{prefix}/{layout.DATA}"),
        remote.get(f"{prefix}/{layout.TABLE}", limit=chunks.table_bytes(record.data_bytes, record.chunk_bytes)),
        remote.get(f"{prefix}/{layout.META_ZST}", limit=record.meta_bytes + record.meta_bytes // 128 + 1024),
    )
    if data_bytes != record.data_bytes:
        raise StoreError("damaged", remote.name, f"{prefix}/{layout.DATA}", "the data has not the size its record says")
    with store.workspace() as (work, _):
        out = work / "out"
        out.mkdir(mode=0o755)
        try:
            table = await in_thread(layers.check_table, table_data, record)
            await in_thread((out / layers.TABLE).write_bytes, table_data)
            await in_thread(_unpack_meta, packed, record, out / layers.META)
        except (Damaged, zstandard.ZstdError) as error:
            raise StoreError("damaged", remote.name, prefix, f"the layer's {error}") from None
        if lazy:
            await in_thread(store.publish, out, record, origin=Origin(stores=(remote.name,), prefix=prefix))
            return
        async with _partial(store, record) as (fd, path):
            await download([remote], f"{prefix}/{layout.DATA}", table, fd, progress=meter.part(digest, record.data_bytes))
            await in_thread(os.rename, path, out / layers.DATA)
        await in_thread(store.publish, out, record)


@contextlib.asynccontextmanager
async def _partial(store: ImageStore, record: LayerRecord) -> AsyncIterator[tuple[int, Path]]:
    """A file for the data, with what an earlier pull has left in it. It stays if this one is cut short."""
    path = store.partial / f"{layers.directory_name(record.digest)}.{layout.packing(record)}"
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            await _lock(fd, path)
            if _same_file(fd, path):
                break
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # who had it has finished it and moved it away
    try:
        yield fd, path
    finally:
        os.close(fd)


async def _lock(fd: int, path: Path) -> None:
    """Another process may be pulling the same layer, for minutes: look now and then, which can be cancelled, unlike flock."""
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            await asyncio.sleep(0.2)


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _unpack_meta(packed: bytes, record: LayerRecord, path: Path) -> None:
    """Never writes more than the record says."""
    size, checksum = 0, hashlib.sha256()
    with open(path, "xb") as file, zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(packed) as reader:
        while block := reader.read(_BLOCK):
            size += len(block)
            if size > record.meta_bytes:
                break
            checksum.update(block)
            file.write(block)
    if size != record.meta_bytes or checksum.hexdigest() != record.meta_sha256:
        raise Damaged("metadata does not match its checksum")


async def _pull_trace(store: ImageStore, remote: RemoteStore, trace: TraceFile) -> None:
    """A trace makes a start faster, no more: one that cannot be had is left out."""
    if not layout.is_trace(trace):
        return
    record = await in_thread(store.record, trace.layer)
    target = store.traces / layers.directory_name(trace.layer) / trace.name
    if layout.packing(record) != trace.packing or await in_thread(target.exists):
        return
    try:
        data = await remote.get(layout.trace(record, trace.sha256), limit=layout.MAX_TRACE_BYTES)
    except StoreError:
        return
    if hashlib.sha256(data).hexdigest() == trace.sha256:
        await in_thread(store.write_trace, trace.layer, trace.name, data)
