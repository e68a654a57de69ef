# SPDX-License-Identifier: Apache-2.0
"""Pinned downloads and the unpacking of archives from outside. No network: pip is given a directory in its place."""

import hashlib
import io
import os
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from examples.demo import fetch as fetch_module
from examples.demo.fetch import (
    DigestMismatch,
    FetchError,
    Release,
    UnsafeArchive,
    WheelPart,
    check_digest,
    fetch,
    read_sdist,
    unpack_sdist,
    unpack_wheels,
)

WHEEL = "toy-1.0-py3-none-any.whl"
METADATA = "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n"


def _member(name: str, *, type_: bytes = tarfile.REGTYPE, size: int = 0, mode: int = 0o644, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mode, info.linkname, info.mtime = type_, size, mode, link, 1_000_000_000
    return info


def _tar(path: Path, *members: tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            if isinstance(member, tuple):
                info, content = member
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            else:
                tar.addfile(member)
    return path


def _wheel(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


def _release(content: bytes) -> Release:
    return Release(project="toy", version="1.0", filename=WHEEL, sha256=hashlib.sha256(content).hexdigest())


@pytest.fixture
def offline_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that pip takes for the only place where packages are."""
    index = tmp_path / "index"
    index.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


def _toy_wheel(index: Path) -> bytes:
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {"toy/__init__.py": "", "toy-1.0.dist-info/METADATA": METADATA, "toy-1.0.dist-info/WHEEL": tags, "toy-1.0.dist-info/RECORD": ""}
    return _wheel(index / WHEEL, files).read_bytes()


@pytest.mark.slow
def test_fetch_downloads_once_and_keeps_only_the_file(offline_index: Path, tmp_path: Path) -> None:
    release = _release(_toy_wheel(offline_index))
    path = fetch(release, tmp_path / "cache")
    (offline_index / WHEEL).unlink()
    assert fetch(release, tmp_path / "cache") == path
    assert os.listdir(tmp_path / "cache") == [WHEEL]


@pytest.mark.slow
def test_fetch_refuses_a_file_that_was_not_pinned(offline_index: Path, tmp_path: Path) -> None:
    _toy_wheel(offline_index)
    with pytest.raises(FetchError, match="pip exited with"):
        fetch(_release(b"another"), tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_fetch_refuses_a_cached_file_that_was_not_pinned(tmp_path: Path) -> None:
    (tmp_path / WHEEL).write_bytes(b"tampered with")
    with pytest.raises(DigestMismatch, match=WHEEL):
        fetch(_release(b"as published"), tmp_path)
    assert (tmp_path / WHEEL).read_bytes() == b"tampered with"


def test_check_digest_names_both_digests(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    check_digest(path, hashlib.sha256(b"content").hexdigest())
    with pytest.raises(DigestMismatch, match=f"expected sha256 {'0' * 64}, got {hashlib.sha256(b'content').hexdigest()}"):
        check_digest(path, "0" * 64)


def test_unpack_sdist_drops_the_top_and_normalises_modes(tmp_path: Path) -> None:
    archive = _tar(
        tmp_path / "toy.tar.gz",
        _member("toy-1.0", type_=tarfile.DIRTYPE),
        (_member("toy-1.0/src/toy.py", mode=0o666), b"print(1)\n"),
        (_member("toy-1.0/run.sh", mode=0o4775), b"#!/bin/sh\n"),
    )
    target = tmp_path / "out" / "toy"
    unpack_sdist(archive, target)
    assert (target / "src/toy.py").read_bytes() == b"print(1)\n"
    assert stat.S_IMODE((target / "src/toy.py").stat().st_mode) == 0o644
    assert stat.S_IMODE((target / "run.sh").stat().st_mode) == 0o755
    assert stat.S_IMODE(target.stat().st_mode) == 0o755
    assert (target / "run.sh").stat().st_mtime == 1_000_000_000
    assert os.listdir(tmp_path / "out") == ["toy"]


@pytest.mark.parametrize(
    ("members", "says"),
    [
        pytest.param([_member("/etc/evil")], "below the top", id="absolute"),
        pytest.param([_member("toy/../../evil")], "below the top", id="parent"),
        pytest.param([_member("toy/a\\b")], "below the top", id="backslash"),
        pytest.param([_member("toy/link", type_=tarfile.SYMTYPE, link="/etc/passwd")], "neither a regular file", id="symlink"),
        pytest.param([_member("toy/link", type_=tarfile.LNKTYPE, link="/etc/passwd")], "neither a regular file", id="hard link"),
        pytest.param([_member("toy/null", type_=tarfile.CHRTYPE)], "neither a regular file", id="device"),
        pytest.param([_member("toy/pipe", type_=tarfile.FIFOTYPE)], "neither a regular file", id="fifo"),
        pytest.param([_member("toy")], "neither a regular file", id="top is a file"),
        pytest.param([_member("toy/a"), _member("other/a")], "outside the one top", id="two tops"),
        pytest.param([_member("toy/a"), _member("toy/a")], "one name twice", id="twice"),
        pytest.param([_member("toy/a"), _member("toy/a/b")], "file used as a directory", id="file as directory"),
    ],
)
def test_unpack_sdist_refuses(members: list[tarfile.TarInfo], says: str, tmp_path: Path) -> None:
    archive = _tar(tmp_path / "toy.tar.gz", *members)
    with pytest.raises(UnsafeArchive, match=says):
        unpack_sdist(archive, tmp_path / "out" / "toy")
    assert os.listdir(tmp_path / "out") == []
    assert sorted(os.listdir(tmp_path)) == ["out", "toy.tar.gz"]


def test_unpack_sdist_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = _tar(tmp_path / "toy.tar.gz", (_member("toy/a"), b"12345"), (_member("toy/b"), b"12345"))
    monkeypatch.setattr(fetch_module, "MAX_ARCHIVE_BYTES", 9)
    with pytest.raises(UnsafeArchive, match="more than 9 bytes"):
        unpack_sdist(archive, tmp_path / "toy")
    monkeypatch.setattr(fetch_module, "MAX_ARCHIVE_BYTES", 10)
    monkeypatch.setattr(fetch_module, "MAX_ARCHIVE_ENTRIES", 1)
    with pytest.raises(UnsafeArchive, match="more than 1 entries"):
        unpack_sdist(archive, tmp_path / "toy")
    assert not (tmp_path / "toy").exists()


def test_unpack_sdist_refuses_what_is_no_archive(tmp_path: Path) -> None:
    archive = tmp_path / "toy.tar.gz"
    archive.write_bytes(b"not an archive")
    with pytest.raises(UnsafeArchive, match="not a readable archive"):
        unpack_sdist(archive, tmp_path / "toy")


def test_unpack_never_writes_over_what_is_there(tmp_path: Path) -> None:
    archive = _tar(tmp_path / "toy.tar.gz", _member("toy/a"))
    (tmp_path / "toy").mkdir()
    with pytest.raises(FileExistsError):
        unpack_sdist(archive, tmp_path / "toy")


def test_unpack_wheels_takes_the_parts_asked_for(tmp_path: Path) -> None:
    whole = _wheel(tmp_path / "a.whl", {"a/__init__.py": "a", "a-1.0.dist-info/METADATA": METADATA})
    part = _wheel(tmp_path / "b.whl", {"b/inner/x.py": "x", "b/outer.py": "no", "binary/y": "no"})
    unpack_wheels([(whole, WheelPart()), (part, WheelPart(take="b/inner", into="moved"))], tmp_path / "kit")
    files = sorted(path.relative_to(tmp_path / "kit").as_posix() for path in (tmp_path / "kit").rglob("*") if path.is_file())
    assert files == ["a-1.0.dist-info/METADATA", "a/__init__.py", "moved/x.py"]
    assert {path.stat().st_mtime for path in (tmp_path / "kit").rglob("*.py")} == {1_600_000_000}


@pytest.mark.parametrize("name", ["../evil.py", "/evil.py", "a/../../evil.py"])
def test_unpack_wheels_refuses_names_outside(name: str, tmp_path: Path) -> None:
    wheel = _wheel(tmp_path / "a.whl", {name: ""})
    with pytest.raises(UnsafeArchive, match="below the top"):
        unpack_wheels([(wheel, WheelPart())], tmp_path / "kit")
    assert not (tmp_path / "kit").exists()


def test_unpack_wheels_refuses_two_wheels_with_one_file(tmp_path: Path) -> None:
    wheels = [(_wheel(tmp_path / name, {"same.py": name}), WheelPart()) for name in ("a.whl", "b.whl")]
    with pytest.raises(UnsafeArchive, match="one name twice"):
        unpack_wheels(wheels, tmp_path / "kit")


def test_read_sdist_gives_text_in_the_order_asked_for(tmp_path: Path) -> None:
    archive = _tar(tmp_path / "toy.tar.gz", (_member("toy/tests/a.py"), b"a"), (_member("toy/tests/b.py"), "ä".encode()))
    assert list(read_sdist(archive, ["tests/b.py", "tests/a.py"]).items()) == [("tests/b.py", "ä"), ("tests/a.py", "a")]
    with pytest.raises(KeyError, match="absent"):
        read_sdist(archive, ["tests/absent.py"])
