# SPDX-License-Identifier: Apache-2.0
"""What a machine monitor has for a root directory: a copy of QEMU with its libraries and firmware, and nothing else.

A copy, so that an upgrade of the package under living machines changes nothing for them: a template's clones need the very QEMU that made
it. Its name is a digest of its content, which is also the QEMU part of a template's key.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from opendsec.api.errors import Unsupported
from opendsec.kernel.probes import machines
from opendsec.kernel.probes.tools import Missing
from opendsec.runtime.vmm.arguments import QEMU

FORMAT = 2
FOLDERS = ("dev", "tmp", "state")
PLACES = ("ram", "kernel", "initrd", "firmware", "variables", "source", "target", "base")
"""Names that a machine's own files get, and those of tools (`tools.py`)."""

FIRMWARE = ("/usr/share/qemu", "/usr/share/seabios", "/usr/share/vgabios", "/usr/lib/ipxe/qemu")
PRELOADED = "/usr/lib/dsec-ram.so"
"""What is loaded into QEMU before its own libraries: see native/ram.c."""

RESTORE = "/usr/bin/dsec-restore"
"""What becomes a QEMU that was captured: see native/restore.c. Not there on machines for which it cannot be built."""

_NATIVE = Path(__file__).resolve().parents[2] / "_native"
NATIVE = _NATIVE / "dsec-ram.so"
KEYMAPS = "/usr/share/qemu/keymaps"
FIRMWARE_SUFFIXES = (".bin", ".rom", ".img")
MODULES = ("hw-display-virtio-gpu.so", "hw-display-virtio-gpu-pci.so", "hw-display-virtio-vga.so")


@dataclass(frozen=True)
class Programs:
    """A prepared root directory."""

    root: Path
    digest: str
    version: str


def version_of(qemu: str = QEMU) -> str:
    """QEMU's version, such as "10.0.2". Raises Unsupported if there is none, or one that is too old."""
    try:
        return machines.qemu_version(qemu)
    except Missing as error:
        raise Unsupported(str(error), field="spec.backend") from None


def sources(qemu: str = QEMU) -> dict[str, Path]:
    """Every file to copy: its name in the root directory (the one the host has) → the file with its links resolved. Raises Unsupported."""
    if not NATIVE.exists():
        raise Unsupported(f"{NATIVE.name} was not built")
    wanted = {qemu}
    modules = [path for folder in Path("/usr/lib").glob("*/qemu") for path in sorted(folder.iterdir()) if path.name in MODULES]
    for program in (qemu, *map(str, modules)):
        wanted |= {program, *libraries(program)}
    for folder in map(Path, FIRMWARE):
        if folder.is_dir():
            wanted |= {str(path) for path in sorted(folder.iterdir()) if path.suffix in FIRMWARE_SUFFIXES and path.is_file()}
    wanted |= {str(path) for path in Path(KEYMAPS).glob("*") if path.is_file()}
    own = {PRELOADED: NATIVE, RESTORE: _NATIVE / "dsec-restore"}
    return {plain(name): Path(name).resolve() for name in sorted(wanted)} | {name: path for name, path in own.items() if path.exists()}


def plain(name: str) -> str:
    """/lib/x → /usr/lib/x, where the one is a link to the other."""
    first = "/" + name.split("/", 2)[1]
    return "/usr" + name if os.path.islink(first) and name.startswith(("/lib", "/bin", "/sbin")) else name


def libraries(program: str) -> list[str]:
    said = subprocess.run(["ldd", program], capture_output=True, text=True, timeout=30, check=True).stdout
    return re.findall(r"(?:=> |^\s+)(/\S+) \(0x", said, re.MULTILINE)


def prepare(parent: Path, qemu: str = QEMU) -> Programs:
    """The root directory beneath `parent`, made if it is not there. Blocking; some 0.1 s, or a second where it has to be made."""
    version = version_of(qemu)
    return copied(parent, sources(qemu), version)


def prepare_tools(parent: Path, names: Sequence[str]) -> Programs:
    """A root directory for other programs that read what guests made, such as qemu-img. Raises Unsupported if one is not there."""
    wanted: set[str] = set()
    for name in names:
        found = shutil.which(name, path="/usr/bin:/usr/sbin")
        if found is None:
            raise Unsupported(f"there is no {name} here")
        wanted |= {found, *libraries(found)}
    return copied(parent, {plain(name): Path(name).resolve() for name in sorted(wanted)}, " ".join(names))


def copied(parent: Path, files: dict[str, Path], version: str) -> Programs:
    digest = digest_of(files, version)
    root = parent / digest
    if not (root / "complete").exists():
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=".making-", dir=parent))
        try:
            fill(making, files)
            try:
                making.rename(root)
            except OSError:  # somebody else was quicker
                if not (root / "complete").exists():
                    raise
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return Programs(root, digest, version)


def digest_of(files: dict[str, Path], version: str) -> str:
    """Of names, sizes and times, not of 60 MB of content: a package manager that replaces a file changes them."""
    state = hashlib.sha256(f"{FORMAT} {version}\n".encode())
    for name, path in files.items():
        facts = path.stat()
        state.update(f"{name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return state.hexdigest()[:32]


def fill(root: Path, files: dict[str, Path]) -> None:
    for name, path in files.items():
        target = root / name.lstrip("/")
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with path.open("rb") as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
            copy.flush()
            os.fsync(copy.fileno())  # a crash of the machine must not leave half a program that is called complete
        target.chmod(0o555 if os.access(path, os.X_OK) else 0o444)
    for name in ("lib", "lib64", "bin"):
        if os.path.islink(f"/{name}") and (root / "usr" / name).is_dir() and not (root / name).exists():
            (root / name).symlink_to(f"usr/{name}")
    # Programs may be executed but not read: then the kernel lets nobody of their own user look into the process.
    for name in files:
        if name.startswith("/usr/bin/"):
            (root / name.lstrip("/")).chmod(0o111)
    for name in FOLDERS:
        (root / name).mkdir(mode=0o755, exist_ok=True)
    for name in PLACES:
        (root / name).touch(mode=0o444)
    (root / "complete").touch(mode=0o444)
    for folder, folders, _ in os.walk(root):
        for name in folders:
            if not os.path.islink(os.path.join(folder, name)):
                os.chmod(os.path.join(folder, name), 0o755)
    root.chmod(0o755)


def collect(parent: Path, keep: set[str]) -> list[str]:
    """Remove the copies that are neither named in `keep` (digests that machines or saved states were made with) nor half made just now;
    which ones. Blocking."""
    removed = []
    for path in parent.iterdir() if parent.is_dir() else ():
        if path.name not in keep and not path.name.startswith("."):
            (path / "complete").unlink(missing_ok=True)  # first: what is half gone must not be taken for whole
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path.name)
    return removed
