# SPDX-License-Identifier: Apache-2.0
"""The linter over layers made of directories."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from opendsec.api.errors import NotFound
from opendsec.api.images import BuildRequest, DirectorySource, Finding
from opendsec.images.build import build
from opendsec.images.lint import lint, lint_layers
from opendsec.images.store import ImageStore
from tests.unit.images_build.test_gitdir import Git

pytestmark = pytest.mark.slow


class Tree:
    """A directory that becomes a layer, and the store it goes to."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        self.root.mkdir()
        self.store = ImageStore(folder / "store")
        self.store.prepare()
        self.layers = 0

    def write(self, path: str, content: str | bytes = "x") -> Path:
        full = self.root / path
        full.parent.mkdir(parents=True, exist_ok=True)
        full.write_bytes(content if isinstance(content, bytes) else content.encode())
        return full

    async def layer(self) -> str:
        self.layers += 1
        request = BuildRequest(name="w", version=str(self.layers), kind="workspace", source=DirectorySource(path=str(self.root)))
        layer = await build(self.store, request, progress=lambda event: None, allow_host_paths=True)
        return layer.digest  # type: ignore[union-attr]

    async def lint(self, *packages: str) -> dict[str, list[str]]:
        """Rule → paths."""
        await self.layer()
        return by_rule(list(lint(self.store, f"workspace:w@{self.layers}", packages).findings))


def by_rule(findings: list[Finding]) -> dict[str, list[str]]:
    rules: dict[str, list[str]] = {}
    for finding in findings:
        rules.setdefault(finding.rule, []).append(finding.path)
    return rules


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


async def test_a_clean_tree_has_no_findings(tree: Tree) -> None:
    (tree.root / "workspace").mkdir()
    git = Git(tree.root / "workspace")
    git.commit("1")
    git.commit("2")
    tree.write("workspace/src/a.py")
    assert await tree.lint("astropy") == {}
    with pytest.raises(NotFound):
        lint(tree.store, "nothing")


async def test_history_beyond_head(tree: Tree) -> None:
    (tree.root / "repo").mkdir()
    git = Git(tree.root / "repo")
    first = git.commit("1")
    git.commit("the answer")
    git("branch", "fix")
    git.commit("more of it")
    git("reset", "-q", "--hard", first.decode())
    found = await tree.lint()
    assert found == {
        rule: ["/repo/.git"] for rule in ("git.refs_ahead", "git.reflog", "git.special", "git.newer_objects", "git.unreachable")
    }
    # What a careful author does: nothing but HEAD's history is left.
    git("branch", "-D", "fix")
    (tree.root / "repo/.git/ORIG_HEAD").unlink()
    git("reflog", "expire", "--expire=now", "--all")
    git("gc", "-q", "--prune=now")
    assert await tree.lint() == {}


async def test_stashes_worktrees_and_alternates(tree: Tree) -> None:
    (tree.root / "repo").mkdir()
    git = Git(tree.root / "repo")
    git.commit("1")
    git("worktree", "add", "-q", str(tree.root / "other"), "-b", "other")
    tree.write("repo/file", "aside")
    git("stash")
    tree.write("repo/.git/objects/info/alternates", "/elsewhere/objects\n")
    found = await tree.lint()
    assert {"git.stash", "git.worktrees", "git.alternates"} <= found.keys()


async def test_a_bare_repository_and_one_in_modules(tree: Tree) -> None:
    (tree.root / "work").mkdir()
    git = Git(tree.root / "work")
    first = git.commit("1")
    git.commit("2")
    git("reset", "-q", "--hard", first.decode())
    for name in ("bare.git", "super/.git/modules/inner"):
        (tree.root / name).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", str(tree.root / "work/.git"), str(tree.root / name)], check=True)
    for name in ("HEAD", "refs", "objects"):
        if name == "HEAD":
            tree.write("super/.git/HEAD", "ref: refs/heads/main\n")
        else:
            (tree.root / "super/.git" / name).mkdir()
    found = await tree.lint()
    assert set(found["git.newer_objects"]) == {"/bare.git", "/super/.git/modules/inner", "/work/.git"}


async def test_caches_that_hold_the_package(tree: Tree) -> None:
    wheel = tree.write("root/.cache/pip/http-v2/a/b/body")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("scikit_learn/__init__.py", "")
    tree.write("opt/wheels/scikit_learn-1.5.0-py3-none-any.whl")
    tree.write("opt/sdists/scikit-learn-1.5.0.tar.gz")
    tree.write("opt/wheels/numpy-2.0-py3-none-any.whl")
    tree.write(
        "root/.npm/_cacache/index-v5/aa/bb/cc",
        '{"key":"make-fetch-happen:request-cache:https://packages.invalid/left-pad/-/left-pad-1.0.tgz"}',
    )
    tree.write("root/.cache/uv/archive-v0/x/scikit_learn-1.5.0.dist-info/METADATA")
    tree.write("root/.cargo/registry/cache/index.packages.invalid-1/serde-1.0.200.crate")
    tree.write("root/.cargo/registry/src/index.packages.invalid-1/serde-1.0.200/lib.rs")
    tree.write("root/go/pkg/mod/github.com/pkg/errors@v0.9.1/errors.go")
    tree.write("root/go/pkg/mod/cache/download/github.com/pkg/errors/@v/v0.9.1.zip")
    found = await tree.lint("scikit-learn", "left-pad", "serde", "github.com/pkg/errors")
    assert sorted(found["cache.package"]) == ["/opt/sdists/scikit-learn-1.5.0.tar.gz", "/opt/wheels/scikit_learn-1.5.0-py3-none-any.whl"]
    assert found["cache.pip"] == ["/root/.cache/pip/http-v2/a/b/body"]
    assert found["cache.npm"] == ["/root/.npm/_cacache/index-v5/aa/bb/cc"]
    assert found["cache.uv"] == ["/root/.cache/uv/archive-v0/x/scikit_learn-1.5.0.dist-info"]
    assert len(found["cache.cargo"]) == 2 and len(found["cache.go"]) == 2
    assert await tree.lint() == {}


async def test_an_installed_package_that_is_newer(tree: Tree) -> None:
    tree.write("work/pyproject.toml", '[project]\nname = "My.Package"\nversion = "1.2.0"\n')
    tree.write("usr/lib/python3/site-packages/my_package-1.3.dist-info/METADATA")
    assert (await tree.lint("my-package"))["site.newer"] == ["/usr/lib/python3/site-packages/my_package-1.3.dist-info"]
    tree.write("work/pyproject.toml", '[project]\nname = "My.Package"\nversion = "1.3.0"\n')
    assert await tree.lint("my-package") == {}


async def test_leftovers_and_what_scrubbing_would_take(tree: Tree) -> None:
    tree.write("work/fix.patch")
    tree.write("work/a.py.rej")
    tree.write("usr/share/doc/x.patch")
    tree.write("root/.ssh/id_thing", "-----BEGIN OPENSSH PRIVATE KEY-----\n")
    tree.write("root/.ssh/known_hosts", "host key")
    tree.write("root/.aws/credentials")
    tree.write("root/.bash_history")
    tree.write("work/core.1", b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x04\x00" + bytes(100))
    tree.write("work/core.2", b"not a core")
    tree.write("work/.npmrc", "registry=https://x\n")
    tree.write("root/.npmrc", "//registry/:_authToken=abc\n")
    found = await tree.lint()
    assert sorted(found.pop("leftover.patch")) == ["/work/a.py.rej", "/work/fix.patch"]
    assert found == {
        "credentials.key": ["/root/.ssh/id_thing"],
        "credentials": ["/root/.aws"],
        "history": ["/root/.bash_history"],
        "core": ["/work/core.1"],
        "credentials.token": ["/root/.npmrc"],
    }


async def test_of_several_layers_only_what_one_brought(tree: Tree) -> None:
    tree.write("work/old.patch")
    low = await tree.layer()
    (tree.root / "work/old.patch").unlink()
    tree.write("work/new.patch")
    high = await tree.layer()
    assert len(lint_layers(tree.store, [low, high])) == 2
    assert [finding.path for finding in lint_layers(tree.store, [low, high], of=high)] == ["/work/new.patch"]
