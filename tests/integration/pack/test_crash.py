# SPDX-License-Identifier: Apache-2.0
"""An edge that is killed while it packs: the sandbox goes on under the next one, and nothing is left over."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.images import link_store
from tests.nodes import NodeEdge

pytestmark = pytest.mark.slow

# An edge that packs again and again. It says so, and is killed at some moment.
PACKING = """
import asyncio, sys
from pathlib import Path
from opendsec.api.images import PackRequest
from opendsec.edge.packing import pack
from tests.nodes import NodeEdge

async def main():
    edge = NodeEdge(Path(sys.argv[1]), "1GiB", "btrfs")
    await edge.start()
    box = await edge.create()
    await edge.sh(box, "mkdir /w; head -c 3M /dev/urandom >/w/data; sha256sum /w/data >/w/sum")
    print(box, flush=True)
    async def one(number):
        await pack(edge.node, box, PackRequest(name=f"n{number}@1", scrub=False, action_id=f"action-{number}"))
    async def freezing():
        handle = edge.node.box(box).handle
        while True:
            await (await handle.snapshot_disk()).release()
    asyncio.ensure_future(freezing())
    for number in range(1000):
        await one(number)
        print(number, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_killed_while_it_packs(test_images: Path, after: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="n-", dir="/var/tmp"))
    (folder / "state").mkdir()
    link_store(test_images, folder / "state/images")
    first = subprocess.Popen([sys.executable, "-c", PACKING, str(folder)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
    assert first.stdout is not None
    with first.stdout as said:
        box = said.readline().strip()
        for _ in range(after):
            said.readline()
        first.kill()
        first.wait()
    edge = NodeEdge(folder, "1GiB", "btrfs")
    await edge.start()
    try:
        assert await edge.sh(box, "cd /w && sha256sum -c sum") == "/w/data: OK\n" or await edge.sh(box, "sha256sum -c /w/sum")
        assert edge.snapshots == []
        assert os.listdir(edge.store.root / "tmp") == []
        for image in edge.store.list().images:
            for digest in image.layers:
                edge.store.verify(digest)
        assert sum(image.name.startswith("n") for image in edge.store.list().images) >= after
    finally:
        await edge.close()
        shutil.rmtree(folder)
