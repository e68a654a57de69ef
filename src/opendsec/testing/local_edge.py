# SPDX-License-Identifier: Apache-2.0
"""The real server, node and journal in the event loop of a test, over fakes or over the real parts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path

import httpx

from opendsec.edge import config
from opendsec.edge.assemble import Parts
from opendsec.edge.config import Settings
from opendsec.edge.fn.routes import Functions
from opendsec.edge.listen import locked
from opendsec.edge.log import Log, NullLog
from opendsec.edge.node import Node
from opendsec.edge.serve import Assemble, Serving, serve
from opendsec.testing.fakes.backend import FakeMachine
from opendsec.testing.fakes.parts import fake_images, fake_parts

TOKEN = "a-token-for-tests-only"


class LocalEdge:
    """One edge; it can be stopped and started again on the same state.

    `directory`: a short path of the test's own. `assembling` None: fakes over `machine`, which outlives the edge.
    """

    def __init__(
        self,
        directory: Path,
        *,
        assembling: Assemble | None = None,
        machine: FakeMachine | None = None,
        log: Log | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.machine = machine or FakeMachine(directory / "machine")
        self.node: Node | None = None
        self.functions: Functions | None = None
        self.tcp_url = ""
        self._assembling = assembling or self._fakes
        self._log = log or NullLog()
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        for name in ("state", "run"):
            (directory / name).mkdir(exist_ok=True)
        token = directory / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        given = {"state_dir": "state", "run_dir": "run", "token_file": "token"}
        flags = [f"--{key.replace('_', '-')}={directory / value}" for key, value in given.items()]
        flags += [f"--{key.replace('_', '-')}={value}" for key, value in {"tcp": "127.0.0.1:0", **(settings or {})}.items()]
        self.settings: Settings = config.load(flags, {})

    async def _fakes(self, settings: Settings, edge_id: str, log: Log) -> Parts:
        images = await asyncio.to_thread(fake_images, settings.state_dir / "images")
        return fake_parts(self.machine, images, languages=settings.fn_languages)

    async def start(self) -> None:
        """Returns once it answers; raises what kept it from that."""
        ready: asyncio.Future[Serving] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()

        async def run() -> None:
            with locked(self.settings.state_dir), locked(self.settings.run_dir):
                await serve(self.settings, self._log, self._assembling, stop=self._stop, ready=ready.set_result)

        self._task = asyncio.ensure_future(run())
        await asyncio.wait((self._task, ready), return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            self._task.result()
        serving = ready.result()
        self.node, self.functions = serving.node, serving.functions
        self.tcp_url = f"http://127.0.0.1:{serving.tcp_port}"

    async def stop(self) -> None:
        """As SIGTERM does: sandboxes stay."""
        self._stop.set()
        if self._task is not None:
            task, self._task = self._task, None
            await task

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def close(self) -> None:
        """End it and its sandboxes."""
        if self._task is not None and self.node is not None and not self._task.done():
            await self.node.kill_all("the test is over")
        with contextlib.suppress(Exception):
            await self.stop()
        self.machine.close()

    def http(self) -> httpx.AsyncClient:
        """A client over the unix socket."""
        return httpx.AsyncClient(base_url="http://edge", transport=httpx.AsyncHTTPTransport(uds=str(self.settings.socket)), timeout=60)

    def tcp(self, token: str | None = TOKEN) -> httpx.AsyncClient:
        """A client over TCP."""
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        return httpx.AsyncClient(base_url=self.tcp_url, headers=headers, timeout=60)
