# SPDX-License-Identifier: Apache-2.0
"""The reader of git directories, against directories that git itself makes, and against damaged ones."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from opendsec.images.gitdir import Repository

pytestmark = pytest.mark.slow

ENV = {
    "PATH": os.environ["PATH"],
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@b",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@b",
}


class Git:
    """A repository; each commit is a minute later."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.now = folder, 1_700_000_000
        self("init", "-q", "-b", "main", *options, str(folder), at=folder.parent)

    def __call__(self, *arguments: str, at: Path | None = None) -> str:
        env = {**ENV, "GIT_AUTHOR_DATE": f"{self.now} +0000", "GIT_COMMITTER_DATE": f"{self.now} +0000"}
        done = subprocess.run(["git", *arguments], cwd=at or self.folder, env=env, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(self, text: str) -> bytes:
        self.now += 60
        (self.folder / "file").write_text(text)
        self("add", "file")
        self("commit", "-q", "-m", text)
        return self("rev-parse", "HEAD").encode()

    def read(self) -> Repository:
        fd = os.open(self.folder / ".git", os.O_RDONLY | os.O_DIRECTORY)
        try:
            return Repository(fd).read()
        finally:
            os.close(fd)


@pytest.fixture
def git(tmp_path: Path) -> Git:
    (tmp_path / "r").mkdir()
    return Git(tmp_path / "r")


def test_commits_and_times(git: Git) -> None:
    first, second = git.commit("1"), git.commit("2")
    repository = git.read()
    assert repository.head == second and repository.problems == []
    assert repository.commits.keys() == {first, second}
    assert repository.commits[second].parents == (first,)
    assert repository.commits[second].time - repository.commits[first].time == 60
    assert repository.ancestors(second) == {first, second} and repository.ancestors(first) == {first}


@pytest.mark.parametrize("options", [(), ("--object-format=sha256",)], ids=["sha1", "sha256"])
def test_packed_it_reads_the_same(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "r").mkdir()
    git = Git(tmp_path / "r", *options)
    rng = random.Random(1)
    for number in range(60):
        git.commit(f"{number}\n" + "".join(f"{rng.random()}\n" for _ in range(40)) + "a long message\n" * 20)
    git("tag", "-a", "v1", "-m", "tagged", "HEAD~5")
    git("branch", "side", "HEAD~3")
    loose = git.read()
    git("gc", "-q", "--aggressive", "--prune=now")
    assert not list((git.folder / ".git/objects").glob("[0-9a-f][0-9a-f]"))
    packed = git.read()
    assert packed.commits == loose.commits and len(packed.commits) == 60 and packed.problems == []
    assert packed.tags == loose.tags and len(packed.tags) == 1
    assert {ref.name: ref.target for ref in packed.refs} == {ref.name: ref.target for ref in loose.refs}


def test_what_names_commits(git: Git) -> None:
    first = git.commit("1")
    later = git.commit("the answer")
    git("branch", "answer")
    git("update-ref", "refs/remotes/origin/main", later.decode())
    git("reset", "-q", "--hard", first.decode())
    (git.folder / "file").write_text("put aside")
    git("stash")
    git("pack-refs", "--all")
    (git.folder / ".git/FETCH_HEAD").write_bytes(later + b"\t\tbranch 'x' of y\n")
    repository = git.read()
    known = repository.ancestors(first)
    assert {ref.name for ref in repository.refs if repository.peeled(ref.target) not in known} == {
        "refs/heads/answer",
        "refs/remotes/origin/main",
        "refs/stash",
    }
    assert {ref.name for ref in repository.special} >= {"ORIG_HEAD", "FETCH_HEAD"}
    assert later in {ref.target for ref in repository.reflogs}


def damage_index(git: Git) -> None:
    path = next((git.folder / ".git/objects/pack").glob("*.idx"))
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:1100])


def damage_pack(git: Git) -> None:
    path = next((git.folder / ".git/objects/pack").glob("*.pack"))
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:12] + os.urandom(200))


def loop_of_refs(git: Git) -> None:
    (git.folder / ".git/HEAD").write_text("ref: refs/heads/a\n")
    (git.folder / ".git/refs/heads/a").write_text("ref: refs/heads/a\n")


def links(git: Git) -> None:
    shutil.rmtree(git.folder / ".git/refs")
    (git.folder / ".git/refs").symlink_to("/etc")
    (git.folder / ".git/packed-refs").unlink(missing_ok=True)
    (git.folder / ".git/packed-refs").symlink_to("/etc/passwd")


def climbing_head(git: Git) -> None:
    (git.folder / ".git/HEAD").write_text("ref: refs/../../../../../etc/hostname\n")


def pipes(git: Git) -> None:
    (git.folder / ".git/HEAD").unlink()
    os.mkfifo(git.folder / ".git/HEAD")
    os.mkfifo(git.folder / ".git/refs/heads/pipe")


def bomb(git: Git) -> None:
    import zlib

    (git.folder / ".git/objects/aa").mkdir(exist_ok=True)
    data = zlib.compress(b"commit 99999999999\0" + bytes(64 << 20))
    (git.folder / f".git/objects/aa/{'0' * 38}").write_bytes(data)


@pytest.mark.parametrize(
    "damage", [damage_index, damage_pack, loop_of_refs, links, climbing_head, pipes, bomb], ids=lambda one: one.__name__
)
def test_hostile_directories_are_read_without_harm(git: Git, damage: Callable[[Git], None]) -> None:
    for number in range(5):
        git.commit(str(number))
    if damage in (damage_index, damage_pack):
        git("gc", "-q", "--prune=now")
    damage(git)
    repository = git.read()
    if damage in (damage_index, damage_pack):
        assert repository.problems
    if damage in (loop_of_refs, climbing_head, pipes):
        assert repository.head is None
    assert not any("root" in ref.name for ref in repository.refs)


def test_random_damage_raises_nothing(git: Git) -> None:
    for number in range(10):
        git.commit(str(number) * 50)
    git("gc", "-q", "--prune=now")
    rng = random.Random(7)
    files = [path for path in (git.folder / ".git").rglob("*") if path.is_file() and path.suffix in ("", ".idx", ".pack")]
    kept = {path: path.read_bytes() for path in files}
    for _ in range(150):
        path = rng.choice(files)
        data = bytearray(kept[path])
        for _ in range(rng.randint(1, 8)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        path.chmod(0o600)
        path.write_bytes(bytes(data))
        git.read()
        path.write_bytes(kept[path])
