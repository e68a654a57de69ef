# SPDX-License-Identifier: Apache-2.0
"""Trees to and from tar streams; what comes out of a sandbox is hostile."""

from __future__ import annotations

import io
import os
import socket
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from opendsec.api.errors import Internal, InvalidRequest
from opendsec.client import transfer


async def stream(data: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode = kind, link, mode
    return made


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


async def test_a_tree_makes_the_round_trip(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "a" / "empty").mkdir(parents=True)
    (source / "a" / "run").write_bytes(os.urandom(700_000))
    (source / "a" / "run").chmod(0o755)
    (source / "a" / "same").hardlink_to(source / "a" / "run")
    (source / "link").symlink_to("a/run")
    (source / "a" / "up").symlink_to("../a/run")
    Path(os.fsdecode(os.fsencode(source) + b"/caf\xe9")).write_bytes(b"x")
    os.mkfifo(source / "fifo")
    (source / "a" / "out").symlink_to("/etc/passwd")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(source / "a" / "socket"))
    behind: list[str] = []
    raw = b"".join([chunk async for chunk in transfer.pack(source, behind.append)])
    assert sorted(behind) == ["a/socket", "fifo"]
    assert await transfer.unpack(stream(raw), target, behind.append) == 700_001
    assert sorted(behind) == ["a/out", "a/socket", "fifo"]  # nothing is left out in silence
    assert (target / "a" / "run").read_bytes() == (source / "a" / "run").read_bytes()
    assert (target / "a" / "run").stat().st_mode & 0o7777 == 0o755
    assert (target / "a" / "same").samefile(target / "a" / "run")
    assert (target / "link").readlink() == Path("a/run") and (target / "a" / "up").readlink() == Path("../a/run")
    assert b"caf\xe9" in os.listdir(os.fsencode(target))
    assert (target / "a" / "empty").is_dir() and not (target / "fifo").exists()


async def test_packing_stops_when_nobody_reads(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(4 << 20))
    chunks = transfer.pack(tmp_path)
    await anext(chunks)
    await chunks.aclose()  # the thread and both ends of the pipe are gone: the leak detector looks


ESCAPES = {
    "up": [(member("../evil"), b"x")],
    "deep up": [(member("a/../../evil"), b"x")],
    "absolute": [(member("/tmp/opendsec-evil"), b"x")],
    "through a symlink": [(member("out", tarfile.SYMTYPE, ".."), b""), (member("out/evil"), b"x")],
    "through an absolute symlink": [(member("out", tarfile.SYMTYPE, "/tmp"), b""), (member("out/opendsec-evil"), b"x")],
    "symlink over a directory": [
        (member("d", tarfile.DIRTYPE, mode=0o755), b""),
        (member("d/x"), b"1"),
        (member("s", tarfile.SYMTYPE, "d/../.."), b""),
    ],
    "hard link to the outside": [(member("evil", tarfile.LNKTYPE, "../secret"), b"")],
    "absolute hard link": [(member("evil", tarfile.LNKTYPE, "/etc/hostname"), b"")],
    "device": [(member("evil", tarfile.CHRTYPE), b"")],
    "fifo": [(member("evil", tarfile.FIFOTYPE), b"")],
}


@pytest.mark.parametrize("name", ESCAPES)
async def test_nothing_leaves_the_tree(name: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    target = tmp_path / "target"
    behind: list[str] = []
    try:
        await transfer.unpack(stream(archive(*ESCAPES[name])), target, behind.append)
    except InvalidRequest:
        pass
    else:
        there = {one.name for one, _ in ESCAPES[name] if os.path.lexists(target / one.name.lstrip("/"))}
        assert there | set(behind) == {one.name for one, _ in ESCAPES[name]}  # nothing is left out in silence
    assert {path.name for path in tmp_path.iterdir()} == {"secret", "target"}
    assert not Path("/tmp/opendsec-evil").exists()
    for path in target.rglob("*"):
        assert not path.is_symlink() or path.resolve().is_relative_to(target.resolve()), path
        assert path.is_symlink() or path.is_dir() or path.is_file()
        assert "secret" not in path.read_text() if path.is_file() else True


async def test_existing_links_are_replaced_not_followed(tmp_path: Path) -> None:
    target, outside = tmp_path / "target", tmp_path / "outside"
    target.mkdir()
    outside.write_text("precious")
    (target / "file").symlink_to(outside)
    await transfer.unpack(stream(archive((member("file"), b"new"))), target)
    assert outside.read_text() == "precious" and (target / "file").read_text() == "new"
    (target / "sub").symlink_to(tmp_path)
    with pytest.raises(InvalidRequest):
        await transfer.unpack(stream(archive((member("sub/outside"), b"new"))), target)
    assert outside.read_text() == "precious"


async def test_no_setuid_and_no_owner(tmp_path: Path) -> None:
    root = member("root", mode=0o6755)
    root.uid = root.gid = 12345
    await transfer.unpack(stream(archive((root, b"x"))), tmp_path / "t")
    info = (tmp_path / "t" / "root").stat()
    assert info.st_mode & 0o7777 == 0o755 and info.st_uid == os.geteuid()


async def test_garbage_and_cut_streams_are_errors(tmp_path: Path) -> None:
    with pytest.raises(Internal):
        await transfer.unpack(stream(b"garbage" * 1000), tmp_path / "t")
    good = archive((member("x"), bytes(100_000)))
    with pytest.raises(Internal):
        await transfer.unpack(stream(good[:50_000]), tmp_path / "t")

    async def breaks() -> AsyncIterator[bytes]:
        yield good[:5000]
        raise RuntimeError("the connection broke")

    with pytest.raises(RuntimeError, match="the connection broke"):
        await transfer.unpack(breaks(), tmp_path / "t")


async def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    async def breaks() -> AsyncIterator[bytes]:
        yield b"ne"
        raise RuntimeError("broke")

    with pytest.raises(RuntimeError):
        await transfer.write_file(path, breaks(), mode=0o600)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1
    assert await transfer.write_file(path, stream(b"new"), mode=0o640) == 3
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(InvalidRequest):
        await transfer.write_file(tmp_path / "no" / "file", stream(b"x"), mode=0o600)
