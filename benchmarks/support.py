# SPDX-License-Identifier: Apache-2.0
"""An edge for a benchmark: its own state and run directories, the tests' base image, gone afterwards."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import opendsec as od
from opendsec.client import launch
from opendsec.images.store import ImageStore
from tests.images import BASE, link_store

IMAGE = BASE
T = TypeVar("T")


async def timed(doing: Coroutine[None, None, T]) -> tuple[T, float]:
    """Its result, and the milliseconds until then."""
    began = time.perf_counter()
    result = await doing
    return result, (time.perf_counter() - began) * 1000


def image_layers(images: Path, image: str = IMAGE) -> list[tuple[Path, Path]]:
    """(metadata, data) files of the image's layers, lowest first."""
    return [(layer.meta, layer.data) for layer in ImageStore(images).resolve(image).layers]


@asynccontextmanager
async def bench_edge(images: Path) -> AsyncIterator[od.Client]:
    """A client of a fresh edge that has the images of the store at `images`."""
    folder = Path(tempfile.mkdtemp(prefix="dsec-bench-", dir="/var/tmp"))
    try:
        link_store(images, folder / "state" / "images")
        async with od.Client(run_dir=folder / "run", state_dir=folder / "state") as client:
            try:
                yield client
            finally:
                pidfd = os.pidfd_open((await client.info()).pid)
                try:
                    await client.shutdown(kill=True)
                    await client.aclose()
                    await asyncio.to_thread(launch.wait_ended, pidfd)
                finally:
                    os.close(pidfd)
    finally:
        shutil.rmtree(folder)
