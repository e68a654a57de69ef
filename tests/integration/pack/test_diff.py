# SPDX-License-Identifier: Apache-2.0
"""Differences of images and layers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opendsec.api.errors import NotFound
from opendsec.api.images import ImageConfig
from opendsec.images import diff as module
from opendsec.images.diff import diff
from opendsec.images.store import ImageStore
from tests.integration.pack.test_lint import Tree

pytestmark = pytest.mark.slow


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def seen(store: ImageStore, a: str, b: str) -> list[tuple[str, str, str, str]]:
    return [(entry.change, entry.path, entry.kind, entry.what) for entry in diff(store, a, b).entries]


async def test_every_kind_of_change(tree: Tree) -> None:
    for name in ("same", "content", "longer", "mode", "attribute", "becomes-dir", "gone", "dir/gone/deep"):
        tree.write(name)
    (tree.root / "link").symlink_to("a")
    (tree.root / "caf\udce9").write_text("x")
    first = await tree.layer()
    tree.write("content", "y")
    tree.write("longer", "xx")
    (tree.root / "mode").chmod(0o600)
    os.setxattr(tree.root / "attribute", "user.a", b"1")
    for name in ("becomes-dir", "gone", "dir/gone/deep", "link", "caf\udce9"):
        (tree.root / name).unlink()
    (tree.root / "dir/gone").rmdir()
    (tree.root / "becomes-dir").mkdir()
    (tree.root / "link").symlink_to("b")
    tree.write("new/deep/er")
    second = await tree.layer()
    assert seen(tree.store, first, second) == [
        ("changed", "/attribute", "file", "xattrs"),
        ("changed", "/becomes-dir", "dir", "kind"),
        ("removed", "/caf\\xe9", "file", ""),
        ("changed", "/content", "file", "content"),
        ("removed", "/gone", "file", ""),
        ("changed", "/link", "link", "target"),
        ("changed", "/longer", "file", "content"),
        ("changed", "/mode", "file", "mode"),
        ("added", "/new", "dir", ""),
        ("removed", "/dir/gone", "dir", ""),
    ]
    assert {(change, path) for change, path, _, _ in seen(tree.store, second, first)} >= {("added", "/gone"), ("removed", "/new")}
    assert seen(tree.store, first, "workspace:w@1") == []
    with pytest.raises(NotFound):
        diff(tree.store, first, "nothing")


async def test_images_are_compared_as_a_sandbox_sees_them(tree: Tree) -> None:
    tree.write("a", "1")
    tree.write("b", "1")
    low = await tree.layer()
    (tree.root / "b").unlink()
    tree.write("a", "2")
    high = await tree.layer()
    (tree.root / "a").unlink()
    tree.write("c", "1")
    other = await tree.layer()
    tree.store.name_image("one", [low, high], ImageConfig())
    tree.store.name_image("two", [low, high, other], ImageConfig())
    assert seen(tree.store, "one", "two") == [("added", "/c", "file", "")]
    assert seen(tree.store, low, "one") == [("changed", "/a", "file", "content")]


async def test_it_is_bounded(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = await tree.layer()
    for number in range(20):
        tree.write(f"f{number}")
    monkeypatch.setattr(module, "MAX_ENTRIES", 5)
    report = diff(tree.store, empty, await tree.layer())
    assert len(report.entries) == 5 and report.truncated
