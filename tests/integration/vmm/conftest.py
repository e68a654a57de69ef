# SPDX-License-Identifier: Apache-2.0
"""Machines are driven from uvloop, as the edge drives them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


uvloop.new_event_loop().close()  # the first one makes a pipe that the process keeps
