# SPDX-License-Identifier: Apache-2.0
"""The contract of a backend, over the fake, over containers, over microVMs and over full VMs."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from opendsec.api.ids import EDGE, new_id
from opendsec.images.store import ImageStore
from opendsec.runtime.backend import Backend, Handle
from opendsec.runtime.container.backend import ContainerBackend
from opendsec.runtime.scratch import ScratchSettings, choose
from opendsec.testing.contracts import backend as contract
from opendsec.testing.contracts.backend import Setup
from opendsec.testing.fakes.backend import FakeBackend, FakeHandle, FakeMachine
from opendsec.testing.fakes.parts import IMAGE, fake_images
from tests.full_vms import DISK, FullNode, debian_disk
from tests.full_vms import LIMITS as FULL_LIMITS
from tests.images import BASE, base_store
from tests.vms import LIMITS, VmNode

FIRST = pytest.mark.timeout(900)  # for the one that makes the disk and its template; both are kept
"""Marks tests of full VMs."""


@pytest.fixture(params=("fake", "container", "microvm", pytest.param("vm", marks=[pytest.mark.slow, FIRST])))
async def setup(request: pytest.FixtureRequest) -> AsyncGenerator[Setup, None]:
    with tempfile.TemporaryDirectory() as folder:
        async for setup in SETUPS[request.param](Path(folder)):
            await setup.start()
            yield setup
            await setup.backend.close()


async def fake_setup(directory: Path) -> AsyncGenerator[Setup, None]:
    machine = FakeMachine(directory / "machine")

    async def make() -> Backend:
        backend = FakeBackend(machine)
        await backend.start()
        return backend

    def murder(handle: Handle) -> None:
        assert isinstance(handle, FakeHandle)
        handle.sandbox.die()

    yield Setup(make=make, layers=fake_images(directory / "images").resolve(IMAGE).layers, murder=murder)
    machine.close()


async def container_setup(directory: Path) -> AsyncGenerator[Setup, None]:
    scratch, _ = await choose(directory, ScratchSettings(driver="tmpfs"))
    edge_id = new_id(EDGE)

    async def make() -> Backend:
        backend = ContainerBackend(edge_id=edge_id, scratch=scratch, staging=directory, lock=directory / "spawner.lock")
        await backend.start()
        return backend

    yield Setup(
        make=make,
        layers=ImageStore(base_store()).resolve(BASE).layers,
        murder=lambda handle: os.kill(handle.record.pid, signal.SIGKILL),
    )
    await scratch.close()


async def microvm_setup(directory: Path) -> AsyncGenerator[Setup, None]:
    async with VmNode(directory) as node:
        yield Setup(
            make=node.make,
            layers=ImageStore(base_store()).resolve(BASE).layers,
            murder=lambda handle: os.kill(handle.record.pid, signal.SIGKILL),
            limits=LIMITS,
        )


async def vm_setup(directory: Path) -> AsyncGenerator[Setup, None]:
    async with FullNode(directory) as node:
        setup = Setup(
            make=node.make,
            layers=ImageStore(debian_disk()).resolve(DISK).layers,
            murder=lambda handle: os.kill(handle.record.pid, signal.SIGKILL),
            limits=FULL_LIMITS,
            timeout_s=600.0,
        )
        backend = await node.make()
        await backend.prepare(setup.placement())  # a boot of minutes where the machine is busy, if it is not kept
        await backend.close()
        yield setup


SETUPS = {"fake": fake_setup, "container": container_setup, "microvm": microvm_setup, "vm": vm_setup}


@pytest.mark.parametrize("name", contract.CHECKS)
async def test_contract(name: str, setup: Setup) -> None:
    await contract.CHECKS[name](setup)
