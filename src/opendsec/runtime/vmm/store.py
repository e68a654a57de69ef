# SPDX-License-Identifier: Apache-2.0
"""What VMs keep on disk, and which of it is still needed.

    <state>/vm/
        kernels/ boot/ qemu/ scratch/     what machines are made of; see `kernel`, `parts`, `programs`
        templates/<key>/    template.json, ram, devices; its disk is disks/template-<key>.qcow2
        boxes/<sandbox id>/ box.json, its own disk (disk-N.qcow2), and when it was paused: ram-N, devices-N
        waiting/<machine>/  disk-0.qcow2 of a machine that waits to become a sandbox
        disks/<id>.qcow2    what a disk was at a snapshot; disks of others lie on it
        memory/<id>/        ram, devices: what memory was at a snapshot
        snapshots/<id>.json

`box.json` is the truth about a sandbox: the edge's journal may be a step behind. A snapshot's disk and memory are kept until neither its
record nor any box names them: `collect` removes the rest. Everything is published by a rename, after what it names. All of this blocks,
for some tenths of a millisecond unless said otherwise.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from opendsec.api.spec import Limits
from opendsec.runtime.backend import SnapshotRecord, VmOptions
from opendsec.runtime.vmm.process import VmmRecord

Version = Literal[1]
TEMPLATES_KEPT = 8  # that no sandbox or snapshot came of; each has some 100 MiB
T = TypeVar("T")


class Layer(msgspec.Struct, frozen=True):
    """The two files of a layer."""

    digest: str
    meta: str
    data: str


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """`template.json`. `disks`: what the template's own disk lies on, lowest first; below all is the empty file system `scratch`."""

    version: Version = 1
    key: str
    accel: Literal["tcg", "kvm"]
    qemu: str  # digest
    boot: str  # key of the boot image
    layers: tuple[str, ...]
    cpus: int
    memory_bytes: int
    scratch: str  # name of the empty file system
    scratch_bytes: int
    disks: tuple[str, ...]
    profile: str = ""  # of a full VM, as all that follows
    width: int = 0
    height: int = 0
    media: tuple[str, ...] = ()  # discs in its drives, of the host
    answers: bool = False  # and one more, `answers`, beside it
    made_for: dict[str, str] = {}  # what it can be loaded into: see `fits`

    @property
    def disk(self) -> str:
        """Its own, on which those of its clones lie."""
        return f"template-{self.key}"


class BoxState(msgspec.Struct, frozen=True, kw_only=True):
    """`box.json`. `vmm` None: no process. `memory`: "" the template's, "own" `ram-N` here, else the id of a snapshot's memory.
    `disks`: ids of frozen disks, lowest first, below its own, `disk-<generation>.qcow2`."""

    version: Version = 1
    sandbox_id: str
    state: Literal["making", "running", "paused"]
    template: str
    accel: Literal["tcg", "kvm"]
    machine: str  # names its control group and its run directory
    uid: int  # QEMU's
    uid_base: int  # what the edge has given it
    scratch_bytes: int
    limits: Limits
    layers: tuple[Layer, ...]
    options: VmOptions
    hostname: str = ""
    mac: str = ""
    memory: str = ""
    saves: int = 0  # how often its memory was saved; the number in `ram-N`
    disks: tuple[str, ...] = ()
    generation: int = 0
    stored_bytes: int = 0  # of a paused one: what its memory takes on the disk
    vmm: VmmRecord | None = None


class SnapshotState(msgspec.Struct, frozen=True, kw_only=True):
    """`snapshots/<id>.json`. `disks`: with the one that was frozen for it, the last."""

    version: Version = 1
    record: SnapshotRecord
    disks: tuple[str, ...]


class VmStore:
    """All of it below `root`, which is `<state>/vm`, or `vm-full` of full VMs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._collecting = threading.Lock()

    def prepare(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("boxes", "disks", "memory", "snapshots", "templates", "scratch", "boot"):
            (self.root / name).mkdir(mode=0o700, exist_ok=True)

    # --- places --------------------------------------------------------------------------------------------------------

    def box(self, sandbox_id: str) -> Path:
        return self.root / "boxes" / sandbox_id

    def own_disk(self, box: BoxState) -> Path:
        return self.box(box.sandbox_id) / f"disk-{box.generation}.qcow2"

    def template(self, key: str) -> Path:
        return self.root / "templates" / key

    def disk(self, disk_id: str) -> Path:
        return self.root / "disks" / f"{disk_id}.qcow2"

    def memory(self, memory_id: str) -> Path:
        return self.root / "memory" / memory_id

    def saved(self, box: BoxState) -> tuple[Path, Path]:
        """Memory and device state that a paused box has."""
        here = self.box(box.sandbox_id)
        return here / f"ram-{box.saves}", here / f"devices-{box.saves}"

    def shared_folders(self) -> list[Path]:
        """Those that hold what many stand on."""
        return [*(self.root / name for name in ("disks", "memory", "snapshots", "templates", "scratch", "boxes")), self.root]

    # --- boxes ---------------------------------------------------------------------------------------------------------

    def write_box(self, box: BoxState, *, durable: bool = False) -> None:
        write(self.box(box.sandbox_id) / "box.json", msgspec.json.encode(box), durable=durable)

    def read_box(self, sandbox_id: str) -> BoxState | None:
        return read(self.box(sandbox_id) / "box.json", BoxState)

    def boxes(self) -> list[str]:
        return sorted(os.listdir(self.root / "boxes")) if self.root.is_dir() else []

    def box_states(self) -> Iterator[BoxState]:
        for name in self.boxes():
            if (box := self.read_box(name)) is not None:
                yield box

    def remove_box(self, sandbox_id: str) -> None:
        shutil.rmtree(self.box(sandbox_id), ignore_errors=True)

    # --- snapshots -----------------------------------------------------------------------------------------------------

    def write_snapshot(self, snapshot: SnapshotState, *, durable: bool = True) -> None:
        path = self.root / "snapshots" / f"{snapshot.record.snapshot_id}.json"
        write(path, msgspec.json.encode(snapshot), durable=durable)

    def read_snapshot(self, snapshot_id: str) -> SnapshotState | None:
        return read(self.root / "snapshots" / f"{snapshot_id}.json", SnapshotState)

    def snapshots(self) -> list[str]:
        folder = self.root / "snapshots"
        return sorted(name.removesuffix(".json") for name in os.listdir(folder) if name.endswith(".json")) if folder.is_dir() else []

    def forget_snapshot(self, snapshot_id: str) -> None:
        (self.root / "snapshots" / f"{snapshot_id}.json").unlink(missing_ok=True)

    # --- templates -----------------------------------------------------------------------------------------------------

    def read_template(self, key: str) -> Template | None:
        return read(self.template(key) / "template.json", Template)

    def use_template(self, key: str) -> Template | None:
        """As above, and it counts as used now."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.template(key) / "template.json")
        return self.read_template(key)

    # --- what is not needed any more -------------------------------------------------------------------------------------

    def clear_unfinished(self) -> None:
        """Of an edge that died: disks of machines that waited, templates and files half made."""
        shutil.rmtree(self.root / "waiting", ignore_errors=True)
        for name in ("templates", "scratch", "snapshots", "disks"):
            for path in (self.root / name).glob(".*"):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def collect(self, kept: frozenset[str] = frozenset()) -> int:
        """Remove disks and memory that nothing names any more, templates that lie on such disks, and all but a few of those that nobody
        uses; how many. `kept`: ids in use that are not written down yet. May take as long as removing large files does."""
        with self._collecting:
            disks, memory, templates, count = set(kept), set(kept), set(kept), 0
            for box in self.box_states():
                disks.update(box.disks)
                memory.add(box.memory)
                templates.add(box.template)
            for name in self.snapshots():
                if (snapshot := self.read_snapshot(name)) is not None:
                    disks.update(snapshot.disks)
                    memory.add(name)
                    templates.add(snapshot.record.vm.template)
            room = TEMPLATES_KEPT
            for path in sorted((self.root / "templates").glob("*/template.json"), key=_used_at, reverse=True):
                if (template := read(path, Template)) is None:
                    continue
                unused = template.key not in templates
                room -= unused
                if unused and (room < 0 or not disks.issuperset(template.disks)):  # or it came of a snapshot that is gone
                    shutil.rmtree(path.parent, ignore_errors=True)
                    count += 1
                else:
                    disks.add(template.disk)
                    disks.update(template.disks)
            for path in (self.root / "disks").glob("*.qcow2"):
                if path.stem not in disks:
                    path.unlink(missing_ok=True)
                    count += 1
            for path in (self.root / "memory").iterdir():
                if path.name not in memory:
                    shutil.rmtree(path, ignore_errors=True)
                    count += 1
            return count


def _used_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def write(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Replace a file at once. `durable`: also if the machine loses power right after."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        with open(fresh, "wb", buffering=0, opener=_private) as file:
            rest = memoryview(data)
            while rest:  # of a disk that is nearly full a part may be taken
                rest = rest[file.write(rest) :]
            if durable:
                os.fdatasync(file.fileno())
        fresh.rename(path)
        if durable:
            settle([path.parent])
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def settle(paths: Iterable[Path]) -> None:
    """What was written to these files, and what is in these directories, outlives a loss of power from here on. Blocks."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def read(path: Path, kind: type[T]) -> T | None:
    """What `write` wrote; None if it is not there, or of another version."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None
