# SPDX-License-Identifier: Apache-2.0
"""The content-addressed store of layers, and the names that point into it.

    <root>/
        lock             flock: shared while a layer is published and named, exclusive while garbage is collected
        layers/          sha256-<hex>/…, see `layers`; immutable once there
        refs/images/     a record for each image name: ordered digests and a config
        refs/layers/     a record for each `kind:name@version`: one digest
        partial/         sha256-<hex>.<packing>: data of a layer that is being pulled; a pull that was cut short goes on from there
        traces/          sha256-<hex>/<name>: access traces of a layer; opaque here, they go when the layer goes
        cache/           sha256-<hex>/…: what was loaded of layers whose data is elsewhere; its owner is the loader, but it goes
                         when the layer goes
        tmp/             what is being made; start-up clears what no living process holds

Publishing is one rename of a finished, synced directory: a crash leaves things in `tmp/` and nowhere else. Several processes may use
one store. All methods are blocking file system calls, safe from any thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import msgspec

from opendsec.api.errors import Conflict, Internal, InvalidRequest, NotFound
from opendsec.api.images import Collected, ComposeRequest, ImageConfig, ImageInfo, ImageList, LayerInfo
from opendsec.images import chunks, garbage, held, names, origins, records
from opendsec.images import layers as formats
from opendsec.images.chunks import ChunkTable
from opendsec.images.layers import DataSource, LayerRecord, LayerRef, LocalData, Missing
from opendsec.images.names import LayerName
from opendsec.images.origins import Origin
from opendsec.images.records import Damaged, TooLarge
from opendsec.images.references import ImageRef, LayerNameRef, References

GRACE_S = 3600.0
MAX_LAYERS = 128  # of one sandbox, the image's and the spec's together; overlay takes 500


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox of `image` plus further layers consists of."""

    image: str
    config: ImageConfig
    layers: tuple[LayerRef, ...]  # lowest first, each digest once


class ImageStore:
    def __init__(self, root: Path, *, data_source: DataSource | None = None, clock: Callable[[], float] = time.time) -> None:
        self.root = root
        self.cache, self.traces, self.partial = root / "cache", root / "traces", root / "partial"
        self._layers, self._temporary = root / "layers", root / "tmp"
        self._refs = References(root / "refs", self._temporary)
        self._data_source: DataSource = data_source or LocalData()
        self._clock = clock
        self._records: dict[str, tuple[tuple[int, int], LayerRecord]] = {}
        self._at_work: dict[object, tuple[float, tuple[str, ...]]] = {}  # since when, and what it builds upon

    def prepare(self) -> None:
        """Make the directories and clear what dead builders left. Before first use; may be repeated at any time."""
        for folder in (self._layers, self._temporary, self.cache, self.traces, self.partial):
            folder.mkdir(parents=True, exist_ok=True)
        self._refs.prepare()
        self.root.chmod(0o700)
        with self._locked(fcntl.LOCK_EX):
            for entry in list(os.scandir(self._temporary)):
                if entry.is_dir(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        held.remove_unless_held(Path(entry.path))
                else:
                    os.unlink(entry.path)  # records are written under the lock, so nobody is writing this one

    # --- reading ---------------------------------------------------------------------------------------------------

    def resolve(self, image: str, layers: Sequence[str] = ()) -> Resolved:
        """The layers and config of `image` with `layers` on top. Raises NotFound or InvalidRequest naming what is missing or
        ambiguous (`field`: "image" or "layers[i]"), Internal if a layer is damaged.

        A layer asked for twice counts where it is highest: there it hides all that the lower copy could show.
        """
        ref = self._refs.image(image, "image")
        digests = list(ref.layers)
        for position, text in enumerate(layers):
            digests.append(self._digest(text, f"layers[{position}]"))
        digests = [digest for position, digest in enumerate(digests) if digest not in digests[position + 1 :]]
        if len(digests) > MAX_LAYERS:
            raise InvalidRequest(f"a sandbox may have at most {MAX_LAYERS} layers, with the image's own", field="layers")
        return Resolved(image=image, config=ref.config, layers=tuple(self.layer_ref(digest) for digest in digests))

    def layer_ref(self, digest: str) -> LayerRef:
        """The files of a layer, there and of the right size. Raises NotFound, Internal."""
        directory = self._directory(digest)
        record = self._record(digest)
        try:
            meta = formats.present(directory / formats.META, record.meta_bytes)
            return LayerRef(digest, meta, self._data_source.data_file(directory, record))
        except Missing as error:
            raise _damaged(digest, str(error)) from None

    def list(self) -> ImageList:
        """Everything stored. Damaged records are left out here and told by `damaged`."""
        found = {digest: record for digest, record in self._scan() if isinstance(record, LayerRecord)}
        of: dict[str, list[str]] = {}
        for name, digest in self._refs.layers().items():
            of.setdefault(digest, []).append(str(name))
        images = [_image_info(ref, found) for ref in self._refs.images()]
        layers = [_layer_info(record, of.get(digest, ())) for digest, record in found.items()]
        return ImageList(
            images=tuple(sorted(images, key=lambda image: image.name)),
            layers=tuple(sorted(layers, key=lambda layer: (layer.created_at, layer.digest))),
        )

    def damaged(self) -> dict[str, str]:
        """Digests whose record cannot be read, and why."""
        return {digest: str(record) for digest, record in self._scan() if not isinstance(record, LayerRecord)}

    def verify(self, digest: str) -> None:
        """Read what is here of a layer and compare it with its checksums. Raises NotFound, Internal naming what differs.

        Data that was loaded from elsewhere is not looked at: each chunk of it was checked before it was kept."""
        directory, record = self._directory(digest), self._record(digest)
        self.check(digest)
        with open(directory / formats.META, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != record.meta_sha256:
                raise _damaged(digest, f"{formats.META} does not match its checksum")
        if not (directory / formats.DATA).exists():
            return
        found, whole = chunks.compute(directory / formats.DATA, record.chunk_bytes or chunks.CHUNK_BYTES)
        if whole != record.data_sha256:
            at = ""
            if record.chunks_sha256:
                expected = self.chunk_table(digest)
                wrong = [index for index in range(expected.count) if found.digest(index) != expected.digest(index)]
                at = f" in {len(wrong)} of {expected.count} chunks, the first at byte {expected.span(wrong[0])[0]}" if wrong else ""
            raise _damaged(digest, f"{formats.DATA} does not match its checksum{at}")

    def image(self, name: str, field: str = "name") -> ImageRef:
        """Raises InvalidRequest or NotFound with that field, Internal."""
        return self._refs.image(name, field)

    def record(self, digest: str) -> LayerRecord:
        """Raises NotFound, Internal."""
        return self._record(digest)

    def directory(self, digest: str) -> Path:
        """Where the files of a layer lie. Raises NotFound, Internal."""
        self._record(digest)
        return self._directory(digest)

    def origin(self, digest: str) -> Origin | None:
        """Where the layer's data can be had; None if all of it is here. Raises NotFound, Internal."""
        directory = self.directory(digest)
        if (directory / formats.DATA).exists():
            return None
        try:
            return origins.read(directory)
        except Damaged as error:
            raise _damaged(digest, str(error)) from None

    def chunk_table(self, digest: str) -> ChunkTable:
        """The checksums of the layer's chunks. A layer of the first format gets its table now, which reads all its data; its record
        has it from then on. Raises NotFound, Internal."""
        directory, record = self._directory(digest), self._record(digest)
        try:
            if not record.chunks_sha256:
                record = self._make_table(directory, record)
            return formats.read_table(directory, record)
        except (Damaged, Missing) as error:
            raise _damaged(digest, str(error)) from None

    def renew(self, digest: str) -> None:
        """As if it were published now: for who found a layer here and means to name it. Raises NotFound, Internal."""
        with self._locked(fcntl.LOCK_SH):
            self.check(digest)
            now = self._clock()
            os.utime(self._directory(digest), (now, now))

    def digests_of(self, name: str, field: str = "name") -> tuple[str, ...]:
        """The layers of an image, lowest first, or the one that is named or meant by a digest. Raises NotFound."""
        listed = self.list()
        for image in listed.images:
            if image.name == name:
                return image.layers
        for layer in listed.layers:
            if name == layer.digest or name in layer.names:
                return (layer.digest,)
        raise NotFound(f"no image or layer is named {name[:200]!r}", field=field)

    # --- changing --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def workspace(self) -> Iterator[tuple[Path, int]]:
        """A directory under `tmp/` and a descriptor that keeps it: as long as any process holds the descriptor open, start-up of
        another edge leaves the directory alone. Removed at the end."""
        path, fd = held.new_directory(self._temporary)
        try:
            yield path, fd
        finally:
            try:
                shutil.rmtree(path)
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def at_work(self, digests: Iterable[str] = ()) -> Iterator[None]:
        """Meanwhile `gc` leaves, whatever its grace period, these layers and all that are published or renewed: somebody of this
        process is about to name them."""
        token = object()
        # A moment earlier: times of files come from a coarser clock.
        self._at_work[token] = (self._clock() - 1, tuple(digests))
        try:
            yield
        finally:
            del self._at_work[token]

    def publish(self, directory: Path, record: LayerRecord, *, origin: Origin | None = None) -> LayerInfo:
        """Move a finished directory (in a `workspace`) into the store: the metadata and the data file, or the metadata, the chunk table
        and an `origin` for the data. A chunk table that the record does not know of is made.

        If the layer is there already, by whoever published first, that one stays and `directory` is left to its owner, unless that
        one is damaged. If that one's data is elsewhere and this has it, it gets it. Raises Damaged if `directory` has not what the
        record says."""
        digest, target = record.digest, self._directory(record.digest)
        if origin is not None:
            origins.write(directory, origin, temporary=self._temporary)
        elif not record.chunks_sha256:
            record = formats.with_table(directory, record)
        with self._locked(fcntl.LOCK_SH):
            records.write(directory / formats.RECORD, formats.MAGIC, formats.VERSION, record, temporary=self._temporary)
            for name in (formats.META, formats.TABLE, formats.DATA):
                if name != formats.DATA or origin is None:
                    _seal(directory / name)
            records.sync_directory(directory)
            try:
                os.rename(directory, target)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                try:
                    self.check(digest)
                    if origin is None:
                        self._give_data(directory, record)
                except Internal:
                    self._discard(digest)
                    os.rename(directory, target)
            now = self._clock()
            os.utime(target, (now, now))  # the grace period of `gc` starts, also for one that was there
            records.sync_directory(self._layers)
            return _layer_info(self._record(digest), self._refs.names_of(digest))

    def _give_data(self, directory: Path, record: LayerRecord) -> None:
        target, there = self._directory(record.digest), self._record(record.digest)
        same = (there.meta_sha256, there.data_sha256) == (record.meta_sha256, record.data_sha256)  # not another packing of the tree
        if same and not (target / formats.DATA).exists():
            os.rename(directory / formats.DATA, target / formats.DATA)
            records.sync_directory(target)

    def add_origin(self, digest: str, origin: Origin) -> None:
        """Let the layer's data be had from these stores too, if it is the same data. Raises NotFound, Internal."""
        with self._locked(fcntl.LOCK_SH):
            there = self.origin(digest)
            if there is not None and there.prefix == origin.prefix and not set(origin.stores) <= set(there.stores):
                stores = tuple(dict.fromkeys(there.stores + origin.stores))
                origins.write(self._directory(digest), Origin(stores=stores, prefix=there.prefix), temporary=self._temporary)

    def write_trace(self, digest: str, name: str, data: bytes) -> None:
        """Keep an access trace with a layer; it replaces the one of that name. Raises NotFound, Internal."""
        with self._locked(fcntl.LOCK_SH):
            self._record(digest)
            folder = self.traces / formats.directory_name(digest)
            folder.mkdir(exist_ok=True)
            records.write_bytes(folder / name, data, temporary=self._temporary)

    def drop_partial(self) -> None:
        """Remove what pulls that were cut short have left to go on from."""
        for path in garbage.idle_files(self.partial):
            path.unlink(missing_ok=True)

    def add_data(self, digest: str, path: Path) -> None:
        """Make a finished file the data of a layer whose data was elsewhere. Its chunks must have been checked. Raises NotFound,
        Internal."""
        with self._locked(fcntl.LOCK_SH):
            record = self._record(digest)
            try:
                formats.present(path, record.data_bytes)
            except Missing as error:
                raise _damaged(digest, str(error)) from None
            _seal(path)
            os.rename(path, self._directory(digest) / formats.DATA)
            records.sync_directory(self._directory(digest))

    def name_layer(self, name: LayerName, digest: str) -> LayerInfo:
        """Let a complete name mean `digest`; it replaces what the name meant before. Raises NotFound."""
        with self._locked(fcntl.LOCK_SH):
            layer = self._record(digest)
            self._refs.write_layer(LayerNameRef(name=str(name), digest=digest, created_at=self._clock()))
            return _layer_info(layer, self._refs.names_of(digest))

    def name_image(
        self, name: str, digests: Sequence[str], config: ImageConfig, *, notes: Sequence[str] = (), source: str = ""
    ) -> ImageInfo:
        """Let `name` mean these layers, lowest first; it replaces what the name meant before. Raises InvalidRequest, NotFound."""
        names.check_image_name(name, "name")
        with self._locked(fcntl.LOCK_SH):
            found = {digest: self._record(digest) for digest in digests}
            ref = ImageRef(name=name, layers=tuple(digests), config=config, created_at=self._clock(), notes=tuple(notes), source=source)
            try:
                self._refs.write_image(ref)
            except TooLarge:
                raise InvalidRequest("is too large: an image's record holds 1 MiB", field="config") from None
            return _image_info(ref, found)

    def compose(self, request: ComposeRequest) -> ImageInfo:
        """Name the layers of an image and further ones as an image of its own. Raises InvalidRequest, NotFound."""
        names.check_image_name(request.name, "name")
        self._refs.image(request.base, "base")  # for the field's name in the error
        resolved = self.resolve(request.base, request.layers)
        config = resolved.config if request.config is None else request.config
        return self.name_image(request.name, [layer.digest for layer in resolved.layers], config)

    def remove(self, name: str) -> None:
        """Forget the name of an image, or a layer's complete `kind:name@version`. The layers themselves stay until `gc`.
        Raises NotFound, InvalidRequest."""
        if names.is_digest(name):
            raise InvalidRequest("a layer itself is removed by garbage collection, once nothing names it", field="name")
        with self._locked(fcntl.LOCK_EX):
            if self._refs.remove(name):
                return
        raise NotFound(f"no image or layer is named {name[:200]!r}", field="name")

    def gc(self, in_use: AbstractSet[str] = frozenset(), *, dry_run: bool = False, grace_s: float = GRACE_S) -> Collected:
        """Remove layers that no name uses, that are not `in_use` (digests of sandboxes living or being created) and that were
        published longer than `grace_s` ago (a build has to get from publishing to naming). Damaged ones count as unused."""
        with self._locked(fcntl.LOCK_EX):
            # A reference that cannot be read might name anything, so nothing goes until a person has looked at it.
            if problem := next(self._refs.unreadable(), None):
                raise Conflict(f"not collecting while a reference is damaged: {problem}")
            used = set(in_use) | set(self._refs.layers().values())
            horizon = self._clock() - grace_s
            for since, digests in list(self._at_work.values()):
                used.update(digests)
                horizon = min(horizon, since)
            for image in self._refs.images():
                used.update(image.layers)
            found = garbage.find(self._layers, (self.cache, self.traces), self.partial, used=used, horizon=horizon)
            places = [path for digest in found.digests for path in self._places(digest)] + found.strays
            freed = sum(map(garbage.disk_bytes, places))
            if not dry_run:
                for digest in found.digests:
                    self._discard(digest)
                for path in found.strays:
                    garbage.remove(path, self._temporary)
        return Collected(digests=tuple(found.digests), freed_bytes=freed, dry_run=dry_run)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _directory(self, digest: str) -> Path:
        if not names.is_digest(digest):
            raise NotFound(f"{digest[:80]!r} is not the digest of a layer")
        return self._layers / formats.directory_name(digest)

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        fd = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, how)
            yield
        finally:
            os.close(fd)

    def _digest(self, text: str, field: str) -> str:
        if not names.is_digest(text):
            return self._refs.layer(text, field)
        try:
            return self._record(text).digest
        except NotFound as error:
            raise NotFound(error.message, field=field, data=error.data) from None

    def _places(self, digest: str) -> tuple[Path, ...]:
        """All that belongs to a layer, the layer itself first."""
        name = formats.directory_name(digest)
        return self._layers / name, self.cache / name, self.traces / name

    def _discard(self, digest: str) -> None:
        self._records.pop(digest, None)
        for path in self._places(digest):
            garbage.remove(path, self._temporary)

    def check(self, digest: str) -> None:
        """That a layer has its files, of the right sizes. Raises NotFound, Internal."""
        directory, record = self._directory(digest), self._record(digest)
        try:
            formats.present(directory / formats.META, record.meta_bytes)
            if record.chunks_sha256:
                formats.read_table(directory, record)
            if (directory / formats.DATA).exists() or not record.chunks_sha256 or origins.read(directory) is None:
                formats.present(directory / formats.DATA, record.data_bytes)
        except (Missing, Damaged) as error:
            raise _damaged(digest, str(error)) from None

    def _make_table(self, directory: Path, record: LayerRecord) -> LayerRecord:
        with self.workspace() as (work, _):
            # As published, but in a place of its own: two that do this at once make the same files.
            os.symlink(directory / formats.DATA, work / formats.DATA)
            record = formats.with_table(work, record)
            _seal(work / formats.TABLE)
            with self._locked(fcntl.LOCK_SH):
                os.rename(work / formats.TABLE, directory / formats.TABLE)
                records.sync_directory(directory)
                records.write(directory / formats.RECORD, formats.MAGIC, formats.VERSION, record, temporary=self._temporary)
        return record

    def _record(self, digest: str) -> LayerRecord:
        """Raises NotFound, Internal."""
        path = self._directory(digest) / formats.RECORD
        try:
            # Another process may have collected the layer, mended it or made its chunk table: records are replaced, never rewritten.
            status = path.stat()
            stamp = status.st_ino, status.st_mtime_ns
            known = self._records.get(digest)
            if known is not None and known[0] == stamp:
                return known[1]
            record = records.read(path, formats.MAGIC, formats.VERSION, LayerRecord)
        except FileNotFoundError:
            self._records.pop(digest, None)
            raise NotFound(f"no layer {digest} is stored here", data={"digest": digest}) from None
        except Damaged as error:
            raise _damaged(digest, str(error)) from None
        if record.digest != digest:
            raise _damaged(digest, f"{formats.RECORD} is that of {record.digest}")
        self._records[digest] = stamp, record
        return record

    def _scan(self) -> Iterator[tuple[str, LayerRecord | Internal]]:
        for directory in sorted(self._layers.iterdir()) if self._layers.is_dir() else ():
            digest = formats.digest_of(directory)
            try:
                yield digest, self._record(digest)
            except Internal as error:
                yield digest, error
            except NotFound:
                continue  # collected since the listing


def _damaged(digest: str, why: str) -> Internal:
    return Internal(f"layer {digest} is damaged: {why}", data={"digest": digest})


def _image_info(ref: ImageRef, found: dict[str, LayerRecord]) -> ImageInfo:
    size = sum(found[digest].meta_bytes + found[digest].data_bytes for digest in ref.layers if digest in found)
    return ImageInfo(name=ref.name, layers=ref.layers, config=ref.config, size_bytes=size, created_at=ref.created_at)


def _layer_info(record: LayerRecord, of: Sequence[str]) -> LayerInfo:
    return LayerInfo(
        digest=record.digest,
        kind=record.kind,
        names=tuple(sorted(of)),
        meta_bytes=record.meta_bytes,
        data_bytes=record.data_bytes,
        created_at=record.created_at,
    )


def _seal(path: Path) -> None:
    """Durable, and read-only against mistakes (root may still write)."""
    with open(path, "rb") as file:
        os.fchmod(file.fileno(), 0o444)
        os.fsync(file.fileno())
