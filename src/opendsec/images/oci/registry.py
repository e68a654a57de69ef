# SPDX-License-Identifier: Apache-2.0
"""`docker://HOST/NAME[:TAG | @DIGEST]`.

Manifest and config come first, as the registry has them, and are pinned by digest. So it is known which layers are wanted before any
is fetched; skopeo copies into an OCI layout in which the others lie already: sparse files of their names and sizes, which it takes
for the blobs.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from pathlib import Path

from opendsec.api.errors import InvalidRequest, NotFound
from opendsec.api.references import Reference
from opendsec.images.oci import manifest as formats
from opendsec.images.oci.limits import Limits
from opendsec.images.oci.manifest import Descriptor, Platform
from opendsec.images.oci.skopeo import Skopeo
from opendsec.images.oci.sources import Progress, Stored, _add, checked_blob, descend

_PLAIN = (".tar", ".diff.tar")


class Registry:
    def __init__(
        self, reference: Reference, want: Platform, skopeo: Skopeo, work: Path, limits: Limits, held: contextlib.ExitStack
    ) -> None:
        self._skopeo, self._work, self._limits, self._held = skopeo, work, limits, held
        self._repository = f"docker://{reference.place}/{reference.name}"
        end = f"@{reference.digest}" if reference.digest else f":{reference.tag or 'latest'}"
        data = skopeo.inspect(self._repository + end, config=False)
        first = formats.parse_manifest(data)
        self.digest = formats.digest_of(data)
        if reference.digest and self.digest != reference.digest:
            raise InvalidRequest("the registry sent another manifest than the one of this digest", field="reference")
        manifest, at = descend(first, want, self._manifest)
        self.digest = at.digest if at is not None else self.digest
        config, self._descriptors = formats.check_image(manifest)
        self.config = formats.verify(skopeo.inspect(f"{self._repository}@{self.digest}", config=True), config, "the image's config")
        self.layers = tuple(Stored(name=item.digest, size=item.size) for item in self._descriptors)

    def _manifest(self, descriptor: Descriptor) -> bytes:
        return self._skopeo.inspect(f"{self._repository}@{formats.check_digest(descriptor.digest, 'a manifest')}", config=False)

    def fetch(self, wanted: Sequence[int], progress: Progress) -> dict[int, int]:
        if not wanted:
            return {}
        total = sum(self.layers[number].size for number in wanted)
        for number in wanted:
            if self.layers[number].size > self._limits.blob_bytes:
                raise InvalidRequest(f"layer {self.layers[number].name} is larger than {self._limits.blob_bytes} bytes", field="reference")
        # To an OCI layout skopeo would pack what is not packed, and then nothing has the digest that it should have.
        plain = any(item.media_type.endswith(_PLAIN) for item in self._descriptors)
        folder = self._work / "registry"
        folder.mkdir()
        blobs = folder if plain else folder / "blobs" / "sha256"
        if not plain:
            self._pretend(blobs, wanted)
        target = f"dir:{folder}" if plain else f"oci:{folder}:image"
        watch = functools.partial(_at_most, progress, total)
        self._skopeo.copy(f"{self._repository}@{self.digest}", target, down=True, watched=folder, progress=watch)
        found: dict[int, int] = {}
        before = 0
        for number in wanted:
            item = self._descriptors[number]
            count = functools.partial(_add, progress, "checking", total, before)
            try:
                found[number] = checked_blob(blobs / item.digest.partition(":")[2], item, f"layer {item.digest}", self._limits, count)
            except NotFound:
                raise InvalidRequest(f"skopeo did not bring layer {item.digest}", field="reference") from None
            self._held.callback(os.close, found[number])
            before += item.size
        return found

    def _pretend(self, blobs: Path, wanted: Sequence[int]) -> None:
        blobs.mkdir(parents=True)
        needed = {self._descriptors[number].digest for number in wanted}
        for item in self._descriptors:
            if item.digest not in needed:
                with open(blobs / item.digest.partition(":")[2], "wb") as file:
                    file.truncate(item.size)


def _at_most(progress: Progress, total: int, done: int) -> None:
    progress("fetching", min(done, total), total)
