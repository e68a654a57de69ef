# SPDX-License-Identifier: Apache-2.0
"""Where the parts of an image are had from: an OCI layout, a docker-archive, a registry. One shape for all three.

Whatever a source gives has been compared with its digest, where it has one. (A docker-archive names its layers by nothing; what
comes out of them is compared with the config's diff_ids, as for all others.)
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from opendsec.api.errors import InvalidRequest, NotFound
from opendsec.images.oci import manifest as formats
from opendsec.images.oci.limits import MAX_CONFIG_BYTES, MAX_INDEX_DEPTH, MAX_MANIFEST_BYTES, Limits
from opendsec.images.oci.manifest import Descriptor, Manifest, Platform

REF_NAME = "org.opencontainers.image.ref.name"
CONTAINERD_NAME = "io.containerd.image.name"

Progress = Callable[[str, int, int], None]
"""What is being done, and how many bytes of how many."""


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A layer as the source has it."""

    name: str  # for people: its digest, or where it lies in an archive
    size: int  # as stored; that of a docker-archive's layers is known when they have been read


class Source(Protocol):
    config: bytes
    layers: tuple[Stored, ...]
    digest: str  # of the manifest; "" if there is none

    def fetch(self, wanted: Sequence[int], progress: Progress) -> dict[int, int]:
        """Descriptors of the files of these layers, by their number; the source closes them. Raises InvalidRequest, Unavailable…"""


def open_regular(path: Path, what: str, *, dir_fd: int | None = None) -> int:
    """A descriptor of a file that is one: links are not followed, FIFOs not waited for. Raises InvalidRequest, NotFound."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    except FileNotFoundError:
        raise NotFound(f"{what} is not there: {str(path)!r}", field="reference") from None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.ENXIO):
            raise
        raise InvalidRequest(f"{what} cannot be read: {error.strerror}: {str(path)!r}", field="reference") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidRequest(f"{what} is no file: {str(path)!r}", field="reference")
    return fd


def read_regular(path: Path, what: str, limit: int) -> bytes:
    fd = open_regular(path, what)
    with open(fd, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise InvalidRequest(f"{what} is larger than {limit} bytes", field="reference")
    return data


def checked_blob(path: Path, descriptor: Descriptor, what: str, limits: Limits, progress: Callable[[int], None]) -> int:
    """A descriptor of a blob that has the size and digest it should have. Raises InvalidRequest, NotFound."""
    if descriptor.size > limits.blob_bytes:
        raise InvalidRequest(f"{what} has {descriptor.size} bytes, at most {limits.blob_bytes}", field="reference")
    fd = open_regular(path, what)
    try:
        size = os.fstat(fd).st_size
        if size != descriptor.size:
            raise InvalidRequest(f"{what} has {size} bytes instead of {descriptor.size}", field="reference")
        digest, done = hashlib.sha256(), 0
        while block := os.read(fd, 1 << 20):
            digest.update(block)
            done += len(block)
            progress(done)
        if f"sha256:{digest.hexdigest()}" != descriptor.digest:
            raise InvalidRequest(f"{what} does not match its digest", field="reference")
    except BaseException:
        os.close(fd)
        raise
    return fd


def descend(first: Manifest, want: Platform, read: Callable[[Descriptor], bytes]) -> tuple[Manifest, Descriptor | None]:
    """From an index to the manifest for a platform, through indexes of indexes. The manifest's descriptor, if there was an index.
    Raises NotFound listing what is there, InvalidRequest."""
    manifest, at = first, None
    for _ in range(MAX_INDEX_DEPTH + 1):
        if manifest.manifests is None:
            return manifest, at
        at = formats.choose(manifest.manifests, want)
        manifest = formats.parse_manifest(formats.verify(read(at), at, "a manifest"))
    raise InvalidRequest(f"the image's index leads through more than {MAX_INDEX_DEPTH} others", field="reference")


class Layout:
    """`oci:/PATH[:TAG]`."""

    def __init__(self, path: Path, tag: str, want: Platform, limits: Limits, held: contextlib.ExitStack) -> None:
        self._path, self._limits, self._held = path, limits, held
        if not path.is_dir():
            raise NotFound(f"no OCI layout at {str(path)!r}", field="reference")
        read_regular(path / "oci-layout", "the mark of an OCI layout", 4096)
        index = formats.parse_manifest(read_regular(path / "index.json", "the index", MAX_MANIFEST_BYTES))
        entries = index.manifests or ()
        if tag:
            named = [entry for entry in entries if tag in _names(entry)]
            if not named:
                there = sorted({name for entry in entries for name in _names(entry)})
                raise NotFound(f"no image is tagged {tag!r}; there is: {', '.join(there)[:500] or 'no tag'}", field="reference")
            entries = tuple(named)
        elif len({name for entry in entries for name in _names(entry)}) > 1:
            there = sorted({name for entry in entries for name in _names(entry)})
            raise InvalidRequest(f"there are several images: say which of {', '.join(there)[:500]}", field="reference")
        manifest, at = descend(Manifest(schema_version=2, manifests=entries), want, self._small)
        self.digest = at.digest if at is not None else ""
        config, self._descriptors = formats.check_image(manifest)
        self.config = formats.verify(self._small(config), config, "the image's config")
        self.layers = tuple(Stored(name=item.digest, size=item.size) for item in self._descriptors)

    def _blob(self, digest: str) -> Path:
        return self._path / "blobs" / formats.check_digest(digest, "a blob").replace(":", "/")

    def _small(self, descriptor: Descriptor) -> bytes:
        return read_regular(self._blob(descriptor.digest), f"blob {descriptor.digest}", MAX_CONFIG_BYTES)

    def fetch(self, wanted: Sequence[int], progress: Progress) -> dict[int, int]:
        found = {}
        total = sum(self.layers[number].size for number in wanted)
        before = 0
        for number in wanted:
            descriptor = self._descriptors[number]
            what = f"layer {descriptor.digest}"
            count = functools.partial(_add, progress, "checking", total, before)
            found[number] = checked_blob(self._blob(descriptor.digest), descriptor, what, self._limits, count)
            self._held.callback(os.close, found[number])
            before += descriptor.size
        return found


def _add(progress: Progress, what: str, total: int, before: int, done: int) -> None:
    progress(what, before + done, total)


def _names(entry: Descriptor) -> set[str]:
    """What an entry of a layout's index is called: tags, as Docker and containerd write them too."""
    annotations = entry.annotations or {}
    found = {annotations[key] for key in (REF_NAME, CONTAINERD_NAME) if key in annotations}
    return found | {name.rpartition(":")[2] for name in found if ":" in name.rpartition("/")[2]}
