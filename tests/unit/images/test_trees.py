# SPDX-License-Identifier: Apache-2.0
"""The digest of a tree, what is left out of a layer, and compiled Python files; all on plain directories."""

from __future__ import annotations

import errno
import importlib.util
import os
import py_compile
import shutil
import struct
from pathlib import Path

import pytest

from opendsec.api.errors import InvalidRequest
from opendsec.images import directory, pyc, tree, worker
from opendsec.images.directory import Hide, Rewrite
from opendsec.images.erofs import TIMESTAMP


def digest(root: Path) -> str:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return tree.digest(fd).digest
    finally:
        os.close(fd)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "dir").mkdir(parents=True)
    (root / "dir" / "file").write_text("content")
    (root / "other").write_text("content")
    os.link(root / "dir" / "file", root / "dir" / "hard")
    os.symlink("dir/file", root / "link")
    (root / os.fsdecode(b"n\xff")).write_text("")
    return root


def test_the_digest_is_of_the_tree_not_of_its_times_or_place(root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(root, copy, symlinks=True)
    (copy / "dir" / "hard").unlink()
    os.link(copy / "dir" / "file", copy / "dir" / "hard")
    os.utime(copy / "other", (5, 5))
    os.truncate(copy / "other", 0)
    (copy / "other").write_text("content")
    assert digest(copy) == digest(root)


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "other").write_text("contenT"),
        lambda root: (root / "other").chmod(0o600),
        lambda root: (root / "other").rename(root / "another"),
        lambda root: (root / "other").rename(root / "dir" / "other"),
        lambda root: root.chmod(0o700),
        lambda root: (root / "empty").mkdir(),
        lambda root: ((root / "link").unlink(), os.symlink("other", root / "link")),
        lambda root: ((root / "dir" / "hard").unlink(), (root / "dir" / "hard").write_text("content")),
        lambda root: ((root / "other").unlink(), os.mkfifo(root / "other")),
        lambda root: os.setxattr(root / "other", "user.a", b"b"),
    ],
)
def test_the_digest_knows(root: Path, change: object) -> None:
    before = digest(root)
    change(root)  # type: ignore[operator]
    assert digest(root) != before


def test_fields_cannot_be_mistaken_for_each_other(tmp_path: Path) -> None:
    for name, value in (("one", b"ab"), ("two", b"a")):
        (tmp_path / name).mkdir()
        os.setxattr(tmp_path / name, "user.x" if value == b"ab" else "user.xa", value)
    assert digest(tmp_path / "one") != digest(tmp_path / "two")


def test_the_digest_counts(root: Path) -> None:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    seen: list[int] = []
    try:
        found = tree.digest(fd, progress=seen.append)
    finally:
        os.close(fd)
    assert (found.entries, found.content_bytes, seen[-1]) == (7, 14, 14)


def test_a_tree_nested_too_deep_is_refused(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    top = here
    try:
        for _ in range(30):
            os.mkdir("d" * 200, dir_fd=here)
            deeper = os.open("d" * 200, os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
            if here != top:
                os.close(here)
            here = deeper
        with pytest.raises(tree.TooDeep, match="dddd"):
            tree.digest(top)
    finally:
        os.close(here)
        os.close(top)


# --- what a layer leaves out ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "pattern", "expected"),
    [
        (b"a/b.pyc", b"*.pyc", True),
        (b"a/b.py", b"*.pyc", False),
        (b"a/.git", b".git", True),
        (b".git", b".git", True),
        (b"a/build", b"a/build", True),
        (b"b/a/build", b"a/build", False),
        (b"b/a/build", b"*/build", True),
        (b"a/x1", b"a/x[0-9]", True),
        (b"a/n\xff", b"n?", True),
    ],
)
def test_exclusion(path: bytes, pattern: bytes, expected: bool) -> None:
    assert directory.excluded(path, [pattern]) is expected


def edits(root: Path, *exclude: str, keep_owner: bool = False) -> tuple[list[directory.Edit], list[str]]:
    said: list[str] = []
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return directory.scan(fd, exclude=exclude, keep_owner=keep_owner, log=said.append), said
    finally:
        os.close(fd)


def test_a_scan_finds_nothing_to_change_in_a_plain_tree(root: Path) -> None:
    assert edits(root) == ([], [])


def test_an_excluded_directory_is_hidden_once(root: Path) -> None:
    assert edits(root, "dir/")[0] == [Hide(b"dir")]
    assert sorted(edits(root, "ha*", "dir/file")[0]) == [Hide(b"dir/file"), Hide(b"dir/hard")]


def test_a_link_to_a_directory_is_not_entered(root: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.pyc").touch()
    os.symlink(tmp_path / "outside", root / "way-out")
    assert edits(root, "*.pyc")[0] == []


# --- compiled files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "source"),
    [
        (b"os.cpython-311.pyc", b"os.py"),
        (b"os.cpython-311.opt-1.pyc", b"os.py"),
        (b"a.b.cpython-311.pyc", b"a.b.py"),
        (b"os.pyc", None),
        (b"os.py", None),
        (b".pyc", None),
        (b"", None),
    ],
)
def test_the_source_of_a_cache_file(name: bytes, source: bytes | None) -> None:
    assert pyc.source_name(name) == source


@pytest.fixture
def module(root: Path) -> Path:
    source = root / "dir" / "module.py"
    source.write_text("x = 1\n")
    os.utime(source, (1_700_000_000, 1_700_000_000))
    compiled = Path(py_compile.compile(os.fspath(source), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP))
    assert compiled == Path(importlib.util.cache_from_source(os.fspath(source)))
    return compiled


def test_a_valid_compiled_file_gets_the_layers_time(root: Path, module: Path) -> None:
    (edit,) = edits(root)[0]
    assert isinstance(edit, Rewrite)
    assert edit.path == os.fsencode(module.relative_to(root))
    old = module.read_bytes()
    assert edit.beginning == old[:8] + struct.pack("<I", TIMESTAMP) + old[12:16]
    assert edits(root, "__pycache__")[0] == [Hide(b"dir/__pycache__")]
    assert edits(root, "*.pyc")[0] == [Hide(edit.path)]


@pytest.mark.parametrize("target", ["elsewhere.py", "/dir/elsewhere.py", "../dir/elsewhere.py"])
def test_a_source_may_be_a_link_within_the_tree(root: Path, module: Path, target: str) -> None:
    source = module.parent.parent / "module.py"
    source.rename(source.with_name("elsewhere.py"))
    os.symlink(target, source)
    assert [edit.path for edit in edits(root)[0]] == [os.fsencode(module.relative_to(root))]


def test_a_source_outside_the_tree_is_none(root: Path, module: Path, tmp_path: Path) -> None:
    source = module.parent.parent / "module.py"
    source.rename(tmp_path / "outside.py")
    os.symlink(tmp_path / "outside.py", source)
    assert edits(root)[0] == []


def test_others_are_left_alone(root: Path, module: Path) -> None:
    source = module.parent.parent / "module.py"
    os.utime(source, (1_700_000_001, 1_700_000_001))
    assert edits(root)[0] == []  # stale
    py_compile.compile(os.fspath(source), invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    assert edits(root)[0] == []  # holds no time
    module.write_bytes(b"short")
    assert edits(root)[0] == []
    source.unlink()
    assert edits(root)[0] == []


def test_a_tree_that_changes_while_it_is_read_is_the_callers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = os.listdir

    def stale(path: int) -> list[str]:
        """As if a file had been removed, and a directory replaced, between the listing and the look."""
        return [*names(path), "gone"]

    monkeypatch.setattr(os, "listdir", stale)
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(InvalidRequest, match="was changed while it was read: 'gone'") as caught, worker.still_there():
            directory.scan(fd, exclude=(), keep_owner=False, log=lambda text: None)
    finally:
        os.close(fd)
    assert caught.value.field == "source.path"
    with pytest.raises(PermissionError), worker.still_there():
        raise PermissionError(errno.EACCES, "no")
