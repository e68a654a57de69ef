# SPDX-License-Identifier: Apache-2.0
"""Programs that read hostile disk images see those and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from opendsec.api.errors import Internal, Unavailable, Unsupported
from opendsec.kernel import cgroups
from opendsec.runtime.vmm import programs, tools
from opendsec.runtime.vmm.arguments import Inside
from opendsec.runtime.vmm.place import Place
from tests.boxes import STAGING, UID_BASE
from tests.vmms import Vmms

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]
QEMU_IMG = "/usr/bin/qemu-img"


@pytest.fixture
def place(vmms: Vmms) -> Place:
    root = programs.prepare_tools(vmms.folder / "tools", ["qemu-img", "sleep"]).root
    return Place(
        name="tool",
        directory=str(vmms.folder / "run" / "tool"),
        group=f"{vmms.group}/tool",
        limits={"memory_bytes": 256 << 20, "cpu_cores": 1, "pids": 64},
        uid=UID_BASE + 65_536 * 2,
        root=str(root),
        staging=str(STAGING),
    )


def gone(place: Place) -> bool:
    return not cgroups.discover().group(place.group).exists() and not Path(place.directory).exists()


async def test_converts_an_image(vmms: Vmms, place: Place) -> None:
    source, target = vmms.folder / "source", vmms.folder / "target"
    source.write_bytes(os.urandom(1 << 20))
    source.chmod(0o600)
    target.touch()
    files = [Inside(str(source), "source"), Inside(str(target), "target", writable=True)]
    command = [QEMU_IMG, "convert", "-f", "raw", "-O", "qcow2", "/source", "/target"]
    (await tools.run(vmms.spawner, place, command, files)).check("qemu-img")
    assert gone(place)
    said = (await tools.run(vmms.spawner, place, [QEMU_IMG, "info", "--output=json", "/target"], files)).check("qemu-img")
    assert json.loads(said)["virtual-size"] == 1 << 20
    assert gone(place)


async def test_what_an_image_names_is_not_there(vmms: Vmms, place: Place) -> None:
    secret, image = vmms.folder / "secret", vmms.folder / "image"
    secret.write_bytes(b"s" * 65_536)
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(secret), "-F", "raw", image], check=True, timeout=30)
    target = vmms.folder / "target"
    target.touch()
    files = [Inside(str(image), "source"), Inside(str(target), "target", writable=True)]
    ended = await tools.run(vmms.spawner, place, [QEMU_IMG, "convert", "-f", "qcow2", "-O", "raw", "/source", "/target"], files)
    with pytest.raises(Internal, match="No such file"):
        ended.check("qemu-img")
    assert b"s" * 100 not in target.read_bytes()


async def test_ends_that_are_none(vmms: Vmms, place: Place) -> None:
    with pytest.raises(Unavailable, match="did not end within"):
        await tools.run(vmms.spawner, place, ["/usr/bin/sleep", "60"], timeout_s=0.2)
    assert gone(place)
    with pytest.raises(Internal, match="cannot start"):
        await tools.run(vmms.spawner, place, ["/usr/bin/none"])
    assert gone(place)
    ended = await tools.run(vmms.spawner, place, [QEMU_IMG, "nonsense"])
    with pytest.raises(Internal, match="ended with 1"):
        ended.check("qemu-img")
    with pytest.raises(Unsupported, match="no such-program"):
        programs.prepare_tools(vmms.folder, ["such-program"])
