# SPDX-License-Identifier: Apache-2.0
"""MicroVMs for tests. What takes long is made once and kept beside the images (see `tests.images`): the guest kernel, QEMU's root
directory, and the templates, by the same keys as in production. A test's own store has links to them, so that it can be thrown away whole.

Emulated machines are slow, and take 100 MiB while they boot: use few, of 128 MiB, one at a time, and the same size in all tests.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

from opendsec.api.ids import EDGE, new_id
from opendsec.api.spec import Limits
from opendsec.runtime.container.backend import ContainerBackend
from opendsec.runtime.microvm.backend import MicroVMBackend
from opendsec.runtime.scratch.tmpfs import TmpfsScratch
from opendsec.runtime.vmm import processes
from opendsec.runtime.vmm.backend import VmBackend
from opendsec.runtime.vmm.locks import locked
from opendsec.runtime.vmm.store import VmStore

LIMITS = Limits(cpu=1.0, cpu_weight=100, memory_bytes=128 << 20, disk_bytes=64 << 20, inodes=4096, pids=64, open_files=256)
"""What nearly all tests should ask for: then they share a template."""

KEPT = 6
SHARED = ("boot", "qemu", "kernels", "scratch", "templates", "disks")


def kept() -> Path:
    """Where they are kept."""
    parent = Path(os.environ.get("OPENDSEC_TEST_IMAGES", "/var/tmp/opendsec-test-images"))
    root = parent / "vm"
    root.mkdir(mode=0o755, parents=True, exist_ok=True)
    return root


def borrow(store: VmStore) -> None:
    """Links in an empty store to what is kept."""
    store.prepare()
    with locked(kept() / "lock"):
        prune()
        for name in SHARED:
            (kept() / name).mkdir(mode=0o700, exist_ok=True)
            if name in ("qemu", "kernels", "boot"):
                continue  # used where they are
            for path in (kept() / name).iterdir():
                target = store.root / name / path.name
                if path.name.startswith(".") or path.name == "lock" or path.name.endswith(".lock"):
                    continue
                if path.is_dir():
                    shutil.copytree(path, target, copy_function=os.link)
                else:
                    os.link(path, target)


def give_back(store: VmStore) -> None:
    """Keep the templates for LIMITS that were made in a store, with what they lie on."""
    usual = f"{LIMITS.disk_bytes}-{LIMITS.inodes}.ext4"
    with locked(kept() / "lock"):
        prune()
        for name in ("templates", "scratch", "disks"):
            for path in (store.root / name).iterdir():
                target = kept() / name / path.name
                if target.exists() or path.suffix == ".lock" or path.name.startswith(".") or path.name == "lock":
                    continue
                if name == "templates":
                    template = store.read_template(path.name)
                    if template is None or template.disks or (template.memory_bytes, template.scratch) != (LIMITS.memory_bytes, usual):
                        continue
                    making = target.with_name(f".{target.name}")
                    shutil.rmtree(making, ignore_errors=True)
                    shutil.copytree(path, making, copy_function=os.link)
                    making.rename(target)
                elif path.name == usual or (kept() / "templates" / path.stem.removeprefix("template-")).exists():
                    os.link(path, target)


def prune() -> None:
    """Of templates and boot images that an earlier state of the sources made, only the newest stay."""
    for path in (kept() / "templates").glob("[0-9a-f]*/process"):
        if processes.find(path.parent) is None:  # of an earlier boot: it would have to be captured again and again
            shutil.rmtree(path.parent, ignore_errors=True)
    for name in ("templates", "boot"):
        newest = sorted((kept() / name).glob("[0-9a-f]*"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in newest[KEPT:]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
                (kept() / "disks" / f"template-{path.name}.qcow2").unlink(missing_ok=True)
            else:
                path.unlink(missing_ok=True)


B = TypeVar("B", bound=VmBackend)


class MachineNode(Generic[B]):
    """What a backend of machines needs around it, in a directory of the test's. `make` gives a started backend of the same edge, each time
    another one."""

    def __init__(self, directory: Path, *, edge_id: str = "") -> None:
        self.directory = directory
        self.edge_id = edge_id or new_id(EDGE)
        self.store = VmStore(directory / "vm")
        for name in ("run", "staging"):
            (directory / name).mkdir(mode=0o755, exist_ok=True)
        directory.chmod(0o755)
        self.containers = ContainerBackend(
            edge_id=self.edge_id, scratch=TmpfsScratch(), staging=directory / "staging", lock=directory / "spawner.lock"
        )

    def backend(self) -> B:
        """Not started."""
        raise NotImplementedError

    def borrow(self) -> None:
        """Have what is kept."""
        raise NotImplementedError

    def give_back(self) -> None:
        """Keep what others can use."""
        raise NotImplementedError

    async def make(self) -> B:
        backend = self.backend()
        await backend.start()
        return backend

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.borrow)
        await self.containers.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.containers.close()
        await asyncio.to_thread(self.give_back)


class VmNode(MachineNode[MicroVMBackend]):
    """For microVMs. `waiting`: how many wait for each template; `merge`: whether equal pages may be merged."""

    def __init__(self, directory: Path, *, waiting: int = 0, edge_id: str = "", merge: bool = False) -> None:
        super().__init__(directory, edge_id=edge_id)
        self.waiting, self.merge = waiting, merge

    def backend(self) -> MicroVMBackend:
        return MicroVMBackend(
            edge_id=self.edge_id,
            root=self.store.root,
            run_dir=self.directory / "run",
            containers=self.containers,
            shared=kept(),
            waiting=self.waiting,
            merge=self.merge,
        )

    def borrow(self) -> None:
        borrow(self.store)

    def give_back(self) -> None:
        give_back(self.store)
