# SPDX-License-Identifier: Apache-2.0
"""The names of the published DSec client library over this SDK: a thin layer for programs written against them.

    client = DSecClient()
    await client.open()
    args = DSecContainerRunArgs(container_image="python:3.12", memory_limit_mb=4096, cpu_cores_limit=4, ttl_running_stop=300)
    sandbox = await client.run_container(args, timeout=120)
    result = await sandbox.run_shell("echo hello world")
    await sandbox.stop()
    await client.close()

What the published library does beyond these names is not imitated; `sandbox.box` is the SDK's `Sandbox`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from opendsec.api.errors import InvalidRequest, Unavailable, Unsupported
from opendsec.api.spec import Container
from opendsec.client.aio import Client, Sandbox
from opendsec.client.results import Result

__all__ = ["DSecClient", "DSecContainerRunArgs", "DSecSandbox"]


@dataclass(frozen=True)
class DSecContainerRunArgs:
    """What to run. `ttl_running_stop`: seconds without use after which it is stopped. `network_rules`: service to allowed or not."""

    container_image: str
    memory_limit_mb: int = 512
    cpu_cores_limit: float = 1.0
    ttl_running_stop: float | None = None
    network_rules: Mapping[str, bool] | None = None
    init_user: str = ""

    def spec(self) -> Container:
        """As a spec of ours. Raises Unsupported for rules that allow something: sandboxes have a loopback and nothing else."""
        if self.network_rules is not None:
            if not isinstance(self.network_rules, Mapping):
                raise InvalidRequest("must map names of services to true or false", field="network_rules")
            allowed = sorted(str(name) for name, rule in self.network_rules.items() if rule)
            if allowed:
                raise Unsupported(f"no network access can be given yet, so none to {', '.join(allowed)}", field="network_rules")
        if not isinstance(self.memory_limit_mb, int):
            raise InvalidRequest("must be a whole number of MiB", field="memory_limit_mb")
        return Container(
            image=self.container_image,
            memory=self.memory_limit_mb << 20,
            cpu=self.cpu_cores_limit,
            ttl_idle_s=self.ttl_running_stop,
            user=self.init_user,
        )


class DSecClient:
    """A connection to an edge; see `opendsec.Client` for the address."""

    def __init__(self, endpoint: str | None = None, *, token: str | None = None, client: Client | None = None) -> None:
        self.client = client or Client(endpoint, token=token)

    async def open(self) -> None:
        """Reach the edge now rather than with the first call. Raises Unavailable, Unauthorized."""
        await self.client.info()

    async def close(self) -> None:
        await self.client.aclose()

    async def run_container(self, args: DSecContainerRunArgs, timeout: float | None = None) -> DSecSandbox:
        """A container, ready for commands; `timeout` in seconds. Raises Unavailable when it passes."""
        try:
            async with asyncio.timeout(timeout):
                return DSecSandbox(await self.client.create(args.spec()))
        except TimeoutError:
            raise Unavailable(f"the container was not ready within {timeout:g} s") from None

    async def __aenter__(self) -> DSecClient:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


class DSecSandbox:
    """A running container."""

    def __init__(self, box: Sandbox) -> None:
        self.box = box

    @property
    def sandbox_id(self) -> str:
        return self.box.id

    async def run_shell(self, command: str, timeout: float | None = None) -> Result:
        """Run shell text; its result. `timeout` in seconds ends the command, which is a result too."""
        return await self.box.run(command, timeout_s=timeout)

    async def stop(self) -> None:
        """End it; may be repeated."""
        await self.box.kill()
