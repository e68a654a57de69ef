# SPDX-License-Identifier: Apache-2.0
"""kill -9 at many points of everything that changes a store, here or there."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from opendsec.images.store import ImageStore
from tests.integration.images_remote.crashes import WORKS
from tests.layers import check_store, digest_of, new_store
from tests.support import ROOT

# Every so many calls; `1` was tried for each, which takes two minutes.
EVERY = {"Publish": 3, "Upgrade": 3, "Collect": 3, "Push": 5, "Pull": 8, "PullLazily": 8, "Complete": 6}


@pytest.mark.slow
@pytest.mark.parametrize("work", list(WORKS))
def test_a_process_killed_at_any_call_leaves_what_start_up_takes(work: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.integration.images_remote.crashes", work, tmp_path, str(EVERY[work])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 8


PUBLISHER = """
import sys
from pathlib import Path
from tests.layers import add_image, new_store
store = new_store(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for turn in range(1000):
    for number in range(4):
        add_image(store, f"image-{number}", f"layer-{number}", f"layer-{number + 1}", size=100_000)
        print(turn, number, flush=True)
"""


@pytest.mark.slow
def test_publishers_that_are_killed_do_not_disturb_the_others(tmp_path: Path) -> None:
    """Four processes publish the same layers; three are killed in the midst of it, and the garbage is collected all the while."""
    dice = random.Random(7)
    new_store(tmp_path / "store")
    command = [sys.executable, "-c", PUBLISHER, tmp_path / "store"]
    publishers = [subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    try:
        for publisher in publishers:
            assert publisher.stdout is not None and publisher.stdout.readline() == "ready\n"
        for publisher in publishers:
            assert publisher.stdin is not None
            publisher.stdin.write("go\n")
            publisher.stdin.flush()
        collector = ImageStore(tmp_path / "store")
        for publisher in publishers:
            assert publisher.stdout is not None
            for _ in range(dice.randrange(3, 9)):
                assert publisher.stdout.readline()
                collector.gc()
            publisher.kill()
    finally:
        for publisher in publishers:
            publisher.kill()
            publisher.communicate()
    store = check_store(tmp_path / "store")
    assert {layer.digest for layer in store.list().layers} <= {digest_of(f"layer-{number}") for number in range(5)}
    for image in store.list().images:
        store.resolve(image.name)
    assert os.listdir(store.root / "tmp") == []
