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
        edge_id = (edge.state_dir / "edge.id").read_text().strip()
        leak_detector.allow("cgroups", f"opendsec-{edge_id}-microvm")  # machines that wait to become sandboxes live on between tests;
        leak_detector.allow("processes", r"^/usr/bin/qemu-system-x86_64 .*-incoming defer")  # tests look at the sandboxes' own
        leak_detector.allow("processes", f"-m opendsec.edge .*{edge.state_dir}|^dsec-spawner")  # the edge that a test has restarted
        yield edge
    finally:
        edge.remove()
