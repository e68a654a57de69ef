# SPDX-License-Identifier: Apache-2.0
"""The contract of function calls on the wire, over an edge of fakes and over a real one."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from opendsec.testing.contracts import fn_api
from opendsec.testing.contracts.fn_api import COMPILED, COMPILED_TOML, FnEdge
from tests.contract.conftest import image_of, local_edge

pytestmark = pytest.mark.slow


@pytest.fixture(params=("fake", "container"))
async def edge(request: pytest.FixtureRequest) -> AsyncGenerator[FnEdge, None]:
    image = image_of(request.param)
    with tempfile.TemporaryDirectory() as folder:
        languages = Path(folder) / "languages"
        languages.mkdir()
        (languages / f"{COMPILED}.toml").write_text(COMPILED_TOML.format(image=image))
        settings = {"fn_languages": str(languages), "fn_images": f"*={image}"}
        async with local_edge(request.param, Path(folder), **settings) as local, local.http() as client:

            def members() -> set[str]:
                assert local.functions is not None and local.functions.parts is not None
                return set(local.functions.parts.backend.leftovers())

            yield FnEdge(client=client, image=image, restart=local.restart, members=members)


@pytest.mark.parametrize("name", fn_api.CHECKS)
async def test_contract(name: str, edge: FnEdge) -> None:
    await fn_api.CHECKS[name](edge)
