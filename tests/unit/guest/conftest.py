# SPDX-License-Identifier: Apache-2.0
"""Channels under both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="module", autouse=True)
def libuv() -> None:
    """libuv opens a pipe for signals with its first loop and keeps it for the life of the process: that is no leak of a test."""
    uvloop.new_event_loop().close()
