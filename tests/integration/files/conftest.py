# SPDX-License-Identifier: Apache-2.0
"""Boxes to work in: one of each kind for a module's tests, each in a directory of its own. "guest": through guestd, as in a machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.files.box import Box
from tests.integration.files.guestbox import DEVIATIONS, GuestBox


@pytest.fixture(scope="module", params=["host", "inside", "guest"])
def box(request: pytest.FixtureRequest) -> Iterator[Box]:
    with GuestBox() if request.param == "guest" else Box(request.param) as made:
        yield made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what the guest does otherwise: see DEVIATIONS."""
    items[:] = [item for item in items if not (isinstance(item, pytest.Function) and deviates(item))]


def deviates(item: pytest.Function) -> bool:
    return item.originalname in DEVIATIONS and hasattr(item, "callspec") and item.callspec.params.get("box") == "guest"


@pytest.fixture
def here(box: Box, request: pytest.FixtureRequest) -> bytes:
    """A directory of the test's own, made inside, empty, writable for root of the box."""
    count = getattr(request.module, "_made", 0)
    request.module._made = count + 1
    path = f"/work/t{count}"
    box.run(f"os.makedirs({path!r}); os.chdir({path!r})")
    return path.encode()
