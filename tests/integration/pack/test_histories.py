# SPDX-License-Identifier: Apache-2.0
"""Random histories of changes, packed and packed again: a sandbox of the result sees what the first one saw."""

from __future__ import annotations

import re

import pytest

from opendsec.api.images import PackRequest
from opendsec.edge.packing import pack
from tests.integration.pack.test_pack import see
from tests.nodes import NodeEdge

pytestmark = pytest.mark.slow

CHANGES = r"""
import os, random, shutil, sys
rng = random.Random(int(sys.argv[1]))
tops = ["/usr/share", "/etc", "/opt", "/var/lib", "/w"]
os.makedirs("/w", exist_ok=True)

def some(kind):
    path = rng.choice(tops)
    for _ in range(rng.randrange(6)):
        try:
            names = sorted(os.listdir(path))
        except OSError:
            break
        if not names:
            break
        below = os.path.join(path, rng.choice(names))
        if os.path.islink(below) or not os.path.isdir(below):
            if kind == "file":
                return below
            continue
        path = below
    return path

def fresh():
    return os.path.join(some("dir"), "n%d" % rng.randrange(10**6))

def step():
    kind = rng.randrange(13)
    if kind == 0: os.mkdir(fresh())
    elif kind == 1: open(fresh(), "w").write("x" * rng.randrange(10000))
    elif kind == 2: open(some("file"), "a").write("more")
    elif kind in (3, 4):
        path = some("file")
        if path not in tops: os.rename(path, fresh())
    elif kind in (5, 6):
        path = some("dir")
        if path not in tops: os.rename(path, fresh())
    elif kind == 7: os.unlink(some("file"))
    elif kind == 8:
        path = some("dir")
        if path not in tops:
            shutil.rmtree(path)
            if rng.random() < 0.7:
                os.mkdir(path); open(path + "/again", "w").write("new")
    elif kind == 9: os.link(some("file"), fresh(), follow_symlinks=False)
    elif kind == 10: os.symlink(rng.choice(["..", "/etc/passwd", "nowhere"]), fresh())
    elif kind == 11: os.chmod(some("file"), rng.choice([0o600, 0o755, 0o4755]))
    elif kind == 12: os.chown(some("file"), rng.randrange(65536), rng.randrange(65536), follow_symlinks=False)

done = 0
for _ in range(400):
    try:
        step(); done += 1
    except OSError:
        pass
print(done)
"""
_LINKS = re.compile(r"(0o\d+ \d+ \d+ \d+) \d+ ")


async def seen(edge: NodeEdge, box: str) -> list[str]:
    """Without link counts: names that one file of the image had within a renamed directory and elsewhere are files of their own now."""
    return [_LINKS.sub(r"\1 ", line) for line in await see(edge, box, *PLACES)]


PLACES = ("/usr/share", "/etc", "/opt", "/var/lib", "/w")


@pytest.mark.parametrize(("edge", "seed"), [("btrfs", 0), ("btrfs", 1), ("btrfs", 2), ("tmpfs", 3)], indirect=["edge"])
async def test_a_random_history(edge: NodeEdge, seed: int) -> None:
    box = await edge.create(disk="512MiB")
    assert int(await edge.sh(box, f"python3 -ISc '{CHANGES}' {seed}")) > 100
    before = await seen(edge, box)
    await pack(edge.node, box, PackRequest(name="first@1", scrub=False))
    second = await edge.create("first:1", disk="512MiB")
    assert await seen(edge, second) == before
    await edge.sh(second, f"python3 -ISc '{CHANGES}' {seed + 100}")
    later = await seen(edge, second)
    await pack(edge.node, second, PackRequest(name="second@1", scrub=False))
    third = await edge.create("second:1")
    assert await seen(edge, third) == later
    assert later != before
