# SPDX-License-Identifier: Apache-2.0
"""One edge for a module's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.leaks import LeakDetector
from tests.machine_edges import MachineEdge


@pytest.fixture(scope="module")
def edge(test_images: Path, leak_detector: LeakDetector) -> Iterator[MachineEdge]:
    leak_detector.allow("children", r"-m opendsec\.edge")  # of the module, which some tests restart
    edge = MachineEdge(test_images)
    try:
        edge.start()
        yield edge
    finally:
        edge.remove()
