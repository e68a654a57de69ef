# SPDX-License-Identifier: Apache-2.0
"""A store, a loader and layers to read, for tests and benchmarks of loading on demand.

    with Rig(tmp_path) as rig:                        # rig.web is the store: a FaultServer
        layer = rig.layer({"a/file": b"content"})     # in the store; here is its metadata
        async with rig.loader() as loader:
            mount = await rig.mount(loader, layer)    # a detached mount
            rig.read(mount, "a/file")

The loader is a family of processes; `rig.close` sees to it that none is left. Reads by `read` and `Reader` are safe; never map a file of
such a mount into this process: a page fault holds the interpreter's lock, and the store needs it to answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from opendsec.images import chunks, erofs, layers
from opendsec.images.chunks import ChunkTable
from opendsec.images.lazy.client import Loader, Settings
from opendsec.images.lazy.protocol import Event, Mechanism
from opendsec.images.origins import Origin
from opendsec.images.remote import layout
from opendsec.images.store import ImageStore
from opendsec.kernel import mounts
from tests.services import FaultServer

READ = """
import sys
try:
    with open(sys.argv[1], "rb", buffering=0) as file:
        while block := file.read(int(sys.argv[2])):
            sys.stdout.buffer.write(block)
except OSError as error:
    sys.exit(error.errno)
"""


def noise(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


@dataclass(frozen=True)
class Layer:
    digest: str
    meta: Path
    files: Mapping[str, bytes]
    blob: bytes
    table: ChunkTable
    key: str  # of data.blob in the store

    def chunks_of(self, name: str) -> range:
        """Of a file of more than a block: where its bytes lie in the data."""
        at = self.blob.index(self.files[name][:4096])
        return self.table.covering(at, len(self.files[name]))


class Reader:
    """A process that reads a file and gives what it read."""

    def __init__(self, mount: int, name: str, block: int = 1 << 20) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-ISc", READ, f"/proc/self/fd/{mount}/{name}", str(block)],
            pass_fds=[mount],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def result(self, timeout_s: float = 60) -> bytes | int:
        """The bytes, or an errno."""
        out, _ = self.process.communicate(timeout=timeout_s)
        return out if self.process.returncode == 0 else self.process.returncode

    async def result_soon(self, timeout_s: float = 60) -> bytes | int:
        return await asyncio.to_thread(self.result, timeout_s)


class Rig:
    def __init__(self, folder: Path, *, mechanism: Mechanism = "fanotify", attempt_s: float = 5.0, patience_s: float = 10.0) -> None:
        self.folder, self.mechanism = folder, mechanism
        self.remote = folder / "remote"
        self.remote.mkdir(parents=True)
        self.store = ImageStore(folder / "images")
        self.store.prepare()
        self.stores = folder / "stores.toml"
        self.run_dir = folder / "run"
        self.events: list[Event] = []
        self._mounts: list[int] = []
        self._attempt_s, self._patience_s = attempt_s, patience_s
        self.web = FaultServer(self.remote)

    def __enter__(self) -> Rig:
        self.web.__enter__()
        self.set_stores({"web": self.web.url})
        return self

    def __exit__(self, *exc: object) -> None:
        self.unmount()
        self.kill_all()
        self.web.close()

    def set_stores(self, urls: Mapping[str, str]) -> None:
        patience = f"attempt_s = {self._attempt_s}\ndeadline_s = {self._patience_s}\n"
        self.stores.write_text("".join(f'[[store]]\nname = "{name}"\nurl = "{url}"\n{patience}' for name, url in urls.items()))

    # --- layers ----------------------------------------------------------------------------------------------------

    def layer(self, files: Mapping[str, bytes], *, stores: tuple[str, ...] = ("web",), local: bool = False) -> Layer:
        """Pack files, put the layer into the store, and have here what a pull that loads on demand brings; or all of it (`local`)."""
        with self.store.workspace() as (work, _):
            tree, out = work / "tree", work / "out"
            for name, content in files.items():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                (tree / name).write_bytes(content)
            out.mkdir()
            erofs.pack(tree, out, all_root=True)
            blob = (out / layers.DATA).read_bytes()
            digest = "sha256:" + hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()
            record = layers.describe(out, digest=digest, kind="base", created_at=time.time())
            prefix = layout.layer_prefix(record)
            target = self.remote / prefix
            target.mkdir(parents=True, exist_ok=True)
            (target / layout.DATA).write_bytes(blob)
            if not local:
                (out / layers.DATA).unlink()
            self.store.publish(out, record, origin=None if local else Origin(stores=stores, prefix=prefix))
        directory = self.store.directory(digest)
        return Layer(digest, directory / layers.META, dict(files), blob, chunks.read(directory / layers.TABLE), f"{prefix}/{layout.DATA}")

    def cached(self, layer: Layer) -> Path:
        return self.store.cache / layers.directory_name(layer.digest)

    # --- the loader ------------------------------------------------------------------------------------------------

    def settings(self, **more: float) -> Settings:
        base = Settings(
            root=self.store.root,
            run_dir=self.run_dir,
            stores=self.stores,
            mechanism=self.mechanism,
            tick_s=0.1,
            linger_s=0.5,
            quiet_s=0.0,
            small_bytes=0,  # layers of tests are small, and are to be watched
        )
        return Settings(**{name: more.get(name, getattr(base, name)) for name in base.__struct_fields__})

    @contextlib.asynccontextmanager
    async def loader(self, **settings: float) -> AsyncIterator[Loader]:
        loader = await Loader.start(self.settings(**settings), self.events.append)
        try:
            yield loader
        finally:
            await loader.close()

    def family(self) -> dict[int, str]:
        """Living processes of our family: pid → role."""
        found = {}
        marker = os.fsencode(self.store.root)
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                threads = len(os.listdir(f"/proc/{pid}/task"))
            except OSError:
                continue
            if b"opendsec.images.lazy.keeper" in line and marker in line and state not in "ZX":
                found[int(pid)] = "loader" if threads > 1 else "keeper"
        return found

    def kill_all(self) -> None:
        """All at once: none is left to replace another."""
        stopped: set[int] = set()
        while pids := set(self.family()) - stopped:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= pids
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait(lambda: not self.family())

    async def crash_until(self, condition: Callable[[], object]) -> None:
        """Kill each loader as soon as it is there."""

        def work() -> None:
            while not condition():
                self.wait(lambda: self.pids("loader") or condition())
                for pid in self.pids("loader"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

        await asyncio.to_thread(work)

    def pids(self, role: str) -> list[int]:
        return sorted(pid for pid, found in self.family().items() if found == role)

    def wait(self, condition: Callable[[], object], timeout_s: float = 20) -> None:
        """Until something outside of this process is so, of which nobody tells."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, "it does not come about"
            time.sleep(0.01)

    async def wait_event(self, kind: str, timeout_s: float = 20) -> Event:
        end = time.monotonic() + timeout_s
        while True:
            for event in self.events:
                if event.event == kind:
                    return event
            assert time.monotonic() < end, f"no event {kind}; there were {self.events}"
            await asyncio.sleep(0.01)

    # --- reading ---------------------------------------------------------------------------------------------------

    async def mount(self, loader: Loader, layer: Layer) -> int:
        path, _ = await loader.ensure(layer.digest)
        return await asyncio.to_thread(self.mount_data, layer, path)

    def mount_data(self, layer: Layer, path: Path) -> int:
        fd = mounts.mount_erofs(layer.meta, path)
        self._mounts.append(fd)
        return fd

    def unmount(self, *fds: int) -> None:
        for fd in fds or tuple(self._mounts):
            os.close(fd)
            self._mounts.remove(fd)

    async def read(self, mount: int, name: str) -> bytes:
        """Raises OSError, as a reader inside would see it."""

        def work() -> bytes:
            fd = os.open(name, os.O_RDONLY, dir_fd=mount)
            try:
                parts = []
                while part := os.read(fd, 1 << 20):
                    parts.append(part)
                return b"".join(parts)
            finally:
                os.close(fd)

        return await asyncio.to_thread(work)


def drop_page_cache() -> None:
    """Of the whole machine, as far as it is clean."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")
