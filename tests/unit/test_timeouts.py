# SPDX-License-Identifier: Apache-2.0
"""A test that hangs fails when its time is up, in whatever it hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

HANGING = """
import asyncio, time
import pytest

pytestmark = pytest.mark.timeout(0.5, func_only=True)

async def test_future():
    await asyncio.get_running_loop().create_future()

async def test_task():
    await asyncio.gather(asyncio.sleep(100))

async def test_turning():
    while True:
        await asyncio.sleep(0)

async def test_callbacks():
    loop = asyncio.get_running_loop()
    def again():
        loop.call_soon(again)
    again()
    await loop.create_future()

def test_plain():
    time.sleep(100)
"""
CONFTEST = """
import asyncio, uvloop

def pytest_asyncio_loop_factories():
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
"""


@pytest.mark.slow
def test_whatever_hangs(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "tests.timeouts"]
    ended = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-q", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout.count("FAILED ") == 9 and "9 failed in" in ended.stdout, ended.stdout + ended.stderr
    assert "await asyncio.get_running_loop().create_future()" in ended.stdout
