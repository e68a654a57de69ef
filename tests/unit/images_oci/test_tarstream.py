# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import tarfile

import pytest

from opendsec.images.oci.limits import Limits
from opendsec.images.oci.tarstream import BadLayer, Entry, Segment, TarStream
from tests.integration.oci.corpus import gnu_sparse, header, padded, pax_sparse, pax_sparse_0_0, record
from tests.oci_layouts import archive, entry, folder


def read(data: bytes, limits: Limits | None = None) -> list[tuple[Entry, bytes]]:
    stream = TarStream(io.BytesIO(data).read, limits or Limits())
    return [(item, b"".join(stream.content())) for item in stream]


def test_plain() -> None:
    found = read(archive(entry("a", b"one", mode=0o4711, uid=5, gid=6, mtime=7), folder("d")))
    assert [item.name for item, _ in found] == [b"a", b"d/"]
    item, content = found[0]
    assert (item.kind, item.size, item.mode, item.uid, item.gid, item.mtime_ns) == ("file", 3, 0o4711, 5, 6, 7_000_000_000)
    assert content == b"one"


def test_content_that_nobody_takes_is_skipped() -> None:
    stream = TarStream(io.BytesIO(archive(entry("a", b"x" * 5000), entry("b", b"y"))).read, Limits())
    assert [item.name for item in stream] == [b"a", b"b"]


def test_short_reads() -> None:
    source = io.BytesIO(archive(entry("a", b"x" * 5000), entry("b", b"y", pax={"SCHILY.xattr.user.k": "v"})))
    stream = TarStream(lambda count: source.read(min(count, 7)), Limits())
    assert [(item.name, len(b"".join(stream.content())), item.xattrs) for item in stream] == [
        (b"a", 5000, {}),
        (b"b", 1, {b"user.k": b"v"}),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1.5", 1_500_000_000), ("-1.5", -1_500_000_000), ("-3", -3_000_000_000), ("0.123456789123", 123_456_789), ("5.", 5_000_000_000)],
)
def test_times(text: str, expected: int) -> None:
    assert read(archive(entry("a", pax={"mtime": text})))[0][0].mtime_ns == expected


@pytest.mark.parametrize(
    "data",
    [archive(gnu_sparse()), pax_sparse_0_0(), archive(pax_sparse("0.1")), archive(pax_sparse("1.0"))],
    ids=["gnu", "0.0", "0.1", "1.0"],
)
def test_sparse(data: bytes) -> None:
    [(item, content)] = read(data)
    assert item.name == b"sparse"
    assert item.segments is not None
    assert sum(segment.length for segment in item.segments) == len(content)
    assert item.size in (2 << 20, 3 << 20)


def test_segments() -> None:
    assert read(pax_sparse_0_0())[0][0].segments == (Segment(4096, 1000), Segment(1 << 20, 24))


def sparse(text: str, size: str = "1000", content: bytes = b"x" * 10) -> bytes:
    return archive(entry("f", content, pax={"GNU.sparse.size": size, "GNU.sparse.numblocks": "1", "GNU.sparse.map": text}))


@pytest.mark.parametrize(
    "data",
    [
        sparse("0,5"),  # fewer bytes than there are
        sparse("0,20"),
        sparse("995,10"),  # beyond the end
        sparse("5,5,0,5"),  # backwards
        sparse("0,7,5,3"),  # one over the other
        sparse("0"),
        sparse("a,b"),
        sparse("0,10", size="-1"),
        archive(entry("f", b"9" * 512, pax={"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "10"})),
        archive(entry("f", padded(b"2\n0\n1\n"), pax={"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "10"})),
    ],
)
def test_sparse_maps_that_make_no_sense(data: bytes) -> None:
    with pytest.raises(BadLayer, match="sparse file whose map"):
        read(data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"x" * 1024, "no tar archive"),
        (archive(entry("a", b"x" * 600), end=False)[:900], "cut off in the content"),
        (archive(entry("a", b"x"))[:100], "cut off"),
        (bytes(header(b"x", b"L", 2 << 20)), "extension header of"),
        (bytes(header(b"x", b"x", 10)) + padded(b"nonsense!!"), "pax header that makes no sense"),
        (bytes(header(b"x", b"x", len(record("mtime", "1")))) + padded(record("mtime", "1")), "cut off after an extension header"),
        (archive(entry("a", pax={"mtime": "soon"})), "mtime is not a number"),
        (archive(entry("a", pax={"uid": "root"})), "uid is not a number"),
        (archive(entry("a", pax={"size": "-5"})), "negative size"),
        (bytes(header(b"a", b"0", 0, _100=b"9999999\0")), "not octal"),
        (archive(entry("a", kind=b"V")), "unknown kind"),
        (archive(entry("a", pax={"path": "a\0b"})), "NUL"),
        (archive(entry("a", kind=tarfile.SYMTYPE, link="x" * 5000)), "link of more than"),
    ],
)
def test_refused(data: bytes, said: str) -> None:
    with pytest.raises(BadLayer, match=said):
        read(data)


def test_an_archive_may_end_without_end_blocks() -> None:
    assert len(read(archive(entry("a"), end=False))) == 1
    assert read(b"") == []


def test_what_follows_the_end_is_read_and_ignored() -> None:
    source = io.BytesIO(archive(entry("a")) + b"rubbish" * 10_000)
    assert len(list(TarStream(source.read, Limits()))) == 1
    assert source.read() == b""
