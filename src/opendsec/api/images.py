# SPDX-License-Identifier: Apache-2.0
"""Images and layers as the edge shows them, and how to ask for one to be built."""

from __future__ import annotations

from typing import Literal

import msgspec

LayerKind = Literal["base", "workspace", "toolkit"]


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What commands inherit: environment, user, working directory, entry point."""

    env: dict[str, str] = {}
    user: str = "root"
    workdir: str = "/"
    entrypoint: tuple[str, ...] = ()


class LayerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A layer: an immutable tree addressed by its digest."""

    digest: str  # sha256:<64 hex digits>
    kind: LayerKind
    names: tuple[str, ...] = ()  # `kind:name@version`
    meta_bytes: int
    data_bytes: int
    created_at: float


class ImageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An image: ordered layers and a config."""

    name: str
    layers: tuple[str, ...]  # digests, lowest first
    config: ImageConfig
    size_bytes: int
    created_at: float


class ImageList(msgspec.Struct, frozen=True):
    images: tuple[ImageInfo, ...]
    layers: tuple[LayerInfo, ...]


class DirectorySource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="directory"):
    """A directory of the edge's machine. Accepted only over the unix socket."""

    path: str
    prefix: str = "/"  # where in the sandbox its content appears
    owner: Literal["root", "keep"] = "root"


class DebianSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="debian"):
    """A Debian suite, by mmdebstrap with the machine's own apt sources."""

    suite: str = ""  # "" = the machine's own
    packages: tuple[str, ...] = ()
    variant: Literal["essential", "minbase", "apt"] = "minbase"


class BuildRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Build one layer. `kind` "base": an image `name` is made of it. Otherwise the layer is named `kind:name@version`."""

    name: str
    source: DirectorySource | DebianSource
    kind: LayerKind = "base"
    version: str = "1"
    config: ImageConfig = ImageConfig()
    exclude: tuple[str, ...] = ()  # shell patterns on paths relative to the source


class ComposeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Name an ordered list of existing layers as an image."""

    name: str
    base: str  # an image
    layers: tuple[str, ...]
    config: ImageConfig | None = None  # None = the base's


class BuildEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a build's progress; the last is `done` or `failed`."""

    kind: Literal["step", "progress", "log", "done", "failed"]
    message: str = ""
    done: int = 0
    total: int = 0
    image: ImageInfo | None = None
    layer: LayerInfo | None = None


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What a garbage collection removed, or would remove."""

    digests: tuple[str, ...]
    freed_bytes: int
    dry_run: bool
