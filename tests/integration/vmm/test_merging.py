# SPDX-License-Identifier: Apache-2.0
"""The kernel may look for equal pages in machines only where an operator has said that they are all one tenant's."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from opendsec.images.store import ImageStore
from opendsec.kernel import procfs
from opendsec.runtime.vmm.handle import VmHandle
from opendsec.testing.contracts.backend import Setup
from tests.images import BASE
from tests.vms import LIMITS, VmNode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MERGEABLE = "mg"


@pytest.mark.parametrize("merge", [False, True])
async def test_memory_is_mergeable_only_where_it_may_be(test_images: Path, monkeypatch: pytest.MonkeyPatch, merge: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with VmNode(Path(folder), merge=merge) as node:
            setup = Setup(make=node.make, layers=ImageStore(test_images).resolve(BASE).layers, murder=lambda _: None, limits=LIMITS)
            await setup.start()
            try:
                await check(setup, merge)
                monkeypatch.setattr("opendsec.runtime.vmm.processes.find", lambda template: None)  # the slower way
                await check(setup, merge)
            finally:
                await setup.backend.close()


async def check(setup: Setup, merge: bool) -> None:
    async with setup.box() as handle:
        assert isinstance(handle, VmHandle)
        flags = procfs.mapping_flags(handle.vmm.pid)
    assert [MERGEABLE in found for path, found in flags if path == b"/ram"] == [merge]
    assert merge or all(MERGEABLE not in found for _, found in flags)
