# SPDX-License-Identifier: Apache-2.0
"""How images and layers are called, and the file names their references are kept under.

image    `debian`, `python:3.12`, `team/tools:2`            names an ordered list of layers and a config
layer    `workspace:astropy@4f2c`, `toolkit:harness@7`      names one digest; kind and version may be left out if clear
digest   `sha256:<64 hex digits>`                           the layer itself
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple
from urllib.parse import quote

from opendsec.api.errors import InvalidRequest
from opendsec.api.images import LayerKind

KINDS: tuple[LayerKind, ...] = ("base", "workspace", "toolkit")

# The same as a spec accepts (a test compares them): what can be named can be asked for.
_IMAGE = re.compile(r"[a-z0-9](?:[a-z0-9._/-]{0,126}[a-z0-9])?(?::[A-Za-z0-9._-]{1,64})?")
_LAYER_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._+/-]{0,126})")
_VERSION = re.compile(r"[A-Za-z0-9._+-]{1,64}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class LayerName(NamedTuple):
    """`kind:name@version`; None is a part that was left out."""

    kind: LayerKind | None
    name: str
    version: str | None

    def __str__(self) -> str:
        return (f"{self.kind}:" if self.kind else "") + self.name + (f"@{self.version}" if self.version else "")

    @property
    def complete(self) -> bool:
        return self.kind is not None and self.version is not None

    def matches(self, other: LayerName) -> bool:
        """Whether `other`, which is complete, is one that this may stand for."""
        return self.name == other.name and self.kind in (None, other.kind) and self.version in (None, other.version)


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def check_image_name(name: str, field: str) -> str:
    """`name` unchanged, or InvalidRequest."""
    if not _IMAGE.fullmatch(name):
        raise InvalidRequest(f"must be a name such as 'debian' or 'python:3.12' in lower case; got {name[:80]!r}", field=field)
    return name


def parse_layer_name(text: str, field: str) -> LayerName:
    """The parts of `[kind:]name[@version]`. Raises InvalidRequest."""
    kind_text, colon, rest = text.rpartition(":")
    kind = next((kind for kind in KINDS if kind == kind_text), None)
    name, at, version = rest.partition("@")
    if (colon and kind is None) or not _LAYER_NAME.fullmatch(name) or (at and not _VERSION.fullmatch(version)):
        raise InvalidRequest(
            f"must look like 'workspace:name@version', 'toolkit:name@version' or 'sha256:<64 hex digits>'; got {text[:80]!r}", field=field
        )
    return LayerName(kind, name, version if at else None)


def complete_layer_name(kind: LayerKind, name: str, version: str) -> LayerName:
    """The name of a layer just built. Raises InvalidRequest naming `name` or `version`. A tag of a base's name is its version."""
    if kind == "base":
        name, _, tag = check_image_name(name, "name").partition(":")
        version = tag or version
    if not _LAYER_NAME.fullmatch(name):
        raise InvalidRequest(
            f"must be at most 127 letters, digits or any of . _ + / -, a letter or digit first; got {name[:80]!r}", field="name"
        )
    if not _VERSION.fullmatch(version):
        raise InvalidRequest(f"must be 1 to 64 letters, digits or any of . _ + -; got {version[:80]!r}", field="version")
    return LayerName(kind, name, version)


def file_name(name: str) -> str:
    """A file name for the reference `name`: readable, at most 255 bytes, and different for different names."""
    return f"{quote(name, safe='')[:160]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
