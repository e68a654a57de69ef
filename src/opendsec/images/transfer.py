# SPDX-License-Identifier: Apache-2.0
"""Images to and from remote stores: as the layers that they are, so what is there already is not sent again.

A push sends, of each layer that is missing, first its files, then its record, and the image's record after all layers. Until then
nothing points to what was sent. A pull takes the same way back; with `lazy` it brings the metadata and the chunk tables, and `origin.json`
says where the rest is. What lies where: `remote.layout`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

import zstandard

from opendsec.api.errors import Conflict, Internal, InvalidRequest, NotFound, Unavailable
from opendsec.api.images import BuildEvent, ImageInfo
from opendsec.images import chunks, layers, names, records
from opendsec.images.build import check_config, to_the_end
from opendsec.images.chunks import ChunkTable
from opendsec.images.download import download, each
from opendsec.images.layers import LayerRecord
from opendsec.images.origins import Origin
from opendsec.images.records import Damaged
from opendsec.images.remote import layout
from opendsec.images.remote.config import Stores
from opendsec.images.remote.layout import RemoteImage, TraceFile
from opendsec.images.remote.store import RemoteStore, StoreError
from opendsec.images.store import MAX_LAYERS, ImageStore

P = ParamSpec("P")
T = TypeVar("T")
Progress = Callable[[BuildEvent], None]

MAX_META_BYTES = 2 << 30
_AT_ONCE = 4  # layers
_TRIES = 3
_ZSTD_LEVEL = 9
_BLOCK = 1 << 20

_pulling: WeakValueDictionary[tuple[Path, str], asyncio.Lock] = WeakValueDictionary()


async def push_image(
    store: ImageStore, image: str, remote: RemoteStore, *, progress: Progress, name: str = "", stores: Stores | None = None
) -> None:
    """Make `image` an image of the remote store, called `name` there ("" = the same). `stores`: where layers are fetched from that are
    neither there nor here; without it they must be here. Raises InvalidRequest, NotFound, Conflict, Unavailable, Internal."""
    ref = await _thread(store.image, image)
    name = names.check_image_name(name or image, "reference")
    meter = _Meter(progress, "pushing", "layers")
    with _told("reference", store):
        await each(dict.fromkeys(ref.layers), partial(_push_layer, store, remote, meter, stores), at_once=_AT_ONCE)
        traces: list[TraceFile] = []
        for digest in dict.fromkeys(ref.layers):
            traces += await _push_traces(store, digest, remote)
        record = RemoteImage(
            name=name, layers=ref.layers, config=ref.config, created_at=ref.created_at, notes=ref.notes, traces=tuple(traces)
        )
        await remote.put(layout.image_record(name), records.encode(layout.IMAGE_MAGIC, layout.IMAGE_VERSION, record))
    meter.end()


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
    with _told("reference", store):
        ref = await _again_if_damaged(lambda: _image_record(remote, image))
        for tries_left in reversed(range(_TRIES)):
            meter = _Meter(progress, "pulling", "layers")
            pull = partial(_pull_layer, store, remote, meter, lazy=lazy, stores=stores)
            await each(dict.fromkeys(ref.layers), pull, at_once=_AT_ONCE)
            await each(ref.traces, partial(_pull_trace, store, remote), at_once=_AT_ONCE)
            meter.end()
            try:
                source = f"store:{remote.name}/{image}"
                return await _thread(store.name_image, name, ref.layers, ref.config, notes=ref.notes, source=source)
            except NotFound:  # collected since, which takes a grace period of next to nothing
                if not tries_left:
                    raise
    raise AssertionError


# --- push ----------------------------------------------------------------------------------------------------------


async def _push_layer(store: ImageStore, remote: RemoteStore, meter: _Meter, stores: Stores | None, digest: str) -> None:
    if await _is_there(remote, digest):
        return
    table = await _thread(store.chunk_table, digest)  # gives a layer of the first format its table
    record, directory = await _thread(store.record, digest), await _thread(store.directory, digest)
    prefix = layout.layer_prefix(record)
    part = meter.part(digest, record.data_bytes)
    async with _whole_data(store, record, table, stores) as data:
        await _put_unless_there(remote, f"{prefix}/{layout.DATA}", data, record.data_bytes, part)
    await remote.put(f"{prefix}/{layout.TABLE}", await _thread((directory / layers.TABLE).read_bytes))
    await remote.put(f"{prefix}/{layout.META_ZST}", await _thread(_compress, directory / layers.META))
    await remote.put(layout.layer_record(digest), records.encode(layers.MAGIC, layers.VERSION, record))


async def _is_there(remote: RemoteStore, digest: str) -> bool:
    """Whether the store has the layer with all its files, of this or another packing."""
    try:
        record = await _layer_record(remote, digest)
        prefix = layout.layer_prefix(record)
        right = await remote.size(f"{prefix}/{layout.DATA}") == record.data_bytes
        return right and await remote.exists(f"{prefix}/{layout.TABLE}") and await remote.exists(f"{prefix}/{layout.META_ZST}")
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
    origin = await _thread(store.origin, record.digest)
    if origin is None:
        yield await _thread(store.directory, record.digest) / layers.DATA
        return
    if stores is None:
        raise Conflict(
            f"the data of layer {record.digest} is not here, and not in the store it is pushed to", data={"digest": record.digest}
        )
    with store.workspace() as (work, _), open(work / layers.DATA, "xb") as file:
        await download([stores.get(name) for name in origin.stores], origin.key(layout.DATA), table, file.fileno())
        yield work / layers.DATA


async def _push_traces(store: ImageStore, digest: str, remote: RemoteStore) -> list[TraceFile]:
    def found() -> list[tuple[str, bytes]]:
        folder = store.traces / layers.directory_name(digest)
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        usable = [file for file in files if layout.is_trace_name(file.name) and 0 < file.stat().st_size <= layout.MAX_TRACE_BYTES]
        return [(file.name, file.read_bytes()) for file in usable]

    sent: list[TraceFile] = []
    for name, data in await _thread(found):
        record, sha256 = await _thread(store.record, digest), hashlib.sha256(data).hexdigest()
        key = layout.trace(record, sha256)
        if not await remote.exists(key):
            await remote.put(key, data)
        sent.append(TraceFile(layer=digest, name=name, bytes=len(data), sha256=sha256, packing=layout.packing(record)))
    return sent


def _compress(path: Path) -> bytes:
    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True).compress(path.read_bytes())


# --- pull ----------------------------------------------------------------------------------------------------------


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


async def _layer_record(remote: RemoteStore, digest: str) -> LayerRecord:
    key = layout.layer_record(digest)
    data = await remote.get(key, limit=records.MAX_BYTES)
    try:
        record = records.decode(data, layers.MAGIC, layers.VERSION, LayerRecord)
    except Damaged as error:
        raise StoreError("damaged", remote.name, key, f"the layer's record {error}") from None
    sizes = chunks.is_chunk_bytes(record.chunk_bytes) and 0 < record.meta_bytes <= MAX_META_BYTES and record.data_bytes >= 0
    if record.digest != digest or not record.chunks_sha256 or not sizes:
        raise StoreError("damaged", remote.name, key, "the layer's record is of another layer, or out of bounds")
    return record


async def _pull_layer(store: ImageStore, remote: RemoteStore, meter: _Meter, digest: str, *, lazy: bool, stores: Stores | None) -> None:
    lock = _pulling.setdefault((store.root, digest), asyncio.Lock())
    async with lock:  # two pulls of one layer: the second finds it here
        try:
            await _thread(store.renew, digest)
        except (NotFound, Internal):  # not here, or damaged, which publishing repairs
            await _again_if_damaged(lambda: _fetch_layer(store, digest, remote, meter, lazy=lazy))
            return
        origin = await _thread(store.origin, digest)
        if origin is None:
            return
        if lazy:
            if remote.name not in origin.stores:
                prefix = layout.layer_prefix(await _again_if_damaged(lambda: _layer_record(remote, digest)))
                await _thread(store.add_origin, digest, Origin(stores=(remote.name,), prefix=prefix))
            return
        record, table = await _thread(store.record, digest), await _thread(store.chunk_table, digest)
        remotes = [remote] if remote.name in origin.stores else [stores.get(name) for name in origin.stores] if stores else []
        if not remotes:
            raise Conflict(f"the data of layer {digest} is in the store {origin.stores[0]}; pull it from there", data={"digest": digest})
        async with _partial(store, record) as (fd, path):
            await download(remotes, origin.key(layout.DATA), table, fd, progress=meter.part(digest, record.data_bytes))
            await _thread(store.add_data, digest, path)


async def _fetch_layer(store: ImageStore, digest: str, remote: RemoteStore, meter: _Meter, *, lazy: bool) -> None:
    try:
        record = await _layer_record(remote, digest)
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
            table = await _thread(layers.check_table, table_data, record)
            await _thread((out / layers.TABLE).write_bytes, table_data)
            await _thread(_unpack_meta, packed, record, out / layers.META)
        except (Damaged, zstandard.ZstdError) as error:
            raise StoreError("damaged", remote.name, prefix, f"the layer's {error}") from None
        if lazy:
            await _thread(store.publish, out, record, origin=Origin(stores=(remote.name,), prefix=prefix))
            return
        async with _partial(store, record) as (fd, path):
            await download([remote], f"{prefix}/{layout.DATA}", table, fd, progress=meter.part(digest, record.data_bytes))
            await _thread(os.rename, path, out / layers.DATA)
        await _thread(store.publish, out, record)


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
    record = await _thread(store.record, trace.layer)
    target = store.traces / layers.directory_name(trace.layer) / trace.name
    if layout.packing(record) != trace.packing or await _thread(target.exists):
        return
    try:
        data = await remote.get(layout.trace(record, trace.sha256), limit=layout.MAX_TRACE_BYTES)
    except StoreError:
        return
    if hashlib.sha256(data).hexdigest() == trace.sha256:
        await _thread(store.write_trace, trace.layer, trace.name, data)


# --- both ----------------------------------------------------------------------------------------------------------


async def _again_if_damaged(work: Callable[[], Awaitable[T]]) -> T:
    """Bytes that came wrong once may come right: what is small is simply asked for once more."""
    try:
        return await work()
    except StoreError as error:
        if error.kind != "damaged":
            raise
    return await work()


async def _thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """In a thread, which has ended when this returns, also on cancellation: it may use what the caller then closes."""
    return await to_the_end(asyncio.to_thread(call, *args, **kwargs))


@contextlib.contextmanager
def _told(field: str, store: ImageStore) -> Iterator[None]:
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


class _Meter:
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
