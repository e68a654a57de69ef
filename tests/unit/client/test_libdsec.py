# SPDX-License-Identifier: Apache-2.0
"""The published names."""

from __future__ import annotations

import pytest

from opendsec.api.errors import InvalidRequest, NotFound, Unsupported
from opendsec.client.aio import Client
from opendsec.libdsec import DSecClient, DSecContainerRunArgs
from opendsec.testing.fakes.edge import FakeEdge


async def test_the_published_session() -> None:
    with FakeEdge() as edge:
        client = DSecClient(client=Client(f"unix:{edge.socket_path}"))
        await client.open()
        args = DSecContainerRunArgs(
            container_image="python:3.12",
            memory_limit_mb=4096,
            cpu_cores_limit=4,
            ttl_running_stop=300,
            network_rules={"npm": False, "pypi": False},
            init_user="root",
        )
        sandbox = await client.run_container(args, timeout=120)
        result = await sandbox.run_shell("echo hello world")
        assert (result.stdout, result.exit_code) == ("hello world\n", 0)
        assert (await sandbox.run_shell("sleep 60", timeout=0.05)).outcome == "timed_out"
        spec = edge.boxes[sandbox.sandbox_id].info.spec
        assert spec is not None
        assert (spec.memory, spec.cpu, spec.ttl_idle_s, spec.user) == (4096 << 20, 4, 300, "root")
        await sandbox.stop()
        await sandbox.stop()
        with pytest.raises(NotFound):
            await client.run_container(DSecContainerRunArgs(container_image="no-such-image"))
        await client.close()


def test_rules_that_allow_something_are_refused() -> None:
    with pytest.raises(Unsupported, match="pypi"):
        DSecContainerRunArgs(container_image="x", network_rules={"npm": False, "pypi": True}).spec()
    with pytest.raises(InvalidRequest):
        DSecContainerRunArgs(container_image="x", network_rules=["pypi"]).spec()  # type: ignore[arg-type]
    assert DSecContainerRunArgs(container_image="x", network_rules={}).spec().image == "x"
