# SPDX-License-Identifier: Apache-2.0
"""What an image from outside may be at most. All of it is decided by strangers, so all of it has a bound."""

from __future__ import annotations

import msgspec

MAX_MANIFEST_BYTES = 4 << 20  # as registries bound them
MAX_CONFIG_BYTES = 8 << 20
MAX_LAYERS = 127  # with one of the sandbox's own on top; as Docker
MAX_INDEX_DEPTH = 3  # an index of indexes of manifests


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one layer."""

    blob_bytes: int = 64 << 30  # as stored, compressed
    tar_bytes: int = 256 << 30  # decompressed
    file_bytes: int = 16 << 40  # of one file with its holes: a sparse /var/log/lastlog is honest
    entries: int = 4_000_000
    ratio: int = 200  # decompressed to compressed, once `ratio_from_bytes` have come out; tar of text gets 10, of zeros 1000
    ratio_from_bytes: int = 1 << 30
    metadata_bytes: int = 256 << 20  # of names, links and attributes together
    name_bytes: int = 255
    path_bytes: int = 4095
    link_bytes: int = 4095
    xattr_bytes: int = 60_000  # of one file, names with values
