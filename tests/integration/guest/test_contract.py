# SPDX-License-Identifier: Apache-2.0
"""What a backend promises of commands and files, over the channel to a guestd on this machine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import cast

import pytest

from opendsec.runtime.backend import Backend
from opendsec.testing.contracts import backend as contract
from opendsec.testing.contracts.backend import Setup
from tests.hostguest import HostGuestBackend, HostGuestHandle

CHECKS = (
    "a_command_runs_as_planned",
    "standard_streams_may_be_none",
    "further_descriptors_arrive",
    "what_cannot_start_says_why",
    "a_signal_is_told",
    "a_tree_dies_whole",
    "what_came_after_the_mark_is_signalled_apart",
    "a_child_that_holds_the_pipe_does_not_delay_the_end",
    "many_commands_run_at_once",
    "a_terminal_is_one",
    "a_death_is_told",
    "files_and_commands_see_the_same",
)


@pytest.fixture
async def setup() -> AsyncGenerator[Setup, None]:
    async def make() -> Backend:
        return cast(Backend, HostGuestBackend())

    made = Setup(make=make, layers=(), murder=lambda handle: cast(HostGuestHandle, handle).guest.kill())
    await made.start()
    yield made


@pytest.mark.parametrize("name", CHECKS)
async def test_contract(name: str, setup: Setup) -> None:
    await contract.CHECKS[name](setup)
