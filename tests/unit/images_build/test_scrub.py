# SPDX-License-Identifier: Apache-2.0
"""Which paths the scrub rules cover."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.images.scrub import RULES, Matcher, Scrub


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_text("")
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def rule(matcher: Matcher, path: str, folder: int) -> str | None:
    found = matcher.rule(path.encode(), os.stat("file", dir_fd=folder), folder)
    return None if found is None else found.name


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/root/.bash_history", "scrub.history"),
        ("/home/me/.bash_history", "scrub.history"),
        ("/work/.bash_history", None),
        ("/root/.ipython/profile_default/history.sqlite-journal", "scrub.history"),
        ("/root/.cache/pip", "scrub.cache.python"),
        ("/root/.cache", None),
        ("/work/.netrc", "scrub.credentials"),
        ("/.netrc", "scrub.credentials"),
        ("/tmp", None),
        ("/tmp/x", "scrub.temporary"),
        ("/work/tmp/x", None),
        ("/work/deep/.claude", "scrub.agent"),
        ("/work/.aider.chat.history.md", "scrub.agent"),
        ("/work/.file.swp", "scrub.editor"),
        ("/work/file.swp", None),
        ("/etc/machine-id", "scrub.machine"),
        ("/var/log/apt/history.log", "scrub.logs"),
        ("/var/log/deep/er/x.log", "scrub.logs"),
        ("/work/core", None),  # empty, so no core dump
        ("/work/x.pem", None),
    ],
)
def test_the_rules(folder: int, path: str, expected: str | None) -> None:
    assert rule(Matcher(Scrub()), path, folder) == expected


def test_more_and_kept(folder: int) -> None:
    matcher = Matcher(Scrub(more=("/data/[ab]?/**", "**/x.tmp"), keep=("/tmp/stay", "~/.cache/pip")))
    assert rule(matcher, "/data/a1/deep/er", folder) == "scrub.asked"
    assert rule(matcher, "/data/c1/deep", folder) is None
    assert rule(matcher, "/x.tmp", folder) == rule(matcher, "/deep/x.tmp", folder) == "scrub.asked"
    assert rule(matcher, "/tmp/stay", folder) is None and rule(matcher, "/tmp/go", folder) == "scrub.temporary"
    assert rule(matcher, "/root/.cache/pip", folder) is None
    assert rule(Matcher(Scrub(rules=False)), "/tmp/go", folder) is None


def test_every_rule_gives_a_reason() -> None:
    assert all(one.reason and one.patterns and one.name.startswith("scrub.") for one in RULES)
