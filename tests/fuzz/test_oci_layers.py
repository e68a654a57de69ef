# SPDX-License-Identifier: Apache-2.0
"""What strangers send as an image: layers, packings, manifests. The answer is a tree or a clear refusal, never another error."""

from __future__ import annotations

import io
import os
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.api.errors import CallerError
from opendsec.images.oci import decompress, settings
from opendsec.images.oci import manifest as formats
from opendsec.images.oci.erofs_image import Blob, write_metadata
from opendsec.images.oci.limits import Limits
from opendsec.images.oci.nodes import Below, LayerTree
from opendsec.images.oci.tarstream import BadLayer, TarStream
from tests.integration.oci.corpus import CASES
from tests.oci_layouts import archive, entry, packed

LIMITS = Limits(tar_bytes=1 << 20, file_bytes=1 << 24, entries=1000, metadata_bytes=1 << 20)
NAMES = st.sampled_from(
    (
        "a",
        "a/b",
        "a/b/c",
        "l",
        "l/x",
        ".wh.a",
        "a/.wh.b",
        "a/.wh..wh..opq",
        ".wh..wh..opq",
        "./",
        "a/",
        "l/.wh.x",
        "..",
        "/a",
        ".wh.",
        "b//c/.",
    )
)
KINDS = st.sampled_from((tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE))
LINKS = st.sampled_from(("a", "a/b", "..", "/", "l", "../../x", "/a/b", "b", "."))
ENTRIES = st.builds(
    lambda name, kind, link, content: entry(name, content if kind == tarfile.REGTYPE else b"", kind=kind, link=link),
    NAMES,
    KINDS,
    LINKS,
    st.binary(max_size=700),
)
BELOW = st.dictionaries(
    st.sampled_from((b"", b"a", b"a/b", b"l", b"b")),
    st.sampled_from((None, Below(), *(Below(link=link) for link in (b"a", b"b/c", b"", b"l", b"x/y")))),
)
MUTATIONS = st.lists(st.tuples(st.integers(0, 20_000), st.binary(min_size=1, max_size=12)), min_size=1, max_size=6)
LAYERS = sorted({layer for case in CASES.values() for layer in case.layers if len(layer) < 40_000})


def convert(layers: list[bytes], below: dict[bytes, Below | None]) -> None:
    """All that the confined child does."""
    data, meta = (os.memfd_create(name, os.MFD_CLOEXEC) for name in ("data", "meta"))
    try:
        tree, blob = LayerTree(LIMITS), Blob(data)
        try:
            for number, layer in enumerate(layers):
                if number:
                    tree.next_layer()
                stream = TarStream(io.BytesIO(layer).read, LIMITS)
                for item in stream:
                    inode = tree.add(item)
                    if inode is not None:
                        blob.store(inode, item.segments, stream.content())
            for _ in range(100):
                if not (questions := tree.questions()):
                    break
                tree.answer({question.path: below.get(question.path) for question in questions})
            else:
                pytest.fail("it never stops asking")
        except BadLayer as error:
            str(error).encode()
            return
        tree.finish()
        blob.flush()
        write_metadata(tree.root, meta, blob.blocks)
        assert os.fstat(data).st_size == blob.blocks * 4096
    finally:
        os.close(data)
        os.close(meta)


@given(st.lists(st.lists(ENTRIES, max_size=12), min_size=1, max_size=3), BELOW)
def test_entries_in_any_order(layers: list[list[tuple[tarfile.TarInfo, bytes]]], below: dict[bytes, Below | None]) -> None:
    convert([archive(*items) for items in layers], below)


@given(st.sampled_from(LAYERS), MUTATIONS)
def test_damaged_layers(layer: bytes, mutations: list[tuple[int, bytes]]) -> None:
    data = bytearray(layer)
    for at, value in mutations:
        at %= max(1, len(data))
        data[at : at + len(value)] = value
    for head in range(0, len(data) - 511, 512):  # so that damage gets past the checksum
        if data[head + 257 : head + 262] == b"ustar":
            data[head + 148 : head + 156] = b"%06o\0 " % (sum(data[head : head + 148]) + 8 * 32 + sum(data[head + 156 : head + 512]))
    convert([bytes(data)], {})


@given(st.binary(max_size=3000))
def test_noise(data: bytes) -> None:
    convert([data], {})


@given(st.sampled_from(("gzip", "zstd")), MUTATIONS)
def test_damaged_packings(pack: str, mutations: list[tuple[int, bytes]]) -> None:
    data = bytearray(packed(archive(entry("a", os.urandom(100) * 40)), pack))
    for at, value in mutations:
        at %= len(data)
        data[at : at + len(value)] = value
    fd = os.memfd_create("layer", os.MFD_CLOEXEC)
    try:
        os.write(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
        try:
            assert sum(len(piece) for piece in decompress.decompressed(fd)) < 1 << 24
        except BadLayer:
            pass
    finally:
        os.close(fd)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8), st.just("sha256:" + "0" * 64)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                (
                    "schemaVersion",
                    "config",
                    "layers",
                    "manifests",
                    "digest",
                    "size",
                    "mediaType",
                    "platform",
                    "os",
                    "Env",
                    "User",
                    "rootfs",
                    "diff_ids",
                )
            ),
            inner,
            max_size=5,
        ),
    ),
    max_leaves=20,
)


@given(JSON)
def test_manifests_and_configs(value: object) -> None:
    import json

    data = json.dumps(value).encode()
    try:
        manifest = formats.parse_manifest(data)
        if manifest.manifests is None:
            formats.check_image(manifest)
        else:
            formats.choose(manifest.manifests, formats.wanted(""))
    except CallerError as error:
        error.message.encode()
    try:
        settings.to_ours(formats.parse_config(data, 0))
    except CallerError as error:
        error.message.encode()
