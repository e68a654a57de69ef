# SPDX-License-Identifier: Apache-2.0
"""The tour of the README, from a registry and back: `python -m examples.images_tour`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.images import BASE, link_store
from tests.support import ROOT


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tour(test_images: Path) -> None:
    state = Path(tempfile.mkdtemp(prefix="tour-", dir="/var/tmp"))
    try:
        link_store(test_images, state / "images")
        command = [sys.executable, "-m", "examples.images_tour", "--state", str(state), "--image", BASE]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:]
        assert "The tour is complete." in done.stdout
    finally:
        shutil.rmtree(state)
