# SPDX-License-Identifier: Apache-2.0
"""A fake edge for each module, a client for each test, and the command line."""

from __future__ import annotations

import io
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

from opendsec.client.aio import Client
from opendsec.client.cli import main
from opendsec.testing.fakes.edge import FakeEdge


@pytest.fixture(scope="module")
def edge() -> Iterator[FakeEdge]:
    with FakeEdge() as edge:
        yield edge


@pytest.fixture
async def client(edge: FakeEdge) -> AsyncIterator[Client]:
    async with Client(f"unix:{edge.socket_path}") as client:
        yield client


class Ran(NamedTuple):
    code: int
    out: str
    err: str


class Dsec(Protocol):
    def __call__(self, *words: str, stdin: bytes = b"") -> Ran: ...


@pytest.fixture
def dsec(edge: FakeEdge, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Dsec:
    """Run `dsec` in this process, in a directory of the test's own."""
    monkeypatch.setenv("OPENDSEC_ADDRESS", f"unix:{edge.socket_path}")
    monkeypatch.chdir(tmp_path)

    def run(*words: str, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "argv", ["dsec", *words])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            main.main()
            code: object = 0
        except SystemExit as end:
            code = end.code
        out, err = capfd.readouterr()
        assert isinstance(code, int)
        return Ran(code, out, err)

    return run
