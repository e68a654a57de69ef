# SPDX-License-Identifier: Apache-2.0
"""The contract of function calls through the SDK, with real members."""

from __future__ import annotations

import pytest

from opendsec.testing.contracts import client_fn as contract
from tests.edges import EdgeProcess
from tests.toolchain import TOOLCHAIN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the image is built first, if it is not kept


@pytest.mark.parametrize("name", contract.CHECKS)
async def test_contract(name: str, edge: EdgeProcess) -> None:
    await contract.CHECKS[name](contract.Setup(make=edge.client, image=TOOLCHAIN))
