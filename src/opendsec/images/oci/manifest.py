# SPDX-License-Identifier: Apache-2.0
"""Manifests, indexes and configs of OCI and Docker (schema 2), and the choice of a platform. Pure; all of it is a stranger's."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from opendsec.api.errors import InvalidRequest, NotFound, Unsupported
from opendsec.images.oci.limits import MAX_CONFIG_BYTES, MAX_LAYERS, MAX_MANIFEST_BYTES

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER_GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
_LAYERS = re.compile(
    r"application/vnd\.oci\.image\.layer\.v1\.tar(?:\+gzip|\+zstd)?|application/vnd\.docker\.image\.rootfs\.diff\.tar(?:\.gzip|\.zstd)?"
)
_FOREIGN = re.compile(
    r"application/vnd\.oci\.image\.layer\.nondistributable\.v1\.tar.*|application/vnd\.docker\.image\.rootfs\.foreign\.diff\.tar.*"
)
_DIGEST = re.compile(r"[a-z0-9]+(?:[+._-][a-z0-9]+)*:[0-9a-zA-Z=_-]{16,512}")
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "riscv64": "riscv64", "ppc64le": "ppc64le", "s390x": "s390x"}

T = TypeVar("T")


class Platform(msgspec.Struct, frozen=True, omit_defaults=True):
    architecture: str = ""
    os: str = ""
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(filter(None, (self.os or "?", self.architecture or "?", self.variant)))


class Descriptor(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    media_type: str = ""
    digest: str
    size: int
    urls: tuple[str, ...] | None = None
    annotations: dict[str, str] | None = None
    platform: Platform | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A manifest or an index: which one is said by what is there, as the media type is often left out."""

    schema_version: int = 0
    media_type: str | None = None
    config: Descriptor | None = None
    layers: tuple[Descriptor, ...] | None = None
    manifests: tuple[Descriptor, ...] | None = None


class ContainerConfig(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    user: str | None = None
    env: tuple[str, ...] | None = None
    working_dir: str | None = None
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None
    volumes: dict[str, msgspec.Raw] | None = None
    exposed_ports: dict[str, msgspec.Raw] | None = None
    healthcheck: msgspec.Raw = msgspec.Raw(b"null")
    stop_signal: str | None = None
    on_build: tuple[str, ...] | None = None
    shell: tuple[str, ...] | None = None


class RootFs(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "layers"
    diff_ids: tuple[str, ...] | None = None


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """An image's config. What is not here is not looked at."""

    architecture: str = ""
    os: str = ""
    variant: str = ""
    config: ContainerConfig | None = None
    rootfs: RootFs = RootFs()

    @property
    def platform(self) -> Platform:
        return Platform(self.architecture, self.os, self.variant)

    @property
    def diff_ids(self) -> tuple[str, ...]:
        return self.rootfs.diff_ids or ()


def decode(data: bytes, kind: type[T], what: str, *, limit: int = MAX_MANIFEST_BYTES) -> T:
    """Raises InvalidRequest."""
    if len(data) > limit:
        raise InvalidRequest(f"{what} is larger than {limit} bytes", field="reference")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{what} cannot be understood: {str(error)[:200]}", field="reference") from None


def check_digest(digest: str, what: str) -> str:
    """`digest` if it is one that we can check. Raises InvalidRequest, Unsupported."""
    if _SHA256.fullmatch(digest):
        return digest
    if _DIGEST.fullmatch(digest):
        raise Unsupported(f"{what} has a digest by {digest.partition(':')[0]}; known is sha256", field="reference")
    raise InvalidRequest(f"{what} has no proper digest: {digest[:80]!r}", field="reference")


def verify(data: bytes, descriptor: Descriptor, what: str) -> bytes:
    """`data` if it is what the descriptor says. Raises InvalidRequest."""
    check_digest(descriptor.digest, what)
    if len(data) != descriptor.size:
        raise InvalidRequest(f"{what} has {len(data)} bytes instead of {descriptor.size}", field="reference")
    if "sha256:" + hashlib.sha256(data).hexdigest() != descriptor.digest:
        raise InvalidRequest(f"{what} does not match its digest {descriptor.digest}", field="reference")
    return data


def parse_manifest(data: bytes) -> Manifest:
    """Raises InvalidRequest; Unsupported for Docker's schema 1."""
    manifest = decode(data, Manifest, "the manifest")
    if manifest.schema_version == 1:
        raise Unsupported("the image has a manifest of Docker's schema 1, which has no digests of what is in its layers", field="reference")
    if manifest.manifests is None and (manifest.config is None or manifest.layers is None):
        raise InvalidRequest("the manifest has neither layers and a config nor further manifests", field="reference")
    return manifest


def check_image(manifest: Manifest) -> tuple[Descriptor, tuple[Descriptor, ...]]:
    """Config and layers of a manifest that is no index. Raises InvalidRequest, Unsupported."""
    assert manifest.config is not None and manifest.layers is not None
    if len(manifest.layers) > MAX_LAYERS:
        raise InvalidRequest(f"the image has {len(manifest.layers)} layers, at most {MAX_LAYERS}", field="reference")
    for layer in manifest.layers:
        name = f"layer {layer.digest[:80]}"
        if _FOREIGN.fullmatch(layer.media_type) or layer.urls:
            raise Unsupported(f"{name} may not be distributed with its image: it lies elsewhere, and is not fetched", field="reference")
        if layer.media_type and not _LAYERS.fullmatch(layer.media_type):
            raise Unsupported(f"{name} is of media type {layer.media_type[:100]!r}, no file system layer that is known", field="reference")
        check_digest(layer.digest, name)
        if layer.size < 0:
            raise InvalidRequest(f"{name} has a negative size", field="reference")
    check_digest(manifest.config.digest, "the config")
    return manifest.config, manifest.layers


def parse_config(data: bytes, layers: int) -> Config:
    """Raises InvalidRequest, Unsupported."""
    config = decode(data, Config, "the image's config", limit=MAX_CONFIG_BYTES)
    if len(config.diff_ids) != layers:
        raise InvalidRequest(f"the image's config tells of {len(config.diff_ids)} layers, but it has {layers}", field="reference")
    for digest in config.diff_ids:
        check_digest(digest, "a layer")
    return config


def here() -> Platform:
    machine = os.uname().machine
    return Platform(_MACHINES.get(machine, machine), "linux")


def wanted(text: str) -> Platform:
    """`linux/amd64`, `linux/arm/v7`; "" = this machine's."""
    if not text:
        return here()
    system, _, rest = text.partition("/")
    architecture, _, variant = rest.partition("/")
    return Platform(architecture, system, variant)


def fits(found: Platform, want: Platform) -> bool:
    """An empty variant asked for takes any; arm64 has but one, v8."""
    variants = {found.variant, want.variant} - {""}
    same = not want.variant or found.variant == want.variant or (want.architecture == "arm64" and variants == {"v8"})
    return found.os == want.os and found.architecture == want.architecture and same


def choose(manifests: Sequence[Descriptor], want: Platform) -> Descriptor:
    """The first manifest of an index for a platform; one that says no platform may be an index of its own, or for anything.
    Raises NotFound listing what there is."""
    for descriptor in manifests:
        if descriptor.platform is not None and fits(descriptor.platform, want):
            return descriptor
    open_ones = [descriptor for descriptor in manifests if descriptor.platform is None]
    if open_ones:
        return open_ones[0]
    there = sorted({str(item.platform) for item in manifests if item.platform is not None and item.platform.os not in ("", "unknown")})
    raise NotFound(f"the image is not there for {want}; there is: {', '.join(there) or 'nothing'}", field="platform")


def check_platform(config: Config, want: Platform) -> None:
    """Raises NotFound."""
    if config.os and config.architecture and not fits(config.platform, Platform(want.architecture, want.os)):
        raise NotFound(f"the image is not there for {want}; there is: {config.platform}", field="platform")


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()
