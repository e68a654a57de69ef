# SPDX-License-Identifier: Apache-2.0
"""The contract of pool members, over the fake and over the real ones."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from opendsec.images.layers import LayerRef
from opendsec.runtime.container.backend import ContainerBackend
from opendsec.runtime.fncall.backend import FnMembers
from opendsec.runtime.fncall.interface import Member
from opendsec.runtime.fncall.member import FnMember
from opendsec.runtime.scratch.tmpfs import TmpfsScratch
from opendsec.testing.contracts import fn_members
from opendsec.testing.contracts.fn_members import Setup
from opendsec.testing.fakes.members import FakeMember, FakeMembers
from tests.boxes import STAGING

pytestmark = pytest.mark.slow

_numbers = itertools.count()


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncGenerator[Setup, None]:
    backend = FakeMembers(tmp_path / "members")
    await backend.start()

    def murder(member: Member) -> None:
        assert isinstance(member, FakeMember)
        member.die("killed")

    yield Setup(backend=backend, layers=(), murder=murder, isolates=False)
    assert list(backend.leftovers()) == []
    await backend.close()


@pytest.fixture
async def real(tmp_path: Path, base_layers: tuple[LayerRef, ...]) -> AsyncGenerator[Setup, None]:
    containers = ContainerBackend(
        edge_id=f"edge_test{os.getpid()}c{next(_numbers)}", scratch=TmpfsScratch(), staging=STAGING, lock=tmp_path / "lock"
    )
    backend = FnMembers(containers)
    await containers.start()
    await backend.start()

    def murder(member: Member) -> None:
        assert isinstance(member, FnMember)
        os.kill(member.pid, signal.SIGKILL)

    yield Setup(backend=backend, layers=base_layers, murder=murder, isolates=True)
    assert list(backend.leftovers()) == []
    await backend.close()
    await containers.close()


@pytest.mark.parametrize("name", fn_members.CHECKS)
async def test_contract_of_real_members(name: str, real: Setup) -> None:
    await fn_members.CHECKS[name](real)


@pytest.mark.parametrize("name", fn_members.CHECKS)
async def test_contract_of_the_fake(name: str, fake: Setup) -> None:
    await fn_members.CHECKS[name](fake)
