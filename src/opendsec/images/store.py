# SPDX-License-Identifier: Apache-2.0
"""The content-addressed store of layers, and the names that point into it.

    <root>/
        lock             flock: shared while a layer is published and named, exclusive while garbage is collected
        layers/          sha256-<hex>/…, see `layers`; immutable once there
        refs/images/     a record for each image name: ordered digests and a config
        refs/layers/     a record for each `kind:name@version`: one digest
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
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import msgspec

from opendsec.api.errors import Conflict, Internal, InvalidRequest, NotFound
from opendsec.api.images import Collected, ComposeRequest, ImageConfig, ImageInfo, ImageList, LayerInfo
from opendsec.images import layers as formats
from opendsec.images import names, records
from opendsec.images.layers import DataSource, LayerRecord, LayerRef, LocalData, Missing
from opendsec.images.names import LayerName
from opendsec.images.records import Damaged
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
        self._layers, self._temporary = root / "layers", root / "tmp"
        self._refs = References(root / "refs", self._temporary)
        self._data_source: DataSource = data_source or LocalData()
        self._clock = clock
        self._records: dict[str, LayerRecord] = {}  # immutable by digest, so never stale, only gone

    def prepare(self) -> None:
        """Make the directories and clear what dead builders left. Before first use; may be repeated at any time."""
        for folder in (self._layers, self._temporary):
            folder.mkdir(parents=True, exist_ok=True)
        self._refs.prepare()
        self.root.chmod(0o700)
        with self._locked(fcntl.LOCK_EX):
            for entry in list(os.scandir(self._temporary)):
                if entry.is_dir(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        _remove_unless_held(Path(entry.path))
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
        """Read a layer's files whole and compare them with their checksums. Raises NotFound, Internal naming what differs."""
        ref, record = self.layer_ref(digest), self._record(digest)
        for path, expected in ((ref.meta, record.meta_sha256), (ref.data, record.data_sha256)):
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                    raise _damaged(digest, f"{path.name} does not match its checksum")

    # --- changing --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def workspace(self) -> Iterator[tuple[Path, int]]:
        """A directory under `tmp/` and a descriptor that keeps it: as long as any process holds the descriptor open, start-up of
        another edge leaves the directory alone. Removed at the end."""
        path, fd = self._held_directory()
        try:
            yield path, fd
        finally:
            try:
                shutil.rmtree(path)
            finally:
                os.close(fd)

    def publish(self, directory: Path, record: LayerRecord) -> LayerInfo:
        """Move a finished directory (meta and data files, in a `workspace`) into the store. If the layer is there already, by
        whoever published first, that one stays and `directory` is left to its owner, unless that one is damaged."""
        target = self._directory(record.digest)
        with self._locked(fcntl.LOCK_SH):
            records.write(directory / formats.RECORD, formats.MAGIC, formats.VERSION, record, temporary=self._temporary)
            for name in (formats.META, formats.DATA):
                _seal(directory / name)
            records.sync_directory(directory)
            try:
                os.rename(directory, target)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                try:
                    self.layer_ref(record.digest)
                except Internal:
                    self._discard(record.digest)
                    os.rename(directory, target)
            now = self._clock()
            os.utime(target, (now, now))  # the grace period of `gc` starts, also for one that was there
            records.sync_directory(self._layers)
            return _layer_info(self._record(record.digest), self._refs.names_of(record.digest))

    def name_layer(self, name: LayerName, digest: str) -> LayerInfo:
        """Let a complete name mean `digest`; it replaces what the name meant before. Raises NotFound."""
        with self._locked(fcntl.LOCK_SH):
            layer = self._record(digest)
            self._refs.write_layer(LayerNameRef(name=str(name), digest=digest, created_at=self._clock()))
            return _layer_info(layer, self._refs.names_of(digest))

    def name_image(self, name: str, digests: Sequence[str], config: ImageConfig) -> ImageInfo:
        """Let `name` mean these layers, lowest first; it replaces what the name meant before. Raises InvalidRequest, NotFound."""
        names.check_image_name(name, "name")
        with self._locked(fcntl.LOCK_SH):
            found = {digest: self._record(digest) for digest in digests}
            ref = ImageRef(name=name, layers=tuple(digests), config=config, created_at=self._clock())
            self._refs.write_image(ref)
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
            for image in self._refs.images():
                used.update(image.layers)
            horizon = self._clock() - grace_s
            garbage: list[tuple[str, int]] = []
            for directory in sorted(self._layers.iterdir()):
                digest = formats.digest_of(directory)
                if names.is_digest(digest) and digest not in used and directory.stat().st_mtime <= horizon:
                    garbage.append((digest, sum(file.stat().st_blocks * 512 for file in directory.iterdir())))
            if not dry_run:
                for digest, _ in garbage:
                    self._discard(digest)
        return Collected(digests=tuple(digest for digest, _ in garbage), freed_bytes=sum(size for _, size in garbage), dry_run=dry_run)

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

    def _held_directory(self) -> tuple[Path, int]:
        while True:
            path = self._temporary / f"build-{secrets.token_hex(8)}"
            path.mkdir(mode=0o700)
            fd = _hold(path)
            if fd is not None:
                return path, fd
            # Another process was clearing up and took it between the two calls.

    def _digest(self, text: str, field: str) -> str:
        if not names.is_digest(text):
            return self._refs.layer(text, field)
        try:
            return self._record(text).digest
        except NotFound as error:
            raise NotFound(error.message, field=field, data=error.data) from None

    def _discard(self, digest: str) -> None:
        # Out of sight first: a removal cut short leaves half a layer in tmp/, never in layers/.
        doomed = self._temporary / f"gc-{secrets.token_hex(8)}"
        os.rename(self._directory(digest), doomed)
        self._records.pop(digest, None)
        shutil.rmtree(doomed)

    def _record(self, digest: str) -> LayerRecord:
        """Raises NotFound, Internal."""
        directory = self._directory(digest)
        record = self._records.get(digest)
        if record is not None and not directory.exists():  # another process has collected it
            del self._records[digest]
            record = None
        if record is None:
            try:
                record = records.read(directory / formats.RECORD, formats.MAGIC, formats.VERSION, LayerRecord)
            except FileNotFoundError:
                raise NotFound(f"no layer {digest} is stored here", data={"digest": digest}) from None
            except Damaged as error:
                raise _damaged(digest, str(error)) from None
            if record.digest != digest:
                raise _damaged(digest, f"{formats.RECORD} is that of {record.digest}")
            self._records[digest] = record
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


def _hold(path: Path) -> int | None:
    """A descriptor that holds `path` against clearing, or None if it has gone or somebody else holds it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


def _remove_unless_held(path: Path) -> None:
    fd = _hold(path)
    if fd is not None:
        try:
            shutil.rmtree(path)
        finally:
            os.close(fd)
