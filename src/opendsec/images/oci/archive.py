# SPDX-License-Identifier: Apache-2.0
"""`docker-archive:/PATH[:NAME[:TAG]]`: a tar file as `docker save` writes it, old form and new, packed or not.

Its members are copied into files of ours that are named by numbers, so no name of the archive is ever a path. `manifest.json`, which
may be the last member, says which of them are what; links between members (old versions wrote equal layers once) are followed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
from collections.abc import Sequence
from pathlib import Path

import msgspec

from opendsec.api.errors import InvalidRequest, NotFound
from opendsec.images.oci import convert
from opendsec.images.oci import manifest as formats
from opendsec.images.oci.limits import MAX_CONFIG_BYTES, MAX_LAYERS, MAX_MANIFEST_BYTES, Limits
from opendsec.images.oci.sources import Progress, Stored, open_regular
from opendsec.images.oci.tarstream import BadLayer, TarStream, shown

_MAX_MEMBERS = 100_000
_MAX_LINKS = 8


class _Image(msgspec.Struct, rename="pascal", kw_only=True):
    config: str
    repo_tags: tuple[str, ...] | None = None
    layers: tuple[str, ...]


class Archive:
    def __init__(self, path: Path, name: str, tag: str, work: Path, limits: Limits, held: contextlib.ExitStack, progress: Progress) -> None:
        self._work, self._limits, self._held = work / "members", limits, held
        self._work.mkdir()
        self._files: dict[str, Path] = {}
        self._links: dict[str, str] = {}
        self.digest = ""
        source = open_regular(path, "the archive")
        held.callback(os.close, source)
        self._read(source, progress)
        images = formats.decode(self._small("manifest.json", MAX_MANIFEST_BYTES), tuple[_Image, ...], "manifest.json of the archive")
        image = _select(images, f"{name}:{tag}" if tag else name)
        self.config = self._small(image.config, MAX_CONFIG_BYTES)
        _check_name(image.config, self.config)
        if len(image.layers) > MAX_LAYERS:
            raise InvalidRequest(f"the image has {len(image.layers)} layers, at most {MAX_LAYERS}", field="reference")
        self._paths = [self._member(layer) for layer in image.layers]
        self.layers = tuple(
            Stored(name=layer[:200], size=path.stat().st_size) for layer, path in zip(image.layers, self._paths, strict=True)
        )

    def fetch(self, wanted: Sequence[int], progress: Progress) -> dict[int, int]:
        found = {}
        for number in wanted:
            found[number] = os.open(self._paths[number], os.O_RDONLY | os.O_CLOEXEC)
            self._held.callback(os.close, found[number])
        return found

    def _read(self, source: int, progress: Progress) -> None:
        total = os.fstat(source).st_size
        with convert.unpacked(source, "the archive", total, self._limits) as read:
            stream = TarStream(read, self._limits)
            try:
                for number, entry in enumerate(stream):
                    if number >= _MAX_MEMBERS:
                        raise InvalidRequest(f"the archive has more than {_MAX_MEMBERS} members", field="reference")
                    name = _normal(entry.name)
                    if entry.kind in ("symlink", "hard_link"):
                        base = posixpath.dirname(name) if entry.kind == "symlink" else ""
                        self._links[name] = _normal(os.fsencode(posixpath.join(base, os.fsdecode(entry.link))))
                    elif entry.kind == "file":
                        if entry.segments is not None:
                            raise InvalidRequest(f"the archive has a sparse member: {shown(entry.name)}", field="reference")
                        path = self._work / str(number)
                        with open(path, "xb") as file:
                            for piece in stream.content():
                                file.write(piece)
                                progress("reading the archive", os.lseek(source, 0, os.SEEK_CUR), total)
                        self._files[name] = path
                        self._links.pop(name, None)
            except BadLayer as error:
                raise InvalidRequest(f"the archive {error}", field="reference") from None

    def _member(self, name: str) -> Path:
        at = _normal(os.fsencode(name))
        for _ in range(_MAX_LINKS):
            if at in self._files:
                return self._files[at]
            if at not in self._links:
                break
            at = self._links[at]
        raise InvalidRequest(f"the archive has no {name[:200]!r}: it is not what `docker save` writes", field="reference")

    def _small(self, name: str, limit: int) -> bytes:
        with open(self._member(name), "rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise InvalidRequest(f"{name[:200]!r} of the archive is larger than {limit} bytes", field="reference")
        return data


def _normal(name: bytes) -> str:
    return posixpath.normpath("/" + os.fsdecode(name)).lstrip("/")


def _select(images: tuple[_Image, ...], wanted: str) -> _Image:
    tags = sorted({tag for image in images for tag in image.repo_tags or ()})
    if not wanted:
        if len(images) == 1:
            return images[0]
        raise InvalidRequest(f"there are several images: say which of {', '.join(tags)[:500]}", field="reference")
    known = (wanted, f"{wanted}:latest")
    for image in images:
        if set(known) & set(image.repo_tags or ()):
            return image
    # Who wrote the archive may have put a host before the name, and a directory that people leave out.
    ends = tuple(f"/{name}" for name in known)
    fitting = [image for image in images if any(tag.endswith(ends) for tag in image.repo_tags or ())]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        several = ", ".join(tag for tag in tags if tag.endswith(ends))
        raise InvalidRequest(f"{wanted!r} may be several images: say which of {several[:500]}", field="reference")
    raise NotFound(f"no image is called {wanted!r}; there is: {', '.join(tags)[:500] or 'no name'}", field="reference")


def _check_name(name: str, config: bytes) -> None:
    """A config is called by its digest, in both forms of the archive."""
    digest = posixpath.basename(name).removesuffix(".json")
    if len(digest) == 64 and not digest.strip("0123456789abcdef") and hashlib.sha256(config).hexdigest() != digest:
        raise InvalidRequest("the image's config does not match the digest that it is called by", field="reference")
