# SPDX-License-Identifier: Apache-2.0
"""A real edge with real microVMs. What takes long (kernel, templates) is kept beside the images and lent to it, see `tests.vms`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opendsec.api.spec import MicroVM
from opendsec.runtime.vmm.store import VmStore
from tests.edges import EdgeProcess
from tests.images import BASE
from tests.vms import LIMITS, borrow, give_back, kept


class MachineEdge(EdgeProcess):
    """An edge process whose store of machines begins with what is kept."""

    def __init__(self, images: Path) -> None:
        super().__init__(images, ["--vm-parts", str(kept()), "--scratch-driver", "tmpfs"])
        self.folder.chmod(0o755)  # machines are put together below the run directory, as their own users
        self.store = VmStore(self.state_dir / "vm")
        borrow(self.store)

    def remove(self) -> None:
        if self.store.root.exists():
            give_back(self.store)
        super().remove()


@pytest.fixture(scope="module")
def edge(test_images: Path) -> Iterator[MachineEdge]:
    edge = MachineEdge(test_images)
    try:
        edge.start()
        yield edge
    finally:
        edge.remove()


def machine(**fields: Any) -> MicroVM:
    """Of the size whose template all tests share."""
    sizes = {
        "cpu": LIMITS.cpu,
        "memory": LIMITS.memory_bytes,
        "disk": LIMITS.disk_bytes,
        "inodes": LIMITS.inodes,
        "pids": LIMITS.pids,
        "open_files": LIMITS.open_files,
    }
    return MicroVM(**{"image": BASE, **sizes, **fields})
