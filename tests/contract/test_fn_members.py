# SPDX-License-Identifier: Apache-2.0
"""The contract of pool members, over the fake and over the real ones."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from opendsec.runtime.fncall.interface import Member
from opendsec.testing.contracts import fn_members
from opendsec.testing.contracts.fn_members import Setup
from opendsec.testing.fakes.members import FakeMember, FakeMembers

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize("name", fn_members.CHECKS)
async def test_contract_of_the_fake(name: str, fake: Setup) -> None:
    await fn_members.CHECKS[name](fake)
