# SPDX-License-Identifier: Apache-2.0
"""A real edge with real microVMs. What takes long (kernel, templates) is kept beside the images and lent to it, see `tests.vms`."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from opendsec.api.spec import MicroVM
from opendsec.kernel import cgroups, procfs
from opendsec.runtime.container.plan import edge_group
from opendsec.runtime.vmm.store import VmStore
from tests.edges import EdgeProcess
from tests.images import BASE
from tests.vms import LIMITS, borrow, give_back, kept


class MachineEdge(EdgeProcess):
    """An edge process whose store of machines begins with what is kept."""

    def __init__(self, images: Path, arguments: Sequence[str] = ()) -> None:
        super().__init__(images, ["--vm-parts", str(kept()), "--scratch-driver", "tmpfs", *arguments])
        self.folder.chmod(0o755)  # machines are put together below the run directory, as their own users
        self.store = VmStore(self.state_dir / "vm")
        borrow(self.store)

    def commands_under_way(self) -> int:
        """As the journal has it."""
        with contextlib.closing(sqlite3.connect(f"file:{self.state_dir / 'journal.db'}?mode=ro", uri=True)) as db:
            return int(db.execute("SELECT count(*) FROM commands WHERE ended_at IS NULL").fetchone()[0])

    def machine_groups(self) -> set[str]:
        """The names of the control groups of this edge's machines."""
        return {group.name.rpartition("/")[2] for group in self._groups()}

    def machine_cpu_us(self) -> int:
        """CPU time that its machines have used."""
        return sum(group.usage().cpu_us or 0 for group in self._groups())

    def _groups(self) -> list[cgroups.Group]:
        edge_id = (self.state_dir / "edge.id").read_text().strip()
        hierarchies = cgroups.discover()
        top = hierarchies.group(f"{edge_group(edge_id)}-microvm")
        return [hierarchies.group(group.name) for group in top.children()] if top.exists() else []

    def strays(self, sandboxes: Collection[str]) -> set[str]:
        """What is there of machines that belongs neither to one of these sandboxes nor to those that wait, and to no snapshot."""
        root, boxes = self.store.root, list(self.store.box_states())
        machines = {box.machine for box in boxes if box.sandbox_id in sandboxes}
        machines |= {path.name for path in (root / "waiting").glob("*")}
        used = {f"template-{path.name}" for path in (root / "templates").glob("*")} | set(self.store.snapshots())
        used |= {name for box in boxes for name in (*box.disks, box.memory)}
        used |= {name for one in map(self.store.read_snapshot, self.store.snapshots()) if one is not None for name in one.disks}
        found = {f"sandbox {name}" for name in self.store.boxes() if name not in sandboxes}
        found |= {f"group {name}" for name in self.machine_groups() - machines}
        found |= {f"directory {path.name}" for path in (self.run_dir / "microvm").glob("*") if path.name not in machines}
        found |= {f"disk {path.name}" for path in (root / "disks").glob("*") if path.stem not in used}
        found |= {f"memory {path.name}" for path in (root / "memory").glob("*") if path.name not in used}
        found |= {f"unfinished {path.name}" for name in ("templates", "scratch", "snapshots") for path in (root / name).glob(".*")}
        found |= {
            f"mount {os.fsdecode(one.mount_point)}"
            for one in procfs.mountinfo()
            if str(self.run_dir / "microvm").encode() in one.mount_point
        }
        for pid in self.machines():
            with contextlib.suppress(OSError):
                if not any(path.rpartition(b"/")[2].decode() in machines for path in procfs.cgroup(pid).values()):
                    found.add(f"process {pid}")
        return found

    def machines(self) -> list[int]:
        """Host pids of the QEMUs of this edge, by the groups that they are in."""
        edge_id = (self.state_dir / "edge.id").read_text().strip().encode()
        found = []
        for pid in procfs.pids():
            try:
                if b"qemu" in b" ".join(procfs.cmdline(pid)[:1]) and any(edge_id in path for path in procfs.cgroup(pid).values()):
                    found.append(pid)
            except OSError:
                continue
        return found

    def machine_processes(self) -> int:
        return len(self.machines())

    def kill_machines(self) -> None:
        for pid in self.machines():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def remove(self) -> None:
        if self.store.root.exists():
            give_back(self.store)
        super().remove()


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
