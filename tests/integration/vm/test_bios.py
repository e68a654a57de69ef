# SPDX-License-Identifier: Apache-2.0
"""The Debian disk started by BIOS, all the way: template, clone, a command."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from opendsec.images.store import ImageStore
from opendsec.runtime.backend import VmOptions
from opendsec.testing.contracts.backend import Setup, output
from tests.full_vms import DISK, LIMITS, FullNode, debian_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first makes the disk and its template, which are kept
ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


async def test_a_disk_starts_by_bios() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with FullNode(Path(folder)) as node:
            layers = ImageStore(debian_disk()).resolve(DISK).layers
            setup = Setup(make=node.make, layers=layers, murder=lambda _: None, limits=LIMITS, timeout_s=600)
            await setup.start()
            try:
                async with setup.box(vm=VmOptions(profile="linux-bios")) as handle:
                    words = ("/bin/sh", "-c", "test -d /sys/firmware/efi || echo none; findmnt -no SOURCE /")
                    said, ended = await output(handle, *words, env=ENV, cwd="/")
                    assert (said, ended.code) == (b"none\n/dev/vda2\n", 0)
            finally:
                await setup.backend.close()
