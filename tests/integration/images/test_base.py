# SPDX-License-Identifier: Apache-2.0
"""The Debian base that other tests stand on: ready for sandboxes, and nothing of this machine in it."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.api.errors import InvalidRequest
from opendsec.api.images import BuildEvent, BuildRequest, DebianSource
from opendsec.images import debian
from opendsec.images.build import build
from opendsec.images.erofs import TIMESTAMP
from opendsec.images.store import ImageStore
from opendsec.kernel import mounts
from tests.images import BASE, link_store
from tests.support import requires

pytestmark = requires("erofs_device")


@pytest.fixture
def base(test_images: Path) -> Iterator[Path]:
    (ref,) = ImageStore(test_images).resolve(BASE).layers
    fd = mounts.mount_erofs(ref.meta, ref.data)
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def test_a_linked_store_is_independent(test_images: Path, tmp_path: Path) -> None:
    store = link_store(test_images, tmp_path / "state" / "images")
    store.remove(BASE)
    store.gc(grace_s=0)
    assert ImageStore(test_images).resolve(BASE).image == BASE


def test_the_shared_layer_is_what_it_says(test_images: Path) -> None:
    store = ImageStore(test_images)
    for layer in store.list().layers:
        store.verify(layer.digest)


def test_it_has_what_programs_expect(base: Path) -> None:
    for program in ("bin/sh", "bin/bash", "usr/bin/python3", "usr/bin/git", "usr/bin/patch", "bin/ps"):
        assert os.access(base / program, os.X_OK), program
    assert (base / "etc/hosts").read_text() == debian.HOSTS
    assert (base / "etc/resolv.conf").read_bytes() == b""
    for name, mode in {"dev": 0o755, "proc": 0o555, "sys": 0o555, "run": 0o755, "tmp": 0o1777, "var/tmp": 0o1777}.items():
        assert (base / name).stat().st_mode & 0o7777 == mode, name
        assert os.listdir(base / name) == [], name
    assert "root" in (base / "etc/passwd").read_text()
    assert (base / "usr/bin/passwd").stat().st_mode & 0o4000


def test_it_has_nothing_of_this_machine(base: Path) -> None:
    assert (base / "etc/hostname").read_text() == "localhost\n"
    assert (base / "etc/machine-id").read_bytes() == b""
    assert os.listdir(base / "etc/apt/sources.list.d") == []
    assert not any(line.startswith("deb") for line in (base / "etc/apt/sources.list").read_text().splitlines())
    assert not (base / "etc/apt/apt.conf.d/99mmdebstrap").exists()
    assert os.listdir(base / "var/lib/apt/lists") == []
    assert [name for _, _, files in os.walk(base / "var/log") for name in files] == []
    assert socket.gethostname() not in {line.split()[-1] for line in (base / "etc/hosts").read_text().splitlines()}


def test_its_python_needs_no_compiling(base: Path) -> None:
    """Otherwise each import in each sandbox would compile, and write what it compiled into the scratch."""
    library = next((base / "usr/lib").glob("python3.*/os.py")).parent
    checked = 0
    for compiled in (library / "__pycache__").glob("*.pyc"):
        flags, time, size = struct.unpack("<III", compiled.read_bytes()[4:16])
        source = library / f"{compiled.name.split('.')[0]}.py"
        assert (flags, time) == (0, TIMESTAMP), compiled.name
        assert source.lstat().st_mtime == TIMESTAMP
        assert source.is_symlink() or source.stat().st_size == size, compiled.name  # an absolute link leads out of this mount
        checked += 1
    assert checked > 100


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_equal_packages_give_an_equal_layer(tmp_path: Path) -> None:
    """The smallest system, twice."""
    store = ImageStore(tmp_path / "images")
    store.prepare()
    digests = []
    for _ in range(2):
        events: list[BuildEvent] = []
        request = BuildRequest(name="tiny", source=DebianSource(variant="essential"))
        image = await build(store, request, progress=events.append, allow_host_paths=False)
        digests.append(image.layers if hasattr(image, "layers") else ())
        assert {event.kind for event in events} >= {"step", "log", "done"}
    assert digests[0] == digests[1]
    assert len(store.list().layers) == 1


@pytest.mark.slow
async def test_a_package_that_does_not_exist_is_the_callers_mistake(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    store.prepare()
    request = BuildRequest(name="tiny", source=DebianSource(variant="essential", packages=("no-such-package",)))
    with pytest.raises(InvalidRequest, match="no-such-package") as caught:
        await build(store, request, progress=lambda event: None, allow_host_paths=False)
    assert caught.value.field == "source.packages"
    assert os.listdir(store.root / "tmp") == []


async def test_a_suite_that_this_machine_has_no_source_for_is_the_callers_mistake(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    store.prepare()
    request = BuildRequest(name="tiny", source=DebianSource(suite="nosuchsuite"))
    with pytest.raises(InvalidRequest, match="nosuchsuite") as caught:
        await build(store, request, progress=lambda event: None, allow_host_paths=False)
    assert caught.value.field == "source.suite"


def test_the_shared_store_can_be_had_without_pytest() -> None:
    """As benchmarks do; the image exists by now or is made."""
    program = "from tests.images import base_store; print(base_store())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    assert Path(done.stdout.strip()).is_dir()
