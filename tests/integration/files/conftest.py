# SPDX-License-Identifier: Apache-2.0
"""Boxes to work in: one of each kind for a module's tests, each test in a directory of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.files.box import Box


@pytest.fixture(scope="module", params=["host", "inside"])
def box(request: pytest.FixtureRequest) -> Iterator[Box]:
    with Box(request.param) as made:
        yield made


@pytest.fixture
def here(box: Box, request: pytest.FixtureRequest) -> bytes:
    """A directory of the test's own, made inside, empty, writable for root of the box."""
    count = getattr(request.module, "_made", 0)
    request.module._made = count + 1
    path = f"/work/t{count}"
    box.run(f"os.makedirs({path!r}); os.chdir({path!r})")
    return path.encode()
