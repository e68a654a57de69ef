# SPDX-License-Identifier: Apache-2.0
"""Packing a tree with mkfs.erofs, metadata apart from data.

Only options that erofs-utils 1.5 and its successors share. With a fixed time and UUID the same tree packs to the same bytes.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from opendsec.api.errors import Internal, Unavailable
from opendsec.images import tree
from opendsec.images.layers import DATA, META, LayerRef
from opendsec.images.view import merged

TIMESTAMP = 946_684_800
"""2000-01-01: the modification time of everything in a layer. Older than anything made later; not before 1980, which zip cannot hold."""

CHUNK_BYTES = 4096


def pack(source: Path, out: Path, *, all_root: bool) -> None:
    """Write `meta.erofs` and `data.blob` of the tree at `source` into the directory `out`. Raises Unavailable (no mkfs.erofs, no
    space), Internal with what it said."""
    command = [
        "mkfs.erofs",
        "--quiet",
        f"-T{TIMESTAMP}",
        "-U00000000-0000-0000-0000-000000000000",
        *(["--all-root"] if all_root else []),
        f"--chunksize={CHUNK_BYTES}",
        f"--blobdev={out / DATA}",
        os.fspath(out / META),
        os.fspath(source),
    ]
    (out / DATA).touch()  # some versions open it without creating it
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            close_fds=False,  # it too holds the workspace: see `ImageStore.workspace`
            check=False,
        )
    except FileNotFoundError:
        raise Unavailable("mkfs.erofs is not installed (Debian package erofs-utils)") from None
    if done.returncode != 0:
        said = done.stdout[-2000:].decode(errors="replace").strip()
        if "No space left" in said:
            raise Unavailable("no space left to pack the layer")
        raise Internal(f"mkfs.erofs failed with status {done.returncode}: {said}")


def digest(directory: Path, progress: Callable[[int], None] = lambda done: None, *, times: bool = False) -> tree.TreeDigest:
    """The digest of a packed layer, from the tree as mounted (attached nowhere)."""
    with merged([LayerRef("", directory / META, directory / DATA)]) as root:
        return tree.digest(root, times=times, progress=progress)
