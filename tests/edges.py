# SPDX-License-Identifier: Apache-2.0
"""A real edge as a child process of the test, that can be killed and started again on the same state."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import opendsec as od
from opendsec.kernel import procfs
from tests.images import link_store


class EdgeProcess:
    """`start`, `kill`, `stop` any number of times; `remove` at the end, which takes sandboxes and directories with it."""

    def __init__(self, images: Path | None, arguments: Sequence[str] = (), *, stores: str = "") -> None:
        """`images`: a store whose images it is to have; `stores`: the text of its `stores.toml`."""
        self.folder = Path(tempfile.mkdtemp(prefix="edge-", dir="/var/tmp"))  # on a disk; /tmp may be memory
        self.state_dir, self.run_dir = self.folder / "state", self.folder / "run"
        self.state_dir.mkdir()
        if images is not None:
            link_store(images, self.state_dir / "images")
        if stores:
            (self.state_dir / "stores.toml").write_text(stores)
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self.edge_id = ""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Return when it accepts connections. Raises AssertionError with its log if it does not."""
        ready, tell = os.pipe2(os.O_CLOEXEC)
        command = [sys.executable, "-m", "opendsec.edge", "--state-dir", str(self.state_dir), "--run-dir", str(self.run_dir)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--ready-fd", str(tell), *self._arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(tell,)
            )
        os.close(tell)
        try:
            assert os.read(ready, 1), f"the edge did not start:\n{self.log()[-4000:]}"
        finally:
            os.close(ready)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def client(self) -> od.Client:
        return od.Client(run_dir=self.run_dir, state_dir=self.state_dir, start_edge=False)

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def stop(self) -> None:
        """SIGTERM, and wait."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait()
            self._process = None

    def remove(self) -> None:
        """End sandboxes and edge, release what the state directory holds, remove it."""
        import asyncio

        async def end() -> None:
            async with self.client() as client:
                await client.shutdown(kill=True)

        try:
            if self._process is None:
                self.start()
            asyncio.run(end())
            assert self._process is not None
            self._process.wait()
        finally:
            self._process = None
            for mount in procfs.mountinfo():
                assert not os.fsdecode(mount.mount_point).startswith(str(self.folder)), f"still mounted: {mount}"
            shutil.rmtree(self.folder)
