# SPDX-License-Identifier: Apache-2.0
"""The contract of images over a real edge with a real store, by each way of loading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.testing.contracts import images as contract
from tests.edges import EdgeProcess
from tests.images import BASE
from tests.leaks import LeakDetector

ARGUMENTS = ("--scratch-size", "1GiB")


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("depot")


def stores(remote: Path) -> str:
    return f'[[store]]\nname = "depot"\nurl = "{remote}"\nwritable = true\n'


@pytest.fixture(scope="module")
def edge(test_images: Path, remote: Path, leak_detector: LeakDetector) -> Iterator[EdgeProcess]:
    process = EdgeProcess(test_images, ARGUMENTS, stores=stores(remote))
    leak_detector.allow("processes", r"opendsec")  # the loader starts when it is first needed, and ends with the edge;
    leak_detector.allow("cgroups", r"/opendsec-edge_\w+$")  # so does the group of its sandboxes
    try:
        process.start()
        yield process
    finally:
        process.remove()


@pytest.mark.slow
@pytest.mark.parametrize("name", contract.CHECKS)
async def test_contract(name: str, edge: EdgeProcess, tmp_path: Path) -> None:
    setup = contract.Setup(make=edge.client, image=BASE, store="depot", folder=tmp_path)
    await contract.CHECKS[name](setup)
