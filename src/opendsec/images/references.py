# SPDX-License-Identifier: Apache-2.0
"""Names that point into the store: `refs/images/` and `refs/layers/`, one record a name, each replaced at once or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from opendsec.api.errors import Internal, InvalidRequest, NotFound
from opendsec.api.images import ImageConfig
from opendsec.images import names, records
from opendsec.images.names import LayerName
from opendsec.images.records import Damaged

_IMAGE_MAGIC, _LAYER_MAGIC, _VERSION = "opendsec-image", "opendsec-layer-name", 1

R = TypeVar("R", "ImageRef", "LayerNameRef")


class ImageRef(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    layers: tuple[str, ...]  # digests, lowest first
    config: ImageConfig
    created_at: float
    notes: tuple[str, ...] = ()  # what was left out when it came in
    source: str = ""  # where it came from, without credentials


class LayerNameRef(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # `kind:name@version`
    digest: str
    created_at: float


class References:
    """The caller holds the store's lock where it matters."""

    def __init__(self, root: Path, temporary: Path) -> None:
        self._images, self._layers, self._temporary = root / "images", root / "layers", temporary

    def prepare(self) -> None:
        for folder in (self._images, self._layers):
            folder.mkdir(parents=True, exist_ok=True)

    def write_image(self, ref: ImageRef) -> None:
        records.write(self._images / names.file_name(ref.name), _IMAGE_MAGIC, _VERSION, ref, temporary=self._temporary)

    def write_layer(self, ref: LayerNameRef) -> None:
        records.write(self._layers / names.file_name(ref.name), _LAYER_MAGIC, _VERSION, ref, temporary=self._temporary)

    def image(self, name: str, field: str) -> ImageRef:
        """Raises InvalidRequest or NotFound with that field, Internal if the reference is damaged."""
        names.check_image_name(name, field)
        try:
            return records.read(self._images / names.file_name(name), _IMAGE_MAGIC, _VERSION, ImageRef)
        except FileNotFoundError:
            known = sorted(ref.name for ref in self.images())
            there = "images here: " + ", ".join(known[:8]) + ("…" if len(known) > 8 else "") if known else "there are none yet"
            raise NotFound(f"no image {name!r}; {there}", field=field, data={"image": name}) from None
        except Damaged as error:
            raise Internal(f"the reference of image {name!r} is damaged: {error}") from None

    def layer(self, text: str, field: str) -> str:
        """The digest that `[kind:]name[@version]` means. Raises InvalidRequest if it could mean several, NotFound, Internal."""
        wanted = names.parse_layer_name(text, field)
        if wanted.complete:  # the common case, and the one that does not grow with the number of names
            try:
                return records.read(self._layers / names.file_name(str(wanted)), _LAYER_MAGIC, _VERSION, LayerNameRef).digest
            except FileNotFoundError:
                pass
            except Damaged as error:
                raise Internal(f"the reference of layer {text!r} is damaged: {error}") from None
        index = self.layers()
        found = {str(name): digest for name, digest in index.items() if wanted.matches(name)}
        if not found:
            alike = sorted(str(name) for name in index if name.name == wanted.name)
            hint = f"; there is {', '.join(alike[:8])}" if alike else ""
            raise NotFound(f"no layer {text!r}{hint}", field=field, data={"layer": text})
        if len(set(found.values())) > 1:
            raise InvalidRequest(f"{text!r} could be any of {', '.join(sorted(found)[:8])}: say which", field=field)
        return next(iter(found.values()))

    def images(self) -> Iterator[ImageRef]:
        """All that can be read."""
        return _readable(self._images, _IMAGE_MAGIC, ImageRef)

    def layers(self) -> dict[LayerName, str]:
        """Complete name → digest, all that can be read."""
        return {names.parse_layer_name(ref.name, "name"): ref.digest for ref in _readable(self._layers, _LAYER_MAGIC, LayerNameRef)}

    def names_of(self, digest: str) -> tuple[str, ...]:
        return tuple(sorted(str(name) for name, points_to in self.layers().items() if points_to == digest))

    def remove(self, name: str) -> bool:
        """Forget an image's name or a layer's complete name; False if there is none."""
        candidates = [self._images / names.file_name(name)]
        try:
            candidates.append(self._layers / names.file_name(str(names.parse_layer_name(name, "name"))))
        except InvalidRequest:
            pass  # it can only be an image's
        for path in candidates:
            try:
                path.unlink()
            except FileNotFoundError:
                continue
            records.sync_directory(path.parent)
            return True
        return False

    def unreadable(self) -> Iterator[str]:
        """What is wrong with each reference that cannot be read."""
        yield from _problems(self._images, _IMAGE_MAGIC, ImageRef)
        yield from _problems(self._layers, _LAYER_MAGIC, LayerNameRef)


def _readable(folder: Path, magic: str, kind: type[R]) -> Iterator[R]:
    for path in _entries(folder):
        try:
            ref = records.read(path, magic, _VERSION, kind)
        except (Damaged, FileNotFoundError):
            continue  # FileNotFoundError: removed since the listing
        if names.file_name(ref.name) == path.name:
            yield ref


def _problems(folder: Path, magic: str, kind: type[R]) -> Iterator[str]:
    for path in _entries(folder):
        try:
            ref = records.read(path, magic, _VERSION, kind)
        except FileNotFoundError:
            continue
        except Damaged as error:
            yield str(error)
        else:
            if names.file_name(ref.name) != path.name:
                yield f"{path.name} is the reference of {ref.name!r}"


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
