# SPDX-License-Identifier: Apache-2.0
"""The tar codec, against the standard library's and against archives that are wrong on purpose."""

from __future__ import annotations

import io
import os
import tarfile
import threading
from pathlib import Path

import pytest

from opendsec.api.errors import InvalidRequest
from opendsec.runtime.files import tarball
from opendsec.runtime.files.tarball import Member, TarReader


def member(
    name: bytes = b"name",
    kind: tarball.MemberKind = "file",
    size: int = 0,
    mode: int = 0o644,
    uid: int = 0,
    gid: int = 0,
    mtime: int = 1_700_000_000,
    link: bytes = b"",
) -> Member:
    return Member(name, kind, size, mode, uid, gid, mtime, link)


def read(data: bytes, tmp_path: Path, *, content: bool = True) -> list[tuple[Member, bytes]]:
    """All members of a stream with their content."""
    source = tmp_path / "source"
    source.write_bytes(data)
    fd = os.open(source, os.O_RDONLY)
    found = []
    try:
        for item in (reader := TarReader(fd)):
            body = b""
            if content and item.size:
                target = os.open(tmp_path / "content", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
                try:
                    assert reader.content_to(target) == item.size
                    body = os.pread(target, item.size, 0)
                finally:
                    os.close(target)
            found.append((item, body))
    finally:
        os.close(fd)
    return found


def archive(*members: Member) -> bytes:
    return b"".join(tarball.header(item) + bytes(item.size) + tarball.padding(item.size) for item in members) + tarball.END_OF_ARCHIVE


ODD = [
    member(name=b"plain", size=3),
    member(name=b"d", kind="directory", mode=0o1777),
    member(name=b"link", kind="symlink", link=b"../../etc/passwd"),
    member(name=b"hard", kind="hard_link", link=b"plain"),
    member(name=b"fifo", kind="fifo", mode=0o600),
    member(name="ünïcode/名".encode(), size=512),
    member(name=b"not utf-8 \xff\xfe/\x80", kind="symlink", link=b"\xff to \xfe"),
    member(name=b"new\nline\ttab", size=1),
    member(name=b"x" * 255 + b"/" + b"y" * 255, size=1024),
    member(name=b"/".join([b"d"] * 5000), mode=0o6755),
    member(name=b"ids", uid=65_534, gid=3_000_000),
    member(name=b"old", mtime=-1_000_000),
    member(name=b"future", mtime=1 << 35),
]


@pytest.mark.parametrize("item", ODD, ids=lambda item: repr(item.name[:20]))
def test_what_is_written_is_read(item: Member, tmp_path: Path) -> None:
    assert read(archive(item), tmp_path) == [(item, bytes(item.size))]


def test_all_together(tmp_path: Path) -> None:
    assert [item for item, _ in read(archive(*ODD), tmp_path, content=False)] == ODD


@pytest.mark.parametrize("item", ODD, ids=lambda item: repr(item.name[:20]))
def test_the_standard_library_reads_what_is_written(item: Member) -> None:
    with tarfile.open(fileobj=io.BytesIO(archive(item)), encoding="utf-8", errors="surrogateescape") as tar:
        (info,) = tar.getmembers()
    assert os.fsencode(info.name) == item.name
    assert os.fsencode(info.linkname) == item.link
    assert (info.size, info.mode, info.uid, info.gid, info.mtime) == (item.size, item.mode, item.uid, item.gid, item.mtime)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_the_standard_library_writes_is_read(form: int, tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, encoding="utf-8") as tar:
        for name in ("a", "directory/" * 12 + "file", "ü"):
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = 700, 0o640, 1_700_000_000 if form == tarfile.USTAR_FORMAT else 1_700_000_000.25
            tar.addfile(info, io.BytesIO(name[0].encode() * 700))
        info = tarfile.TarInfo("s")
        info.type, info.linkname = tarfile.SYMTYPE, "t" * (90 if form == tarfile.USTAR_FORMAT else 300)
        tar.addfile(info)
    found = read(out.getvalue(), tmp_path)
    assert [(item.name, item.kind, item.size, item.mode, item.mtime) for item, _ in found[:3]] == [
        (b"a", "file", 700, 0o640, 1_700_000_000),
        (b"directory/" * 12 + b"file", "file", 700, 0o640, 1_700_000_000),
        ("ü".encode(), "file", 700, 0o640, 1_700_000_000),
    ]
    assert [body[:1] for _, body in found[:2]] == [b"a", b"d"]
    assert found[3][0].link == b"t" * (90 if form == tarfile.USTAR_FORMAT else 300)


def test_content_that_nobody_wanted_is_skipped(tmp_path: Path) -> None:
    items = [member(name=b"a", size=5000), member(name=b"b", size=1)]
    assert [item.name for item, _ in read(archive(*items), tmp_path, content=False)] == [b"a", b"b"]


def test_from_a_pipe(tmp_path: Path) -> None:
    """Where the content takes another way, past this process's memory."""
    reading, writing = os.pipe()
    target = os.open(tmp_path / "content", os.O_RDWR | os.O_CREAT)
    try:
        os.write(writing, tarball.header(member(size=10_000)) + b"c" * 10_000 + tarball.padding(10_000) + tarball.END_OF_ARCHIVE)
        os.close(writing)
        reader = TarReader(reading)
        for item in reader:
            assert reader.content_to(target) == item.size
        assert os.pread(target, 20_000, 0) == b"c" * 10_000
    finally:
        os.close(reading)
        os.close(target)


@pytest.mark.parametrize("zero_copy", [True, False])
def test_copying_waits_for_a_slow_reader(zero_copy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a pipe that does not block; also where the kernel cannot copy by itself."""
    if not zero_copy:

        def without(*_: object) -> int:
            raise OSError(22, "Invalid argument")

        monkeypatch.setattr(os, "sendfile", without)
    (tmp_path / "source").write_bytes(os.urandom(1 << 20))
    source = os.open(tmp_path / "source", os.O_RDONLY)
    reading, writing = os.pipe2(os.O_NONBLOCK)
    os.set_blocking(reading, True)
    received = bytearray()

    def consume() -> None:
        while data := os.read(reading, 1000):
            received.extend(data)

    thread = threading.Thread(target=consume)
    thread.start()
    try:
        assert tarball.copy(source, writing, 1000) == 1000
        assert tarball.copy(source, writing, 5 << 20) == (1 << 20) - 1000
        assert tarball.copy(source, writing, 1) == 0
        tarball.write_all(writing, bytes(1 << 18))
    finally:
        os.close(writing)
        thread.join()
        os.close(reading)
        os.close(source)
    assert received == (tmp_path / "source").read_bytes() + bytes(1 << 18)


@pytest.mark.parametrize("zero_copy", [True, False])
def test_reading_waits_for_a_slow_writer(zero_copy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not zero_copy:

        def without(*_: object) -> int:
            raise OSError(22, "Invalid argument")

        monkeypatch.setattr(os, "splice", without)
    reading, writing = os.pipe2(os.O_NONBLOCK)
    os.set_blocking(writing, True)
    data = archive(member(b"a", size=100_000), member(b"b", size=7))

    def produce() -> None:
        for at in range(0, len(data), 777):
            tarball.write_all(writing, data[at : at + 777])
        os.close(writing)

    thread = threading.Thread(target=produce)
    thread.start()
    target = os.open(tmp_path / "content", os.O_RDWR | os.O_CREAT)
    try:
        reader = TarReader(reading)
        assert [(item.name, reader.content_to(target)) for item in reader] == [(b"a", 100_000), (b"b", 7)]
    finally:
        thread.join()
        os.close(reading)
        os.close(target)


# --- wrong on purpose ----------------------------------------------------------------------------------------------


def checksummed(block: bytes) -> bytes:
    total = sum(block[:148]) + 8 * 32 + sum(block[156:512])
    return block[:148] + b"%06o\0 " % total + block[156:]


def patched(at: int, value: bytes, item: Member | None = None) -> bytes:
    block = tarball.header(item or member())
    return checksummed(block[:at] + value + block[at + len(value) :]) + tarball.END_OF_ARCHIVE


def pax(records: bytes) -> bytes:
    block = tarball.header(member(name=b"pax", size=len(records)))
    return checksummed(block[:156] + b"x" + block[157:]) + records + tarball.padding(len(records)) + archive(member())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"\x1f\x8b" + bytes(600), "gzip"),
        (b"PK\x03\x04" + bytes(600), "zip"),
        (b"hello" * 200, "not a tar stream"),
        (b"hello", "cut off"),
        (tarball.header(member(size=1000)), "cut off"),
        (tarball.header(member(size=1000)) + b"some", "cut off"),
        (archive(member())[:512] + b"\1" * 512, "damaged"),
        (archive(member()) + b"something else", "follows the end"),
        (patched(156, b"3"), "character device"),
        (patched(156, b"4"), "block device"),
        (patched(156, b"S"), "sparse"),
        (patched(156, b"M"), "multi-volume"),
        (patched(156, b"Q"), "unknown kind"),
        (patched(124, b"\xff" * 12), "makes no sense"),  # size -1
        (patched(124, b"\x80" + b"\x7f" * 11), "out of range"),
        (patched(124, b"12345678901\x00".replace(b"1", b"9")), "octal"),
        (pax(b"hello"), "pax header"),
        (pax(b"99 path=x\n"), "pax header"),
        (pax(b"0 path=x\n"), "pax header"),
        (pax(b"-5 path=x\n"), "pax header"),
        (pax(b"11 path=ab\n"), None),
        (pax(b"10 size=x\n"), "size is not a number"),
        (pax(b"11 size=-1\n"), "makes no sense"),
        (pax(b"12 uid=1e99\n"), "uid is not a number"),
        (pax(b"33 mtime=99999999999999999999999\n"), "mtime is not a number"),
        (pax(b"22 GNU.sparse.major=1\n"), "sparse"),
        (pax(b"13 path=a\0bc\n"), "makes no sense"),
        (pax(b"")[:512], "cut off"),
        (patched(156, b"L", member(size=7 << 30)), "extension header of"),
        (patched(156, b"x", member(size=2 << 20)), "extension header of"),
    ],
)
def test_refused(data: bytes, words: str | None, tmp_path: Path) -> None:
    if words is None:
        assert len(read(data, tmp_path)) == 1
        return
    with pytest.raises(InvalidRequest, match=words) as caught:
        read(data, tmp_path)
    assert caught.value.field == "body"
    caught.value.message.encode()  # valid Unicode, whatever the archive holds


def test_an_archive_of_nothing(tmp_path: Path) -> None:
    assert read(tarball.END_OF_ARCHIVE, tmp_path) == []
    assert read(bytes(10_240), tmp_path) == []


def test_no_end_blocks(tmp_path: Path) -> None:
    assert len(read(archive(member(size=10))[:-1024], tmp_path)) == 1


def test_git_archive(tmp_path: Path) -> None:
    """A global header comes first; nothing in it concerns us."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "f" * 40, "path": "all"}) as tar:
        tar.addfile(tarfile.TarInfo("a"))
    assert [item.name for item, _ in read(out.getvalue(), tmp_path)] == [b"a"]


def test_a_name_too_long(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no sense"):
        read(archive(member(name=b"a/" * 33_000)), tmp_path)
