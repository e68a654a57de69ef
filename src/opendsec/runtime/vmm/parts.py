# SPDX-License-Identifier: Apache-2.0
"""What all microVMs of a node are made of: the boot image, QEMU's root directory, empty file systems. Made when first wanted, kept by
what goes into them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from opendsec.api.errors import Unsupported
from opendsec.runtime.vmm import bootimage, disks, initramfs, kernel, programs
from opendsec.runtime.vmm.locks import locked
from opendsec.runtime.vmm.programs import Programs
from opendsec.runtime.vmm.store import VmStore, settle

GUESTD = Path(__file__).resolve().parents[2] / "_native" / "dsec-guestd"
FORMAT = 1  # of the boot image


@dataclass(frozen=True)
class BootImage:
    """A kernel with guestd in its initramfs."""

    key: str
    path: Path


class Parts:
    """All methods block. `kernels`, `programs`: other directories for what is large and equal for many stores (tests share them)."""

    def __init__(self, store: VmStore, *, guestd: Path = GUESTD, shared: Path | None = None) -> None:
        self._store, self._guestd = store, guestd
        self._shared = shared or store.root
        self._boot: BootImage | None = None
        self._programs: Programs | None = None

    def programs(self) -> Programs:
        """Raises Unsupported where there is no QEMU."""
        if self._programs is None:
            self._programs = programs.prepare(self._shared / "qemu")
        return self._programs

    def programs_of(self, digest: str, version: str) -> Programs | None:
        """What a state was saved with: the same version of QEMU, or the very copy. None if neither is here. Raises Unsupported."""
        now = self.programs()
        if digest == now.digest or version == now.version:
            return now
        root = self._shared / "qemu" / digest
        return Programs(root, digest, version) if (root / "complete").exists() else None

    def boot_image(self) -> BootImage:
        """Raises Unavailable if the kernel cannot be had, Unsupported if guestd was not built. May download 30 MB."""
        if self._boot is None:
            if not self._guestd.exists():
                raise Unsupported(f"{self._guestd.name} was not built")
            root = self._shared / "kernels"
            found = kernel.install(root)
            guestd = self._guestd.read_bytes()
            key = hashlib.sha256(f"{FORMAT} {found.key} ".encode() + hashlib.sha256(guestd).digest()).hexdigest()[:16]
            folder = self._shared / "boot"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = folder / f"{key}.elf"
            if not path.exists():
                with locked(folder / "lock"):  # of all threads too: two sandboxes may be the first
                    if not path.exists():
                        modules = {name: found.module(root, name).read_bytes() for name in found.modules}
                        image = bootimage.build(found.vmlinux(root).read_bytes(), initramfs.build(guestd, modules, found.modules))
                        fresh = folder / f".{key}"
                        fresh.unlink(missing_ok=True)
                        fresh.write_bytes(image)
                        fresh.chmod(0o444)
                        fresh.rename(path)
            self._boot = BootImage(key, path)
        return self._boot

    def scratch(self, disk_bytes: int, inodes: int) -> tuple[Path, int]:
        """An empty file system of that room, which is only read, and its size."""
        name = f"{disk_bytes}-{inodes}.ext4"
        path = self._store.root / "scratch" / name
        if not path.exists():
            with locked(self._store.root / "scratch" / "lock"):
                if not path.exists():
                    fresh = path.with_name(f".{name}")
                    fresh.unlink(missing_ok=True)
                    disks.format_scratch(fresh, disk_bytes, inodes)
                    fresh.chmod(0o444)
                    settle([fresh])
                    fresh.rename(path)
        return path, path.stat().st_size
