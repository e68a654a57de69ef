# SPDX-License-Identifier: Apache-2.0
"""OCI layouts and docker-archives written by hand, so that they can be wrong in every way."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zstandard

from opendsec.images.oci.manifest import here

MEDIA = {
    "gzip": "application/vnd.oci.image.layer.v1.tar+gzip",
    "zstd": "application/vnd.oci.image.layer.v1.tar+zstd",
    "none": "application/vnd.oci.image.layer.v1.tar",
}
HERE = here()


def entry(
    name: str,
    content: bytes = b"",
    *,
    kind: bytes = tarfile.REGTYPE,
    mode: int = 0o644,
    uid: int = 0,
    gid: int = 0,
    mtime: float = 1_600_000_000,
    link: str = "",
    pax: Mapping[str, str] | None = None,
    device: tuple[int, int] = (0, 0),
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mode, info.uid, info.gid, info.mtime = kind, len(content), mode, uid, gid, mtime
    info.linkname = link
    info.devmajor, info.devminor = device
    info.pax_headers = dict(pax or {})
    return info, content


def folder(name: str, mode: int = 0o755, **more: object) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, kind=tarfile.DIRTYPE, mode=mode, **more)  # type: ignore[arg-type]


def symlink(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, kind=tarfile.SYMTYPE, mode=0o777, link=target)


def hard_link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, kind=tarfile.LNKTYPE, link=target)


def archive(*entries: tuple[tarfile.TarInfo, bytes] | bytes, end: bool = True) -> bytes:
    """A tar of entries; bytes are put in as they are."""
    out = io.BytesIO()
    for item in entries:
        if isinstance(item, bytes):
            out.write(item)
            continue
        info, content = item
        out.write(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
        out.write(content + bytes(-len(content) % 512))
    if end:
        out.write(bytes(1024))
    return out.getvalue()


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def packed(data: bytes, how: str) -> bytes:
    if how == "gzip":
        return gzip.compress(data, mtime=0)
    return zstandard.ZstdCompressor().compress(data) if how == "zstd" else data


@dataclass
class Image:
    """An image to be written down. Whatever is to be wrong is changed in the middle of it."""

    layers: Sequence[bytes] = ()  # tars
    pack: str = "gzip"
    config: dict[str, object] = field(default_factory=dict)
    architecture: str = HERE.architecture
    variant: str = ""
    docker: bool = False  # media types of Docker's schema 2
    diff_ids: Sequence[str] | None = None

    def config_bytes(self) -> bytes:
        return json.dumps(
            {
                "architecture": self.architecture,
                "os": "linux",
                **({"variant": self.variant} if self.variant else {}),
                "config": self.config,
                "rootfs": {"type": "layers", "diff_ids": list(self.diff_ids or [sha256(layer) for layer in self.layers])},
                "history": [{"created_by": "test"} for _ in self.layers],
            }
        ).encode()


class Layout:
    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self.index: list[dict[str, object]] = []
        self.write_index()

    def blob(self, data: bytes, media: str, **more: object) -> dict[str, object]:
        digest = sha256(data)
        (self.path / "blobs" / digest.replace(":", "/")).write_bytes(data)
        return {"mediaType": media, "digest": digest, "size": len(data), **more}

    def file(self, digest: str) -> Path:
        return self.path / "blobs" / digest.replace(":", "/")

    def manifest(self, image: Image, **more: object) -> dict[str, object]:
        """The descriptor of an image's manifest."""
        kind = "application/vnd.docker.distribution.manifest.v2+json" if image.docker else "application/vnd.oci.image.manifest.v1+json"
        layer = "application/vnd.docker.image.rootfs.diff.tar.gzip" if image.docker else MEDIA[image.pack]
        config = "application/vnd.docker.container.image.v1+json" if image.docker else "application/vnd.oci.image.config.v1+json"
        body = {
            "schemaVersion": 2,
            "mediaType": kind,
            "config": self.blob(image.config_bytes(), config),
            "layers": [self.blob(packed(data, image.pack), layer) for data in image.layers],
        }
        platform = {"architecture": image.architecture, "os": "linux", **({"variant": image.variant} if image.variant else {})}
        return self.blob(json.dumps(body).encode(), kind, platform=platform, **more)

    def nested(self, manifests: Sequence[dict[str, object]], **more: object) -> dict[str, object]:
        body = {"schemaVersion": 2, "manifests": list(manifests)}
        return self.blob(json.dumps(body).encode(), "application/vnd.oci.image.index.v1+json", **more)

    def add(self, descriptor: dict[str, object], tag: str = "") -> None:
        if tag:
            descriptor = {**descriptor, "annotations": {"org.opencontainers.image.ref.name": tag}}
        self.index.append(descriptor)
        self.write_index()

    def write_index(self) -> None:
        (self.path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": self.index}))


def layout(path: Path, *layers: bytes, tag: str = "latest", pack: str = "gzip", config: dict[str, object] | None = None) -> Layout:
    """A layout of one image."""
    made = Layout(path)
    made.add(made.manifest(Image(layers=layers, pack=pack, config=config or {})), tag)
    return made


def docker_archive(path: Path, image: Image, *, tags: Sequence[str] = ("demo:latest",), linked: bool = False) -> Path:
    """As old versions of `docker save` wrote them; `linked`: equal layers as symlinks to the first."""
    config = image.config_bytes()
    name = sha256(config)[7:] + ".json"
    entries: list[tuple[tarfile.TarInfo, bytes]] = [entry(name, config)]
    names: list[str] = []
    first: dict[bytes, str] = {}
    for number, layer in enumerate(image.layers):
        names.append(f"{number:064x}/layer.tar")
        entries.append(folder(f"{number:064x}"))
        if linked and layer in first:
            entries.append(symlink(names[-1], "../" + first[layer]))
        else:
            entries.append(entry(names[-1], layer))
            first.setdefault(layer, names[-1])
    entries.append(entry("manifest.json", json.dumps([{"Config": name, "RepoTags": list(tags), "Layers": names}]).encode()))
    path.write_bytes(archive(*entries))
    return path
