# SPDX-License-Identifier: Apache-2.0
"""A push as the worker does it: each layer becomes a blob of an OCI layout in the workspace, which skopeo copies to where it shall go.

Nothing in the image says when or where it was pushed: the same image has the same digest each time.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from opendsec.api.errors import Conflict, NotFound
from opendsec.images.layers import LayerRef
from opendsec.images.oci import export, settings
from opendsec.images.oci.jobs import Exported, Job
from opendsec.images.oci.manifest import OCI_CONFIG, OCI_LAYER_GZIP, OCI_MANIFEST, digest_of
from opendsec.images.oci.pulling import Step
from opendsec.images.oci.skopeo import Skopeo
from opendsec.images.oci.sources import REF_NAME, Progress
from opendsec.images.view import merged

_LEVEL = 6


def push(job: Job, step: Step, progress: Progress) -> None:
    """Raises errors of the contract, OSError for a full disk."""
    work, reference = Path(job.work), job.reference
    target = Path(reference.place)
    if reference.transport == "docker-archive" and target.exists():
        raise Conflict(f"there is a file already: {reference.place!r}", field="reference")
    if reference.on_this_machine and not target.parent.is_dir():
        raise NotFound(f"no directory {str(target.parent)!r}", field="reference")
    layout = work / "layout"
    (layout / "blobs" / "sha256").mkdir(parents=True)
    diff_ids, layers = [], []
    for number, layer in enumerate(job.layers, 1):
        step(f"packing layer {number} of {len(job.layers)}")
        diff_id, descriptor = _layer(layer, layout, progress)
        diff_ids.append(diff_id)
        layers.append(descriptor)
    config = settings.from_ours(job.config, diff_ids, [layer.digest for layer in job.layers])
    manifest = _Manifest(config=_blob(layout, config, OCI_CONFIG), layers=layers)
    index = _Index(manifests=[_blob(layout, msgspec.json.encode(manifest), OCI_MANIFEST, {REF_NAME: "image"})])
    (layout / "oci-layout").write_bytes(b'{"imageLayoutVersion":"1.0.0"}')
    (layout / "index.json").write_bytes(msgspec.json.encode(index))
    step("sending")
    skopeo = Skopeo(work, reference.place, token=job.token, tls_verify=job.tls_verify, stall_s=job.stall_s, retries=job.retries)
    skopeo.copy(f"oci:{layout}:image", _target(job), down=False, watched=None, progress=lambda done: None)


def _target(job: Job) -> str:
    reference = job.reference
    if reference.transport == "docker":
        return f"docker://{reference.place}/{reference.name}:{reference.tag or 'latest'}"
    if reference.transport == "oci":
        return f"oci:{reference.place}:{reference.tag or 'latest'}"
    name, _, tag = job.name.partition(":")
    return f"docker-archive:{reference.place}:{reference.name or name}:{reference.tag or tag or 'latest'}"


class _Descriptor(msgspec.Struct, kw_only=True, rename="camel", omit_defaults=True):
    media_type: str
    digest: str
    size: int
    annotations: dict[str, str] = {}


class _Manifest(msgspec.Struct, kw_only=True, rename="camel"):
    schema_version: int = 2
    media_type: str = OCI_MANIFEST
    config: _Descriptor
    layers: list[_Descriptor]


class _Index(msgspec.Struct, kw_only=True, rename="camel"):
    schema_version: int = 2
    manifests: list[_Descriptor]


def _blob(layout: Path, data: bytes, media_type: str, annotations: dict[str, str] | None = None) -> _Descriptor:
    digest = digest_of(data)
    (layout / "blobs" / digest.replace(":", "/")).write_bytes(data)
    return _Descriptor(media_type=media_type, digest=digest, size=len(data), annotations=annotations or {})


def _layer(layer: Exported, layout: Path, progress: Progress) -> tuple[str, _Descriptor]:
    """The diff_id and the blob of a layer."""
    total = os.stat(layer.data).st_size
    staged = layout / "blobs" / "sha256" / "staged"
    with open(staged, "wb") as file:
        packer = _Packer(file.write, lambda done: progress("packing", min(done, total), total))
        with merged([LayerRef(layer.digest, Path(layer.meta), Path(layer.data))]) as root:
            export.tar(root, packer.write)
        packer.finish()
    digest = f"sha256:{packer.digest.hexdigest()}"
    size = staged.stat().st_size
    os.rename(staged, layout / "blobs" / digest.replace(":", "/"))
    return f"sha256:{packer.diff_id.hexdigest()}", _Descriptor(media_type=OCI_LAYER_GZIP, digest=digest, size=size)


class _Packer:
    """gzip with neither a time nor a name in it, and the digests of both sides."""

    def __init__(self, sink: Callable[[bytes], object], progress: Callable[[int], None]) -> None:
        self._sink, self._progress = sink, progress
        self._gzip = zlib.compressobj(_LEVEL, zlib.DEFLATED, 31)
        self.digest, self.diff_id = hashlib.sha256(), hashlib.sha256()
        self._done = 0

    def write(self, data: bytes) -> None:
        self.diff_id.update(data)
        self._out(self._gzip.compress(data))
        self._done += len(data)
        self._progress(self._done)

    def finish(self) -> None:
        self._out(self._gzip.flush())

    def _out(self, data: bytes) -> None:
        self.digest.update(data)
        self._sink(data)
