# SPDX-License-Identifier: Apache-2.0
"""kill -9 of edge, QEMU and guestd at random moments: what lives is as it should be, whoever asks is told right, nothing is left.
`benchmarks/microvm.py` does more rounds of the same."""

from __future__ import annotations

import pytest

from tests.machine_crash import Crashes
from tests.machine_edges import MachineEdge

ROUNDS = 9

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def test_kill_at_random_moments(edge: MachineEdge) -> None:
    tally = await Crashes(edge, seed=20261130).run(ROUNDS)
    assert not tally.counts, "\n".join(tally.details)
