# SPDX-License-Identifier: Apache-2.0
"""Readers, evictions and kill -9 of whoever, mixed for some seconds: never a wrong byte, and at the end everything is there again."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import signal
from pathlib import Path

import pytest

from opendsec.images.lazy.protocol import Mechanism
from tests.lazy import Reader, Rig, drop_page_cache, noise

pytestmark = [pytest.mark.requires("fanotify_pre_content", "fuse"), pytest.mark.slow]

TURNS, READERS = 6, 8


@pytest.mark.parametrize("mechanism", ["fanotify", "fuse"])
async def test_nobody_ever_reads_a_wrong_byte(tmp_path: Path, mechanism: Mechanism) -> None:
    choose = random.Random(1)
    with Rig(tmp_path, mechanism=mechanism) as rig:
        layers = [rig.layer({f"f{n}": noise(1_500_000, 100 * number + n) for n in range(12)}) for number in range(2)]
        async with rig.loader(limit_bytes=20 << 20) as loader:
            for _ in range(TURNS):
                mounted = [(layer, await rig.mount(loader, layer)) for layer in choose.choices(layers, k=3)]
                reads = []
                for _ in range(READERS):
                    layer, mount = choose.choice(mounted)
                    name = f"f{choose.randrange(12)}"
                    reads.append((layer.files[name], Reader(mount, name, choose.choice([4096, 65536, 1 << 20]))))
                for _ in range(2):
                    await asyncio.sleep(choose.random() * 0.1)  # that is where in their work they are killed
                    with contextlib.suppress(ProcessLookupError, IndexError):
                        os.kill(choose.choice(sorted(rig.family())), signal.SIGKILL)
                    drop_page_cache()
                for expected, reader in reads:
                    assert await reader.result_soon() in (expected, errno.EIO)
                rig.unmount(*(mount for _, mount in mounted))
                for layer in layers:
                    await loader.evict(layer.digest)
            rig.wait(lambda: len(rig.pids("loader")) == 1 and len(rig.pids("keeper")) == 2)
            assert loader.lost == ()
            assert await rig.read(await rig.mount(loader, layers[0]), "f0") == layers[0].files["f0"]
