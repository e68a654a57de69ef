# SPDX-License-Identifier: Apache-2.0
"""Full VMs for tests, as `tests.vms` has microVMs. A boot of a whole system is long: templates are kept beside the images, by their keys,
with the disks they lie on; a test's own store has links to them.

    debian_disk()      the root of an ImageStore with image `debian-disk`: no desktop
    debian_desktop()   the same of `debian-desktop`
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from opendsec.api.images import BuildRequest, DebianDiskSource
from opendsec.api.spec import Limits
from opendsec.runtime.backend import VmOptions
from opendsec.runtime.vm.backend import VMBackend
from opendsec.runtime.vm.operator import Operator
from opendsec.runtime.vmm.locks import locked
from opendsec.runtime.vmm.store import VmStore
from tests.images import kept_store
from tests.vms import MachineNode
from tests.vms import kept as kept_parts

DISK, DESKTOP = "debian-disk", "debian-desktop"
LIMITS = Limits(cpu=1.0, cpu_weight=100, memory_bytes=512 << 20, disk_bytes=4 << 30, inodes=4096, pids=64, open_files=256)
"""What nearly all tests should ask for: then they share a template."""

OPTIONS = VmOptions(profile="linux-uefi")
KEPT = 4
SHARED = ("images", "templates", "disks")


def debian_disk() -> Path:
    return kept_store(BuildRequest(name=DISK, source=DebianDiskSource()))


def debian_desktop() -> Path:
    return kept_store(BuildRequest(name=DESKTOP, source=DebianDiskSource(desktop=True)))


def kept() -> Path:
    """Where they are kept."""
    root = Path(os.environ.get("OPENDSEC_TEST_IMAGES", "/var/tmp/opendsec-test-images")) / "vm-full"
    root.mkdir(mode=0o755, parents=True, exist_ok=True)
    return root


def borrow(store: VmStore) -> None:
    """Links in an empty store to what is kept."""
    store.prepare()
    with locked(kept() / "lock"):
        for name in SHARED:
            for folder in (kept() / name, store.root / name):
                folder.mkdir(mode=0o700, exist_ok=True)
            for path in (kept() / name).iterdir():
                if path.is_dir():
                    shutil.copytree(path, store.root / name / path.name, copy_function=os.link)
                else:
                    os.link(path, store.root / name / path.name)


def give_back(store: VmStore) -> None:
    """Keep the templates that booted something, with what they lie on."""
    with locked(kept() / "lock"):
        for path in (store.root / "templates").iterdir():
            template = store.read_template(path.name) if path.is_dir() else None
            if template is None or template.disks or not (path / "devices").exists():
                continue
            image = f"{template.layers[0].replace(':', '-')}.raw"
            for source in (store.root / "images" / image, store.disk(template.disk)):
                target = kept() / source.parent.name / source.name
                if not target.exists():
                    os.link(source, target)
            target = kept() / "templates" / path.name
            if not target.exists():
                making = target.with_name(f".{target.name}")
                shutil.rmtree(making, ignore_errors=True)
                shutil.copytree(path, making, copy_function=os.link)
                making.rename(target)
        prune()


def prune() -> None:
    """Only the newest stay."""
    store = VmStore(kept())
    newest = sorted((kept() / "templates").glob("[0-9a-f]*"), key=lambda path: path.stat().st_mtime, reverse=True)
    images = set()
    for number, path in enumerate(newest):
        template = store.read_template(path.name)
        if number < KEPT and template is not None:
            images.add(f"{template.layers[0].replace(':', '-')}.raw")
        else:
            shutil.rmtree(path, ignore_errors=True)
            store.disk(f"template-{path.name}").unlink(missing_ok=True)
    for path in (kept() / "images").glob("*.raw"):
        if path.name not in images:
            path.unlink()


class FullNode(MachineNode[VMBackend]):
    """For full VMs."""

    operator: Operator | None = None

    def backend(self) -> VMBackend:
        return VMBackend(
            edge_id=self.edge_id,
            root=self.store.root,
            run_dir=self.directory / "run",
            containers=self.containers,
            shared=kept_parts(),
            operator=self.operator,
        )

    def borrow(self) -> None:
        borrow(self.store)

    def give_back(self) -> None:
        give_back(self.store)
