# SPDX-License-Identifier: Apache-2.0
"""The contract of function calls on the wire, over an edge of fakes and over a real one."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import pytest

from opendsec.edge.assemble import Parts, assemble
from opendsec.edge.config import Settings
from opendsec.edge.fn.languages import load
from opendsec.edge.log import Log
from opendsec.testing.contracts import fn_api
from opendsec.testing.contracts.fn_api import COMPILED, COMPILED_TOML, FnEdge
from opendsec.testing.fakes.backend import FakeMachine
from opendsec.testing.fakes.parts import IMAGE, fake_images, fake_parts
from opendsec.testing.local_edge import LocalEdge
from tests.images import BASE, base_store, link_store

pytestmark = pytest.mark.slow
KINDS = ("fake", "container")
SETTINGS = {"scratch_driver": "tmpfs", "memory_limit": "16GiB"}


@pytest.fixture(params=KINDS)
async def edge(request: pytest.FixtureRequest) -> AsyncGenerator[FnEdge, None]:
    async with running_edge(request.param) as edge:
        yield edge


@contextlib.asynccontextmanager
async def running_edge(kind: str) -> AsyncGenerator[FnEdge, None]:
    """An edge of one kind, and nothing of it afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        image = IMAGE if kind == "fake" else BASE
        languages = directory / "languages"
        languages.mkdir()
        (languages / f"{COMPILED}.toml").write_text(COMPILED_TOML.format(image=image))
        machine = FakeMachine(directory / "machine")

        async def fakes(settings: Settings, edge_id: str, log: Log) -> Parts:
            parts = fake_parts(machine, fake_images(settings.state_dir / "images"))
            assert parts.fn is not None
            return msgspec.structs.replace(parts, fn=msgspec.structs.replace(parts.fn, languages=load(languages, f"*={image}")))

        if kind == "fake":
            local = LocalEdge(directory, settings=SETTINGS, machine=machine, assembling=fakes)
        else:
            for folder_on_the_way in (directory, directory.parent):
                folder_on_the_way.chmod(0o755)  # a sandbox is put together below the run directory, as its own root
            (directory / "state").mkdir()
            link_store(base_store(), directory / "state" / "images")
            settings = {**SETTINGS, "fn_languages": str(languages), "fn_images": f"*={image}"}
            local = LocalEdge(directory, settings=settings, machine=machine, assembling=assemble)
        await local.start()

        def members() -> set[str]:
            assert local.functions is not None and local.functions.parts is not None
            return set(local.functions.parts.backend.leftovers())

        try:
            async with local.http() as client:
                yield FnEdge(client=client, image=image, restart=local.restart, members=members)
        finally:
            await local.close()


@pytest.mark.parametrize("name", fn_api.CHECKS)
async def test_contract(name: str, edge: FnEdge) -> None:
    await fn_api.CHECKS[name](edge)
